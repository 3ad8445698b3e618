"""Models of which the feedforward weights are held sparse, and their files."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from twell_numba.errors import TwellError, UsageError
from twell_numba.formats import BlockELLMatrix, CSRMatrix
from twell_numba.layers.ffn import WEIGHT_FORMATS
from twell_numba.models.cache import KVCache
from twell_numba.models.checkpoint import load_model, save_model
from twell_numba.models.config import FFN_WEIGHT_FORMATS, ModelConfig
from twell_numba.models.sparse_tensors import to_tensors
from twell_numba.models.tokenizer import ByteTokenizer
from twell_numba.models.transformer import Transformer

CONFIG = ModelConfig(
    vocab_size=256,
    d_model=20,
    d_ffn=36,
    n_layers=2,
    n_heads=2,
    n_kv_heads=1,
    context_length=16,
)
FORMATS = ["csr", "block_ell"]
BLOCK_SIZE = 8  # of which neither 20 nor 36 is a multiple
GATE = "model.layers.1.mlp.gate_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"


def sparse_model(
    weight_format: str,
    config: ModelConfig = CONFIG,
    density: float = 0.05,
    block_size: int = 1,
    dtype: type = np.float32,
) -> Transformer:
    """Return a model of which a fraction of the entries, or of the blocks, is not zero."""
    rng = np.random.default_rng(0)
    model = Transformer(config, rng, dtype)
    for ffn in model.ffn_layers:
        for parameter in ffn.parameters():
            rows, columns = parameter.shape
            kept = rng.random((-(-rows // block_size), -(-columns // block_size))) < density
            kept = np.kron(kept, np.ones((block_size, block_size)))
            parameter.value *= 10 * kept[:rows, :columns]
    model.hold_ffn_weights(weight_format, max(block_size, BLOCK_SIZE))
    return model


def saved(folder: Path, weight_format: str, config: ModelConfig = CONFIG) -> Transformer:
    model = sparse_model(weight_format, config)
    save_model(folder, model, ByteTokenizer())
    return model


def tokens_of(batch: int = 2, length: int = 9) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (batch, length))


def edit_tensors(folder: Path, edit: Callable[[dict[str, np.ndarray]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refused(folder: Path, message: str) -> None:
    with pytest.raises(TwellError, match=message) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_the_formats_are_those_of_the_layers() -> None:
    assert FFN_WEIGHT_FORMATS == WEIGHT_FORMATS
    with pytest.raises(UsageError, match="ffn_weight_format='coo' given, one of dense, csr"):
        replace(CONFIG, ffn_weight_format="coo").validate()


@pytest.mark.parametrize("ffn", ["gated", "two_matrix"])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_sparse_model_computes_as_the_dense_one(weight_format: str, ffn: str) -> None:
    model = sparse_model(weight_format, replace(CONFIG, ffn=ffn), dtype=np.float64)
    dense = sparse_model("dense", replace(CONFIG, ffn=ffn), dtype=np.float64)
    assert model.config == replace(dense.config, ffn_weight_format=weight_format)
    tokens = tokens_of()
    logits, backprop = model(tokens, 0.01)
    expected, backprop_dense = dense(tokens, 0.01)
    np.testing.assert_allclose(logits, expected, rtol=1e-10, atol=1e-12)
    dlogits = np.random.default_rng(2).standard_normal(logits.shape)
    backprop(dlogits)
    backprop_dense(dlogits)
    ffn_names = CONFIG.ffn_weight_names()
    theirs = dense.parameters()
    for name, parameter in model.parameters().items():
        assert parameter.grad is not None
        gradient, wanted = parameter.grad, theirs[name].grad
        if name in ffn_names:
            matrix = parameter.operand
            assert isinstance(matrix, CSRMatrix | BlockELLMatrix)
            stored = matrix.with_values(np.ones_like(matrix.stored_values)).to_dense()
            gradient, wanted = matrix.with_values(gradient).to_dense(), wanted * stored
        np.testing.assert_allclose(gradient, wanted, rtol=1e-8, atol=1e-11, err_msg=name)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_steps_give_the_logits_of_the_whole(weight_format: str) -> None:
    model = sparse_model(weight_format)
    tokens = tokens_of(2, 16)
    expected = model.logits(tokens).reshape(2, 16, -1)
    cache = KVCache(model.config, 2, 16)
    for step in (tokens[:, :5], *np.split(tokens[:, 5:], 11, axis=1)):
        logits = model.step(step, cache)
        np.testing.assert_allclose(logits, expected[:, cache.length - 1], atol=1e-5, rtol=1e-5)


def test_weights_given_as_matrices() -> None:
    model = sparse_model("csr", dtype=np.float64)
    weights = {name: parameter.operand for name, parameter in model.parameters().items()}
    weights[GATE].stored_values[:2] = 1e-60  # type: ignore[union-attr]
    copy = Transformer(replace(CONFIG, ffn_weight_format="dense"), weights, np.float64)
    assert copy.parameters()[GATE].operand is weights[GATE]
    assert copy.config.ffn_weight_format == "csr"
    narrow = Transformer(CONFIG, weights, np.float32)
    gate = narrow.parameters()[GATE]
    assert gate.value.dtype == np.float32
    assert gate.value.shape == weights[GATE].stored_values.shape  # type: ignore[union-attr]
    assert not gate.value[:2].any()
    with pytest.raises(ValueError, match=f"{GATE} of shape"):
        Transformer(CONFIG, {**weights, GATE: weights[GATE].T})
    with pytest.raises(ValueError, match="held as csr given beside .* held as dense"):
        Transformer(CONFIG, {**weights, GATE: np.zeros(weights[GATE].shape)})
    with pytest.raises(TypeError, match=f"{GATE} of type list given, a NumPy array or sparse"):
        Transformer(CONFIG, {**weights, GATE: [[1.0]]})  # type: ignore[dict-item]
    norm = CSRMatrix.from_dense(np.zeros((20, 20)))
    name = "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(ValueError, match=f"{name} given as a sparse matrix; an array wanted"):
        Transformer(CONFIG, {**weights, name: norm})


def test_layers_held_differently_cannot_be_saved(tmp_path: Path) -> None:
    model = sparse_model("dense")
    model.ffn_layers[1].hold_weights("csr")
    with pytest.raises(ValueError, match="layer 1 holds its weights as csr, layer 0 as dense"):
        save_model(tmp_path / "new", model, ByteTokenizer())
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("ffn", ["gated", "two_matrix"])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_round_trip_is_exact(tmp_path: Path, weight_format: str, ffn: str, tied: bool) -> None:
    """Patterns stay as they are, with zeros that training has made at stored entries."""
    model = sparse_model(weight_format, replace(CONFIG, ffn=ffn, tied_embeddings=tied))
    matrix = model.parameters()[DOWN].operand
    assert isinstance(matrix, CSRMatrix | BlockELLMatrix)
    matrix.stored_values[...] = 0
    save_model(tmp_path, model, ByteTokenizer())
    loaded, _ = load_model(tmp_path, keep_format=True)
    assert loaded.config == model.config
    assert loaded.weight_format == weight_format
    parameters = loaded.parameters()
    for name, parameter in model.parameters().items():
        ours, theirs = parameters[name].operand, parameter.operand
        if isinstance(theirs, np.ndarray):
            np.testing.assert_array_equal(ours, theirs)
            continue
        assert type(ours) is type(theirs)
        ours.validate()
        for array in theirs.array_names:
            np.testing.assert_array_equal(getattr(ours, array), getattr(theirs, array))
            assert getattr(ours, array).dtype == getattr(theirs, array).dtype
    np.testing.assert_array_equal(loaded.logits(tokens_of()), model.logits(tokens_of()))


def test_padding_is_written_and_read_as_zeros(tmp_path: Path) -> None:
    model = sparse_model("block_ell", density=0.3)
    expected = model.logits(tokens_of())
    for name in CONFIG.ffn_weight_names():
        matrix = model.parameters()[name].operand
        assert isinstance(matrix, BlockELLMatrix)
        padding = ~matrix.stored_places()
        assert padding.any()
        matrix.values[padding] = np.nan
    save_model(tmp_path, model, ByteTokenizer())
    values = f"{GATE}.block_ell.values"
    assert np.isfinite(load_file(tmp_path / "model.safetensors")[values]).all()
    loaded, _ = load_model(tmp_path, keep_format=True)
    np.testing.assert_array_equal(loaded.logits(tokens_of()), expected)
    # What another program wrote beyond the edge is not seen either.

    def poison(tensors: dict[str, np.ndarray]) -> None:
        columns = tensors[f"{GATE}.block_ell.block_columns"]
        at_edge = columns[columns != -1] == 20 // 8
        assert at_edge.any()
        tensors[values][at_edge, :, 20 % 8 :] = np.nan

    edit_tensors(tmp_path, poison)
    loaded, _ = load_model(tmp_path, keep_format=True)
    assert np.isfinite(loaded.parameters()[GATE].value).all()


def test_names_and_description_on_disk(tmp_path: Path) -> None:
    model = saved(tmp_path, "csr")
    tensors = load_file(tmp_path / "model.safetensors")
    assert not set(CONFIG.ffn_weight_names()) & tensors.keys()
    matrix = model.parameters()[DOWN].operand
    assert isinstance(matrix, CSRMatrix)
    for array in ("data", "indices", "indptr"):  # neuron-major, the down projection too
        np.testing.assert_array_equal(tensors[f"{DOWN}.csr.{array}"], getattr(matrix, array))
    assert tensors[f"{DOWN}.csr.indices"].dtype == np.int32
    assert tensors[f"{DOWN}.csr.indptr"].dtype == np.int32
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["ffn_weight_format"] == "csr"
    assert content["model_type"] == "sparse_llama"
    assert content["architectures"] == ["SparseLlamaForCausalLM"]


def test_a_dense_model_is_described_as_ever(tmp_path: Path) -> None:
    save_model(tmp_path, sparse_model("dense"), ByteTokenizer())
    content = json.loads((tmp_path / "config.json").read_text())
    assert "ffn_weight_format" not in content
    assert content["model_type"] == "llama"


@pytest.mark.parametrize("stored", ["dense", *FORMATS])
@pytest.mark.parametrize(
    ("path", "held"),
    [("auto", "csr"), ("dense", "dense"), ("twell", "dense"), ("csr", "csr"),
     ("block_ell", "block_ell")],
)  # fmt: skip
def test_the_path_says_how_weights_are_held(
    tmp_path: Path, stored: str, path: str, held: str
) -> None:
    model = sparse_model(stored, density=0.02)
    save_model(tmp_path, model, ByteTokenizer())
    loaded, _ = load_model(tmp_path, ffn_path=path)
    assert loaded.weight_format == loaded.config.ffn_weight_format == held
    assert loaded.ffn_path == path
    logits = loaded.logits(tokens_of())
    np.testing.assert_allclose(logits, model.logits(tokens_of()), rtol=1e-5, atol=1e-5)
    assert loaded.ffn_layers[0].statistics.path == ("csr" if path == "auto" else path)


def test_auto_makes_a_model_that_is_not_sparse_enough_dense(tmp_path: Path) -> None:
    model = sparse_model("csr", density=0.9)
    save_model(tmp_path, model, ByteTokenizer())
    assert load_model(tmp_path)[0].weight_format == "dense"
    assert load_model(tmp_path, keep_format=True)[0].weight_format == "csr"


def test_a_kept_format_wins_over_the_path(tmp_path: Path) -> None:
    saved(tmp_path, "csr")
    for path, taken in (("csr", "csr"), ("dense", "auto"), ("auto", "auto")):
        loaded, _ = load_model(tmp_path, ffn_path=path, keep_format=True)
        assert (loaded.weight_format, loaded.ffn_path) == ("csr", taken)


def test_auto_keeps_blocks_of_the_size_that_is_stored(tmp_path: Path) -> None:
    model = sparse_model("block_ell", WIDE, 0.02, block_size=8)
    save_model(tmp_path, model, ByteTokenizer())
    loaded, _ = load_model(tmp_path)
    assert loaded.weight_format == "block_ell"
    assert loaded.block_size == model.block_size == 8
    assert load_model(tmp_path, ffn_path="block_ell")[0].block_size == 8


def test_blocks_are_no_larger_than_a_small_model(tmp_path: Path) -> None:
    model = Transformer(replace(CONFIG, d_ffn=5), np.random.default_rng(0))
    save_model(tmp_path, model, ByteTokenizer())
    loaded, _ = load_model(tmp_path, ffn_path="block_ell")
    np.testing.assert_allclose(
        loaded.logits(tokens_of()), model.logits(tokens_of()), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_other_dtypes_are_read(tmp_path: Path, weight_format: str, dtype: type) -> None:
    model = saved(tmp_path, weight_format)
    name = {"csr": f"{GATE}.csr.data", "block_ell": f"{GATE}.block_ell.values"}[weight_format]
    edit_tensors(tmp_path, lambda tensors: tensors.update({name: tensors[name].astype(dtype)}))
    loaded, _ = load_model(tmp_path, keep_format=True)
    ours, theirs = loaded.parameters()[GATE].value, model.parameters()[GATE].value
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours, theirs.astype(dtype).astype(np.float32))


WIDE = replace(CONFIG, d_model=512, d_ffn=2048, n_layers=1)


def ffn_bytes(folder: Path) -> int:
    tensors = load_file(folder / "model.safetensors")
    return sum(array.nbytes for name, array in tensors.items() if ".mlp." in name)


@pytest.mark.parametrize(
    ("weight_format", "block_size", "share"), [("csr", 1, 0.04), ("block_ell", 16, 0.02)]
)
def test_a_model_of_one_per_cent_is_that_small_on_disk(
    tmp_path: Path, weight_format: str, block_size: int, share: float
) -> None:
    save_model(tmp_path / "dense", sparse_model("dense", WIDE), ByteTokenizer())
    model = sparse_model(weight_format, WIDE, 0.01, block_size)
    save_model(tmp_path / "sparse", model, ByteTokenizer())
    assert ffn_bytes(tmp_path / "dense") == 3 * 512 * 2048 * 4
    assert ffn_bytes(tmp_path / "sparse") <= share * ffn_bytes(tmp_path / "dense")
    assert model.ffn_layers[0].weight_density == pytest.approx(0.01, rel=0.3)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(f"{GATE}.csr.indptr"), f"no tensor {GATE}.csr.indptr .1 of"),
        (lambda t: t.update({f"{GATE}.csr.more": np.zeros(1)}), f"has a tensor {GATE}.csr.more"),
        (lambda t: t.update({GATE: np.zeros((36, 20))}), f"has a tensor {GATE} "),
        (
            lambda t: t.update({f"{GATE}.csr.indptr": t[f"{GATE}.csr.indptr"][:-1]}),
            f"{GATE} that is not valid .*indptr of shape .36,. given, .37,. wanted",
        ),
        (
            lambda t: t.update({f"{GATE}.csr.indices": t[f"{GATE}.csr.indices"] + 20}),
            f"{GATE} that is not valid .*column .* given, 0 to 19 wanted",
        ),
        (
            lambda t: t.update({f"{GATE}.csr.indices": t[f"{GATE}.csr.indices"].astype(float)}),
            "dtype float64 given, int32 or int64 wanted",
        ),
        (
            lambda t: t.update({f"{GATE}.csr.data": t[f"{GATE}.csr.data"].astype(np.int32)}),
            f"{GATE}.csr.data of dtype int32",
        ),
        (lambda t: t.update({f"{GATE}.csr.data": t[f"{GATE}.csr.data"][:-1]}), "not valid"),
    ],
)
def test_csr_tensors_that_do_not_fit(
    tmp_path: Path, edit: Callable[[dict[str, np.ndarray]], object], message: str
) -> None:
    saved(tmp_path, "csr")
    edit_tensors(tmp_path, edit)
    refused(tmp_path, message)


VALUES, COLUMNS = f"{GATE}.block_ell.values", f"{GATE}.block_ell.block_columns"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.update({VALUES: t[VALUES][:-1]}), "blocks in values given"),
        (lambda t: t.update({VALUES: t[VALUES][:, 1:]}), r"\(blocks, b, b\) wanted"),
        (lambda t: t.update({VALUES: t[VALUES][:, :0, :0]}), r"\(blocks, b, b\) wanted"),
        (lambda t: t.update({VALUES: t[VALUES].reshape(-1)}), r"\(blocks, b, b\) wanted"),
        (lambda t: t.update({VALUES: np.zeros((1, 21, 21))}), "blocks of 21 rows given, at most"),
        (lambda t: t.update({COLUMNS: t[COLUMNS][:-1]}), "block_columns of shape"),
        (lambda t: t.update({COLUMNS: t[COLUMNS].reshape(-1)}), "block_columns of shape"),
        (
            lambda t: t.update({COLUMNS: np.full((5, 1000), -1, np.int32)}),
            "5 rows of at most 3 wanted",
        ),
        (lambda t: t.update({COLUMNS: np.where(t[COLUMNS] == -1, -1, 7)}), "not valid .*block col"),
        (lambda t: t.update({COLUMNS: t[COLUMNS].astype(np.uint8)}), "uint8|blocks in values"),
    ],
)
def test_block_ell_tensors_that_do_not_fit(
    tmp_path: Path, edit: Callable[[dict[str, np.ndarray]], object], message: str
) -> None:
    saved(tmp_path, "block_ell")
    edit_tensors(tmp_path, edit)
    refused(tmp_path, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ffn_weight_format": "block_ell"}, "no tensor .*block_ell.values"),
        (
            {"ffn_weight_format": "dense"},
            "ffn_weight_format 'dense' given with model_type 'sparse_llama', 'csr' or 'block_ell' ",
        ),
        ({"ffn_weight_format": "coo"}, "ffn_weight_format='coo' given, one of"),
        ({"ffn_weight_format": ["csr"]}, "ffn_weight_format="),
        ({"model_type": "llama"}, "one of sparse_llama, sparse_two_matrix_llama wanted"),
        ({"intermediate_size": 24}, "not valid"),
        ({"hidden_size": 16, "head_dim": 8}, "embed_tokens.weight of shape"),
    ],
)
def test_a_description_that_does_not_fit(tmp_path: Path, changes: dict, message: str) -> None:
    saved(tmp_path, "csr")
    edit_config(tmp_path, **changes)
    refused(tmp_path, message)


def test_a_description_without_its_format(tmp_path: Path) -> None:
    saved(tmp_path, "csr")
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    del content["ffn_weight_format"]
    path.write_text(json.dumps(content))
    refused(tmp_path, "ffn_weight_format missing with model_type 'sparse_llama', 'csr' or")


@pytest.mark.parametrize(
    "names",
    [
        [GATE],
        [f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up", "down")],
    ],
    ids=["within a layer", "between layers"],
)
def test_blocks_of_several_sizes_are_refused(tmp_path: Path, names: list[str]) -> None:
    model = saved(tmp_path, "block_ell")

    def smaller_blocks(tensors: dict[str, np.ndarray]) -> None:
        for name in names:
            matrix = BlockELLMatrix.from_sparse(model.parameters()[name].operand, block_size=4)
            tensors |= to_tensors(name, matrix)

    edit_tensors(tmp_path, smaller_blocks)
    refused(tmp_path, f"{names[0]} that is not valid .blocks of 4 rows given beside blocks of 8 in")
    with pytest.raises(TwellError, match="one size wanted"):
        load_model(tmp_path, keep_format=True)


def test_layers_in_blocks_of_several_sizes_cannot_be_saved(tmp_path: Path) -> None:
    model = sparse_model("block_ell")
    model.ffn_layers[1].hold_weights("block_ell", 4)
    message = "layer 1 holds its weights as block_ell with blocks of 4, layer 0 as .* blocks of 8"
    with pytest.raises(ValueError, match=message):
        save_model(tmp_path / "new", model, ByteTokenizer())
    weights = {name: parameter.operand for name, parameter in model.parameters().items()}
    with pytest.raises(ValueError, match=message):
        Transformer(CONFIG, weights)
    assert not (tmp_path / "new").exists()


def test_a_dense_file_described_as_sparse(tmp_path: Path) -> None:
    save_model(tmp_path, sparse_model("dense"), ByteTokenizer())
    edit_config(tmp_path, ffn_weight_format="csr")
    refused(tmp_path, "model_type 'llama'")
    edit_config(tmp_path, ffn_weight_format="csr", model_type="sparse_llama")
    refused(tmp_path, "no tensor model.layers.0.mlp.gate_proj.weight.csr.data")
