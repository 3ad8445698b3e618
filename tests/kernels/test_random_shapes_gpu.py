"""Every family of GPU kernels against NumPy in float64, on hundreds of random shapes and densities.

Of each family and dtype: a few shapes at the edges (no token, one, 65537; widths of one, and of no
tile), then 200 that are drawn anew, sizes log-uniform. Errors are norm-wise: below 1e-5 in float32
and 5e-3 in bfloat16, where no other bound is given. A result that is a sum of numbers which may
cancel by accident is measured by the root of the sum of their squares, if that is larger.

The random shapes need a real GPU (``-m gpu``; with ``-n 8 --dist worksteal`` about a minute). In
the emulator, and on a GPU under ``compute-sanitizer``, the same checks see a few tiny shapes.
"""

import math
from collections.abc import Callable
from importlib import import_module
from statistics import NormalDist
from types import ModuleType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.device.gpu import gemm  # noqa: E402
from twell_numba.device.gpu.cast import cast  # noqa: E402
from twell_numba.formats import (  # noqa: E402
    BlockELLMatrix,
    CSRMatrix,
    HybridELLMatrix,
    TwELLMatrix,
)
from twell_numba.kernels import cuda_scalars, cuda_sums  # noqa: E402

FLOAT32, BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
TOLERANCE = {FLOAT32: 1e-5, BFLOAT16: 5e-3}
BLOCKS, CASES_OF_A_BLOCK = 8, 25
# Of products of a few numbers that are each rounded to 16 bits, errors do not average out: up to
# five of 2^-9 add up.
FEW, TOLERANCE_OF_FEW = 100, 1e-2

Case = tuple[Any, ...]


class Trial:
    """One case: where arrays are made, uploaded and compared."""

    def __init__(
        self, machine: Any, rng: np.random.Generator, dtype: np.dtype, number: int, text: str
    ) -> None:
        self.machine, self.rng, self.dtype = machine, rng, dtype
        self.number, self.text = number, text
        self.tolerance = TOLERANCE[dtype]
        self.upload = machine.upload

    def rounded(self, array: np.ndarray, dtype: Any = None) -> tuple[Any, np.ndarray]:
        """Return an array on the GPU, in the case's dtype, and the same numbers in float64."""
        stored = array.astype(dtype or self.dtype)
        return self.upload(stored), stored.astype(np.float64)

    def normal(self, *shape: int, dtype: Any = None) -> tuple[Any, np.ndarray]:
        """Return normal numbers on the GPU, and the same numbers in float64."""
        return self.rounded(self.rng.standard_normal(shape, np.float32), dtype)

    def close(
        self, name: str, actual: Any, expected: Any, terms: Any = 0.0, tolerance: float = 0.0
    ) -> None:
        """Check the norm of the difference against that of ``expected``, or of its ``terms``."""
        actual = np.asarray(to_host(actual), np.float64)
        expected = np.asarray(expected, np.float64)
        assert actual.shape == expected.shape, (self.text, name)
        norm = max(np.linalg.norm(expected), np.linalg.norm(np.asarray(terms, np.float64))) or 1.0
        error = np.linalg.norm(actual - expected) / norm
        assert error <= (tolerance or self.tolerance), (self.text, name)

    def equal(self, name: str, actual: Any, expected: Any) -> None:
        """Check that dtypes, shapes and all bits are the same."""
        actual, expected = np.asarray(to_host(actual)), np.asarray(expected)
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), (self.text, name)
        bits = f"u{expected.dtype.itemsize}"
        actual, expected = (np.ascontiguousarray(array).view(bits) for array in (actual, expected))
        np.testing.assert_array_equal(actual, expected, err_msg=f"{self.text}: {name}")


def to_host(array: Any) -> Any:
    return array.to_numpy() if hasattr(array, "to_numpy") else array


def kernels(family: str) -> tuple[ModuleType, ModuleType]:
    """Return a family's GPU kernels and its reference."""
    package = f"twell_numba.kernels.{family}"
    return import_module(f"{package}.cuda"), import_module(f"{package}.reference")


def tolerance_of_sums(dtype: np.dtype, terms: int) -> float:
    """Return the error allowed in sums in float32 of products of numbers of a dtype.

    Those of 16 bits are added up in tensor cores, 16 at a time, which cut off and do not round.
    """
    return TOLERANCE[FLOAT32] if dtype == FLOAT32 else max(TOLERANCE[FLOAT32], terms * 2.0**-26)


def log_uniform(rng: np.random.Generator, *most: int, product: int = 200_000) -> tuple[int, ...]:
    """Return sizes from 1 to ``most``, of which the product is not larger than given."""
    while True:
        sizes = tuple(int(size) for size in np.exp(rng.uniform(0, np.log(np.add(most, 1)))))
        if math.prod(sizes) <= product:
            return sizes


def any_density(rng: np.random.Generator) -> float:
    """Return 0, 1 or, mostly, something between, log-uniform."""
    return float(rng.choice([0, 1, *10 ** rng.uniform(-3, 0, 6)]))


