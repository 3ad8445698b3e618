"""Dense feedforward layers: the path to take while activations are not sparse."""

from twell_numba.kernels.dense_ffn import cpu
from twell_numba.kernels.dense_ffn.reference import DenseActivations
from twell_numba.kernels.dispatch import by_device

_GPU = "twell_numba.kernels.dense_ffn.cuda"

activation_statistics = by_device(cpu.activation_statistics, _GPU)
ffn_backward = by_device(cpu.ffn_backward, _GPU)
ffn_forward = by_device(cpu.ffn_forward, _GPU)
gated_ffn_backward = by_device(cpu.gated_ffn_backward, _GPU)
gated_ffn_forward = by_device(cpu.gated_ffn_forward, _GPU)

__all__ = [
    "DenseActivations",
    "activation_statistics",
    "ffn_backward",
    "ffn_forward",
    "gated_ffn_backward",
    "gated_ffn_forward",
]
