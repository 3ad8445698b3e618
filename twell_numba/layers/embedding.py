"""Token embeddings."""

from collections.abc import Callable

from twell_numba.device.arrays import Array
from twell_numba.kernels.embedding import embedding, embedding_backward
from twell_numba.layers.parameter import Parameter


class Embedding:
    """x[m] = table[tokens[m]].

    Parameters
    ----------
    name : str
        Name of the table in a checkpoint.
    table : array, shape (V, D)
    """

    def __init__(self, name: str, table: Array) -> None:
        self.table = Parameter(name, table)

    def __call__(self, tokens: Array) -> tuple[Array, Callable[[Array], None]]:
        """Return X (M, D) for tokens (M,), and the backward pass, which returns nothing.

        Raises
        ------
        ValueError
            If a token is not in [0, V).
        """
        x = embedding(tokens, self.table.operand)

        def backprop(dx: Array) -> None:
            embedding_backward(dx, tokens, self.table.grad_buffer())

        return x, backprop

    def parameters(self) -> list[Parameter]:
        """Return the parameters trained here."""
        return [self.table]
