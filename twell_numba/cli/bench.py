"""``twell bench``: times of the sparse paths against the dense alternative, in one process."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from twell_numba.cli.bench_model import bench_model, bench_train
from twell_numba.cli.options import (
    Decorator,
    device_option,
    json_option,
    rounds_option,
    seed_option,
)
from twell_numba.cli.text import note, print_table
from twell_numba.errors import UsageError

if TYPE_CHECKING:
    from scipy.sparse import csr_array

    from twell_numba.infer.ffn_problem import FFNProblem, FFNShape


@click.group("bench")
def bench() -> None:
    """Time each path against dense in one run and check its numbers.

    \b
    Example:
      twell bench ffn
      twell bench weights
      twell bench formats
      twell bench model
      twell bench train
    """


bench.add_command(bench_model)
bench.add_command(bench_train)


# Sets of weights that one token on a GPU is timed with: more than its caches hold of usual sizes.
ONE_TOKEN_LAYERS = 8

SIZE = click.IntRange(2, 2**20)
TOKENS = click.IntRange(1, 2**20)
MATRIX_SIZE = click.IntRange(1)


class Density(click.FloatRange):
    """A fraction above 0, below 1 or up to 1; NaN, which no comparison catches, refused."""

    def __init__(self, *, up_to_one: bool = False) -> None:
        super().__init__(0, 1, min_open=True, max_open=not up_to_one)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        density = super().convert(value, param, ctx)
        if math.isnan(density):
            self.fail(f"{value!r} given; a number between 0 and 1 wanted", param, ctx)
        return density


class Nonzeros(click.FloatRange):
    """A number above 0; NaN, which no comparison catches, and infinity refused."""

    def __init__(self) -> None:
        super().__init__(0, min_open=True)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        count = super().convert(value, param, ctx)
        if not math.isfinite(count):
            self.fail(f"{value!r} given; a number above 0 wanted", param, ctx)
        return count


class Skew(click.FloatRange):
    """A number from 0 to 4; NaN, which no comparison catches, refused."""

    def __init__(self) -> None:
        super().__init__(0, 4)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        skew = super().convert(value, param, ctx)
        if math.isnan(skew):
            self.fail(f"{value!r} given; a number from 0 to 4 wanted", param, ctx)
        return skew


dtype_option = click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    help="Of inputs and weights; float32 on the CPU, bfloat16 on a GPU if not given.",
)


def block_size_option(gpu_default: int) -> Decorator:
    """Add ``--block-size``, passed on as None where it is not given."""
    return click.option(
        "--block-size",
        type=click.IntRange(1),
        help=f"Rows and columns of a block of block-ELL; 16, on a GPU {gpu_default} if not given.",
    )


def layer_size_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the sizes of a feedforward layer and its input, None where they are not given."""
    for option, letter, size, cpu, gpu in (
        ("--hidden-width", "F, neurons", SIZE, 2048, 5632),
        ("--width", "D", SIZE, 512, 2048),
        ("--tokens", "M", TOKENS, 1024, 16384),
    ):
        help = f"{letter}; {cpu}, on a GPU {gpu} if not given."
        command = click.option(option, type=size, help=help)(command)
    return command


