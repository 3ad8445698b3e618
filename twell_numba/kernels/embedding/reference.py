"""Rows of a table by token, in plain NumPy.

x_m = table[token_m];   backward: dtable[v] += sum of dx_m over the m with token_m = v
"""

import numpy as np


def embedding(tokens: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return x (M, D) for tokens (M,) in [0, V) and table (V, D)."""
    return table[tokens]


def embedding_backward(dx: np.ndarray, tokens: np.ndarray, dtable: np.ndarray) -> None:
    """Add the gradient dx (M, D) into dtable (V, D)."""
    np.add.at(dtable, tokens, dx)
