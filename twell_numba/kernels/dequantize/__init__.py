"""Numbers unpacked from the blocks of few bits in which GGUF files keep them.

Only on the CPU: weights are unpacked once, when a file is read.
"""

from twell_numba.kernels.dequantize.cpu import dequantize
from twell_numba.kernels.dequantize.reference import BLOCKS

__all__ = ["BLOCKS", "dequantize"]