@bench.command("ffn")
@layer_size_options
@click.option(
    "--density",
    "densities",
    type=Density(),
    multiple=True,
    help="Fraction of neurons that fire for a token; may be given several times. 0.01, 0.05 and "
    "0.5 on the CPU if neither this nor --nonzeros is given.",
)
@click.option(
    "--nonzeros",
    type=Nonzeros(),
    multiple=True,
    help="Number of neurons that fire for a token; may be given several times. 29, 60, 150, 911 "
    "and half of them on a GPU if neither this nor --density is given.",
)
@click.option(
    "--skew",
    type=Skew(),
    default=0.0,
    show_default=True,
    help="The n-th most popular neuron fires in proportion to n^-SKEW; 0: all equally often.",
)
@click.option(
    "--pattern",
    "pattern_file",
    metavar="FILE",
    help="Let neurons fire as in a trained model: an .npz file with arrays NAME_counts, how many "
    "fire for each token, and NAME_columns, which.",
)
@click.option(
    "--pattern-layer",
    "pattern_layers",
    metavar="NAME",
    multiple=True,
    help="A layer of --pattern; may be given several times. All of them if not given.",
)
@click.option(
    "--remove-dead",
    is_flag=True,
    help="Time each pattern also without the neurons that never fire, against dense with them.",
)
@click.option(
    "--layers",
    type=click.IntRange(1, 1024),
    help="Sets of weights used in turn, so that few tokens find them in memory and not in a cache, "
    f"as in a model; 1, for the one token on a GPU {ONE_TOKEN_LAYERS} if not given.",
)
@click.option(
    "--float8",
    is_flag=True,
    help="Time the forward pass also with up and down weights as 8-bit floats, on a GPU.",
)
@dtype_option
@rounds_option
@device_option
@seed_option(0)
@json_option
def bench_ffn(
    tokens: int | None,
    width: int | None,
    hidden_width: int | None,
    densities: tuple[float, ...],
    nonzeros: tuple[float, ...],
    skew: float,
    pattern_file: str | None,
    pattern_layers: tuple[str, ...],
    remove_dead: bool,
    layers: int | None,
    float8: bool,
    dtype: str | None,
    rounds: int,
    device: str,
    seed: int,
    as_json: bool,
) -> None:
    """Time a gated ReLU FFN through every path.

    For each number of neurons that fire: the forward pass and forward with backward over all
    tokens. For the first also one token, on the CPU on its own and right after a large BLAS
    product. `auto (twell)` means that auto took the TwELL path.

    With --pattern, for each of its layers, and the mean of them: gate weights and inputs are made
    so that its neurons fire for its tokens (more tokens than it has begin again at its first). A
    line says how exactly; narrow layers cannot follow every pattern.

    On the CPU, everything is in float32, against NumPy's BLAS. On a GPU, times are the GPU's, of
    work recorded in a graph, against this library's dense path: products by cuBLASLt, the rest in
    fused kernels. Peak memory is that of one layer: inputs, weights, gradients and what a call
    allocates.

    Errors are norm-wise, against float64 computed of the same inputs; of large layers, those of
    64 tokens and the gradients of 16 neurons, drawn at random. That of `twell_float8` is against
    the weights before they were rounded.

    \b
    Examples:
      twell bench ffn --density 0.01 --density 0.1
      twell bench ffn --device cuda --nonzeros 29 --dtype bfloat16
      twell bench ffn --device cuda --tokens 1 --layers 8 --nonzeros 29
      twell bench ffn --device cuda --float8
      twell bench ffn --pattern patterns.npz --remove-dead
    """
    from twell_numba.infer.benchmark import describe_baseline
    from twell_numba.infer.benchmark_pattern import benchmark_pattern, mean_rows
    from twell_numba.infer.ffn_problem import (
        FFNProblem,
        choose_dtype,
        default_shape,
        firing_neurons,
    )

    if float8 and device == "cpu":
        raise UsageError(
            "--float8 given on the CPU, a GPU wanted (--device cuda): on the CPU "
            "8-bit weights save no time"
        )
    _keep_freed_memory(device)
    dtype = choose_dtype(device, dtype)
    problem_of = partial(FFNProblem, seed=seed, dtype=dtype, device=device, skew=skew)
    if pattern_file is None:
        if pattern_layers or remove_dead:
            option = "--pattern-layer" if pattern_layers else "--remove-dead"
            raise UsageError(f"{option} given without --pattern FILE, which it needs")
        shape = default_shape(device, tokens, width, hidden_width)
        firing = firing_neurons(device, shape.neurons, densities, nonzeros)
        measured = _random_rows(problem_of, shape, firing, rounds, layers, float8)
    else:
        if densities or nonzeros or skew:
            raise UsageError("--pattern given with --density, --nonzeros or --skew, one wanted")
        patterns = _load_patterns(pattern_file, pattern_layers, hidden_width, remove_dead)
        neurons = hidden_width or next(iter(patterns.values())).shape[1]
        shape = default_shape(device, tokens, width, neurons)
        problem = problem_of(shape)
        measured = (
            part
            for name, pattern in patterns.items()
            for part in benchmark_pattern(
                problem,
                name,
                pattern,
                rounds,
                remove_dead=remove_dead,
                layers=layers or 1,
                float8=float8,
            )
        )
    rows: list[dict[str, Any]] = []
    for part in measured:
        rows += part
        if not as_json:
            note(_measured_text(part[0]))
    if pattern_file is not None and len(patterns) > 1:
        rows += mean_rows(rows)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    machine, baseline = describe_baseline(device)
    sizes = f"D = {shape.width}, F = {shape.neurons}, {dtype}"
    click.echo(f"{sizes}, {machine}; milliseconds, medians\n{baseline}")
    _print_ffn_table(rows, device, has_patterns=pattern_file is not None)


