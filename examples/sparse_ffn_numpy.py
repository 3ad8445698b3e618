"""A sparse feedforward layer inside a NumPy program: no model, no training, no copies.

The arrays are the caller's own. Weights are neuron-major: row j of gate, up and down belongs to
neuron j, so a down projection stored as (D, F) is passed as ``down.T`` made contiguous once.

Run it with:  python examples/sparse_ffn_numpy.py
"""

import numpy as np

from twell_numba.kernels.twell import gated_ffn_backward, gated_ffn_forward, relu_pack

TOKENS, WIDTH, NEURONS = 256, 128, 1024

random = np.random.default_rng(0)
x = random.standard_normal((TOKENS, WIDTH), np.float32)
gate, up, down = random.standard_normal((3, NEURONS, WIDTH), np.float32) / np.float32(WIDTH**0.5)
x[:, 0], gate[:, 0] = 1, -2  # few neurons fire, as after training with an L1 term

# Forward and backward, reading only the rows of up and down whose neurons fire.
y, activations = gated_ffn_forward(x, gate, up, down)
dy = np.ones_like(y)
gradients = [np.zeros_like(weight) for weight in (gate, up, down)]
dx = gated_ffn_backward(dy, x, gate, up, down, activations, 0.0, *gradients)

# The same layer in plain NumPy gives the same numbers.
hidden = np.maximum(x @ gate.T, 0) * (x @ up.T)
error = np.linalg.norm(y - hidden @ down) / np.linalg.norm(y)
print(f"relative difference to the dense layer: {error:.1e}")
assert error < 1e-5

# What fired is a sparse matrix like any other.
h = activations.hidden()
print(h)
print(f"{h.nnz / TOKENS:.1f} of {NEURONS} neurons fire for a token")

# Packing alone: ReLU of an array as a TwELL matrix, for use with other code.
pattern = relu_pack(x @ gate.T).pattern()
product = pattern @ down
print(f"relu(x Wg^T) @ Wd: {product.shape}, {pattern.nbytes} bytes packed, {hidden.nbytes} dense")
