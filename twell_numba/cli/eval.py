"""``twell eval``: how good and how sparse a model is."""

import math
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from twell_numba.cli.loading import load_noting
from twell_numba.cli.options import (
    device_option,
    dtype_option,
    ffn_path_option,
    float8_option,
    ignored_seed_option,
    json_option,
)
from twell_numba.cli.text import note, print_table
from twell_numba.errors import TwellError, UsageError
from twell_numba.strict_json import to_json

_SECONDS_BETWEEN_NOTES = 10.0


@click.command("eval")
@click.argument("run", metavar="RUN")
@click.option(
    "--data",
    metavar="SRC",
    help="stdlib, a text file, a folder or a prepared .bin, of which the held-out part is used; "
    "the run's own data if neither this nor --tasks is given.",
)
@click.option(
    "--windows",
    type=click.IntRange(min=1),
    help="How many sequences to measure; as in the run's validation if not given.",
)
@click.option(
    "--context",
    type=click.IntRange(min=1),
    help="Tokens of a sequence; as in the run's training, or at most 1024, if not given.",
)
@click.option(
    "--tasks",
    metavar="FILE.jsonl",
    multiple=True,
    help="Multiple-choice questions, JSON lines with context, choices and answer; may be given "
    "many times.",
)
@click.option(
    "--limit", type=click.IntRange(min=1), help="Ask only so many questions of each file."
)
@click.option(
    "--separator",
    metavar="TEXT",
    help="Put between context and choice where neither has white space; a blank if not given.",
)
@ffn_path_option
@float8_option
@ignored_seed_option
@device_option
@dtype_option
@json_option
def evaluate(
    run: str,
    data: str | None,
    windows: int | None,
    context: int | None,
    tasks: tuple[str, ...],
    limit: int | None,
    separator: str | None,
    ffn_path: str,
    float8: bool,
    device: str,
    dtype: str,
    as_json: bool,
) -> None:
    """Measure the model in RUN on held-out text and on tasks.

    RUN is a run folder, a checkpoint, a Hugging Face model's folder or a GGUF file.

    A line of a task: {"context": "2 + 2 =", "choices": ["4", "5"], "answer": 0}; the choice that
    the model finds likeliest is its answer.

    \b
    Examples:
      twell eval runs/tiny-1
      twell eval runs/tiny-1 --data my-texts/ --json
      twell eval runs/tiny-1 --tasks questions.jsonl --limit 100
    """
    _require_used("--tasks", bool(tasks), {"--limit": limit, "--separator": separator})
    if tasks:
        _require_used("--data", data is not None, {"--windows": windows, "--context": context})
    from twell_numba.infer.evaluate import require_finite_weights
    from twell_numba.infer.questions import read_questions

    questions = [read_questions(path, limit) for path in tasks]
    model, tokenizer = load_noting(
        run, dtype=dtype, ffn_path=ffn_path, device=device, float8=float8
    )
    require_finite_weights(model)
    result: dict[str, Any] = {}
    with warnings.catch_warnings():
        # What NumPy would warn of shows in the loss.
        warnings.filterwarnings("ignore", ".* encountered in ", RuntimeWarning)
        if data is not None or not tasks:
            result |= _measure_text(run, model, tokenizer, data, windows, context)
        if tasks:
            result["tasks"] = [
                _measure_task(path, model, tokenizer, asked, separator)
                for path, asked in zip(tasks, questions, strict=True)
            ]
    if as_json:
        click.echo(to_json(result, indent=2))
        return
    if "loss" in result:
        held = model.config.ffn_weight_format + (", 8-bit floats" if float8 else "")
        _print_result(model, result, held)
    if "loss" in result and tasks:
        click.echo()
    if tasks:
        _print_tasks(result["tasks"])


def _require_used(needed: str, is_given: bool, options: dict[str, Any]) -> None:
    for option, value in options.items():
        if value is not None and not is_given:
            raise UsageError(f"{option} {value!r} given without {needed}, which it is about")


