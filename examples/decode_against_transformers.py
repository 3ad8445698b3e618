"""One token after the other on the CPU: this package beside Hugging Face's transformers.

    python examples/decode_against_transformers.py            # random weights, SmolLM2-135M's shape
    python examples/decode_against_transformers.py MODEL      # a Hugging Face folder

Both compute in float32, on as many threads, in turn; what is printed is the median time of a token
after a prompt of 200, and how far the logits are apart. It needs torch and transformers.
"""

import importlib.util
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from twell_numba.device import thread_count
from twell_numba.models.cache import KVCache
from twell_numba.models.checkpoint import load_model, save_model
from twell_numba.models.config import ModelConfig
from twell_numba.models.tokenizer import ByteTokenizer
from twell_numba.models.transformer import Transformer

PROMPT, TOKENS, ROUNDS = 200, 40, 3
SMOLLM2_135M = ModelConfig(
    vocab_size=49152,
    d_model=576,
    d_ffn=1536,
    n_layers=30,
    n_heads=9,
    n_kv_heads=3,
    context_length=2048,
    rope_base=1e5,
    activation="silu",
)


def main() -> None:
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            print(f"Nothing done, for want of {package}")
            return
    with tempfile.TemporaryDirectory() as temporary:
        folder = sys.argv[1] if len(sys.argv) > 1 else random_model(Path(temporary))
        compare(folder)


def random_model(folder: Path) -> str:
    """Write a model of random weights, and return where it is."""
    save_model(folder, Transformer(SMOLLM2_135M, np.random.default_rng(0)), ByteTokenizer())
    return str(folder)


def compare(folder: str) -> None:
    """Time both, and compare their logits."""
    import torch
    import transformers

    torch.set_num_threads(thread_count())
    ours, _ = load_model(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = np.random.default_rng(0).integers(0, ours.config.vocab_size, PROMPT)
    tokens = np.random.default_rng(1).integers(0, ours.config.vocab_size, TOKENS)

    def ours_decodes() -> tuple[list[float], np.ndarray]:
        cache = KVCache(ours.config, 1, PROMPT + TOKENS)
        ours.step(prompt[None, :], cache)
        times, logits = [], np.empty(0)
        for token in tokens:
            start = time.perf_counter()
            logits = ours.step(np.array([[token]]), cache)
            times.append(time.perf_counter() - start)
        return times, logits[0]

    def theirs_decodes() -> tuple[list[float], np.ndarray]:
        with torch.no_grad():
            cache = theirs(torch.from_numpy(prompt[None, :]), use_cache=True).past_key_values
            times, logits = [], torch.empty(0)
            for token in tokens:
                start = time.perf_counter()
                output = theirs(torch.tensor([[int(token)]]), past_key_values=cache, use_cache=True)
                logits = output.logits
                times.append(time.perf_counter() - start)
            return times, logits[0, -1].numpy()

    ours_decodes(), theirs_decodes()  # compiles, and warms up
    ours_times: list[float] = []
    theirs_times: list[float] = []
    for _ in range(ROUNDS):
        times, ours_logits = ours_decodes()
        ours_times += times
        times, theirs_logits = theirs_decodes()
        theirs_times += times
    ours_ms, theirs_ms = (1e3 * statistics.median(times) for times in (ours_times, theirs_times))
    print(f"threads            {thread_count()}")
    print(f"this package       {ours_ms:.2f} ms a token")
    print(f"transformers       {theirs_ms:.2f} ms a token")
    print(f"speed              {theirs_ms / ours_ms:.2f}x of transformers")
    print(f"logits differ by   {np.abs(ours_logits - theirs_logits).max():.1e}")


if __name__ == "__main__":
    main()
