"""What the feedforward layers of the weight-sparse families, CSR and block-ELL, share."""

from twell_numba.kernels.sparse_ffn.activations import (
    SparseWeightActivations,
    activation_statistics,
)

__all__ = ["SparseWeightActivations", "activation_statistics"]
