"""A small real model in plain NumPy, ``glassllm`` (MIT), as an oracle.

It turns pairs of numbers that stand side by side, as Llama's GGUF files do: its weights, written to
such a file as they are, show that rows are put in the right order.
"""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.models.downloads import unpacked_wheel
from tests.models.gguf_files import write_file
from twell_numba.infer.generate import generate
from twell_numba.models.cache import KVCache
from twell_numba.models.checkpoint import load_model

pytest.importorskip("gguf")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NAMES = {
    "norm1.gamma": "attn_norm.weight",
    "attn.W_Q": "attn_q.weight",
    "attn.W_K": "attn_k.weight",
    "attn.W_V": "attn_v.weight",
    "attn.W_O": "attn_output.weight",
    "norm2.gamma": "ffn_norm.weight",
    "ffn.W1": "ffn_gate.weight",
    "ffn.W3": "ffn_up.weight",
    "ffn.W2": "ffn_down.weight",
}


@pytest.fixture(scope="module")
def glassllm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = unpacked_wheel("glassllm", tmp_path_factory.mktemp("glassllm"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module("glassllm")


@pytest.fixture(scope="module")
def theirs(glassllm: ModuleType) -> Any:
    weights = Path(glassllm.__file__).parent / "weights" / "en.npz"
    return glassllm.GlassLM.load(weights, np.float64)


@pytest.fixture(scope="module")
def path(theirs: Any, glassllm: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    _, tokenizer = glassllm.load_pretrained("en")
    tensors = {}
    for name, parameter in theirs.named_parameters().items():
        value = parameter.data.astype(np.float32)
        if name == "E":
            tensors["token_embd.weight"] = value
        elif name == "norm_f.gamma":
            tensors["output_norm.weight"] = value
        else:
            _, layer, part = name.split(".", 2)
            stored = value.T if value.ndim == 2 else value
            tensors[f"blk.{layer}.{NAMES[part]}"] = np.ascontiguousarray(stored)
    config = theirs.cfg
    metadata: dict[str, Any] = {
        "llama.context_length": config.max_len,
        "llama.embedding_length": config.d_model,
        "llama.block_count": config.n_layers,
        "llama.feed_forward_length": tensors["blk.0.ffn_gate.weight"].shape[0],
        "llama.attention.head_count": config.n_heads,
        "llama.attention.head_count_kv": config.n_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": config.eps,
        "llama.rope.freq_base": config.rope_base,
        "tokenizer.ggml.model": "llama",
        **sentencepiece_metadata(tokenizer),
    }
    file = tmp_path_factory.mktemp("model") / "en.gguf"
    write_file(file, "llama", metadata, tensors)
    return file


def sentencepiece_metadata(tokenizer: Any) -> dict[str, Any]:
    """Return its vocabulary, behind it the single bytes that it does not have."""
    rank = {left + right: number for number, (left, right) in enumerate(tokenizer.merges)}
    texts = list(tokenizer.vocab)
    scores = [-float(rank.get(text, len(rank))) for text in texts]
    types = [3, 2, 3, 3] + [1] * (len(texts) - 4)
    # its rows are all taken: bytes stand in the place of its rarest tokens
    for byte in range(256):
        place = len(texts) - 256 + byte
        texts[place], scores[place], types[place] = f"<0x{byte:02X}>", 0.0, 6
    return {
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
    }


def test_logits_are_theirs(theirs: Any, path: Path) -> None:
    model, _ = load_model(path, np.float64)
    tokens = np.random.default_rng(0).integers(4, theirs.cfg.vocab_size, (3, 128))
    logits = theirs(tokens).data
    ours = np.asarray(model.logits(tokens)).reshape(logits.shape)
    assert np.abs(logits).max() > 5
    np.testing.assert_allclose(ours, logits, atol=1e-9, rtol=0)


def test_greedy_tokens_are_theirs(theirs: Any, path: Path) -> None:
    model, _ = load_model(path)
    prompt = [10, 200, 300]
    expected = [step.token for step in theirs.generate(prompt, 100, greedy=True)]
    cache = KVCache(model.config, 1, 128)
    logits = model.step(np.array([prompt]), cache)
    tokens = [int(np.asarray(logits).argmax())]
    while len(tokens) < 100:
        tokens.append(int(np.asarray(model.step(np.array([[tokens[-1]]]), cache)).argmax()))
    assert tokens == expected


def test_it_generates(path: Path) -> None:
    model, tokenizer = load_model(path)
    text = "".join(generate(model, tokenizer, "the cat", max_new_tokens=20, temperature=0.0))
    assert text
