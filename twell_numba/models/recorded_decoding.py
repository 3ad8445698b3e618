"""Decoding on a GPU, one token at a time: recorded once, then replayed with little host work."""

import numpy as np

from twell_numba.device.arrays import Array
from twell_numba.kernels.embedding import embedding
from twell_numba.models.cache import KVCache, require_room
from twell_numba.models.transformer import Transformer


class RecordedDecoding:
    """Takes the next token of each sequence through a model on a GPU.

    What a token of another position needs is read from arrays on the GPU, so that the same
    recording serves all positions.

    Parameters
    ----------
    model : Transformer
        On a GPU. Its feedforward layers keep to the paths that they take now.
    cache : KVCache
        Used by nothing else from now on.
    """

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        from twell_numba.device.gpu import empty
        from twell_numba.device.gpu.recorded import Recorded

        self._model, self._cache = model, cache
        stream = model.stream
        self._tokens = empty((cache.batch, 1), np.int64, stream)
        self._place = empty(2, np.int64, stream)
        shape = (cache.batch, model.config.vocab_size)
        self._logits = empty(shape, model.dtype, stream)
        for layer in cache.layers:
            layer.place = self._place
        self._step = Recorded(self._compute, stream)

    def __call__(self, tokens: np.ndarray) -> Array:
        """Take tokens, integers of shape (B, 1), and return logits (B, V).

        They are valid until the next call.

        Raises
        ------
        ValueError
            If a token is not in [0, V), or the cache or the context has no room.
        """
        vocabulary = self._model.config.vocab_size
        if tokens.min() < 0 or tokens.max() >= vocabulary:
            raise ValueError(f"token {tokens.max()} given, tokens in [0, {vocabulary}) wanted")
        room = min(self._cache.capacity, self._model.config.context_length)
        length = self._cache.length
        stop = require_room(length, 1, room)
        self._tokens.copy_from(np.asarray(tokens, np.int64))
        self._place.copy_from(np.array([length, stop]))
        self._step()
        for layer in self._cache.layers:
            layer.length = stop
        return self._logits

    def _compute(self) -> None:
        cos, sin = (embedding(self._place[0:1], table) for table in self._model.rotary_on_gpu)
        self._logits.copy_from(self._model.step_at(self._tokens, cos, sin, self._cache))
        for ffn in self._model.ffn_layers:
            ffn.forget_last_call()