def _measure_text(
    run: str, model: Any, tokenizer: Any, data: str | None, windows: int | None, context: int | None
) -> dict[str, Any]:
    from twell_numba.infer.evaluate import evaluate as evaluate_model
    from twell_numba.train.held_out import held_out_windows

    tokens, source = held_out_windows(
        run, model, tokenizer, data=data, count=windows, length=context
    )
    note(f"Measuring {len(tokens):,} sequences of {tokens.shape[1] - 1:,} tokens of {source}")
    result = evaluate_model(model, tokens, tokenizer)
    if not math.isfinite(result["loss"]):
        raise TwellError(
            f"the loss of {run} is {result['loss']}, a finite number wanted: the model has "
            f"diverged, use an earlier checkpoint"
        )
    return dict(result)


def _measure_task(
    path: str, model: Any, tokenizer: Any, questions: Sequence[Any], separator: str | None
) -> dict[str, Any]:
    from twell_numba.infer.multiple_choice import DEFAULT_SEPARATOR, answer_questions

    count = len(questions)
    note(f"Answering {count:,} question{'' if count == 1 else 's'} of {path}")
    result = answer_questions(
        model,
        tokenizer,
        questions,
        separator=DEFAULT_SEPARATOR if separator is None else separator,
        progress=_noting_progress(),
    )
    if result["truncated"]:
        note(
            f"{result['truncated']:,} of them are longer than the model's context of "
            f"{model.config.context_length:,} tokens: their beginning is left out"
        )
    return {"task": Path(path).stem, "file": path, **result}


def _noting_progress() -> Callable[[int, int], None]:
    """Return what notes now and then how much is done."""
    last = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal last
        if done < total and time.monotonic() - last >= _SECONDS_BETWEEN_NOTES:
            last = time.monotonic()
            note(f"  {done:,} of {total:,} tokens ({done / total:.0%})")

    return progress


def _print_result(model: Any, result: dict[str, Any], held: str) -> None:
    from twell_numba.infer.evaluate import ffn_weight_sparsity_by_layer

    neurons = model.config.d_ffn
    print_table(
        None,
        [
            ("loss", f"{result['loss']:.4f} nats a token"),
            ("perplexity", f"{result['perplexity']:.3f}"),
            ("bits per byte", f"{result['bits_per_byte']:.4f}"),
            ("activation sparsity", f"{result['ffn_activation_sparsity']:.2%}"),
            ("dead neurons", f"{result['dead_neuron_fraction']:.2%}"),
            ("weight sparsity", f"{result['ffn_weight_sparsity']:.2%}"),
            ("FFN weights held as", held),
        ],
    )
    click.echo()
    weight_sparsity = ffn_weight_sparsity_by_layer(model)
    print_table(
        ("layer", "nonzeros a token", "activation sparsity", "weight sparsity"),
        [
            (
                layer,
                f"{nonzeros:.1f} of {neurons:,}",
                f"{1 - nonzeros / neurons:.2%}",
                f"{zeros:.2%}",
            )
            for layer, (nonzeros, zeros) in enumerate(
                zip(result["nonzeros_per_token"], weight_sparsity, strict=True)
            )
        ],
    )


def _print_tasks(tasks: list[dict[str, Any]]) -> None:
    print_table(
        ("task", "questions", "acc", "+-", "acc by byte", "+-", "chance"),
        [
            (
                task["task"],
                f"{task['questions']:,}",
                *_with_error(task["acc"], task["acc_stderr"]),
                *_with_error(task["acc_norm"], task["acc_norm_stderr"]),
                f"{task['chance']:.2%}",
            )
            for task in tasks
        ],
    )


def _with_error(fraction: float, standard_error: float | None) -> tuple[str, str]:
    return f"{fraction:.2%}", "-" if standard_error is None else f"{standard_error:.2%}"