def _random_rows(
    problem_of: Callable[..., "FFNProblem"],
    shape: "FFNShape",
    firing: list[float],
    rounds: int,
    layers: int | None,
    float8: bool,
) -> Iterator[list[dict[str, Any]]]:
    from twell_numba.infer.benchmark import benchmark_ffn, benchmark_one_token

    random_problem = problem_of(shape)
    for count in firing:
        problem = random_problem.with_nonzeros(count)
        for backward in (False, True):
            yield benchmark_ffn(problem, rounds, backward, layers or 1, float8=float8)
    if shape.tokens == 1:
        return
    one_token = problem_of(replace(shape, tokens=1, nonzeros=firing[0]))
    if one_token.device == "cpu":
        yield benchmark_one_token(one_token, rounds)
    else:
        layers = layers or ONE_TOKEN_LAYERS
        yield benchmark_ffn(one_token, rounds, False, layers, float8=float8)


def _load_patterns(
    path: str, names: tuple[str, ...], hidden_width: int | None, remove_dead: bool
) -> dict[str, "csr_array"]:
    from twell_numba.infer.ffn_pattern import load_patterns

    patterns = load_patterns(path, names)
    neurons = next(iter(patterns.values())).shape[1]
    if hidden_width is not None and hidden_width < neurons:
        raise UsageError(
            f"--hidden-width {hidden_width} given, at least {neurons} wanted: {path} has so many "
            "neurons"
        )
    for name, pattern in patterns.items():
        if remove_dead and not pattern.nnz:
            raise UsageError(
                f"--remove-dead given, but no neuron of {name} of {path} ever fires: nothing would "
                "be left; leave it out, or choose others with --pattern-layer"
            )
    return patterns


def _measured_text(row: dict[str, Any]) -> str:
    text = f"measured: {row['operation']}, {row['nonzeros_per_token']:.1f} nonzeros/token"
    if "pattern" not in row:
        return text
    recall, precision = row["pattern_recall"], row["pattern_precision"]
    exact = "as the pattern says"
    if recall < 1 or precision < 1:
        exact = f"{recall:.2%} of the pattern fire, {1 - precision:.2%} of what fires is not in it"
    removed = ", dead neurons removed" if row["dead_removed"] else ""
    return f"{text} ({row['pattern']}{removed}; {exact})"


def _print_ffn_table(rows: list[dict[str, Any]], device: str, *, has_patterns: bool) -> None:
    has_layers = any(row["layers"] > 1 for row in rows)
    has_peaks = rows[0]["sparse_peak_bytes"] is not None
    print_table(
        (
            "operation",
            *(("pattern", "F") if has_patterns else ()),
            "M",
            *(("layers",) if has_layers else ()),
            "nonzeros/token",
            "path",
            *_time_header(device),
            "error",
            *(("dense peak MiB", "this peak MiB") if has_peaks else ()),
        ),
        [
            (
                row["operation"],
                *((row["pattern"], row["shape"]["F"]) if has_patterns else ()),
                row["shape"]["M"],
                *((row["layers"],) if has_layers else ()),
                f"{row['nonzeros_per_token']:.1f}",
                row["path"],
                *_time_cells(row),
                *(
                    f"{row[key] / 2**20:.0f}"
                    for key in ("dense_peak_bytes", "sparse_peak_bytes")
                    if has_peaks
                ),
            )
            for row in rows
        ],
    )


