"""Dense feedforward layers: the path to take while activations are not sparse."""

from twell_numba.kernels.dense_ffn.cpu import (
    activation_statistics,
    ffn_backward,
    ffn_forward,
    gated_ffn_backward,
    gated_ffn_forward,
)
from twell_numba.kernels.dense_ffn.reference import DenseActivations

__all__ = [
    "DenseActivations",
    "activation_statistics",
    "ffn_backward",
    "ffn_forward",
    "gated_ffn_backward",
    "gated_ffn_forward",
]
