"""Checkpoints in the shapes that people have: against a plain reference, and transformers.

The latter is skipped where transformers is not installed.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.llama_reference import reference_logits
from tests.models.real_models import CONFIGURATIONS, configuration, random_tensors
from twell_numba.formats.tensor_file import read_tensors, write_tensors
from twell_numba.models.cache import KVCache
from twell_numba.models.checkpoint import load_model, save_model
from twell_numba.models.tokenizer import ByteTokenizer
from twell_numba.models.transformer import Transformer

pytestmark = pytest.mark.filterwarnings("default")  # transformers' are not ours to mend


def write_checkpoint(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    config = configuration(name)
    tensors = random_tensors(config)
    ByteTokenizer().save(folder)
    (folder / "config.json").write_text(json.dumps(config))
    write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
    return config, tensors


def greedy(model: Transformer, prompt: np.ndarray, count: int) -> list[int]:
    cache = KVCache(model.config, 1, len(prompt) + count)
    logits = model.step(prompt[None, :], cache)
    tokens = [int(logits.argmax())]
    while len(tokens) < count:
        tokens.append(int(model.step(np.array([[tokens[-1]]]), cache).argmax()))
    return tokens


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_logits_are_those_of_the_reference(tmp_path: Path, name: str) -> None:
    config, tensors = write_checkpoint(tmp_path, name)
    model, _ = load_model(tmp_path, np.float64)
    tokens = np.random.default_rng(1).integers(0, 256, (2, 70))
    logits = model.logits(tokens).reshape(2, 70, -1)
    assert np.abs(logits).max() > 1
    for sequence, of_it in zip(tokens, logits, strict=True):
        np.testing.assert_allclose(
            of_it, reference_logits(config, tensors, sequence), atol=1e-10, rtol=0
        )


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_what_is_written_is_what_was_read(tmp_path: Path, name: str) -> None:
    config, tensors = write_checkpoint(tmp_path, name)
    model, tokenizer = load_model(tmp_path)
    (tmp_path / "copy").mkdir()
    save_model(tmp_path / "copy", model, tokenizer)
    copied = read_tensors(tmp_path / "copy" / "model.safetensors")
    assert copied.keys() == tensors.keys()
    for tensor, value in tensors.items():
        np.testing.assert_array_equal(copied[tensor], value)
    assert load_model(tmp_path / "copy")[0].config == model.config
    written = json.loads((tmp_path / "copy" / "config.json").read_text())
    logits = reference_logits(written, copied, np.arange(40))
    np.testing.assert_array_equal(logits, reference_logits(config, tensors, np.arange(40)))


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_logits_and_text_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    write_checkpoint(tmp_path, name)
    theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(loading.values()), loading
    theirs = theirs.eval()
    model, _ = load_model(tmp_path)
    tokens = np.random.default_rng(2).integers(0, 256, (2, 90))
    with torch.no_grad():
        logits = theirs(torch.from_numpy(tokens)).logits.numpy()
    np.testing.assert_allclose(
        model.logits(tokens).reshape(logits.shape), logits, atol=1e-4, rtol=0
    )
    with torch.no_grad():
        written = theirs.generate(
            torch.from_numpy(tokens[:1]), max_new_tokens=200, do_sample=False, pad_token_id=0
        )
    assert greedy(model, tokens[0], 200) == written[0, 90:].tolist()


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_transformers_reads_what_is_written(tmp_path: Path, name: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    _, tensors = write_checkpoint(tmp_path, name)
    model, tokenizer = load_model(tmp_path)
    (tmp_path / "copy").mkdir()
    save_model(tmp_path / "copy", model, tokenizer)
    theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "copy", output_loading_info=True
    )
    assert not any(loading.values()), loading
    tokens = np.arange(60)[None, :]
    with torch.no_grad():
        logits = theirs.eval()(torch.from_numpy(tokens)).logits.numpy()
    np.testing.assert_allclose(model.logits(tokens), logits[0], atol=1e-4, rtol=0)
