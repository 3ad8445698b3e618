from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.gguf_files import gguf_tensors
from tests.models.real_models import CONFIGURATIONS, configuration, random_tensors
from tests.models.real_tokenizers import tokenizer_of
from twell_numba.errors import TwellError, UsageError
from twell_numba.formats.tensor_file import read_tensors, write_tensors
from twell_numba.models.checkpoint import load_model, save_model
from twell_numba.models.config import ModelConfig
from twell_numba.models.gguf_reader import read_gguf
from twell_numba.models.gguf_writer import WEIGHT_TYPES, write_gguf
from twell_numba.models.tokenizer import BPETokenizer, ByteTokenizer
from twell_numba.models.tokenizer_settings import TokenizerSettings
from twell_numba.models.transformer import Transformer

gguf = pytest.importorskip("gguf")


def loaded(folder: Path, hf: dict[str, Any]) -> tuple[Transformer, dict[str, np.ndarray]]:
    import json

    tensors = random_tensors(hf)
    ByteTokenizer().save(folder)
    (folder / "config.json").write_text(json.dumps(hf))
    write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
    return load_model(folder)[0], tensors


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_huggingface_to_gguf_and_back_is_the_same(tmp_path: Path, name: str) -> None:
    model, tensors = loaded(tmp_path, configuration(name))
    write_gguf(tmp_path / "model.gguf", model, ByteTokenizer())
    read, tokenizer = load_model(tmp_path / "model.gguf")
    assert read.config == model.config
    assert isinstance(tokenizer, ByteTokenizer)
    save_model(tmp_path / "back", read, tokenizer)
    back = read_tensors(tmp_path / "back" / "model.safetensors")
    assert back.keys() == tensors.keys()
    for key, value in tensors.items():
        np.testing.assert_array_equal(back[key], value, err_msg=key)


@pytest.mark.parametrize("name", ["llama", "llama, grouped heads", "qwen2", "llama, biases"])
def test_the_gguf_package_reads_what_is_written(tmp_path: Path, name: str) -> None:
    hf = configuration(name)
    model, tensors = loaded(tmp_path, hf)
    write_gguf(tmp_path / "model.gguf", model, ByteTokenizer())
    read = gguf.GGUFReader(tmp_path / "model.gguf")
    stored = {tensor.name: tensor.data for tensor in read.tensors}
    expected = gguf_tensors(hf, tensors)
    assert stored.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(stored[key], value, err_msg=key)
    architecture = read.get_field("general.architecture").contents()
    assert architecture == ("qwen2" if name == "qwen2" else "llama")
    assert read.get_field(f"{architecture}.context_length").contents() == 512
    assert len(read.get_field("tokenizer.ggml.tokens").contents()) == 256


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("llama, relu", "twell"),
        ("qwen2, relu", "twell"),
        ("llama 3", "llama"),
        ("mistral", "llama"),
        ("qwen2, tied and grouped", "qwen2"),
        ("llama, biases", "llama"),
    ],
)
def test_other_tools_never_take_a_model_for_another(
    tmp_path: Path, name: str, architecture: str
) -> None:
    """As "llama", a model with ReLU would be run with SiLU, and nothing would say so."""
    model, _ = loaded(tmp_path, configuration(name))
    write_gguf(tmp_path / "model.gguf", model, ByteTokenizer())
    read = gguf.GGUFReader(tmp_path / "model.gguf")
    assert read.get_field("general.architecture").contents() == architecture


def small_model(**changes: Any) -> Transformer:
    config = ModelConfig(
        vocab_size=256, d_model=64, d_ffn=96, n_layers=2, n_heads=4, n_kv_heads=2,
        context_length=64,
    )  # fmt: skip
    return Transformer(replace(config, **changes), np.random.default_rng(0))


