"""``twell bench model`` and ``twell bench train``: times of whole models."""

import json
from typing import TYPE_CHECKING, Any

import click

from twell_numba.cli.options import (
    device_option,
    dtype_of,
    dtype_option,
    json_option,
    rounds_option,
    seed_option,
)
from twell_numba.cli.text import note, print_table
from twell_numba.errors import TwellError, UsageError

if TYPE_CHECKING:
    from twell_numba.device.energy import EnergyCounter
    from twell_numba.train.config import TrainConfig

preset_option = click.option(
    "--preset",
    metavar="NAME",
    default="tiny",
    show_default=True,
    help="Whose sizes to take: tiny, small, base, paper-0.5b, paper-1b, paper-1.5b or paper-2b.",
)
set_option = click.option(
    "--set",
    "overrides",
    metavar="KEY=VALUE",
    multiple=True,
    help="One setting over those of the preset; may be given many times.",
)
nonzeros_option = click.option(
    "--nonzeros",
    type=click.FloatRange(min=1),
    multiple=True,
    help="Neurons that fire for a token, in each layer; may be given several times. 29 if not "
    "given, or less in a small model.",
)


@click.command("model")
@preset_option
@set_option
@click.option("--batch", type=click.IntRange(min=1), help="Sequences; the preset's if not given.")
@nonzeros_option
@dtype_option
@rounds_option
@device_option
@seed_option(0)
@json_option
def bench_model(
    preset: str,
    overrides: tuple[str, ...],
    batch: int | None,
    nonzeros: tuple[float, ...],
    dtype: str,
    rounds: int,
    device: str,
    seed: int,
    as_json: bool,
) -> None:
    """Time the forward pass of a whole model, from tokens to logits, through every FFN path.

    The model has random weights, of which offsets let as many neurons fire as are asked for. On a
    GPU the dense path takes its products from cuBLASLt and its attention from cuDNN where they are
    installed. The error is that of the logits against the dense path's. Energy is that of the GPU,
    of three more seconds of passes through each path.

    \b
    Example:
      twell bench model --device cuda --dtype bfloat16 --preset paper-1.5b --batch 64
    """
    from twell_numba.device.memory import keep_freed_memory
    from twell_numba.infer.benchmark_model import benchmark_model

    config = _resolve(preset, overrides, device)
    counts = _nonzeros(nonzeros, config)
    model_dtype = dtype_of(dtype, device)
    counter = _energy_counter(device)
    keep_freed_memory()
    rows = benchmark_model(
        config.model_config(_vocabulary(config)),
        counts,
        batch or config.batch_size,
        config.context_length,
        rounds,
        seed,
        model_dtype,
        _stream(device),
        counter,
    )
    _print(rows, as_json)


@click.command("train")
@preset_option
@set_option
@nonzeros_option
@rounds_option
@device_option
@seed_option(0)
@json_option
def bench_train(
    preset: str,
    overrides: tuple[str, ...],
    nonzeros: tuple[float, ...],
    rounds: int,
    device: str,
    seed: int,
    as_json: bool,
) -> None:
    """Time whole training steps of a model, through every FFN path.

    Weights and tokens are random, and as many neurons fire as are asked for; the learning rate is
    next to nothing, so that this stays so. The error is that of a step's loss against the dense
    path's. `idle` is the part of the time in which a GPU had nothing to do. Energy is that of the
    GPU, of three more seconds of steps through each path.

    \b
    Example:
      twell bench train --device cuda --preset paper-1.5b --set gradient_accumulation=1
    """
    from twell_numba.device.memory import keep_freed_memory
    from twell_numba.train.benchmark_step import benchmark_step

    config = _resolve(preset, (*overrides, f"seed={seed}"), device)
    counts = _nonzeros(nonzeros, config)
    keep_freed_memory()
    stream, counter = _stream(device), _energy_counter(device)
    rows: list[dict[str, Any]] = []
    for count in counts:
        rows += benchmark_step(config, _vocabulary(config), count, rounds, stream, counter)
        if not as_json:
            note(f"measured: {count:g} nonzeros")
    _print(rows, as_json)


def _resolve(preset: str, overrides: tuple[str, ...], device: str) -> "TrainConfig":
    from twell_numba.layers.ffn import REASON_OF_ACTIVATION, has_sparse_path
    from twell_numba.train.config import resolve

    config = resolve(preset, None, list(overrides))
    activation = config.activation
    if not has_sparse_path(activation, on_gpu=device != "cpu"):
        raise UsageError(
            f"activation={activation} given, one with a sparse path on {device} wanted to time "
            f"beside the dense one: {REASON_OF_ACTIVATION[activation]}"
        )
    return config


def _nonzeros(given: tuple[float, ...], config: "TrainConfig") -> list[float]:
    most = config.d_ffn / 2
    for count in given:
        if not count < most:  # NaN neither
            raise UsageError(
                f"--nonzeros {count:g} given, fewer than half of the {config.d_ffn} neurons wanted"
            )
    return list(given) or [min(29.0, config.d_ffn / 50)]


def _vocabulary(config: "TrainConfig") -> int:
    return config.bpe_vocab_size if config.tokenizer == "bpe" else 256


def _stream(device: str) -> Any:
    if device == "cpu":
        return None
    from twell_numba.device.gpu import choose

    return choose(device).stream


def _energy_counter(device: str) -> "EnergyCounter | None":
    """Return the GPU's; where there is none, one line says why."""
    from twell_numba.device.energy import EnergyCounter

    if device == "cpu":
        note("mJ/token not measured: it is counted for NVIDIA GPUs only")
        return None
    try:
        return EnergyCounter(int(device.removeprefix("cuda:")))
    except TwellError as error:
        note(f"mJ/token not measured: {error}")
        return None


def _print(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    first = rows[0]
    sizes = ", ".join(f"{letter} = {size:,}" for letter, size in first["shape"].items())
    click.echo(f"{sizes}, {first['dtype']}, {first['device']}; milliseconds, medians")
    is_training = "milliseconds_by_part" in first
    has_energy = first["sparse_mj_per_token"] is not None
    print_table(
        (
            "operation",
            "nonzeros/token",
            "path",
            "dense",
            "this",
            "speed-up",
            "tokens/ms",
            "error",
            *(("dense mJ/token", "this mJ/token") if has_energy else ()),
            *(("forward", "backward", "optimizer", "idle", "peak GiB") if is_training else ()),
        ),
        [
            (
                *_cells(row),
                *(_energy_cells(row) if has_energy else ()),
                *(_training_cells(row) if is_training else ()),
            )
            for row in rows
        ],
    )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["operation"],
        f"{row['nonzeros_per_token']:.1f}",
        row["path"],
        f"{row['dense_ms']:.3f}",
        f"{row['sparse_ms']:.3f}",
        f"{row['speedup']:.2f}x",
        f"{row['tokens_per_ms']:.1f}",
        f"{row['max_relative_error']:.1e}",
    )


def _energy_cells(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(f"{row[key]:.3f}" for key in ("dense_mj_per_token", "sparse_mj_per_token"))


def _training_cells(row: dict[str, Any]) -> tuple[str, ...]:
    idle, peak = row["idle_fraction"], row["peak_memory_bytes"]
    return (
        *(f"{milliseconds:.3f}" for milliseconds in row["milliseconds_by_part"].values()),
        "" if idle is None else f"{idle:.1%}",
        "" if peak is None else f"{peak / 2**30:.1f}",
    )
