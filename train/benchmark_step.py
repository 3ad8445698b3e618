"""Times of a training step: the sparse path against the dense one."""

import dataclasses
import gc
import time
from statistics import median
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from twell_numba.infer.model_problem import set_nonzeros, sparse_model
from twell_numba.infer.timing import energy_of
from twell_numba.train.config import TrainConfig
from twell_numba.train.corpus import TokenCorpus
from twell_numba.train.trainer import StepResult, Trainer

if TYPE_CHECKING:
    from twell_numba.device.energy import EnergyCounter

PATHS = ("dense", "twell", "auto")
# A path's first steps compile, and record what the others replay.
WARM_UP = 3
# More than are taken.
STEPS = 10**9


def benchmark_step(
    config: TrainConfig,
    vocabulary: int,
    nonzeros: float,
    rounds: int,
    stream: Any = None,
    counter: "EnergyCounter | None" = None,
) -> list[dict[str, Any]]:
    """Time whole training steps of a model with random weights on random tokens.

    The learning rate is 0, so that as many neurons go on firing; the optimizer's work is done all
    the same.

    Parameters
    ----------
    config : TrainConfig
        Its sizes, batch and precision count.
    vocabulary : int
        V.
    nonzeros : float
        Neurons that fire for a token.
    rounds : int
        Timed steps of each path, after each other: what is recorded for two may not fit beside
        each other.
    stream : twell_numba.device.gpu.Stream, optional
        Where it runs on a GPU.
    counter : EnergyCounter, optional
        Of that GPU; without it no energy is measured.

    Returns
    -------
    list of dict
        One row a path, with the keys of ``twell bench --json``, and ``tokens_per_ms``,
        ``milliseconds_by_part``, and of a GPU ``peak_memory_bytes`` and ``idle_fraction``: the part
        of the time in which it had nothing to do; ``dense_mj_per_token`` and
        ``sparse_mj_per_token``, None without a counter, are its energy. The error is that of a
        step's loss against the dense path's.
    """
    config = dataclasses.replace(
        config,
        learning_rate=1e-30,
        weight_decay=0.0,
        l1_activation=0.0,
        l1_warmup_steps=0,
        steps=STEPS,
    )
    trainer = _trainer(config, vocabulary, nonzeros, stream)
    # All paths see the same tokens, step by step.
    start = trainer.sampler.state_dict()
    measured = {}
    for path in PATHS:
        trainer.sampler.load_state_dict(start)
        measured[path] = _measure(trainer, path, rounds, stream, counter)
    dense = measured["dense"]
    dense_ms, dense_loss = dense["sparse_ms"], dense["loss"]
    for row in measured.values():
        row |= {"dense_ms": dense_ms, "speedup": dense_ms / row["sparse_ms"]}
        row["dense_mj_per_token"] = dense["sparse_mj_per_token"]
        row["max_relative_error"] = abs(row.pop("loss") - dense_loss) / dense_loss
    return list(measured.values())


def _trainer(config: TrainConfig, vocabulary: int, nonzeros: float, stream: Any) -> Trainer:
    model = sparse_model(config.model_config(vocabulary), config.seed)
    tokens = np.random.default_rng(config.seed).integers(0, vocabulary, 1 << 20)
    tokenizer: Any = SimpleNamespace(vocab_size=vocabulary)
    corpus = TokenCorpus("random", 1, tokens.size, tokenizer, tokens, tokens)
    trainer = Trainer(config, corpus, model)
    if stream is None:
        set_nonzeros(model, nonzeros, config.seed)
    else:
        trainer.move_to_gpu(stream)
        assert trainer.recorded is not None
        set_nonzeros(model, nonzeros, config.seed, trainer.recorded.flat.refresh_copy)
    return trainer


def _measure(
    trainer: Trainer, path: str, rounds: int, stream: Any, counter: "EnergyCounter | None"
) -> dict[str, Any]:
    trainer.model.ffn_path = path
    if trainer.recorded is not None:
        trainer.recorded.forget()
        gc.collect()  # what the last path had, which refers to itself
        stream.synchronize()  # freeing it is work of the stream: until then it counts as in use
        stream.gpu.memory.reset_peak()
    times, results = [], []
    for _ in range(WARM_UP + rounds):
        begin = time.perf_counter()
        results.append(trainer.take_step())
        times.append(1e3 * (time.perf_counter() - begin))
    row = _row(trainer, path, times[WARM_UP:], results[WARM_UP:], stream)
    row["sparse_mj_per_token"] = None
    if counter is not None:
        millijoules = energy_of(trainer.take_step, row["sparse_ms"], stream, counter)
        row["sparse_mj_per_token"] = millijoules / trainer.config.tokens_per_step
    return row


def _row(
    trainer: Trainer, path: str, times: list[float], results: list[StepResult], stream: Any
) -> dict[str, Any]:
    config = trainer.config
    milliseconds = median(times)
    parts = {
        part: 1e3 * median(result.seconds_by_part[part] for result in results)
        for part in results[0].seconds_by_part
    }
    taken = sorted(set(results[-1].statistics.paths))
    return {
        "operation": "training step",
        "path": path if path != "auto" else f"auto ({', '.join(taken)})",
        "device": trainer.model.device,
        "dtype": str(trainer.model.dtype),
        "shape": {
            "M": config.tokens_per_step,
            "D": config.d_model,
            "F": config.d_ffn,
            "L": config.n_layers,
        },
        "nonzeros_per_token": float(np.mean(results[-1].statistics.nonzeros_per_token())),
        "sparse_ms": milliseconds,
        "tokens_per_ms": config.tokens_per_step / milliseconds,
        "peak_memory_bytes": None if stream is None else stream.gpu.memory.peak(),
        "milliseconds_by_part": parts,
        "idle_fraction": None
        if stream is None
        else max(0.0, 1 - sum(parts.values()) / milliseconds),
        "loss": results[0].loss,
    }
