"""The checkpoint as another tool sees it; skipped where transformers is not installed."""

from pathlib import Path

import numpy as np
import pytest

from twell_numba.models.checkpoint import load_model, save_model
from twell_numba.models.config import ModelConfig
from twell_numba.models.tokenizer import ByteTokenizer
from twell_numba.models.transformer import Transformer

pytestmark = pytest.mark.filterwarnings("default")  # theirs are not ours to mend


def saved(folder: Path, tied: bool, n_kv_heads: int) -> Transformer:
    config = ModelConfig(
        vocab_size=256,
        d_model=64,
        d_ffn=160,
        n_layers=3,
        n_heads=8,
        n_kv_heads=n_kv_heads,
        context_length=64,
        rope_base=5e4,
        norm_eps=1e-3,
        tied_embeddings=tied,
    )
    model = Transformer(config, np.random.default_rng(0))
    for parameter in model.parameters().values():
        parameter.value *= np.random.default_rng(1).uniform(1, 4, parameter.value.shape)
    save_model(folder, model, ByteTokenizer())
    return model


@pytest.mark.parametrize("n_kv_heads", [8, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_gets_the_same_logits(tmp_path: Path, tied: bool, n_kv_heads: int) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = saved(tmp_path, tied, n_kv_heads)
    tokens = np.random.default_rng(2).integers(0, 256, (2, 64))
    theirs, loading = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(loading.values()), loading
    assert theirs.dtype == torch.float32
    with torch.no_grad():
        logits = theirs.eval()(torch.from_numpy(tokens)).logits.numpy()
    assert np.abs(logits).max() > 1
    np.testing.assert_allclose(
        model.logits(tokens).reshape(logits.shape), logits, atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("tied", [True, False])
def test_what_transformers_saves_is_read(tmp_path: Path, tied: bool) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = saved(tmp_path / "ours", tied, 2)
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    ByteTokenizer().save(tmp_path / "theirs")
    loaded, _ = load_model(tmp_path / "theirs")
    assert loaded.config == model.config
    for name, parameter in model.parameters().items():
        np.testing.assert_array_equal(loaded.parameters()[name].value, parameter.value)


def test_transformers_opens_the_tokenizer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    saved(tmp_path, True, 2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("grød 🙂") == list("grød 🙂".encode())
    assert tokenizer.decode(list("grød 🙂".encode())) == "grød 🙂"
