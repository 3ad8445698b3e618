"""``twell bench``: times of the sparse paths against the dense alternative, in one process."""

import json
import math
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
      twell bench formats
    """


SIZE = click.IntRange(2, 2**20)


class Density(click.FloatRange):
    """A fraction between 0 and 1, neither included; NaN, which no comparison catches, refused."""

    def __init__(self) -> None:
        super().__init__(0, 1, min_open=True, max_open=True)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        density = super().convert(value, param, ctx)
        if math.isnan(density):
            self.fail(f"{value!r} given; a number between 0 and 1 wanted", param, ctx)
        return density


rounds_option = click.option(
    "--rounds",
    type=click.IntRange(20),
    default=20,
    show_default=True,
    help="Timed calls of each path, in turn; their median counts.",
)


@bench.command("ffn")
@click.option("--tokens", type=SIZE, default=1024, show_default=True, help="M.")
@click.option("--width", type=SIZE, default=512, show_default=True, help="D.")
@click.option("--hidden-width", type=SIZE, default=2048, show_default=True, help="F, neurons.")
@click.option(
    "--density",
    "densities",
    type=Density(),
    multiple=True,
    default=(0.01, 0.05, 0.5),
    show_default=True,
    help="Fraction of neurons that fire for a token; may be given several times.",
)
@rounds_option
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
    from twell_numba.device.memory import keep_freed_memory
    from twell_numba.infer.benchmark import FFNShape, benchmark_ffn, benchmark_one_token

    keep_freed_memory()  # as in training

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


@bench.command("formats")
@click.option("--rows", type=click.IntRange(1), default=4096, show_default=True, help="M.")
@click.option("--columns", type=click.IntRange(1), default=4096, show_default=True, help="K.")
@click.option("--right-columns", type=click.IntRange(1), default=256, show_default=True, help="N.")
@click.option(
    "--density",
    "densities",
    type=click.FloatRange(0, 1, min_open=True),
    multiple=True,
    default=(0.1, 0.01, 0.001),
    show_default=True,
    help="Fraction of nonzeros, and of nonzero blocks; may be given several times.",
)
@click.option(
    "--block-size",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="Rows and columns of a block of block-ELL.",
)
@rounds_option
@device_option
@seed_option(0)
@json_option
def bench_formats(
    rows: int,
    columns: int,
    right_columns: int,
    densities: tuple[float, ...],
    block_size: int,
    rounds: int,
    device: str,
    seed: int,
    as_json: bool,
) -> None:
    """Time the products of every sparse format in float32, against SciPy and dense NumPy.

    A is M x K and X has N columns; `sampled` is Y @ X.T at the entries of A, which SciPy has no
    function for: the fastest of what its user can write is taken. For `from_dense`, NumPy's time is
    that of a copy, so that the speed-up is the fraction of a copy's speed. Errors are norm-wise,
    against float64.

    \b
    Example:
      twell bench formats --density 0.05 --right-columns 64
    """
    from twell_numba.infer.benchmark_formats import ProductShape, benchmark_formats

    measured: list[dict[str, Any]] = []
    for density in densities:
        shape = ProductShape(rows, columns, right_columns, density, block_size)
        for part in benchmark_formats(shape, rounds, seed):
            measured += part
            if not as_json:
                names = ", ".join(row["path"] for row in part)
                note = f"measured: {part[0]['operation']} of {names} at density {density:g}"
                click.echo(note, err=True)
    if as_json:
        click.echo(json.dumps(measured, indent=2))
        return
    click.echo(
        f"A {rows} x {columns}, N = {right_columns}, float32, cpu; milliseconds, medians; "
        "speed-ups over NumPy and SciPy"
    )
    print_table(
        ("operation", "density", "format", "NumPy", "SciPy", "this", "/NumPy", "/SciPy", "error"),
        [
            (
                row["operation"],
                f"{row['density']:.4f}",
                row["path"],
                f"{row['dense_ms']:.3f}",
                f"{row['scipy_ms']:.3f}",
                f"{row['sparse_ms']:.3f}",
                f"{row['speedup']:.2f}x",
                f"{row['speedup_over_scipy']:.2f}x",
                f"{row['max_relative_error']:.1e}",
            )
            for row in measured
        ],
    )
