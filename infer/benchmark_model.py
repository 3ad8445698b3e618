"""Times of a whole model's forward pass: its sparse path against its dense one."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from twell_numba.device.arrays import to_host
from twell_numba.infer.ffn_problem import relative_error
from twell_numba.infer.model_problem import set_nonzeros, sparse_model
from twell_numba.infer.timing import (
    energy_in_turn_on_gpu,
    time_in_turn,
    time_in_turn_on_gpu,
)
from twell_numba.models.config import ModelConfig
from twell_numba.models.transformer import Transformer

if TYPE_CHECKING:
    from twell_numba.device.energy import EnergyCounter

PATHS = ("dense", "twell", "auto")


def benchmark_model(
    config: ModelConfig,
    nonzeros: list[float],
    batch: int,
    length: int,
    rounds: int,
    seed: int,
    dtype: DTypeLike = np.float32,
    stream: Any = None,
    counter: "EnergyCounter | None" = None,
) -> list[dict[str, Any]]:
    """Time the forward pass, from tokens to logits, of a model with random weights.

    Parameters
    ----------
    config : ModelConfig
    nonzeros : list of float
        Neurons that fire for a token, one measurement each.
    batch, length : int
        B sequences of S tokens.
    rounds : int
        Timed passes of each path.
    seed : int
    dtype : dtype
        Float32 on the CPU.
    stream : twell_numba.device.gpu.Stream, optional
        Where it runs on a GPU.
    counter : EnergyCounter, optional
        Of that GPU; without it no energy is measured.

    Returns
    -------
    list of dict
        One row a path and number of nonzeros, with the keys of ``twell bench --json`` and
        ``tokens_per_ms``; ``dense_mj_per_token`` and ``sparse_mj_per_token``, None without a
        counter, are the GPU's energy. The error is that of the logits against the dense path's: of
        the first sequence.
    """
    model = sparse_model(config, seed)
    if stream is not None:
        model.move_to_gpu(stream, dtype)
    rng = np.random.default_rng(seed)
    tokens: Any = rng.integers(0, config.vocab_size, (batch, length))
    if stream is not None:
        from twell_numba.device.gpu import from_numpy

        tokens = from_numpy(tokens, stream)
    rows = []
    for wanted in nonzeros:
        set_nonzeros(model, wanted, seed)
        rows += _rows(model, tokens, rounds, counter)
    return rows


def _rows(
    model: Transformer, tokens: Any, rounds: int, counter: "EnergyCounter | None"
) -> list[dict[str, Any]]:
    results = {path: _first_logits(model, tokens, path) for path in PATHS}
    calls: dict[str, Callable[[], object]] = {path: _forward(model, tokens, path) for path in PATHS}
    if model.stream is None:
        milliseconds = time_in_turn(calls, rounds)
    else:
        milliseconds = time_in_turn_on_gpu(calls, rounds, model.stream)
    energy: dict[str, float | None] = dict.fromkeys(PATHS)
    if counter is not None:
        millijoules = energy_in_turn_on_gpu(calls, model.stream, counter)
        energy |= {path: millijoules[path] / tokens.size for path in PATHS}
    counts = [ffn.statistics.nonzeros / tokens.size for ffn in model.ffn_layers]
    on_gpu, model.ffn_path = None if model.stream is None else tokens.size, "auto"
    taken = [ffn.next_path(on_gpu) for ffn in model.ffn_layers]
    config = model.config
    names = {path: path for path in PATHS} | {"auto": f"auto ({', '.join(sorted(set(taken)))})"}
    return [
        {
            "operation": "model forward",
            "path": names[path],
            "device": model.device,
            "dtype": str(model.dtype),
            "shape": {
                "M": tokens.size, "D": config.d_model, "F": config.d_ffn, "L": config.n_layers,
            },
            "nonzeros_per_token": float(np.mean(counts)),
            "dense_ms": milliseconds["dense"],
            "sparse_ms": milliseconds[path],
            "speedup": milliseconds["dense"] / milliseconds[path],
            "tokens_per_ms": tokens.size / milliseconds[path],
            "dense_mj_per_token": energy["dense"],
            "sparse_mj_per_token": energy[path],
            "max_relative_error": relative_error(results[path], results["dense"]),
        }
        for path in PATHS
    ]  # fmt: skip


def _forward(model: Transformer, tokens: Any, path: str) -> Callable[[], object]:
    def run() -> None:
        model.ffn_path = path
        model.logits(tokens)

    return run


def _first_logits(model: Transformer, tokens: Any, path: str) -> np.ndarray:
    """Return the logits of the first sequence in float64; twice, so that `auto` has measured."""
    model.ffn_path = path
    for _ in range(2):
        logits = to_host(model.logits(tokens[0:1]))
    return logits.astype(np.float64)