@bench.command("weights")
@layer_size_options
@click.option(
    "--density",
    "densities",
    type=Density(),
    multiple=True,
    default=(0.01, 0.1, 0.2, 0.4),
    show_default=True,
    help="Fraction of weights, or of blocks, that are not zero; may be given several times.",
)
@block_size_option(gpu_default=32)
@dtype_option
@rounds_option
@device_option
@seed_option(0)
@json_option
def bench_weights(
    tokens: int | None,
    width: int | None,
    hidden_width: int | None,
    densities: tuple[float, ...],
    block_size: int | None,
    dtype: str | None,
    rounds: int,
    device: str,
    seed: int,
    as_json: bool,
) -> None:
    """Time a gated ReLU FFN with sparse weights, against the dense layer.

    For each density: the forward pass and forward with backward over all tokens, and one token,
    with weights in CSR and, whole blocks at a time, in block-ELL. Then the density below which each
    is faster than dense. About half of the neurons fire.

    On the CPU, everything is in float32, against NumPy's BLAS. On a GPU, times are the GPU's, of
    work recorded in a graph, against this library's dense path: products by cuBLASLt, the rest in
    fused kernels. Errors are norm-wise, against float64, as in twell bench ffn.

    \b
    Examples:
      twell bench weights --density 0.01 --block-size 32
      twell bench weights --device cuda --density 0.1 --block-size 64
    """
    from twell_numba.infer.benchmark import describe_baseline
    from twell_numba.infer.benchmark_weights import (
        OPERATIONS,
        benchmark_weights,
        break_even_density,
    )
    from twell_numba.infer.ffn_problem import FFNProblem, choose_dtype, default_shape

    _keep_freed_memory(device)
    dtype = choose_dtype(device, dtype)
    shape = default_shape(device, tokens, width, hidden_width)
    block_size = block_size or (16 if device == "cpu" else 32)
    smallest = min(shape.width, shape.neurons)
    if block_size > smallest:
        raise UsageError(
            f"--block-size {block_size} given, at most {smallest} wanted for weights of "
            f"{shape.neurons} x {shape.width}"
        )
    many = FFNProblem(shape, seed, dtype, device)
    one = FFNProblem(replace(shape, tokens=1), seed, dtype, device)
    rows: list[dict[str, Any]] = []
    for density in densities:
        for problem, operations in ((many, OPERATIONS), (one, OPERATIONS[:1])):
            for part in benchmark_weights(problem, density, block_size, rounds, operations):
                rows += part
                if not as_json:
                    tokens_text = f"M = {problem.shape.tokens}"
                    note(f"measured: {part[0]['operation']}, {tokens_text}, density {density:g}")
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    machine, baseline = describe_baseline(device)
    sizes = f"D = {shape.width}, F = {shape.neurons}, blocks of {block_size}, {dtype}"
    click.echo(f"{sizes}, {machine}; milliseconds, medians\n{baseline}")
    print_table(
        ("operation", "M", "stored", "path", *_time_header(device), "error"),
        [
            (
                row["operation"],
                row["shape"]["M"],
                f"{row['density']:.2%}",
                row["path"],
                *_time_cells(row),
            )
            for row in rows
        ],
    )
    click.echo()
    cases: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for row in rows:
        case = (row["operation"], row["shape"]["M"], row["path"])
        cases.setdefault(case, []).append(row)
    print_table(
        ("operation", "M", "path", "faster than dense"),
        [(*case, _break_even_text(of_case, break_even_density)) for case, of_case in cases.items()],
    )


def _keep_freed_memory(device: str) -> None:
    """Keep it as in training, on the CPU; before the first large array."""
    if device == "cpu":
        from twell_numba.device.memory import keep_freed_memory

        keep_freed_memory()


def _time_header(device: str) -> tuple[str, str, str]:
    return ("NumPy" if device == "cpu" else "dense", "this", "speed-up")


def _time_cells(row: dict[str, Any]) -> tuple[str, str, str, str]:
    return (
        f"{row['dense_ms']:.3f}",
        f"{row['sparse_ms']:.3f}",
        f"{row['speedup']:.2f}x",
        f"{row['max_relative_error']:.1e}",
    )


