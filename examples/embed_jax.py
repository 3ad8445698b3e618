"""A sparse feedforward layer on JAX's arrays: forward and backward, without copies.

JAX has streams of its own: DLPack, through which arrays are handed over, lets the work of each side
wait for the other's on the GPU. Weights are neuron-major: their row j belongs to neuron j.

Run it with:  python examples/embed_jax.py   (wants a GPU, jax[cuda13] and twell_numba[cuda])
"""

import os
import sys
import timeit

from twell_numba.errors import TwellError

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave memory to others

try:
    import jax
    import jax.numpy as jnp

    from twell_numba.device.gpu import from_external, gpu, zeros
    from twell_numba.kernels.twell import gated_ffn_backward, gated_ffn_forward

    stream = gpu().stream
    jax.devices("cuda")
except (ImportError, RuntimeError, TwellError) as error:
    reason = str(error).splitlines()[0]
    print(f"Nothing done, for want of a GPU, jax[cuda13] and twell_numba[cuda]: {reason}")
    sys.exit()

TOKENS, WIDTH, NEURONS = 8192, 1024, 4096
keys = jax.random.split(jax.random.key(0), 5)
x, dy = (jax.random.normal(key, (TOKENS, WIDTH)) for key in keys[:2])
weights = [jax.random.normal(key, (NEURONS, WIDTH)) / WIDTH**0.5 for key in keys[2:]]
x, weights[0] = x.at[:, 0].set(1), weights[0].at[:, 0].set(-2.5)  # few neurons fire
x, dy, *weights = (array.astype(jnp.bfloat16) for array in (x, dy, *weights))


def sparse(x, weights):
    """Return y, and a function of dy that returns dx and the gradients of the weights."""
    x, *weights = (from_external(array) for array in (x, *weights))
    y, activations = gated_ffn_forward(x, *weights)

    def pullback(dy):
        # Kernels add gradients into arrays that the caller owns, here in float32.
        gradients = [zeros(weight.shape, "float32", stream) for weight in weights]
        dx = gated_ffn_backward(from_external(dy), x, *weights, activations, 0.0, *gradients)
        return [jax.dlpack.from_dlpack(array) for array in (dx, *gradients)]

    return jax.dlpack.from_dlpack(y), pullback


@jax.jit
def dense(x, gate, up, down):
    """The same layer with JAX alone."""
    return jax.nn.relu(x @ gate.T) * (x @ up.T) @ down


# The dense layer in float32 gives the same numbers, forward and backward.
y, pullback = sparse(x, weights)
with jax.default_matmul_precision("highest"):
    wide = [array.astype(jnp.float32) for array in (x, *weights)]
    expected_y, dense_pullback = jax.vjp(dense, *wide)
    expected = [expected_y, *dense_pullback(dy.astype(jnp.float32))]
names = ("y", "dx", "dgate", "dup", "ddown")
for name, actual, wanted in zip(names, [y, *pullback(dy)], expected, strict=True):
    error = float(jnp.linalg.norm(actual.astype(jnp.float32) - wanted) / jnp.linalg.norm(wanted))
    print(f"{name}: relative difference to the dense layer {error:.1e}")
    assert error < 1e-2


def milliseconds(work):
    """Return the shortest time of 20 calls."""
    times = timeit.repeat(lambda: (work(), gpu().synchronize()), number=1, repeat=20)
    return 1000 * min(times)


print(f"forward, sparse: {milliseconds(lambda: sparse(x, weights)):.2f} ms")
print(f"forward, dense with JAX: {milliseconds(lambda: dense(x, *weights)):.2f} ms")