def root_of_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return how large the sums of a @ b are if signs are random."""
    return np.sqrt(np.square(a) @ np.square(b))


# ---- Norms, positions, tables


def check_rms_norm(trial: Trial, rows: int, width: int) -> None:
    cuda, reference = kernels("rms_norm")
    (x, x64), (addend, addend64), (dy, dy64) = (trial.normal(rows, width) for _ in range(3))
    (weight, weight64), (residual, residual64) = trial.normal(width), trial.normal(rows, width)

    def check(x: Any, x64: np.ndarray, y: Any, inverse_rms: Any, residual: Any) -> None:
        expected_y, expected_inverse = reference.rms_norm(x64, weight64, 1e-5)
        trial.close("y", y, expected_y)
        trial.close("inverse_rms", inverse_rms, expected_inverse)
        added = None if residual is None else residual64
        dweight, expected_dweight = trial.normal(width, dtype=FLOAT32)
        squares = np.square(dy64 * x64 * expected_inverse[:, None]).sum(axis=0)
        terms = np.sqrt(expected_dweight**2 + squares)
        dx = cuda.rms_norm_backward(dy, x, weight, inverse_rms, dweight, residual)
        expected_dx = reference.rms_norm_backward(
            dy64, x64, weight64, expected_inverse, expected_dweight, added
        )
        trial.close("dweight", dweight, expected_dweight, terms)
        terms = np.abs(expected_inverse[:, None] * dy64 * weight64)
        trial.close("dx", dx, expected_dx, terms if added is None else terms + np.abs(added))

    check(x, x64, *cuda.rms_norm(x, weight, 1e-5), None)
    total, y, inverse_rms = cuda.add_rms_norm(x, addend, weight, 1e-5)
    expected = (x64 + addend64).astype(FLOAT32).astype(trial.dtype)
    trial.equal("total", total, expected)
    check(total, expected.astype(np.float64), y, inverse_rms, residual)


def check_bias(trial: Trial, rows: int, width: int) -> None:
    cuda, reference = kernels("bias")
    (y, y64), (dy, dy64) = (trial.normal(rows, width) for _ in range(2))
    (bias, bias64), (dbias, expected) = trial.normal(width), trial.normal(width, dtype=FLOAT32)
    cuda.add_bias(y, bias)
    trial.close("y", y, y64 + bias64)
    terms = np.sqrt(expected**2 + np.square(dy64).sum(axis=0))
    cuda.bias_backward(dy, dbias)
    reference.bias_backward(dy64, expected)
    trial.close("dbias", dbias, expected, terms, TOLERANCE[FLOAT32])


def check_rotary(trial: Trial, batch: int, tokens: int, heads: int, half: int) -> None:
    cuda, reference = kernels("rotary")
    tables = cuda.rotary_tables(np.arange(tokens), 2 * half, 10000.0)
    on_gpu = [trial.upload(table) for table in tables]
    exact = [table.astype(np.float64) for table in tables]
    for name in ("rotary", "rotary_backward"):
        x, x64 = trial.normal(batch, tokens, heads, 2 * half)
        turned = getattr(cuda, name)(x, *on_gpu)
        trial.close(name, turned, getattr(reference, name)(x64, *exact))
        trial.equal("in place", getattr(cuda, name)(x, *on_gpu, x), turned.to_numpy())


def check_embedding(trial: Trial, rows: int, vocabulary: int, width: int) -> None:
    cuda, reference = kernels("embedding")
    tokens = trial.rng.integers(0, vocabulary, rows)
    on_gpu = trial.upload(tokens)
    table, _ = trial.normal(vocabulary, width)
    x = cuda.embedding(on_gpu, table)
    trial.equal("x", x, reference.embedding(tokens, table.to_numpy()))
    (dx, dx64), (dtable, expected) = (
        trial.normal(rows, width), trial.normal(vocabulary, width, dtype=FLOAT32),
    )  # fmt: skip
    squares = expected**2
    cuda.embedding_backward(dx, on_gpu, dtable)
    reference.embedding_backward(dx64, tokens, expected)
    reference.embedding_backward(dx64**2, tokens, squares)
    trial.close("dtable", dtable, expected, np.sqrt(squares), TOLERANCE[FLOAT32])


# ---- Attention


def draw_attention(rng: np.random.Generator) -> Case:
    batch, groups, sharing = (int(number) for number in rng.integers(1, 4, 3))
    width = log_uniform(rng, 256)[0]
    if rng.random() < 0.5:  # such as libraries and vector loads want
        width = 8 * -(-min(width, 128) // 8)
    most = 2_000_000 // (batch * groups * sharing * width)
    queries, later = log_uniform(rng, 120, 400, product=most)
    keys = min(queries + later - 1, max(queries, most // queries))
    return batch, queries, keys, groups * sharing, groups, width


def check_attention(
    trial: Trial, batch: int, queries: int, keys: int, heads: int, groups: int, width: int
) -> None:
    cuda, reference = kernels("attention")
    (q, q64), (dy, dy64) = (trial.normal(batch, queries, heads, width) for _ in range(2))
    (k, k64), (v, v64) = (trial.normal(batch, keys, groups, width) for _ in range(2))
    path = ("auto", "tiled")[trial.number % 2]
    y, log_sum_exp = cuda.causal_attention(q, k, v, path=path)
    gradients = cuda.causal_attention_backward(dy, q, k, v, y, log_sum_exp, path=path)
    expected_y, expected_sum = reference.causal_attention(q64, k64, v64)
    expected = reference.causal_attention_backward(dy64, q64, k64, v64, expected_y, expected_sum)
    trial.close("y", y, expected_y)
    trial.close("log_sum_exp", log_sum_exp, expected_sum, np.ones_like(expected_sum), 1e-5)
    # where queries see few keys or heads are narrow, dq and dk are differences of large numbers
    terms = expected[2] if keys < 16 or width < 4 else 0.0
    for name, actual, wanted in zip(("dq", "dk", "dv"), gradients, expected, strict=True):
        trial.close(f"{name} by {path}", actual, wanted, terms)

    # a cache with room for more keys, of which nothing is read, filled up to the last queries
    before = keys - queries
    caches = [np.full((batch, keys + 3, groups, width), np.nan, trial.dtype) for _ in range(2)]
    on_gpu = []
    for cache, rows in zip(caches, (k.to_numpy(), v.to_numpy()), strict=True):
        cache[:, :before] = rows[:, :before]
        on_gpu.append(trial.upload(cache))
        new = trial.upload(np.ascontiguousarray(rows[:, before:]))
        cuda.append_to_cache(on_gpu[-1], new, before)
        cache[:, before:keys] = rows[:, before:]
        trial.equal("cache", on_gpu[-1], cache)
    length = trial.upload(np.array([keys])) if trial.number % 2 else keys
    other_path = "auto" if trial.number % 2 else "tiled"
    y, log_sum_exp = cuda.causal_attention(q, *on_gpu, length=length, path=other_path)
    trial.close("y of a cache", y, expected_y)
    trial.close("L of a cache", log_sum_exp, expected_sum, np.ones_like(expected_sum), 1e-5)


# ---- Losses, steps, tokens


def check_cross_entropy(trial: Trial, rows: int, vocabulary: int) -> None:
    cuda, reference = kernels("cross_entropy")
    logits, logits64 = trial.rounded(3 * trial.rng.standard_normal((rows, vocabulary)))
    targets = trial.rng.integers(-1, vocabulary, rows)
    scale = float(np.float32(trial.rng.uniform(0.01, 1)))
    on_gpu = trial.upload(targets)
    losses, log_sum_exp = cuda.cross_entropy(logits, on_gpu)
    dlogits = cuda.cross_entropy_backward(logits, on_gpu, log_sum_exp, scale)
    expected_losses, expected_sum = reference.cross_entropy(logits64, targets)
    gradient = reference.cross_entropy_backward(logits64, targets, expected_sum, scale)
    largest = np.maximum(np.abs(expected_sum), 1)
    trial.close("log_sum_exp", log_sum_exp, expected_sum, largest)
    trial.close("losses", losses, expected_losses, largest)
    terms = np.maximum(np.abs(gradient), scale)
    trial.close("dlogits", dlogits, gradient, terms)
    losses = cuda.cross_entropy_in_place(logits, on_gpu, scale)
    trial.close("losses in place", losses, expected_losses, largest)
    trial.close("dlogits in place", logits, gradient, terms)


def check_adamw(trial: Trial, *shape: int) -> None:
    cuda, reference = kernels("adamw")
    rng, tolerance = trial.rng, TOLERANCE[FLOAT32]
    beta1, beta2, decay = (float(number) for number in rng.uniform(0.5, 0.999, 3))
    rate, step = float(10 ** rng.uniform(-5, -1)), int(rng.integers(1, 5000))
    settings = {
        "learning_rate": rate, "beta1": beta1, "beta2": beta2, "eps": 1e-8,
        "weight_decay": decay, "step": step, "grad_scale": float(rng.uniform(0.1, 2)),
    }  # fmt: skip
    host = [rng.standard_normal(shape).astype(FLOAT32) for _ in range(3)]
    host.append(rng.random(shape).astype(FLOAT32))
    names = ("value", "grad", "first_moment", "second_moment")

    def check(kind: str, step_on_gpu: Callable[..., None]) -> list[Any]:
        arrays = [trial.upload(array) for array in host]
        expected = [array.astype(np.float64) for array in host]
        started = [array.copy() for array in expected]
        step_on_gpu(*arrays)
        reference.adamw_step(*expected, **settings)
        for name, actual, wanted, terms in zip(names, arrays, expected, started, strict=True):
            trial.close(f"{name}, {kind}", actual, wanted, terms, tolerance)
        return arrays

    correction = rate / (1 - beta1**step), (1 - beta2**step) ** -0.5
    numbers = [beta1, 1 - beta1, beta2, 1 - beta2, 1e-8, rate * decay, *correction]
    recorded = trial.upload(np.float32(numbers)), trial.upload(np.float32([settings["grad_scale"]]))
    copy = trial.upload(np.zeros(shape, BFLOAT16)) if trial.dtype == BFLOAT16 else None
    value, *_ = check("recorded", lambda *a: cuda.adamw_step_recorded(*a, copy, *recorded))
    if copy is not None:
        trial.equal("copy", copy, value.to_numpy().astype(BFLOAT16))
    host[1] = host[1].astype(trial.dtype)
    check("now", lambda *a: cuda.adamw_step(*a, **settings))
    grad, grad64 = trial.upload(host[1]), host[1].astype(np.float64)
    squares = reference.sum_of_squares(grad64)
    trial.close("squares", cuda.sum_of_squares(grad), squares, 0.0, 1e-12)
    total = cuda_scalars.sum_on_gpu(grad)
    trial.close("sum", total, [grad64.sum()], np.abs(grad64).sum(), 1e-12)
    limit = float(rng.uniform(0.1, 100))
    scale = cuda.clip_scale_on_gpu(trial.upload(np.array([squares])), total, limit)
    trial.close("scale", scale, [min(1.0, limit / max(math.sqrt(squares), 1e-300))], 0.0, 1e-6)


def check_sampling(trial: Trial, rows: int, vocabulary: int) -> None:
    cuda, reference = kernels("sampling")
    rng = trial.rng
    logits = (2 * rng.standard_normal((rows, vocabulary))).astype(trial.dtype)
    logits[:, ::3] = np.round(logits[:, ::3].astype(np.float32))  # many are equal
    logits[rng.random(logits.shape) < 0.1] = -0.0
    logits[:, 1:][rng.random((rows, vocabulary - 1)) < rng.choice([0, 0.1, 0.9])] = -np.inf
    uniform = rng.random(rows)
    settings = (
        float(rng.choice([0, 1, rng.uniform(0.1, 2)])),
        int(rng.choice([0, rng.integers(1, vocabulary + 1)])),
        float(rng.choice([1, rng.uniform(0.05, 1)])),
    )
    tokens = cuda.sample_token(trial.upload(logits), trial.upload(uniform), *settings)
    expected = reference.sample_token(logits.astype(np.float32), uniform, *settings)
    trial.equal(f"tokens {settings}", tokens, expected)


def check_revival(trial: Trial, rows: int, width: int) -> None:
    cuda, reference = kernels("revival")
    rng = trial.rng
    expected = list(rng.standard_normal((3, rows, width)).astype(trial.dtype))
    dead = rng.random(rows) < any_density(rng)
    on_gpu = [trial.upload(array) for array in expected]
    settings = (
        int(rng.integers(0, 2**63)) * 2 + 1, int(rng.integers(0, 2**32)),
        *(float(number) for number in rng.random(2)),
    )  # fmt: skip
    cuda.revive_rows(*on_gpu, trial.upload(dead), *settings)
    reference.revive_rows(*expected, dead, *settings)
    for name, actual, wanted in zip(("gate", "first", "second"), on_gpu, expected, strict=True):
        trial.close(name, actual, wanted, 0.0, 1e-6)
        trial.equal(name, actual.to_numpy()[~dead], wanted[~dead])


def draw_proximal(rng: np.random.Generator) -> Case:
    return (*log_uniform(rng, 3000, 2000, product=20_000), int(rng.choice([3, 4, 16, 32])))


def check_proximal(trial: Trial, rows: int, width: int, block_size: int) -> None:
    cuda, reference = kernels("proximal")
    amount = float(trial.rng.choice([0, trial.rng.uniform(0, 2)]))
    host = trial.rng.standard_normal((rows, width)).astype(trial.dtype)
    for name, *options in (
        ("soft_threshold", amount),
        ("hard_threshold", amount),
        ("block_soft_threshold", block_size, amount),
    ):
        expected, actual = host.copy(), trial.upload(host)
        left = getattr(cuda, name)(actual, *options)
        assert left == getattr(reference, name)(expected, *options), (trial.text, name)
        trial.close(name, actual, expected, 0.0, 1e-6)
        trial.equal(name, actual.to_numpy() == 0, expected == 0)
        assert cuda.count_nonzero(actual) == np.count_nonzero(expected), (trial.text, name)
    if host.size:
        rank = int(trial.rng.integers(1, host.size + 1))
        largest = cuda.largest_magnitude([trial.upload(host)], rank)
        trial.equal(f"rank {rank}", largest, reference.largest_magnitude([host], rank))


# ---- What is exact


def check_transpose(trial: Trial, rows: int, columns: int) -> None:
    cuda, reference = kernels("transpose")
    x, _ = trial.normal(rows, columns)
    expected = reference.transpose(x.to_numpy())
    trial.equal("transposed", cuda.transpose(x), expected)
    trial.equal("in float32", cuda.transpose(x, FLOAT32), expected.astype(FLOAT32))


def check_sums(trial: Trial, size: int) -> None:
    x, y = (trial.normal(size, dtype=FLOAT32)[0] for _ in range(2))
    expected = x.to_numpy() + y.to_numpy()
    cuda_sums.add_into(x, y)
    trial.equal("sum", x, expected)
    first, second = (trial.rng.random(size) < any_density(trial.rng) for _ in range(2))
    on_gpu = trial.upload(first)
    cuda_sums.or_into(on_gpu, trial.upload(second))
    trial.equal("either", on_gpu, first | second)
    trial.equal("rounded", cast(x, BFLOAT16), expected.astype(BFLOAT16))
    rounded = cast(cast(x, BFLOAT16), FLOAT32)
    trial.equal("widened", rounded, expected.astype(BFLOAT16).astype(FLOAT32))


# ---- Dense products and layers


def check_gemm(trial: Trial, m: int, k: int, n: int) -> None:
    (a, a64), (b, b64) = trial.normal(m, k), trial.normal(k, n)
    transposes = [bool(flag) for flag in trial.rng.integers(0, 2, 2)]
    a, b = (
        trial.upload(np.ascontiguousarray(array.to_numpy().T)) if flag else array
        for array, flag in zip((a, b), transposes, strict=True)
    )
    options: dict[str, Any] = dict(zip(("transpose_a", "transpose_b"), transposes, strict=True))
    expected, terms = a64 @ b64, root_of_squares(a64, b64)
    tolerance = tolerance_of_sums(trial.dtype, k)
    for path in ("tiled", "auto") if m and k and n else ("auto",):
        name = f"{path} {transposes}"
        trial.close(name, gemm.matmul(a, b, path=path, **options), expected, terms)
        out, start = trial.normal(m, n, dtype=FLOAT32)
        assert gemm.matmul(a, b, out, accumulate=True, path=path, **options) is out
        wanted = start + expected
        trial.close(f"{name}, added", out, wanted, np.abs(start) + terms, tolerance)


def check_dense_product(trial: Trial, rows: int, inputs: int, outputs: int) -> None:
    cuda, reference = kernels("dense_product")
    (x, x64), (dy, dy64) = trial.normal(rows, inputs), trial.normal(rows, outputs)
    (weight, weight64), (dx, dx64) = trial.normal(outputs, inputs), trial.normal(rows, inputs)
    grad, grad64 = trial.normal(outputs, inputs, dtype=FLOAT32)
    terms = np.abs(grad64) + root_of_squares(dy64.T, x64)
    terms_of_dx = root_of_squares(dy64, weight64)
    y = cuda.linear(x, weight)
    trial.close("y", y, reference.linear(x64, weight64), root_of_squares(x64, weight64.T))
    new_dx = cuda.linear_backward(dy, x, weight, grad)
    assert cuda.linear_backward(dy, x, weight, None, dx) is dx
    trial.close("dx", new_dx, reference.linear_backward(dy64, x64, weight64, grad64), terms_of_dx)
    trial.close("grad", grad, grad64, terms, tolerance_of_sums(trial.dtype, rows))
    terms_of_dx += np.abs(dx64)
    reference.linear_backward(dy64, x64, weight64, None, dx64)
    trial.close("dx, added", dx, dx64, terms_of_dx)


class Layer:
    """A feedforward layer's operands, and what is expected of it.

    x and weights are quarters, times a power of 2: what decides whether a neuron fires, and the
    sign of h, is a sum without rounding errors. Otherwise one of them may change a sign, and with
    it a whole row of the gradients.
    """

    def __init__(
        self, trial: Trial, rows: int, width: int, neurons: int, density: float, *, gated: bool,
        kept: Callable[[], np.ndarray] | None = None,
    ) -> None:  # fmt: skip
        rng, self.trial, self.gated = trial.rng, trial, gated
        x = np.round(4 * rng.standard_normal((rows, width))) / 4
        weights = np.round(4 * rng.standard_normal((3 if gated else 2, neurons, width))) / 4
        if width >= 8 and kept is None:
            bound = 0.0 if density in (0, 1) else NormalDist().inv_cdf(density)
            bound = {0: -6.0, 1: 6.0}.get(density, bound)
            x[:, 0] = 1
            weights[0, :, 0] = np.round(4 * bound * (width - 1) ** 0.5) / 4
        weights *= 2.0 ** np.round(np.log2(max(width, 1) ** -0.5))
        if kept is not None:
            weights = [weight * kept() for weight in weights]
        self.x, self.x64 = trial.rounded(x)
        self.dy, self.dy64 = trial.normal(rows, width)
        self.stored = [weight.astype(trial.dtype) for weight in weights]
        self.exact = [weight.astype(np.float64) for weight in self.stored]
        self.l1_scale = float(rng.choice([0, 0.25]))
        self._compute()

    def _compute(self) -> None:
        _, reference = kernels("dense_ffn")
        name = "gated_ffn" if self.gated else "ffn"
        x, dy, weights = self.x64, self.dy64, self.exact
        gradients = [np.ones(weight.shape) for weight in weights]
        y, activations = getattr(reference, f"{name}_forward")(x, *weights)
        dx = getattr(reference, f"{name}_backward")(
            dy, x, *weights, activations, self.l1_scale, *gradients
        )
        self.expected = [y, dx, *gradients]
        self.pattern, self.hidden = activations.pattern, activations.hidden
        self.statistics = reference.activation_statistics(activations)
        *first, down = weights
        # how large each neuron's gradients are before anything cancels
        d_hidden = np.where(self.pattern <= 0, 0, np.abs(dy @ down.T) + self.l1_scale)
        d_pre = [d_hidden]
        if activations.up is not None:
            d_pre = [d_hidden * activations.up, d_hidden * self.pattern]
        pairs = list(zip(d_pre, first, strict=True))
        self.terms = [
            root_of_squares(self.hidden, down),
            sum(root_of_squares(d, weight) for d, weight in pairs),
            *(1 + root_of_squares(d.T, x) for d in d_pre),
            1 + root_of_squares(self.hidden.T, dy),
        ]

    def check(
        self, cuda: ModuleType, weights: list[Any], *options: Any,
        stored: Callable[[int, Any], tuple[Any, Any]] | None = None, **keywords: Any,
    ) -> Any:  # fmt: skip
        """Check forward and backward pass and statistics, and return the activations.

        ``stored`` makes a weight's gradient dense and says where there is one.
        """
        trial, name = self.trial, "gated_ffn" if self.gated else "ffn"
        tolerance = trial.tolerance
        if trial.dtype == BFLOAT16 and self.statistics[0] < FEW:
            tolerance = TOLERANCE_OF_FEW
        shapes = [
            weight.shape if stored is None else weight.stored_values.shape for weight in weights
        ]
        gradients = [trial.upload(np.ones(shape, FLOAT32)) for shape in shapes]
        y, activations = getattr(cuda, f"{name}_forward")(self.x, *weights, *options, **keywords)
        dx = getattr(cuda, f"{name}_backward")(
            self.dy, self.x, *weights, activations, self.l1_scale, *gradients
        )
        assert (y.dtype, dx.dtype) == (trial.dtype, trial.dtype), trial.text
        names = ["y", "dx", *("dgate", "dup", "ddown")[-len(weights) :]]
        for number, result in enumerate([y, dx, *gradients]):
            expected, terms = self.expected[number], self.terms[number]
            if stored is not None and number >= 2:
                result, is_stored = stored(number - 2, result)
                expected, terms = expected * is_stored, terms * is_stored
            trial.close(names[number], result, expected, terms, tolerance)
        nonzeros, absolute_sum, fired = cuda.activation_statistics(activations)
        assert nonzeros == self.statistics[0], trial.text
        trial.close("sum of |h|", absolute_sum, self.statistics[1], 0.0, tolerance)
        trial.equal("fired", fired, self.statistics[2])
        return activations


def draw_dense_layer(rng: np.random.Generator) -> Case:
    return (*log_uniform(rng, 500, 500, 1000, product=4_000_000), any_density(rng))


def check_dense_ffn(gated: bool) -> Callable[..., None]:
    def check(trial: Trial, rows: int, width: int, neurons: int, density: float) -> None:
        cuda, _ = kernels("dense_ffn")
        layer = Layer(trial, rows, width, neurons, density, gated=gated)
        layer.check(cuda, [trial.upload(weight) for weight in layer.stored])

    return check


def draw_twell(rng: np.random.Generator) -> Case:
    rows, neurons = log_uniform(rng, 300, 1500, product=20_000)
    # few widths that eight divides: kernels are compiled for each
    width = int(rng.choice([32, 256, 768, 2 * rng.integers(2, 150) + 1]))
    tile = int(rng.choice([8, 100, 256, 256]))
    return rows, width, neurons, any_density(rng), tile, log_uniform(rng, tile)[0]


def check_twell(gated: bool) -> Callable[..., None]:
    def check(
        trial: Trial, rows: int, width: int, neurons: int, density: float, tile: int, slots: int
    ) -> None:
        cuda, reference = kernels("twell")
        layer = Layer(trial, rows, width, neurons, density, gated=gated)
        weights = [trial.upload(weight) for weight in layer.stored]
        compact = bool(trial.number % 2)
        packed = layer.check(cuda, weights, tile, slots, compact_tail=compact)
        pattern = packed.pattern()
        pattern.validate()
        wanted = reference.relu_pack(layer.pattern, tile, slots)
        trial.equal("counts", pattern.counts, wanted.pattern().counts)
        trial.equal("tail rows", pattern.tail_rows, wanted.pattern().tail_rows)
        used = np.arange(slots) < pattern.counts[..., None]
        trial.equal("columns", pattern.columns[used], wanted.pattern().columns[used])

    return check


# ---- Sparse matrices


def kept_blocks(
    rng: np.random.Generator, rows: int, columns: int, density: float, b: int
) -> np.ndarray:
    """Return whether each element lies in one of the blocks that are chosen at random."""
    chosen = rng.random((-(-rows // b), -(-columns // b))) < density
    return chosen.repeat(b, axis=0)[:rows].repeat(b, axis=1)[:, :columns]


def blocks_with_entries(dense: np.ndarray, b: int) -> np.ndarray:
    """Return whether each element lies in a block of which any element is not 0."""
    rows, columns = dense.shape
    padded = np.pad(dense != 0, ((0, -rows % b), (0, -columns % b)))
    blocks = padded.reshape(padded.shape[0] // b, b, padded.shape[1] // b, b).any(axis=(1, 3))
    return blocks.repeat(b, axis=0)[:rows].repeat(b, axis=1)[:, :columns]


def draw_csr_layer(rng: np.random.Generator) -> Case:
    return (*log_uniform(rng, 600, 300, 600, product=3_000_000), any_density(rng), 1)


def draw_block_ell_layer(rng: np.random.Generator) -> Case:
    b = int(rng.choice([3, 16, 32, 64]))
    if rng.random() < 0.5:  # whole blocks, as tensor cores want them
        rows, *blocks = log_uniform(rng, 600, 512 // b, 1024 // b, product=3_000_000 // b**2)
        return rows, blocks[0] * b, blocks[1] * b, any_density(rng), b
    return (*log_uniform(rng, 600, 300, 600, product=3_000_000), any_density(rng), b)


def check_sparse_ffn(family: str, gated: bool) -> Callable[..., None]:
    cls, keyword = {"csr": (CSRMatrix, None), "block_ell": (BlockELLMatrix, "block_size")}[family]

    def check(trial: Trial, rows: int, width: int, neurons: int, density: float, b: int) -> None:
        cuda, _ = kernels(family)
        layer = Layer(
            trial, rows, width, neurons, density, gated=gated,
            kept=lambda: kept_blocks(trial.rng, neurons, width, density, b),
        )  # fmt: skip
        layout = {} if keyword is None else {keyword: b}
        weights = [cls.from_dense(trial.upload(weight), **layout) for weight in layer.stored]

        def stored(number: int, gradient: Any) -> tuple[Any, np.ndarray]:
            dense = weights[number].with_values(gradient).to_dense()
            return dense, blocks_with_entries(layer.exact[number], b)

        layer.check(cuda, weights, stored=stored)

    return check


LAYOUTS: dict[str, tuple[Any, Callable[[np.random.Generator], dict[str, int]]]] = {
    "csr": (CSRMatrix, lambda rng: {}),
    "block_ell": (BlockELLMatrix, lambda rng: {"block_size": int(rng.choice([3, 16, 32, 64]))}),
    "twell": (TwELLMatrix, lambda rng: tile_and_slots(rng)),
    "hybrid_ell": (HybridELLMatrix, lambda rng: {"width": log_uniform(rng, 64)[0]}),
}


def tile_and_slots(rng: np.random.Generator) -> dict[str, int]:
    tile = int(rng.choice([4, 32, 100, 256]))
    return {"tile": tile, "slots": log_uniform(rng, tile)[0]}


def draw_product(rng: np.random.Generator) -> Case:
    rows, columns, width = log_uniform(rng, 2000, 2000, 300, product=3_000_000)
    if rows * columns > 100_000:
        columns = 100_000 // rows
    return rows, columns, width, any_density(rng)


def make_sparse(
    trial: Trial, layout: str, rows: int, columns: int, density: float
) -> tuple[Any, dict[str, int], np.ndarray]:
    """Return a format, its parameters and a dense matrix in the dtype, some rows of it full."""
    cls, draw = LAYOUTS[layout]
    parameters, rng = draw(trial.rng), trial.rng
    b = parameters.get("block_size", 1)
    dense = rng.standard_normal((rows, columns)) * kept_blocks(rng, rows, columns, density, b)
    if rng.random() < 0.3:
        some = rng.random(rows) < 0.1
        dense[some] = rng.standard_normal((int(some.sum()), columns))
    return cls, parameters, dense.astype(trial.dtype)


def check_products(layout: str) -> Callable[..., None]:
    def check(trial: Trial, rows: int, columns: int, width: int, density: float) -> None:
        cls, parameters, stored = make_sparse(trial, layout, rows, columns, density)
        trial.text += f" {parameters}"
        A, A64 = cls.from_dense(trial.upload(stored), **parameters), stored.astype(np.float64)
        (x, x64), (y, y64) = trial.normal(columns, width), trial.normal(rows, width)
        z, z64 = trial.normal(width, rows)
        for name, operand, left, right in (
            ("matmul", x, A64, x64),
            ("transposed_matmul", y, A64.T, y64),
            ("left_matmul", z, z64, A64),
        ):
            product = getattr(A, name)(operand)
            assert product.dtype == trial.dtype, (trial.text, name)
            trial.close(name, product, left @ right, root_of_squares(left, right))
            out = trial.upload(np.ones(product.shape, trial.dtype))
            assert getattr(A, name)(operand, out) is out
            trial.equal(f"{name} into out", out, product.to_numpy())
        trial.equal("by operators", A @ x, A.matmul(x).to_numpy())
        is_entry = blocks_with_entries(A64, parameters.get("block_size", 1))
        expected, terms = y64 @ x64.T * is_entry, root_of_squares(y64, x64.T) * is_entry
        sampled = A.sampled_product(y, x)
        trial.close("sampled_product", sampled.to_dense(), expected, terms)
        assert A.sampled_product(y, x, A) is A
        trial.equal("sampled_product into out", A.to_dense(), sampled.to_dense().to_numpy())

    return check


def check_conversion(trial: Trial, rows: int, columns: int, density: float) -> None:
    names = list(LAYOUTS)
    first = names[trial.number % 4]
    second = names[int(trial.rng.integers(4))]
    cls, parameters, stored = make_sparse(trial, first, rows, columns, density)
    stored[stored == 0] = trial.rng.choice([0.0, -0.0])
    other, draw = LAYOUTS[second]
    other_parameters = draw(trial.rng)
    trial.text += f" {first} {parameters}, {second} {other_parameters}"
    on_gpu = cls.from_dense(trial.upload(stored), **parameters)
    expected = cls.from_dense(stored, **parameters)
    check_same(trial, "from_dense", on_gpu, expected)
    trial.equal("to_dense", on_gpu.to_dense(), expected.to_dense())
    check_same(trial, "T", on_gpu.T, expected.T)
    check_same(
        trial, "from_sparse", other.from_sparse(on_gpu, **other_parameters),
        other.from_dense(stored, **other_parameters),
    )  # fmt: skip
    check_same(trial, "to", expected.to(trial.machine.gpu.stream), expected)
    wide = on_gpu.astype(np.float64)
    check_same(trial, "astype", wide, expected.astype(np.float64))


def check_same(trial: Trial, name: str, on_gpu: Any, expected: Any) -> None:
    """Check that a matrix on a GPU has the bits of one in the host's memory, padding aside."""
    assert on_gpu.is_on_gpu
    actual = on_gpu.to("cpu")
    actual.validate()
    assert (type(actual), actual.shape) == (type(expected), expected.shape), (trial.text, name)
    given, wanted = actual._arrays_to_save(), expected._arrays_to_save()
    assert given.keys() == wanted.keys()
    for key, array in wanted.items():
        trial.equal(f"{name}: {key}", given[key], array)


