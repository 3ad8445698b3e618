"""ReLU, packing and activation-sparse feedforward layers."""

from twell_numba.kernels.twell.activations import PackedActivations
from twell_numba.kernels.twell.cpu import (
    activation_statistics,
    ffn_backward,
    ffn_forward,
    gated_ffn_backward,
    gated_ffn_forward,
    relu_pack,
)

__all__ = [
    "PackedActivations",
    "activation_statistics",
    "ffn_backward",
    "ffn_forward",
    "gated_ffn_backward",
    "gated_ffn_forward",
    "relu_pack",
]