def _break_even_text(
    rows: list[dict[str, Any]], break_even: Callable[[list[dict[str, Any]]], float | None]
) -> str:
    density = break_even(rows)
    if density is not None:
        return f"below {density:.1%} stored"
    if all(row["speedup"] >= 1 for row in rows):
        return f"up to {max(row['density'] for row in rows):.1%} stored, the most measured"
    return "at none of the densities measured"


@bench.command("formats")
@click.option("--rows", type=MATRIX_SIZE, help="M; 4096, on a GPU 8192 if not given.")
@click.option("--columns", type=MATRIX_SIZE, help="K; 4096, on a GPU 8192 if not given.")
@click.option("--right-columns", type=MATRIX_SIZE, help="N; 256, on a GPU 2048 if not given.")
@click.option(
    "--density",
    "densities",
    type=Density(up_to_one=True),
    multiple=True,
    default=(0.1, 0.01, 0.001),
    show_default=True,
    help="Fraction of nonzeros, and of nonzero blocks; may be given several times.",
)
@block_size_option(gpu_default=32)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    default="float32",
    show_default=True,
    help="Of all matrices; the CPU computes in float32.",
)
@rounds_option
@device_option
@seed_option(0)
@json_option
def bench_formats(
    rows: int | None,
    columns: int | None,
    right_columns: int | None,
    densities: tuple[float, ...],
    block_size: int | None,
    dtype: str,
    rounds: int,
    device: str,
    seed: int,
    as_json: bool,
) -> None:
    """Time the products of every sparse format, against dense ones and another library's.

    A is M x K and X has N columns; `sampled` is Y @ X.T at the entries of A. For `from_dense`, the
    dense time is that of a copy, so that the speed-up is the fraction of a copy's speed.

    On the CPU, everything is in float32, against dense NumPy and SciPy, which has no function for
    `sampled`: the fastest of what its user can write is taken. On a GPU, times are the GPU's, of
    work recorded in a graph (conversions from dense are not), against cuBLASLt's dense product, for
    `sampled` the whole of it; and where CuPy is installed, against its cuSPARSE products in
    float32. Errors are norm-wise, against float64.

    \b
    Examples:
      twell bench formats --density 0.05 --right-columns 64
      twell bench formats --device cuda --dtype bfloat16 --block-size 64
    """
    from twell_numba.infer.benchmark import describe_baseline
    from twell_numba.infer.benchmark_formats import benchmark_formats, default_product_shape
    from twell_numba.infer.ffn_problem import choose_dtype

    dtype = choose_dtype(device, dtype)
    measured: list[dict[str, Any]] = []
    for density in densities:
        shape = default_product_shape(device, rows, columns, right_columns, density, block_size)
        for part in benchmark_formats(shape, rounds, seed, device, dtype):
            measured += part
            if not as_json:
                names = ", ".join(row["path"] for row in part)
                note(f"measured: {part[0]['operation']} of {names} at density {density:g}")
    if as_json:
        click.echo(json.dumps(measured, indent=2))
        return
    machine, _ = describe_baseline(device)
    dense, other = ("NumPy", "SciPy") if device == "cpu" else ("dense", "cuSPARSE")
    key = other.lower()
    click.echo(
        f"A {shape.rows} x {shape.columns}, N = {shape.right_columns}, blocks of "
        f"{shape.block_size}, {dtype}, {machine}; milliseconds, medians; speed-ups over {dense} "
        f"and {other}"
    )
    print_table(
        ("operation", "density", "format", dense, other, "this", f"/{dense}", f"/{other}", "error"),
        [
            (
                row["operation"],
                f"{row['density']:.4f}",
                row["path"],
                f"{row['dense_ms']:.3f}",
                f"{row[f'{key}_ms']:.3f}" if f"{key}_ms" in row else "",
                f"{row['sparse_ms']:.3f}",
                f"{row['speedup']:.2f}x",
                f"{row[f'speedup_over_{key}']:.2f}x" if f"{key}_ms" in row else "",
                f"{row['max_relative_error']:.1e}",
            )
            for row in measured
        ],
    )