# ---- All families


class Family(NamedTuple):
    """What is checked, how cases are drawn, and cases that are always there."""

    check: Callable[..., None]
    draw: Callable[[np.random.Generator], Case]
    edges: list[Case]
    tiny: list[Case]
    dtypes: tuple[np.dtype, ...] = (FLOAT32, BFLOAT16)


def sizes(*most: int, product: int = 200_000) -> Callable[[np.random.Generator], Case]:
    return lambda rng: log_uniform(rng, *most, product=product)


EDGES_OF_ROWS: list[Case] = [
    (0, 8), (1, 1), (65537, 1), (65537, 7), (65537, 33), (1, 768), (5, 7), (9, 8), (3, 256),
    (3, 257), (2, 1001), (7, 5), (1, 65537),
]  # fmt: skip
EDGES_OF_LAYERS: list[Case] = [
    (0, 8, 40), (1, 1, 1), (65537, 8, 24), (65537, 7, 5), (1, 768, 1001), (33, 7, 257),
    (34, 256, 1), (5, 768, 257), (9, 8, 1001), (17, 1, 5),
]  # fmt: skip
EDGES_OF_TWELL: list[Case] = [
    (0, 8, 40, 0.5, 8, 2), (1, 1, 1, 1.0, 8, 8), (65537, 8, 24, 0.1, 256, 8),
    (65537, 7, 5, 0.5, 4, 2), (1, 768, 1001, 0.03, 256, 64), (33, 7, 257, 0.5, 256, 32),
    (34, 256, 1, 0.5, 256, 256), (5, 768, 257, 1.0, 256, 64), (9, 8, 1001, 0.0, 256, 64),
    (9, 256, 1001, 0.3, 256, 64), (3, 1, 65537, 0.01, 256, 8), (7, 32, 1001, 0.3, 65536, 299),
]  # fmt: skip
EDGES_OF_SPARSE_LAYERS: list[Case] = [
    (0, 8, 40, 0.3, 1), (1, 1, 1, 1.0, 1), (65537, 8, 9, 0.3, 1), (65537, 7, 5, 0.5, 1),
    (1, 768, 1001, 0.01, 1), (33, 7, 257, 0.1, 1), (34, 256, 1, 0.1, 1), (9, 8, 1001, 0.0, 1),
    (4096, 16, 256, 0.2, 1),
]  # fmt: skip
EDGES_OF_PRODUCTS: list[Case] = [
    (0, 3, 2, 0.3), (3, 0, 2, 0.3), (1, 1, 1, 1.0), (65537, 5, 3, 0.3), (5, 65537, 3, 0.01),
    (257, 7, 1, 0.3), (256, 8, 768, 0.1), (1001, 33, 8, 0.01), (5, 1001, 64, 0.0),
    (7, 257, 31, 1.0), (40, 40, 256, 0.2), (16, 256, 4096, 0.3),
]  # fmt: skip
BLOCK_SIZES = (3, 16, 32, 64)

