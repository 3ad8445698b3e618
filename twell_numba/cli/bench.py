"""``twell bench``: times of the sparse paths against the dense alternative, in one process."""

import json
from typing import Any

import click

from twell_numba.cli.options import device_option, json_option, seed_option
from twell_numba.cli.text import print_table


@click.group("bench")
def bench() -> None:
    """Time each path against dense in one run and check its numbers.

    \b
    Example:
      twell bench ffn
    """


@bench.command("ffn")
@click.option("--tokens", type=click.IntRange(1), default=1024, show_default=True, help="M.")
@click.option("--width", type=click.IntRange(2), default=512, show_default=True, help="D.")
@click.option(
    "--hidden-width", type=click.IntRange(2), default=2048, show_default=True, help="F, neurons."
)
@click.option(
    "--density",
    "densities",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    multiple=True,
    default=(0.01, 0.05, 0.5),
    show_default=True,
    help="Fraction of neurons that fire for a token; may be given several times.",
)
@click.option(
    "--rounds",
    type=click.IntRange(20),
    default=20,
    show_default=True,
    help="Timed calls of each path, in turn; their median counts.",
)
@device_option
@seed_option(0)
@json_option
def bench_ffn(
    tokens: int,
    width: int,
    hidden_width: int,
    densities: tuple[float, ...],
    rounds: int,
    device: str,
    seed: int,
    as_json: bool,
) -> None:
    """Time a gated ReLU FFN in float32 through every path, against NumPy's BLAS.

    For each density: the forward pass and forward with backward over all tokens. For the first
    density also one token, on its own and right after a large BLAS product. `auto (twell)` means
    that auto took the TwELL path. Errors are norm-wise, against float64.

    \b
    Example:
      twell bench ffn --density 0.01 --density 0.1
    """
    from twell_numba.infer.benchmark import FFNShape, benchmark_ffn, benchmark_one_token

    rows: list[dict[str, Any]] = []
    for density in densities:
        shape = FFNShape(tokens, width, hidden_width, density * hidden_width)
        for backward in (False, True):
            rows += benchmark_ffn(shape, rounds, seed, backward)
            if not as_json:
                click.echo(f"measured: {rows[-1]['operation']} at density {density:g}", err=True)
    rows += benchmark_one_token(width, hidden_width, densities[0] * hidden_width, rounds, seed)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        click.echo(f"D = {width}, F = {hidden_width}, float32, cpu; milliseconds, medians")
        print_table(
            ("operation", "M", "nonzeros/token", "path", "NumPy", "this", "speed-up", "error"),
            [
                (
                    row["operation"],
                    row["shape"]["M"],
                    f"{row['nonzeros_per_token']:.1f}",
                    row["path"],
                    f"{row['dense_ms']:.3f}",
                    f"{row['sparse_ms']:.3f}",
                    f"{row['speedup']:.2f}x",
                    f"{row['max_relative_error']:.1e}",
                )
                for row in rows
            ],
        )
