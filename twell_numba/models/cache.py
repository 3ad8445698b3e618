"""The keys and values of tokens already seen, so that each new token is computed once."""

import numpy as np
from numpy.typing import DTypeLike

from twell_numba.models.config import ModelConfig


class LayerCache:
    """Keys and values of one attention layer.

    Parameters
    ----------
    shape : tuple of int
        (B, capacity, G, head width).
    dtype : dtype
    """

    def __init__(self, shape: tuple[int, int, int, int], dtype: DTypeLike) -> None:
        self.length = 0
        self._keys = np.empty(shape, dtype)
        self._values = np.empty(shape, dtype)

    def append(self, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Store what S new tokens give, (B, S, G, head width); return that of all T tokens so far.

        Returns
        -------
        keys, values : ndarray, shape (B, T, G, head width)
            Views, valid until the next call.

        Raises
        ------
        ValueError
            If there is no room for S more tokens.
        """
        capacity = self._keys.shape[1]
        stop = self.length + keys.shape[1]
        if stop > capacity:
            raise ValueError(
                f"{keys.shape[1]} tokens given to a cache that holds {self.length} of {capacity}: "
                f"make it larger or stop there"
            )
        self._keys[:, self.length : stop] = keys
        self._values[:, self.length : stop] = values
        self.length = stop
        return self._keys[:, :stop], self._values[:, :stop]


class KVCache:
    """The caches of all layers of a model.

    Parameters
    ----------
    config : ModelConfig
    batch : int
        B, sequences decoded side by side.
    capacity : int
        The most tokens a sequence may have.
    dtype : dtype
        That of the model's parameters.
    """

    def __init__(
        self, config: ModelConfig, batch: int, capacity: int, dtype: DTypeLike = np.float32
    ) -> None:
        shape = (batch, capacity, config.n_kv_heads, config.head_width)
        self.capacity = capacity
        self.layers = [LayerCache(shape, dtype) for _ in range(config.n_layers)]

    @property
    def length(self) -> int:
        """Tokens of each sequence that every layer has stored."""
        return self.layers[-1].length