FAMILIES = {
    "rms_norm": Family(
        check_rms_norm, sizes(3000, 2500), EDGES_OF_ROWS, [(3, 33), (2, 264)],
    ),
    "bias": Family(check_bias, sizes(3000, 2500), EDGES_OF_ROWS, [(3, 33), (2, 264)]),
    "rotary": Family(
        check_rotary,
        sizes(8, 500, 8, 128),
        [(0, 3, 2, 2), (65537, 1, 1, 1), (1, 65537, 1, 2), (1, 1, 1, 1), (2, 5, 3, 3),
         (1, 1001, 2, 4), (3, 257, 1, 32), (2, 1, 7, 128)],
        [(2, 3, 1, 3), (1, 2, 3, 8)],
    ),
    "embedding": Family(
        check_embedding,
        lambda rng: (*log_uniform(rng, 3000, 300), log_uniform(rng, 60)[0]),
        [(0, 3, 8), (1, 1, 1), (65537, 300, 7), (65537, 3, 8), (3, 65537, 2), (40, 3, 768),
         (7, 65, 256), (1001, 257, 5), (32, 64, 8)],
        [(70, 5, 3), (3, 2, 16)],
    ),
    "attention": Family(
        check_attention,
        draw_attention,
        [(0, 3, 3, 2, 1, 4), (2, 0, 3, 2, 1, 4), (1, 1, 1, 1, 1, 1), (65537, 1, 1, 1, 1, 2),
         (1, 1, 65537, 1, 1, 8), (2, 3, 7, 4, 2, 5), (1, 33, 33, 2, 1, 64), (1, 9, 65, 2, 2, 7),
         (1, 8, 257, 3, 1, 256), (1, 65, 129, 4, 2, 64)],
        [(1, 2, 5, 2, 1, 5), (1, 9, 9, 2, 1, 8)],
    ),
    "cross_entropy": Family(
        check_cross_entropy, sizes(3000, 5000), EDGES_OF_ROWS, [(3, 65), (2, 16)],
    ),
    "adamw": Family(
        check_adamw,
        lambda rng: log_uniform(rng, *([300] * int(rng.integers(1, 4)))),
        [(0,), (1,), (65537,), (257,), (1001,), (2056,), (3, 7, 2), (65537, 3)],
        [(3, 7), (264,)],
    ),
    "sampling": Family(
        check_sampling,
        sizes(100, 30_000, product=100_000),
        [(1, 1), (65537, 3), (1, 65537), (3, 1001), (5, 257), (2, 8), (4, 768)],
        [(2, 70), (1, 16)],
    ),
    "revival": Family(
        check_revival, sizes(2000, 1000, product=100_000), EDGES_OF_ROWS, [(3, 9), (2, 33)],
        (FLOAT32,),
    ),
    "proximal": Family(
        check_proximal,
        draw_proximal,
        [(0, 5, 4), (5, 0, 4), (1, 1, 3), (65537, 3, 64), (1, 65537, 64), (257, 7, 3),
         (5, 1001, 32), (8, 768, 16)],
        [(3, 5, 4), (9, 8, 3)],
        (FLOAT32,),
    ),
    "transpose": Family(check_transpose, sizes(3000, 3000), EDGES_OF_ROWS, [(3, 33), (9, 2)]),
    "sums": Family(
        check_sums,
        sizes(100_000),
        [(0,), (1,), (5,), (7,), (8,), (257,), (1001,), (65537,)],
        [(7,), (70,)],
        (FLOAT32,),
    ),
    "gemm": Family(
        check_gemm,
        sizes(600, 600, 600, product=4_000_000),
        [(0, 3, 4), (3, 0, 4), (3, 4, 0), (1, 1, 1), (65537, 8, 7), (7, 33, 65537),
         (5, 65537, 8), (257, 1001, 5), (1, 768, 256), (33, 7, 257)],
        [(3, 17, 33), (8, 8, 8)],
    ),
    "dense_product": Family(
        check_dense_product,
        sizes(600, 600, 600, product=4_000_000),
        EDGES_OF_LAYERS,
        [(3, 5, 7), (2, 8, 16)],
    ),
    **{
        f"dense_ffn_{name}": Family(
            check_dense_ffn(gated),
            draw_dense_layer,
            [(*case, 0.5) for case in EDGES_OF_LAYERS],
            [(3, 5, 7, 0.5), (2, 8, 16, 0.3)],
        )
        for name, gated in (("gated", True), ("two_matrix", False))
    },
    **{
        f"twell_{name}": Family(
            check_twell(gated),
            draw_twell,
            EDGES_OF_TWELL,
            [(3, 5, 9, 0.5, 4, 2), (2, 256, 9, 0.3, 256, 3)],
        )
        for name, gated in (("gated", True), ("two_matrix", False))
    },
    **{
        f"csr_ffn_{name}": Family(
            check_sparse_ffn("csr", gated),
            draw_csr_layer,
            EDGES_OF_SPARSE_LAYERS,
            [(3, 5, 7, 0.4, 1), (9, 4, 6, 0.4, 1)],
        )
        for name, gated in (("gated", True), ("two_matrix", False))
    },
    **{
        f"block_ell_ffn_{name}": Family(
            check_sparse_ffn("block_ell", gated),
            draw_block_ell_layer,
            [(*case[:4], BLOCK_SIZES[number % 4])
             for number, case in enumerate(EDGES_OF_SPARSE_LAYERS)]
            + [(rows, 2 * b, 3 * b, 0.5, b) for rows in (1, 53, 2049) for b in (16, 32, 64)],
            [(3, 5, 7, 0.4, 3), (2, 32, 32, 1.0, 32)],
        )
        for name, gated in (("gated", True), ("two_matrix", False))
    },
    **{
        f"{layout}_product": Family(
            check_products(layout),
            draw_product,
            EDGES_OF_PRODUCTS,
            [(5, 7, 3, 0.4), (9, 4, 8, 0.3)],
        )
        for layout in LAYOUTS
    },
    "conversion": Family(
        check_conversion,
        lambda rng: (*log_uniform(rng, 2000, 2000, product=100_000), any_density(rng)),
        [(*case[:2], case[3]) for case in EDGES_OF_PRODUCTS],
        [(5, 7, 0.4), (9, 4, 0.3), (3, 9, 0.7), (4, 5, 0.5)],
    ),
}  # fmt: skip


