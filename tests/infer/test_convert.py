"""Conversions of a checkpoint to a sparse or dense format, and the removal of dead neurons."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from twell_numba.errors import TwellError, UsageError
from twell_numba.formats import BlockELLMatrix
from twell_numba.infer.convert import Conversion, convert, without_dead_neurons
from twell_numba.infer.evaluate import evaluate, ffn_weight_sparsity, fired_neurons
from twell_numba.models.checkpoint import load_model, save_model
from twell_numba.models.config import ModelConfig
from twell_numba.models.tokenizer import ByteTokenizer
from twell_numba.models.transformer import Transformer


@pytest.fixture
def checkpoint(byte_model: Transformer, tmp_path: Path) -> Path:
    """A model with 96 neurons in each of two layers, of which 90 and 80 can fire."""
    for ffn, dead in zip(byte_model.ffn_layers, (slice(0, 6), slice(40, 56)), strict=True):
        ffn.parameters()[0].value[dead] = 0
        ffn.parameters()[2].value *= 2  # down projections start smaller
    save_model(tmp_path / "source", byte_model, ByteTokenizer())
    return tmp_path / "source"


def windows(model: object = None, tokenizer: object = None) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (20, 33))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refused(
    source: Path, conversion: Conversion, message: str, kind: type[TwellError] = TwellError
) -> None:
    """Assert that a conversion is one line, and leaves everything as it was."""
    before = contents(source)
    destination = source.with_name("refused")
    with pytest.raises(kind, match=message) as caught:
        convert(source, destination, conversion, windows)
    assert "\n" not in str(caught.value)
    assert (type(caught.value) is UsageError) == (kind is UsageError)
    assert not destination.exists()
    assert sorted(path.name for path in source.parent.iterdir()) == [source.name]
    assert contents(source) == before


@pytest.mark.parametrize("weight_format", ["csr", "block_ell", "dense"])
@pytest.mark.parametrize("per_layer", [True, False])
def test_a_model_is_cut_to_a_density(
    checkpoint: Path, tmp_path: Path, weight_format: str, per_layer: bool
) -> None:
    before = contents(checkpoint)
    block_size = 4 if weight_format == "block_ell" else None
    conversion = Conversion(weight_format, block_size, target_density=0.2, per_layer=per_layer)
    report = convert(checkpoint, tmp_path / "new", conversion, windows)
    assert contents(checkpoint) == before
    model, tokenizer = load_model(tmp_path / "new", keep_format=True)
    assert report["format"] == model.weight_format == weight_format
    # Blocks are whole, so that not every number of weights can be left.
    assert 1 - ffn_weight_sparsity(model) == pytest.approx(0.2, abs=0.01)
    densities = [ffn.weight_density for ffn in model.ffn_layers]
    assert [layer["density_after"] for layer in report["layers"]] == densities
    if per_layer:
        for layer in report["layers"]:
            by_matrix = list(layer["density_by_matrix"].values())
            assert by_matrix == pytest.approx([0.2] * 3, abs=0.04)
    measured = evaluate(model, windows(), tokenizer)["loss"]
    assert report["loss_after"] == pytest.approx(measured, rel=1e-6)
    original, _ = load_model(checkpoint)
    assert report["loss_before"] == pytest.approx(
        evaluate(original, windows(), tokenizer)["loss"], rel=1e-6
    )
    assert report["neurons_before"] == report["neurons_after"] == 96
    assert (report["bytes_after"] < report["bytes_before"]) == (weight_format != "dense")


def test_blocks_are_of_the_size_asked_for(checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, tmp_path / "new", Conversion("block_ell", 8, target_density=0.1))
    model, _ = load_model(tmp_path / "new", keep_format=True)
    for parameter in model.ffn_layers[0].parameters():
        assert isinstance(parameter.operand, BlockELLMatrix)
        assert parameter.operand.block_size == 8


def test_a_threshold_alone_keeps_the_format(checkpoint: Path, tmp_path: Path) -> None:
    report = convert(checkpoint, tmp_path / "new", Conversion(weight_threshold=0.15))
    assert report["format"] == "dense"
    assert report["loss_before"] is report["loss_after"] is None
    model, _ = load_model(tmp_path / "new")
    original, _ = load_model(checkpoint)
    for name in model.config.ffn_weight_names():
        old = original.parameters()[name].value
        new = model.parameters()[name].value
        np.testing.assert_array_equal(new, np.where(np.abs(old) < 0.15, 0, old))


@pytest.mark.parametrize("weight_format", ["csr", "block_ell"])
def test_there_and_back_is_exact(checkpoint: Path, tmp_path: Path, weight_format: str) -> None:
    convert(checkpoint, tmp_path / "sparse", Conversion(weight_format))
    report = convert(tmp_path / "sparse", tmp_path / "back", Conversion("dense"), windows)
    assert report["loss_after"] == pytest.approx(report["loss_before"], rel=1e-6)
    assert contents(tmp_path / "back") == contents(checkpoint)


def test_two_matrix_models_are_converted(tmp_path: Path) -> None:
    config = ModelConfig(256, 32, 48, 1, 2, 2, 40, ffn="two_matrix")
    model = Transformer(config, np.random.default_rng(0))
    save_model(tmp_path / "source", model, ByteTokenizer())
    report = convert(tmp_path / "source", tmp_path / "new", Conversion("csr", target_density=0.1))
    assert set(report["layers"][0]["density_by_matrix"]) == {"up_proj", "down_proj"}
    assert load_model(tmp_path / "new")[0].config.ffn == "two_matrix"


def test_dead_neurons_are_removed_and_the_output_stays(checkpoint: Path, tmp_path: Path) -> None:
    report = convert(checkpoint, tmp_path / "new", Conversion(remove_dead=True), windows)
    original, tokenizer = load_model(checkpoint)
    alive = fired_neurons(original, windows()).sum(axis=1)
    assert [layer["neurons_alive"] for layer in report["layers"]] == alive.tolist() == [90, 80]
    assert (report["neurons_before"], report["neurons_after"]) == (96, 90)
    model, _ = load_model(tmp_path / "new")
    assert model.config == replace(original.config, d_ffn=90)
    tokens = windows()[:, :-1]
    np.testing.assert_allclose(model.logits(tokens), original.logits(tokens), rtol=1e-4, atol=1e-4)
    assert report["loss_after"] == pytest.approx(report["loss_before"], rel=1e-6)
    gate = original.parameters()["model.layers.0.mlp.gate_proj.weight"].value
    np.testing.assert_array_equal(
        model.parameters()["model.layers.0.mlp.gate_proj.weight"].value, gate[6:]
    )


@pytest.mark.parametrize(("weight_format", "block_size"), [("csr", None), ("block_ell", 4)])
def test_a_sparse_model_stays_in_its_format_without_dead_neurons(
    checkpoint: Path, tmp_path: Path, weight_format: str, block_size: int | None
) -> None:
    convert(checkpoint, tmp_path / "sparse", Conversion(weight_format, block_size))
    report = convert(tmp_path / "sparse", tmp_path / "new", Conversion(remove_dead=True), windows)
    assert report["format"] == weight_format
    assert report["loss_after"] == pytest.approx(report["loss_before"], rel=1e-6)
    model, _ = load_model(tmp_path / "new", keep_format=True)
    assert model.config.d_ffn == 90
    weights = model.ffn_layers[0].parameters()[0].operand
    if isinstance(weights, BlockELLMatrix):
        assert weights.block_size == block_size


def test_neurons_that_a_cut_kills_are_removed_too(checkpoint: Path, tmp_path: Path) -> None:
    conversion = Conversion("csr", target_density=0.01, remove_dead=True)
    report = convert(checkpoint, tmp_path / "new", conversion, windows)
    alive = [layer["neurons_alive"] for layer in report["layers"]]
    assert report["neurons_after"] == max(alive) < 80


@pytest.mark.parametrize(
    ("alive", "left"), [(799, 800), (793, 800), (794, 800), (792, 792), (399, 400), (393, 393)]
)
def test_a_few_dead_neurons_stay_for_a_multiple_of_eight(alive: int, left: int) -> None:
    config = ModelConfig(256, 16, 808, 1, 2, 2, 40)
    model = Transformer(config, np.random.default_rng(0))
    fired = np.arange(808)[np.newaxis] < alive
    assert without_dead_neurons(model, fired).config.d_ffn == left


def test_the_widest_layer_decides_how_many_neurons_stay(byte_model: Transformer) -> None:
    fired = np.zeros((2, 96), np.bool_)
    fired[0, [5, 50]] = True
    fired[1, [1, 2, 95]] = True
    smaller = without_dead_neurons(byte_model, fired)
    for layer, kept in enumerate(([0, 5, 50], [1, 2, 95])):
        parts = zip(
            byte_model.ffn_layers[layer].parameters(),
            smaller.ffn_layers[layer].parameters(),
            strict=True,
        )
        for old, new in parts:
            np.testing.assert_array_equal(new.value, old.value[kept])
    assert smaller.config.d_ffn == 3
    with pytest.raises(TwellError, match="all 96 of layer 1 fire"):
        without_dead_neurons(byte_model, np.arange(2)[:, np.newaxis] * np.ones((2, 96)) > 0)
    with pytest.raises(TwellError, match="no neuron fires for any token"):
        without_dead_neurons(byte_model, np.zeros((2, 96), np.bool_))


@pytest.mark.parametrize(
    ("conversion", "message"),
    [
        (Conversion(), "nothing to change given"),
        (Conversion("csr", target_density=0.0), "--target-density 0 given"),
        (Conversion("csr", target_density=-0.1), "--target-density -0.1 given"),
        (Conversion("csr", target_density=1.01), "1.01 given, a number above 0 and at most 1"),
        (Conversion("csr", target_density=float("nan")), "--target-density nan given"),
        (Conversion("csr", weight_threshold=0.0), "--weight-threshold 0 given"),
        (Conversion("csr", weight_threshold=float("inf")), "--weight-threshold inf given"),
        (Conversion("csr", weight_threshold=0.1, target_density=0.1), "one of them wanted"),
        (Conversion("csr", per_layer=True), "--per-layer given without"),
        (Conversion("csr", block_size=16), "--block-size given without --to block-ell"),
        (Conversion("block_ell", block_size=0), "--block-size 0 given"),
        (Conversion("block_ell", block_size=33), r"33 x 33 do not fit.*\(96, 32\); .* 32 or less"),
    ],
)
def test_wrong_requests(checkpoint: Path, conversion: Conversion, message: str) -> None:
    refused(checkpoint, conversion, message, UsageError)


@pytest.mark.parametrize(
    ("conversion", "message"),
    [
        (Conversion("csr", weight_threshold=100), "threshold 100 would leave nothing of"),
        (Conversion("csr", target_density=1e-9), "density 1e-09 would leave less than one weight"),
        (
            Conversion("block_ell", target_density=0.001),
            "density 0.001 would leave less than one block",
        ),
        (Conversion("dense"), "is dense already"),
    ],
)
def test_requests_that_do_not_fit_the_model(
    checkpoint: Path, conversion: Conversion, message: str
) -> None:
    refused(checkpoint, conversion, message)


@pytest.mark.parametrize(
    "conversion",
    [
        Conversion("csr"),
        Conversion("block_ell"),
        Conversion(target_density=0.1),
        Conversion("dense", weight_threshold=0.1),
    ],
)
@pytest.mark.parametrize("stored", ["csr", "block_ell"])
def test_what_is_sparse_already_is_refused(
    byte_model: Transformer, tmp_path: Path, stored: str, conversion: Conversion
) -> None:
    byte_model.hold_ffn_weights(stored)
    save_model(tmp_path / "source", byte_model, ByteTokenizer())
    message = f"sparse already, stored as {stored}; convert it with --to dense first"
    refused(tmp_path / "source", conversion, message)


def test_nothing_dead_is_refused(byte_model: Transformer, tmp_path: Path) -> None:
    save_model(tmp_path / "source", byte_model, ByteTokenizer())
    refused(tmp_path / "source", Conversion(remove_dead=True), "no neuron can be removed: all 96")


@pytest.mark.parametrize(
    ("stored", "asked", "advice", "ways_out"),
    [
        (
            "dense",
            "block_ell",
            "--block-size 5 or less, --to csr",
            [Conversion("block_ell", 5, remove_dead=True), Conversion("csr", remove_dead=True)],
        ),
        ("block_ell", None, "--to dense", [Conversion("dense", remove_dead=True)]),
    ],
)
def test_too_few_neurons_left_for_a_block(
    byte_model: Transformer,
    tmp_path: Path,
    stored: str,
    asked: str | None,
    advice: str,
    ways_out: list[Conversion],
) -> None:
    for ffn in byte_model.ffn_layers:
        ffn.parameters()[0].value[5:] = 0
    byte_model.hold_ffn_weights(stored)
    save_model(tmp_path / "source", byte_model, ByteTokenizer())
    refused(
        tmp_path / "source",
        Conversion(asked, remove_dead=True),
        f"16 x 16 do not fit: only 5 neurons of a layer fire .* give {advice}, or more --windows$",
        UsageError,
    )
    for number, way_out in enumerate(ways_out):
        report = convert(tmp_path / "source", tmp_path / f"new-{number}", way_out, windows)
        assert report["neurons_after"] == 5


def test_a_threshold_for_blocks_goes_by_their_root_mean_square(
    checkpoint: Path, tmp_path: Path
) -> None:
    report = convert(checkpoint, tmp_path / "new", Conversion("block_ell", 8, weight_threshold=0.2))
    assert all(0 < layer["density_after"] < 1 for layer in report["layers"])
    original, _ = load_model(checkpoint)
    model, _ = load_model(tmp_path / "new", ffn_path="dense")
    for old, new in zip(original.ffn_layers, model.ffn_layers, strict=True):
        for before, after in zip(old.parameters(), new.parameters(), strict=True):
            for rows in range(0, 96, 8):
                for columns in range(0, 32, 8):
                    block = before.value[rows : rows + 8, columns : columns + 8]
                    kept = np.sqrt(np.square(block).mean()) >= 0.2
                    np.testing.assert_array_equal(
                        after.value[rows : rows + 8, columns : columns + 8], block if kept else 0
                    )


def test_weights_that_are_not_finite_are_refused(byte_model: Transformer, tmp_path: Path) -> None:
    byte_model.ffn_layers[0].parameters()[1].value[2, 3] = np.nan
    save_model(tmp_path / "source", byte_model, ByteTokenizer())
    refused(tmp_path / "source", Conversion("csr"), "not finite")


def test_dead_neurons_cannot_be_told_without_text(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--remove-dead given without --data"):
        convert(checkpoint, tmp_path / "new", Conversion(remove_dead=True))
    assert not (tmp_path / "new").exists()


def test_a_destination_with_something_in_it_is_left_alone(checkpoint: Path, tmp_path: Path) -> None:
    occupied = tmp_path / "occupied"
    occupied.mkdir()
    (occupied / "precious").write_text("text")
    file = tmp_path / "file"
    file.write_text("text")
    for destination in (occupied, file, checkpoint):
        with pytest.raises(TwellError, match="exists already and is left as it is"):
            convert(checkpoint, destination, Conversion("csr"))
    assert contents(occupied) == {"precious": b"text"}
    assert file.read_text() == "text"
    with pytest.raises(TwellError, match="lies in"):
        convert(checkpoint, checkpoint / "inside", Conversion("csr"))
    for blank in ("", " "):
        with pytest.raises(UsageError, match=f"destination '{blank}' given, a folder wanted"):
            convert(checkpoint, blank, Conversion("csr"))
    empty = tmp_path / "empty"
    empty.mkdir()
    convert(checkpoint, empty, Conversion("csr"))
    assert load_model(empty)[0].config.d_ffn == 96


def test_the_checkpoints_of_a_run_are_left_alone(checkpoint: Path, tmp_path: Path) -> None:
    """Of any run: what is added there would be the checkpoint that it goes on from."""
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / "step-1").mkdir(parents=True)
    link = tmp_path / "link"
    link.symlink_to(checkpoints)
    convert(checkpoint, checkpoints / "new", Conversion("csr"))  # no run yet
    (tmp_path / "run" / "config.toml").touch()
    before = sorted(tmp_path.rglob("*"))
    for destination in (checkpoints / "step-99", checkpoints / "a" / "b", link / "step-99"):
        with pytest.raises(TwellError, match="lies among the checkpoints of the run .*/run, ") as e:
            convert(checkpoint, destination, Conversion("csr"))
        assert "\n" not in str(e.value)
    assert sorted(tmp_path.rglob("*")) == before
    convert(checkpoint, tmp_path / "run" / "sparse", Conversion("csr"))


def test_a_full_disk_leaves_nothing_behind(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("twell_numba.formats.tensor_file.save_file", fail)
    with pytest.raises(TwellError, match="new.*No space left on device"):
        convert(checkpoint, tmp_path / "new", Conversion("csr"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_damaged_source_is_one_line(checkpoint: Path, tmp_path: Path, name: str) -> None:
    path = checkpoint / name
    path.write_bytes(path.read_bytes()[:-50])
    refused(checkpoint, Conversion("csr"), name)