@pytest.mark.parametrize("changes", [{}, {"ffn": "two_matrix"}, {"activation": "relu2"}])
def test_models_of_this_package_come_back(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = small_model(**changes)
    write_gguf(tmp_path / "model.gguf", model, ByteTokenizer())
    config, weights, _ = read_gguf(tmp_path / "model.gguf")
    assert config == model.config
    for name, parameter in model.parameters().items():
        np.testing.assert_array_equal(weights[name], parameter.value)


@pytest.mark.parametrize(("kind", "bits"), [("f32", 24), ("f16", 11), ("bf16", 8), ("q8_0", 7)])
def test_weights_are_rounded_to_the_type(tmp_path: Path, kind: str, bits: int) -> None:
    model = small_model()
    write_gguf(tmp_path / "model.gguf", model, ByteTokenizer(), kind)
    _, weights, _ = read_gguf(tmp_path / "model.gguf")
    for name, parameter in model.parameters().items():
        value, read = parameter.value, weights[name]
        if value.ndim == 1:
            np.testing.assert_array_equal(read, value)
        else:
            error = np.abs(read - value).max()
            assert error <= np.abs(value).max() * 2.0**-bits
            assert (error == 0) == (kind == "f32")
    size = (tmp_path / "model.gguf").stat().st_size
    count = model.config.parameter_count()
    nbytes = {"f32": 4, "f16": 2, "bf16": 2, "q8_0": 34 / 32}[kind]
    assert nbytes * count < size < nbytes * count + 60_000


def test_rows_that_are_no_whole_blocks_stay_float32(tmp_path: Path) -> None:
    model = small_model(d_ffn=100)
    write_gguf(tmp_path / "model.gguf", model, ByteTokenizer(), "q8_0")
    kinds = {
        tensor.name: tensor.tensor_type.name
        for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors
    }
    assert kinds["blk.0.ffn_down.weight"] == "F32"
    assert kinds["blk.0.ffn_up.weight"] == "Q8_0"
    read_gguf(tmp_path / "model.gguf")


@pytest.mark.parametrize(("kind", "weight"), [("f16", 1e6), ("q8_0", 1e7)])
def test_weights_beyond_a_type_are_refused_and_nothing_is_left(
    tmp_path: Path, kind: str, weight: float
) -> None:
    model = small_model()
    model.parameters()["model.layers.0.mlp.up_proj.weight"].value[3, 4] = weight
    with pytest.raises(TwellError, match=rf"blk.0.ffn_up.weight has weights up to .*{kind};"):
        write_gguf(tmp_path / "model.gguf", model, ByteTokenizer(), kind)
    assert list(tmp_path.iterdir()) == []
    write_gguf(tmp_path / "model.gguf", model, ByteTokenizer(), "bf16")


def test_what_was_there_stays_when_writing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"before")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full)
    with pytest.raises(TwellError, match="No space left on device"):
        write_gguf(path, small_model(), ByteTokenizer())
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_sparse_weights_and_unknown_types_are_refused(tmp_path: Path) -> None:
    model = small_model()
    with pytest.raises(UsageError, match=f"one of {', '.join(WEIGHT_TYPES)} wanted"):
        write_gguf(tmp_path / "model.gguf", model, ByteTokenizer(), "q4_0")
    model.hold_ffn_weights("csr")
    with pytest.raises(UsageError, match="a model of csr weights"):
        write_gguf(tmp_path / "model.gguf", model, ByteTokenizer())


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama, grouped heads", "llama-bpe"), ("qwen2, tied and grouped", "qwen2"),
     ("llama, wide heads", "legacy")],
)  # fmt: skip
@pytest.mark.filterwarnings("default")  # theirs are not ours to mend
def test_transformers_computes_the_same(tmp_path: Path, name: str, kind: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    tokenizer = BPETokenizer(
        tokenizer_of(kind), TokenizerSettings(bos_token=1, eos_tokens=(2,), adds_bos=False)
    )
    rows = tokenizer.vocab_size
    model, _ = loaded(tmp_path, {**configuration(name), "vocab_size": rows})
    write_gguf(tmp_path / "model.gguf", model, tokenizer)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    )
    tokens = np.random.default_rng(2).integers(0, rows, (2, 60))
    with torch.no_grad():
        logits = theirs.eval()(torch.from_numpy(tokens)).logits.numpy()
    ours = model.logits(tokens).reshape(logits.shape)
    assert np.abs(logits).max() > 1
    np.testing.assert_allclose(ours, logits, atol=1e-4, rtol=0)
