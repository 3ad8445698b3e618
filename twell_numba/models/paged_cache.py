"""Keys and values of many sequences in pages of one pool, so that none is kept for what may come.

As vLLM's (Kwon et al., 2023): a sequence has a list of pages, wherever they are; a page that is
given back serves the next sequence. The memory is fixed when the cache is made.
"""

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from twell_numba.device.arrays import Array
from twell_numba.models.config import ModelConfig

# Tokens of a page: half a page a sequence is wasted on average.
PAGE_SIZE = 16
# What a cache takes at most unless a size is asked for; more where one text alone takes more.
DEFAULT_BYTES = 2**30


class PagedKVCache:
    """The pages of all layers of a model, and which of them are free.

    Parameters
    ----------
    config : ModelConfig
    tokens : int
        How many there is room for; whole pages of it are used.
    dtype : dtype
        That of the model's activations.
    stream : twell_numba.device.gpu.Stream, optional
        For a model on a GPU.

    Attributes
    ----------
    pages : int
        Of each layer.
    layers : list of (array, array), each of shape (pages, page size, G, head width)
        Keys and values of each layer. On the CPU the system hands out their memory when it is
        first written to.
    """

    page_size = PAGE_SIZE

    def __init__(
        self, config: ModelConfig, tokens: int, dtype: DTypeLike = np.float32, stream: Any = None
    ) -> None:
        self.pages = tokens // self.page_size
        shape = (self.pages, self.page_size, config.n_kv_heads, config.head_width)
        self.layers: list[tuple[Array, Array]] = [
            (_empty(shape, dtype, stream), _empty(shape, dtype, stream))
            for _ in range(config.n_layers)
        ]
        self._free = list(range(self.pages))[::-1]

    @property
    def tokens(self) -> int:
        """How many tokens there is room for."""
        return self.pages * self.page_size

    @property
    def free_pages(self) -> int:
        """How many pages belong to no sequence."""
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        """Return how many pages so many tokens of one sequence take."""
        return -(-tokens // self.page_size)

    def take(self, tokens: int) -> np.ndarray | None:
        """Return the pages (int64) for a sequence of so many tokens; None if too few are free."""
        count = self.pages_for(tokens)
        if count > len(self._free):
            return None
        return np.array([self._free.pop() for _ in range(count)], np.int64)

    def give_back(self, table: np.ndarray) -> None:
        """Take pages back from a sequence that has ended."""
        self._free.extend(table.tolist())


def default_cache_tokens(config: ModelConfig, dtype: DTypeLike, sequences: int) -> int:
    """Return room for so many texts of the context's length, within a GiB or for one of them."""
    number = np.dtype(dtype).itemsize
    token = 2 * config.n_layers * config.n_kv_heads * config.head_width * number
    one_text = -(-config.context_length // PAGE_SIZE) * PAGE_SIZE
    return max(one_text, min(sequences * one_text, DEFAULT_BYTES // token))


def _empty(shape: tuple[int, ...], dtype: DTypeLike, stream: Any) -> Array:
    if stream is None:
        return np.empty(shape, dtype)
    from twell_numba.device.gpu import empty

    return empty(shape, dtype, stream)