def check_cases(machine: Any, name: str, dtype: np.dtype, block: str, cases: list[Case]) -> None:
    """Check cases; those that are wanting are drawn."""
    family = FAMILIES[name]
    rng = np.random.default_rng(list(f"{name} {dtype} {block}".encode()))
    for number, given in enumerate(cases):
        case = given or family.draw(rng)
        family.check(Trial(machine, rng, dtype, number, f"{name} {case}"), *case)


def of_every_family(blocks: list[str]) -> list[Any]:
    return [
        pytest.param(name, dtype, block, id=f"{name}-{dtype}-{block}")
        for name, family in FAMILIES.items()
        for dtype in family.dtypes
        for block in blocks
    ]


@pytest.mark.parametrize(("name", "dtype", "block"), of_every_family(["tiny"]))
def test_tiny_shapes(machine, name, dtype, block):
    check_cases(machine, name, dtype, block, FAMILIES[name].tiny)


@pytest.mark.gpu
@pytest.mark.parametrize("machine", ["real"], indirect=True)
@pytest.mark.parametrize(
    ("name", "dtype", "block"), of_every_family(["edges", *map(str, range(BLOCKS))])
)
def test_random_shapes(machine, name, dtype, block):
    cases = FAMILIES[name].edges if block == "edges" else [()] * CASES_OF_A_BLOCK
    check_cases(machine, name, dtype, block, machine.shapes([], cases))
