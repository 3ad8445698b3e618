"""A feedforward layer with 1% of its weights inside a NumPy program: run, differentiated, trained.

The weights are sparse matrices of shape (F, D), neuron-major, the down projection too. A gradient
is an array beside the stored values; there is no dense weight and no dense gradient.

Run it with:  python examples/sparse_weights_numpy.py
"""

import numpy as np

from twell_numba.formats import BlockELLMatrix, CSRMatrix
from twell_numba.kernels import block_ell, csr

TOKENS, WIDTH, NEURONS, DENSITY = 1024, 128, 512, 0.01
RATE, STEPS = 0.05, 300

random = np.random.default_rng(0)
x = random.standard_normal((TOKENS, WIDTH), np.float32)
dense = random.standard_normal((3, NEURONS, WIDTH), np.float32)
dense[random.random(dense.shape) >= DENSITY] = 0
teacher = [CSRMatrix.from_dense(weight) for weight in dense]
wanted, _ = csr.gated_ffn_forward(x, *teacher)
print(teacher[0])

# The same layer in plain NumPy gives the same numbers.
gate, up, down = dense
error = np.linalg.norm(np.maximum(x @ gate.T, 0) * (x @ up.T) @ down - wanted)
assert error < 1e-5 * np.linalg.norm(wanted)

# Another start on the same pattern: index arrays are shared, values are new. Gradient descent on
# the stored values brings the teacher's back.
weights = [
    matrix.with_values(matrix.data + 0.5 * random.standard_normal(matrix.nnz, np.float32))
    for matrix in teacher
]
losses = []
for _ in range(STEPS):
    y, activations = csr.gated_ffn_forward(x, *weights)
    losses.append(float(np.mean((y - wanted) ** 2)))
    gradients = [np.zeros_like(matrix.stored_values) for matrix in weights]
    csr.gated_ffn_backward((y - wanted) / TOKENS, x, *weights, activations, 0.0, *gradients)
    for matrix, gradient in zip(weights, gradients, strict=True):
        matrix.stored_values[...] -= RATE * gradient
print(f"mean square error: {losses[0]:.4f} at first, {losses[-1]:.4f} after {STEPS} steps")
assert losses[-1] < 0.1 * losses[0]

# The same numbers from blocks, which weights as scattered as these leave almost empty.
blocks = [BlockELLMatrix.from_sparse(matrix, block_size=8) for matrix in weights]
y_of_blocks, _ = block_ell.gated_ffn_forward(x, *blocks)
assert np.allclose(y_of_blocks, csr.gated_ffn_forward(x, *weights)[0], atol=1e-4)
print(f"block-ELL stores {blocks[0].nnz / weights[0].nnz:.0f} times as many values")
