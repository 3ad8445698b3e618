"""The keys and values of tokens already seen, so that each new token is computed once."""

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from twell_numba.kernels.attention import causal_attention
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

    def attend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Store what S new tokens give; return what they find among all T tokens so far.

        Parameters
        ----------
        q : ndarray, shape (B, S, H, head width)
        k, v : ndarray, shape (B, S, G, head width)

        Returns
        -------
        ndarray, shape (B, S, H, head width)

        Raises
        ------
        ValueError
            If there is no room for S more tokens.
        """
        stop = require_room(self.length, k.shape[1], self._keys.shape[1])
        self._keys[:, self.length : stop] = k
        self._values[:, self.length : stop] = v
        self.length = stop
        return causal_attention(q, self._keys[:, :stop], self._values[:, :stop])[0]


class GPULayerCache:
    """Keys and values of one attention layer on a GPU.

    Parameters
    ----------
    shape : tuple of int
        (B, capacity, G, head width).
    dtype : dtype
    stream : twell_numba.device.gpu.Stream

    Attributes
    ----------
    length : int
        Tokens stored.
    place : DeviceArray of int64, shape (2,), or None
        Where the next token is stored, and how many there are then: read when the work is done, so
        that it can be recorded. ``length`` then follows only as whoever replays the work says.
    """

    def __init__(self, shape: tuple[int, int, int, int], dtype: DTypeLike, stream: Any) -> None:
        from twell_numba.device.gpu import empty

        self.length = 0
        self.place: Any = None
        self._keys = empty(shape, dtype, stream)
        self._values = empty(shape, dtype, stream)

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        """As :meth:`LayerCache.attend`, for arrays on the GPU."""
        from twell_numba.kernels.attention.cuda import append_to_cache

        where: Any
        end: Any
        if self.place is None:
            where = self.length
            end = self.length = require_room(where, k.shape[1], self._keys.shape[1])
        else:
            where, end = self.place[0:1], self.place[1:2]
        append_to_cache(self._keys, k, where)
        append_to_cache(self._values, v, where)
        return causal_attention(q, self._keys, self._values, length=end)[0]


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
        That of the model's activations.
    stream : twell_numba.device.gpu.Stream, optional
        For a model on a GPU.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        capacity: int,
        dtype: DTypeLike = np.float32,
        stream: Any = None,
    ) -> None:
        shape = (batch, capacity, config.n_kv_heads, config.head_width)
        self.batch, self.capacity = batch, capacity
        self.layers: list[Any]
        if stream is None:
            self.layers = [LayerCache(shape, dtype) for _ in range(config.n_layers)]
        else:
            self.layers = [GPULayerCache(shape, dtype, stream) for _ in range(config.n_layers)]

    @property
    def length(self) -> int:
        """Tokens of each sequence that every layer has stored."""
        return self.layers[-1].length


def require_room(length: int, tokens: int, capacity: int) -> int:
    """Return how many tokens there are with so many more.

    Raises
    ------
    ValueError
        If a cache of that capacity has no room for them.
    """
    if length + tokens > capacity:
        raise ValueError(
            f"{tokens} tokens given to a cache that holds {length} of {capacity}: "
            f"make it larger or stop there"
        )
    return length + tokens
