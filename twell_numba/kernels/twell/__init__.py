"""ReLU, packing and activation-sparse feedforward layers."""

from twell_numba.kernels.dispatch import by_device
from twell_numba.kernels.twell import cpu
from twell_numba.kernels.twell.activations import PackedActivations

_GPU = "twell_numba.kernels.twell.cuda"

activation_statistics = by_device(cpu.activation_statistics, _GPU)
ffn_backward = by_device(cpu.ffn_backward, _GPU)
ffn_forward = by_device(cpu.ffn_forward, _GPU)
gated_ffn_backward = by_device(cpu.gated_ffn_backward, _GPU)
gated_ffn_forward = by_device(cpu.gated_ffn_forward, _GPU)
relu_pack = by_device(cpu.relu_pack, _GPU)

__all__ = [
    "PackedActivations",
    "activation_statistics",
    "ffn_backward",
    "ffn_forward",
    "gated_ffn_backward",
    "gated_ffn_forward",
    "relu_pack",
]
