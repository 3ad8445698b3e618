"""A dense SiLU model becomes a sparse ReLU model: settings, what a run writes, and resuming."""

import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from twell_numba.cli import twell
from twell_numba.errors import TwellError, UsageError
from twell_numba.infer.evaluate import evaluate
from twell_numba.models.checkpoint import load_model, save_model
from twell_numba.models.config import ModelConfig
from twell_numba.models.rope_scaling import RopeScaling
from twell_numba.models.tokenizer import ByteTokenizer
from twell_numba.models.transformer import Transformer
from twell_numba.train import Interrupted, TrainConfig, train
from twell_numba.train.config import resolve, with_overrides
from twell_numba.train.held_out import held_out_windows
from twell_numba.train.prepared import prepare
from twell_numba.train.report import Reporter
from twell_numba.train.run_folder import RunFolder
from twell_numba.train.sparsify import load_initial_model, sparsify_settings

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "text.txt"
    lines = [f"def function_{n}(x):\n    return x * {n * n % 97}\n" for n in range(300)]
    file.write_text("".join(lines))
    return file


@pytest.fixture(scope="module")
def source(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SiLU model, trained for a moment: a run of this package."""
    folder = tmp_path_factory.mktemp("source") / "run"
    config = TrainConfig(
        data=str(text),
        steps=150,
        d_model=32,
        d_ffn=64,
        n_layers=2,
        n_heads=2,
        activation="silu",
        context_length=32,
        batch_size=8,
        learning_rate=1e-2,
        warmup_steps=10,
        eval_batches=2,
    )
    train(config, folder, report=Reporter())
    return folder


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which the settings describe only a part, in a folder as of Hugging Face."""
    folder = tmp_path_factory.mktemp("qwen") / "model"
    config = ModelConfig(
        vocab_size=300,
        d_model=24,
        d_ffn=40,
        n_layers=1,
        n_heads=3,
        n_kv_heads=1,
        head_dim=10,
        context_length=64,
        rope_base=1e6,
        tied_embeddings=False,
        activation="silu",
        attention_bias=True,
        rope_scaling=RopeScaling("llama3", 4.0, original_context=32),
    )
    tokenizer = ByteTokenizer(chat_template=TEMPLATE)
    save_model(folder, Transformer(config, np.random.default_rng(0)), tokenizer)
    return folder


def settings(model: Path, text: Path, *overrides: str) -> TrainConfig:
    given = (f'data="{text}"', "steps=80", "batch_size=8", "eval_batches=2", "eval_interval=40")
    return sparsify_settings(model, (*given, *overrides))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def weights(run: Path) -> dict[str, np.ndarray]:
    return {name: each.value for name, each in load_model(run)[0].parameters().items()}


class StoppingReporter(Reporter):
    """Sends Ctrl-C's signal when a step is done."""

    def __init__(self, step: int) -> None:
        self._step = step

    def step(self, step: int, seconds_left: float | None) -> None:
        if step == self._step:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(scope="module")
def sparse(source: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sparse") / "run"
    before = contents(source)
    config = settings(source, text, "l1_activation=0.03", "learning_rate=3e-3")
    train(config, folder, report=Reporter())
    assert contents(source) == before, "the source is only read"
    return folder


def test_zeros_grow_and_the_loss_recovers(sparse: Path) -> None:
    summary = json.loads((sparse / "summary.json").read_text())
    dense, switched = summary["before"]["source"], summary["before"]["switched"]
    assert dense["ffn_activation_sparsity"] < 0.01
    assert 0.2 < switched["ffn_activation_sparsity"] < summary["ffn_activation_sparsity"]
    assert dense["loss"] < switched["loss"]
    assert summary["loss"] < switched["loss"]
    assert summary["before"].keys() == {"source", "switched"}


def test_before_is_measured_as_the_source_is(sparse: Path, source: Path) -> None:
    model, tokenizer = load_model(source)
    windows, _ = held_out_windows(sparse, model, tokenizer)
    summary = json.loads((sparse / "summary.json").read_text())
    assert evaluate(model, windows, tokenizer)["loss"] == pytest.approx(
        summary["before"]["source"]["loss"], rel=1e-5
    )
    result, _ = load_model(sparse)
    assert evaluate(result, windows, tokenizer)["loss"] == pytest.approx(summary["loss"], rel=1e-5)


def test_the_result_is_a_relu_model_that_runs_without_its_source(sparse: Path) -> None:
    model, tokenizer = load_model(sparse, ffn_path="twell")
    assert model.config.activation == "relu"
    assert isinstance(tokenizer, ByteTokenizer)
    content = json.loads(next(sparse.glob("checkpoints/step-80/config.json")).read_text())
    assert (content["hidden_act"], content["model_type"]) == ("relu", "llama")


@pytest.mark.parametrize("stop", [1, 41])
def test_a_resumed_run_gives_the_same_bits(
    source: Path, sparse: Path, text: Path, tmp_path: Path, stop: int
) -> None:
    copy, run = tmp_path / "copy", tmp_path / "run"
    shutil.copytree(source, copy)
    config = settings(copy, text, "l1_activation=0.03", "learning_rate=3e-3")
    with pytest.raises(Interrupted, match=f"saved; go on with: twell sparsify --resume {run}"):
        train(config, run, report=StoppingReporter(stop))
    shutil.rmtree(copy)  # no longer needed
    summary = train(None, run, resume=True, report=Reporter())
    expected = json.loads((sparse / "summary.json").read_text())
    for key in ("loss", "before", "nonzeros_per_token"):
        assert summary[key] == expected[key]
    for name, value in weights(sparse).items():
        np.testing.assert_array_equal(weights(run)[name], value)


def test_all_that_settings_do_not_describe_is_kept(qwen: Path, text: Path, tmp_path: Path) -> None:
    before = contents(qwen)
    config = settings(qwen, text, "steps=2", "context_length=16")
    with pytest.raises(Interrupted):
        train(config, tmp_path / "run", report=StoppingReporter(1))
    train(None, tmp_path / "run", resume=True, report=Reporter())
    model, tokenizer = load_model(tmp_path / "run")
    original, _ = load_model(qwen)
    assert model.config == dataclasses.replace(original.config, activation="relu")
    assert tokenizer.chat_template == TEMPLATE
    assert contents(qwen) == before
    changed = {
        name: not np.array_equal(value, original.parameters()[name].value)
        for name, value in weights(tmp_path / "run").items()
    }
    assert all(changed.values()), changed


def test_a_changed_description_of_the_model_is_refused(
    qwen: Path, text: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(settings(qwen, text, "context_length=16"), run, report=StoppingReporter(1))
    path = run / "checkpoints" / "step-1" / "config.json"
    path.write_text(path.read_text().replace('"factor": 4.0', '"factor": 2.0'))
    with pytest.raises(TwellError, match="describes a model with rope_scaling="):
        train(None, run, resume=True, report=Reporter())


def test_sequences_are_no_longer_than_the_models_context(
    source: Path, qwen: Path, text: Path
) -> None:
    assert settings(source, text).context_length == 32
    assert settings(qwen, text).context_length == 64
    assert settings(qwen, text, "context_length=8").context_length == 8


def test_warmups_follow_the_number_of_steps(source: Path, text: Path) -> None:
    default = resolve("sparsify", overrides=["initial_model=x"])
    config = settings(source, text, f"steps={default.steps // 10}")
    assert config.l1_warmup_steps == default.l1_warmup_steps // 10
    assert config.initial_model == str(source / "checkpoints" / "step-150")


@pytest.mark.parametrize("override", ["d_model=64", "ffn=two_matrix", "tokenizer=byte", "preset=x"])
def test_the_model_decides_its_sizes(source: Path, text: Path, override: str) -> None:
    with pytest.raises(UsageError, match=f"{override.split('=')[0]} given, which the model"):
        settings(source, text, override)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_ffn": 65}, "d_ffn=65 given for .*, d_ffn=64 wanted"),
        ({"context_length": 33}, "context_length=33 given for .*, at most 32 wanted"),
        ({"initial_model": "nothing/there"}, "nothing/there does not exist"),
    ],
)
def test_settings_of_another_model_are_refused(
    source: Path, text: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    config = dataclasses.replace(settings(source, text), **changes)
    with pytest.raises(TwellError, match=message):
        train(config, tmp_path / "run", report=Reporter())
    assert not (tmp_path / "run").exists()


def test_squared_relu(source: Path, text: Path, tmp_path: Path) -> None:
    config = settings(source, text, "activation=relu2", "steps=3")
    summary = train(config, tmp_path / "run", report=Reporter())
    assert summary["ffn_activation_sparsity"] > 0.2
    assert load_model(tmp_path / "run")[0].config.activation == "relu2"


def test_no_silu_model_is_made(source: Path, text: Path) -> None:
    with pytest.raises(UsageError, match="activation silu given, relu or relu2 wanted"):
        settings(source, text, "activation=silu")


def test_weight_sparse_models_are_refused(source: Path, text: Path, tmp_path: Path) -> None:
    model, tokenizer = load_model(source)
    pruned = Transformer(
        dataclasses.replace(model.config, activation="relu"),
        {name: each.value for name, each in model.parameters().items()},
    )
    pruned.hold_ffn_weights("csr")
    save_model(tmp_path / "csr", pruned, tokenizer)
    with pytest.raises(TwellError, match="holds its feedforward weights as csr, dense ones wanted"):
        load_initial_model(settings(tmp_path / "csr", text))


def test_text_prepared_with_another_tokenizer_is_refused(
    source: Path, text: Path, tmp_path: Path
) -> None:
    prepare(str(text), tmp_path / "bytes.bin")
    prepare(str(text), tmp_path / "bpe.bin", tokenizer="bpe", bpe_vocab_size=300)
    config = settings(source, tmp_path / "bytes.bin", "steps=1")
    train(config, tmp_path / "run", report=Reporter())
    config = with_overrides(config, [f'data="{tmp_path / "bpe.bin"}"'])
    with pytest.raises(TwellError, match="prepared with another tokenizer than the model's"):
        train(config, tmp_path / "other", report=Reporter())


def test_a_model_and_its_tokenizer_go_together() -> None:
    for overrides in (["initial_model=x"], ["tokenizer=model"]):
        with pytest.raises(UsageError, match="tokenizer=model and a model wanted, or neither"):
            resolve("tiny", overrides=overrides)


def test_silu_has_no_twell_path() -> None:
    with pytest.raises(UsageError, match="ffn_path=twell given with activation=silu"):
        resolve("tiny", overrides=["activation=silu", "ffn_path=twell"])


def test_runs_without_an_initial_model_have_no_before(source: Path) -> None:
    assert not (source / "before.json").exists()
    assert "before" not in json.loads((source / "summary.json").read_text())
    assert RunFolder(source).read_before() is None


@pytest.mark.slow
def test_most_zeros_at_no_loss(tmp_path: Path) -> None:
    sizes = ["d_model=64", "d_ffn=256", "n_layers=2", "sample_interval=0"]
    silu = ["activation=silu", "l1_activation=0", "steps=600"]
    train(resolve("tiny", overrides=[*sizes, *silu]), tmp_path / "silu", report=Reporter())
    overrides = ["data=stdlib", "steps=600", "learning_rate=2e-3", "l1_activation=0.03"]
    config = sparsify_settings(tmp_path / "silu", overrides)
    summary = train(config, tmp_path / "sparse", report=Reporter())
    # The source had not learned all that it could.
    assert summary["loss"] < summary["before"]["source"]["loss"]
    assert summary["ffn_activation_sparsity"] > 0.85
    assert summary["dead_neuron_fraction"] < 0.05


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(twell, list(map(str, arguments)), prog_name="twell")


def test_the_command(source: Path, text: Path, tmp_path: Path) -> None:
    run = tmp_path / "a run"
    options = ("--steps", 4, "--l1", "2e-3", "--l1-warmup", 2, "--learning-rate", "1e-3")
    options += ("--warmup", 1, "--batch-size", 2, "--context", 16, "--set", "eval_batches=2")
    result = invoke("sparsify", source, "--data", text, "--out", run, *options, "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed == {"run": str(run), **json.loads((run / "summary.json").read_text())}
    assert "the model as it was: validation loss" in result.stderr
    assert "with the new activation: validation loss" in result.stderr
    config = RunFolder(run).read_config()
    assert (config.l1_activation, config.warmup_steps, config.context_length) == (2e-3, 1, 16)
    again = invoke("sparsify", "--resume", run, "--steps", 6)
    assert again.exit_code == 0, again.output
    titles = [line.split("  ")[0] for line in again.stdout.splitlines()]
    assert titles[:3] == ["the model as it was", "with the new activation", "validation loss"]
    evaluated = invoke("eval", run, "--json")
    summary = json.loads((run / "summary.json").read_text())
    assert json.loads(evaluated.stdout)["loss"] == pytest.approx(summary["loss"], rel=1e-5)
    assert invoke("eval", run, "--ffn-path", "twell").exit_code == 0
    written = invoke("generate", run, "--prompt", "def ", "--max-new-tokens", 4)
    assert written.exit_code == 0, written.output


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "no MODEL given, a folder or GGUF file to make sparse wanted"),
        (("{source}",), 2, "no --data given: stdlib, a file or folder of text"),
        (("{source}", "--resume", "run"), 2, "MODEL {source} given with --resume"),
        (("missing", "--data", "stdlib"), 1, "missing does not exist"),
        (("{source}", "--data", "missing.txt"), 1, "missing.txt"),
        (("{source}", "--data", "stdlib", "--steps", "x"), 2, "steps='x' given"),
        (("{source}", "--data", "stdlib", "--set", "d_ffn=8"), 2, "d_ffn given, which the model"),
        (("{source}", "--data", "stdlib", "--out", " "), 2, "--out ' ' given"),
        (("{source}", "--data", "stdlib", "--out", "{source}"), 1, "exists already"),
    ],
)
def test_mistakes_get_one_line(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments, code, message
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke("sparsify", *(argument.format(source=source) for argument in arguments))
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    line = result.stderr.splitlines()[-1]
    assert line.startswith("Error: ")
    assert message.format(source=source) in line
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []
