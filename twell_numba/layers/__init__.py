"""Layers with hand-written backward passes.

A layer is called as ``Y, backprop = layer(X)``; ``dX = backprop(dY)`` adds the gradients of the
layer's parameters into their ``grad``. X is (M, D): the tokens of all sequences, one after another.
"""

from twell_numba.layers.attention import Attention
from twell_numba.layers.embedding import Embedding
from twell_numba.layers.ffn import ActivationStatistics, GatedFFN, TwoMatrixFFN
from twell_numba.layers.linear import Linear
from twell_numba.layers.loss import cross_entropy_loss
from twell_numba.layers.parameter import Parameter, SparseParameter
from twell_numba.layers.rms_norm import RMSNorm

__all__ = [
    "ActivationStatistics",
    "Attention",
    "Embedding",
    "GatedFFN",
    "Linear",
    "Parameter",
    "RMSNorm",
    "SparseParameter",
    "TwoMatrixFFN",
    "cross_entropy_loss",
]
