"""Windows to measure a trained model on."""

import numpy as np
import pytest

from twell_numba.errors import TwellError
from twell_numba.infer.evaluate import evaluate
from twell_numba.models.checkpoint import load_model
from twell_numba.train import TrainConfig, train
from twell_numba.train.config import with_overrides
from twell_numba.train.corpus import load_text
from twell_numba.train.held_out import DEFAULT_WINDOWS, held_out_windows
from twell_numba.train.prepared import prepare
from twell_numba.train.report import Reporter
from twell_numba.train.run_folder import RunFolder
from twell_numba.train.tokenizer import make_tokenizer


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("held-out")
    (folder / "text.txt").write_text("some words to read and write\n" * 400)
    config = TrainConfig(
        data=str(folder / "text.txt"),
        steps=2,
        d_model=16,
        d_ffn=24,
        n_layers=1,
        n_heads=2,
        context_length=16,
        batch_size=3,
        eval_batches=4,
    )
    train(config, folder / "run", report=Reporter())
    return folder / "run"


def test_a_run_is_measured_on_what_it_was_validated_on(run):
    model, tokenizer = load_model(run)
    windows, source = held_out_windows(run, model, tokenizer)
    assert windows.shape == (12, 17)
    assert source.endswith("text.txt")
    config = with_overrides(RunFolder(run).read_config(), ["steps=3"])
    summary = train(config, run.with_name("again"), report=Reporter())
    again, tokenizer = load_model(run.with_name("again"))
    assert evaluate(again, windows, tokenizer, 3)["loss"] == summary["loss"]


def test_a_checkpoint_in_a_run_is_measured_alike(run):
    model, tokenizer = load_model(run)
    expected, _ = held_out_windows(run, model, tokenizer)
    windows, _ = held_out_windows(run / "checkpoints" / "step-2", model, tokenizer)
    np.testing.assert_array_equal(windows, expected)
    fewer, _ = held_out_windows(run, model, tokenizer, count=5)
    assert fewer.shape == (5, 17)


def test_other_data_and_text_shorter_than_the_context(run, tmp_path):
    model, tokenizer = load_model(run)
    (tmp_path / "short.txt").write_text("x" * 200)
    windows, source = held_out_windows(run, model, tokenizer, data=str(tmp_path / "short.txt"))
    assert windows.shape == (1, 10)
    assert source == str(tmp_path / "short.txt")
    (tmp_path / "short.txt").write_text("x" * 20)
    with pytest.raises(TwellError, match="1 held-out tokens given"):
        held_out_windows(run, model, tokenizer, data=str(tmp_path / "short.txt"))


def test_a_model_without_a_run_needs_data(run, tmp_path):
    model, tokenizer = load_model(run)
    with pytest.raises(TwellError, match="give --data"):
        held_out_windows(tmp_path, model, tokenizer)
    (tmp_path / "text.txt").write_text("word " * 20_000)
    windows, _ = held_out_windows(tmp_path, model, tokenizer, data=str(tmp_path / "text.txt"))
    assert len(windows) == DEFAULT_WINDOWS


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_prepared_data_must_be_of_the_models_tokenizer(run, tmp_path, kind):
    model, tokenizer = load_model(run)
    text = run.parent / "text.txt"
    prepare(str(text), tmp_path / "data.bin", tokenizer=kind, bpe_vocab_size=260)
    if kind == "bpe":
        with pytest.raises(TwellError, match="another tokenizer than the model's"):
            held_out_windows(run, model, tokenizer, data=str(tmp_path / "data.bin"))
    else:
        windows, _ = held_out_windows(run, model, tokenizer, data=str(tmp_path / "data.bin"))
        expected, _ = held_out_windows(run, model, tokenizer)
        np.testing.assert_array_equal(windows, expected)


def test_damaged_tokens_are_refused(run, tmp_path):
    model, tokenizer = load_model(run)
    text = run.parent / "text.txt"
    bpe = make_tokenizer("bpe", load_text(str(text)), 260)
    prepare(str(text), tmp_path / "data.bin", tokenizer="bpe", bpe_vocab_size=260)
    whole = (tmp_path / "data.bin").read_bytes()
    (tmp_path / "data.bin").write_bytes(whole[:-2] + b"\xff\xff")
    with pytest.raises(TwellError, match="token 65535 in its held-out part"):
        held_out_windows(run, model, bpe, data=str(tmp_path / "data.bin"))
