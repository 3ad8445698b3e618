"""``twell eval``: how good and how sparse a model is."""

import math
import warnings
from typing import Any

import click

from twell_numba.cli.options import (
    device_option,
    dtype_of,
    dtype_option,
    ffn_path_option,
    float8_option,
    ignored_seed_option,
    json_option,
)
from twell_numba.cli.text import print_table
from twell_numba.errors import TwellError
from twell_numba.strict_json import to_json


@click.command("eval")
@click.argument("run", metavar="RUN")
@click.option(
    "--data",
    metavar="SRC",
    help="stdlib, a text file, a folder or a prepared .bin, of which the held-out part is used; "
    "the run's own data if not given.",
)
@click.option(
    "--windows",
    type=click.IntRange(min=1),
    help="How many sequences to measure; as in the run's validation if not given.",
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
    ffn_path: str,
    float8: bool,
    device: str,
    dtype: str,
    as_json: bool,
) -> None:
    """Measure the model in RUN, a run folder or a checkpoint, on held-out text.

    \b
    Examples:
      twell eval runs/tiny-1
      twell eval runs/tiny-1 --data my-texts/ --json
    """
    from twell_numba.infer.evaluate import evaluate as evaluate_model
    from twell_numba.infer.evaluate import ffn_weight_sparsity_by_layer, require_finite_weights
    from twell_numba.models.checkpoint import load_model
    from twell_numba.train.held_out import held_out_windows

    model, tokenizer = load_model(
        run, dtype_of(dtype, device), ffn_path, device=device, float8=float8
    )
    require_finite_weights(model)
    tokens, source = held_out_windows(run, model, tokenizer, data=data, count=windows)
    click.echo(
        f"Measuring {len(tokens):,} sequences of {tokens.shape[1] - 1:,} tokens of {source}",
        err=True,
    )
    with warnings.catch_warnings():
        # What NumPy would warn of shows in the loss.
        warnings.filterwarnings("ignore", ".* encountered in ", RuntimeWarning)
        result = evaluate_model(model, tokens, tokenizer)
    if not math.isfinite(result["loss"]):
        raise TwellError(
            f"the loss of {run} is {result['loss']}, a finite number wanted: the model has "
            f"diverged, use an earlier checkpoint"
        )
    if as_json:
        click.echo(to_json(result, indent=2))
    else:
        held = model.config.ffn_weight_format + (", 8-bit floats" if float8 else "")
        _print_result(dict(result), ffn_weight_sparsity_by_layer(model), model.config.d_ffn, held)


def _print_result(
    result: dict[str, Any], weight_sparsity: list[float], neurons: int, held: str
) -> None:
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
