"""A sparse feedforward layer on CuPy's arrays: forward and backward, no copies, on CuPy's stream.

Weights are neuron-major: row j of gate, up and down belongs to neuron j.

Run it with:  python examples/embed_cupy.py   (wants a GPU, CuPy and twell_numba[cuda])
"""

import sys

from twell_numba.errors import TwellError

try:
    import cupy
    from cupyx.profiler import benchmark

    from twell_numba.device.gpu import Stream, from_external, gpu
    from twell_numba.kernels.twell import gated_ffn_backward, gated_ffn_forward

    gpu()
except (ImportError, TwellError) as error:
    print(f"Nothing done, for want of a GPU, CuPy and twell_numba[cuda]: {error}")
    sys.exit()

TOKENS, WIDTH, NEURONS = 8192, 1024, 4096

# All work below goes to one stream of CuPy's; ours is another name for it.
cupy_stream = cupy.cuda.Stream(non_blocking=True)
cupy_stream.use()
stream = Stream(gpu(), cupy_stream.ptr)


def ours(array):
    """Return an array of CuPy's as this package's kernels take it: the same memory."""
    return from_external(array, stream)


random = cupy.random.default_rng(0)
x, dy = random.standard_normal((2, TOKENS, WIDTH), cupy.float32)
gate, up, down = random.standard_normal((3, NEURONS, WIDTH), cupy.float32) / WIDTH**0.5
x[:, 0], gate[:, 0] = 1, -2.5  # few neurons fire, as after training with an L1 term
x, dy, gate, up, down = (array.astype(cupy.float16) for array in (x, dy, gate, up, down))

# Kernels add gradients into arrays that the caller owns; the results go back without a copy.
gradients = [cupy.zeros(weight.shape, cupy.float32) for weight in (gate, up, down)]
y, activations = gated_ffn_forward(ours(x), ours(gate), ours(up), ours(down))
dx = gated_ffn_backward(
    ours(dy), ours(x), ours(gate), ours(up), ours(down), activations, 0.0, *map(ours, gradients)
)
y, dx = cupy.from_dlpack(y), cupy.from_dlpack(dx)


def dense(x, gate, up, down):
    """The same layer with CuPy alone."""
    return cupy.maximum(x @ gate.T, 0) * (x @ up.T) @ down


# The dense layer in float32 gives the same numbers, forward and backward.
X, DY, G, U, D = (array.astype(cupy.float32) for array in (x, dy, gate, up, down))
g, u, dh = X @ G.T, X @ U.T, DY @ D.T
dg, du = dh * u * (g > 0), dh * cupy.maximum(g, 0)
results = {
    "y": (y, dense(X, G, U, D)),
    "dx": (dx, dg @ G + du @ U),
    "dgate": (gradients[0], dg.T @ X),
    "dup": (gradients[1], du.T @ X),
}
for name, (actual, expected) in results.items():
    error = float(cupy.linalg.norm(actual - expected) / cupy.linalg.norm(expected))
    print(f"{name}: relative difference to the dense layer {error:.1e}")
    assert error < 5e-3

weights = [ours(weight) for weight in (gate, up, down)]
sparse = benchmark(gated_ffn_forward, (ours(x), *weights), n_repeat=20)
alone = benchmark(dense, (x, gate, up, down), n_repeat=20)
for name, times in {"sparse": sparse.gpu_times, "dense with CuPy": alone.gpu_times}.items():
    print(f"forward, {name}: {1000 * times.mean():.2f} ms")
