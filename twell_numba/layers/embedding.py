"""Token embeddings."""

from collections.abc import Callable

import numpy as np

from twell_numba.kernels.embedding import embedding, embedding_backward
from twell_numba.layers.parameter import Parameter


class Embedding:
    """x[m] = table[tokens[m]].

    Parameters
    ----------
    name : str
        Name of the table in a checkpoint.
    table : ndarray, shape (V, D)
    """

    def __init__(self, name: str, table: np.ndarray) -> None:
        self.table = Parameter(name, table)

    def __call__(self, tokens: np.ndarray) -> tuple[np.ndarray, Callable[[np.ndarray], None]]:
        """Return X (M, D) for tokens (M,), and the backward pass, which returns nothing.

        Raises
        ------
        ValueError
            If a token is not in [0, V).
        """
        x = embedding(tokens, self.table.value)

        def backprop(dx: np.ndarray) -> None:
            embedding_backward(dx, tokens, self.table.grad_buffer())

        return x, backprop

    def parameters(self) -> list[Parameter]:
        """Return the parameters trained here."""
        return [self.table]
