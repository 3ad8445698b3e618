"""The language model, forward and backward."""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import DTypeLike

from twell_numba.kernels.rotary import rotary_tables
from twell_numba.layers.embedding import Embedding
from twell_numba.layers.ffn import GatedFFN, TwoMatrixFFN
from twell_numba.layers.linear import Linear
from twell_numba.layers.parameter import Parameter
from twell_numba.models.block import Block, make_norm
from twell_numba.models.cache import KVCache
from twell_numba.models.config import ModelConfig
from twell_numba.models.initial import initial_values


class Transformer:
    """A Llama-shaped transformer: embedding, L blocks, a last norm, and the output head.

    Parameters
    ----------
    config : ModelConfig
    weights : numpy.random.Generator or mapping of str to ndarray
        Where the parameters' values come from: drawn by a generator, or given by name (see
        :meth:`ModelConfig.parameter_shapes`) and held without a copy.
    dtype : dtype
        float32, or float64 for checking gradients. Given values are converted to it.
    ffn_path : {"auto", "dense", "twell"}
        Execution path of the feedforward layers; may be set later.

    Raises
    ------
    UsageError
        If the config is not valid.
    ValueError
        If dtype is another one, or given values lack a parameter, have one too many, or one of
        another shape.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: np.random.Generator | Mapping[str, np.ndarray],
        dtype: DTypeLike = np.float32,
        ffn_path: str = "auto",
    ) -> None:
        config.validate()
        self.config = config
        self.dtype = np.dtype(dtype)
        if self.dtype not in (np.float32, np.float64):
            raise ValueError(f"dtype {self.dtype} given, float32 or float64 wanted")
        if isinstance(weights, np.random.Generator):
            values = initial_values(config, weights, self.dtype)
        else:
            _require_shapes(config, weights)
            values = {
                name: np.ascontiguousarray(value, self.dtype) for name, value in weights.items()
            }
        self.embedding = Embedding("model.embed_tokens.weight", values["model.embed_tokens.weight"])
        self.blocks = [
            Block(f"model.layers.{layer}", config, values, ffn_path)
            for layer in range(config.n_layers)
        ]
        self.norm = make_norm("model.norm.weight", config, values)
        if config.tied_embeddings:
            self.head = Linear.sharing(self.embedding.table)
        else:
            self.head = Linear("lm_head.weight", values["lm_head.weight"])

    def __call__(
        self, tokens: np.ndarray, l1_scale: float = 0.0
    ) -> tuple[np.ndarray, Callable[[np.ndarray], None]]:
        """Return the logits of each token's successor, and the backward pass.

        Parameters
        ----------
        tokens : ndarray of integers, shape (B, S)
        l1_scale : float
            Weight of the sum of |h| of each feedforward layer, of which the backward pass adds the
            gradient.

        Returns
        -------
        logits : ndarray, shape (B * S, V)
        backprop : callable
            Takes dlogits (B * S, V) and adds into the gradient of every parameter.

        Raises
        ------
        ValueError
            If tokens has another shape, is longer than the context, or a token is not in [0, V).
        """
        batch, cos, sin = self._positions(tokens)
        x, backprop_embedding = self.embedding(tokens.reshape(-1))
        backprop_blocks = []
        for block in self.blocks:
            x, backprop_block = block(x, batch, cos, sin, l1_scale)
            backprop_blocks.append(backprop_block)
        x, backprop_norm = self.norm(x)
        logits, backprop_head = self.head(x)

        def backprop(dlogits: np.ndarray) -> None:
            dx = backprop_norm(backprop_head(dlogits))
            for backprop_block in reversed(backprop_blocks):
                dx = backprop_block(dx)
            backprop_embedding(dx)

        return logits, backprop

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Return the logits (B * S, V) for tokens (B, S), keeping the activations of no layer."""
        batch, cos, sin = self._positions(tokens)
        x = self.embedding(tokens.reshape(-1))[0]
        for block in self.blocks:
            x = block(x, batch, cos, sin)[0]
            # A feedforward layer keeps its activations until its statistics have been taken.
            _ = block.ffn.statistics
        return self.head(self.norm(x)[0])[0]

    def step(self, tokens: np.ndarray, cache: KVCache) -> np.ndarray:
        """Take the next tokens of each sequence and return the logits of the last one's successor.

        Parameters
        ----------
        tokens : ndarray of integers, shape (B, S)
            A whole prompt at first, then usually one token. Their positions follow those in the
            cache.
        cache : KVCache
            Changed in place: it then holds these tokens too.

        Returns
        -------
        logits : ndarray, shape (B, V)

        Raises
        ------
        ValueError
            As a call; also if there is no token, or the cache has no room.
        """
        batch, cos, sin = self._positions(tokens, cache.length)
        if tokens.size == 0:
            raise ValueError(f"tokens of shape {tokens.shape} given, at least one token wanted")
        x = self.embedding(tokens.reshape(-1))[0]
        for block, layer_cache in zip(self.blocks, cache.layers, strict=True):
            x = block.step(x, batch, cos, sin, layer_cache)
        last = x.reshape(*tokens.shape, -1)[:, -1]
        return self.head(self.norm(last)[0])[0]

    def parameters(self) -> dict[str, Parameter]:
        """Return every parameter by its checkpoint name; a tied embedding once."""
        listed = [
            *self.embedding.parameters(),
            *(parameter for block in self.blocks for parameter in block.parameters()),
            *self.norm.parameters(),
            *self.head.parameters(),
        ]
        return {parameter.name: parameter for parameter in listed}

    @property
    def ffn_layers(self) -> list[GatedFFN | TwoMatrixFFN]:
        """The feedforward layers, of which each holds the statistics of its last call."""
        return [block.ffn for block in self.blocks]

    @property
    def ffn_path(self) -> str:
        """Execution path of the feedforward layers; setting it sets them all."""
        return self.blocks[0].ffn.path

    @ffn_path.setter
    def ffn_path(self, path: str) -> None:
        for ffn in self.ffn_layers:
            ffn.path = path

    def _positions(self, tokens: np.ndarray, start: int = 0) -> tuple[int, np.ndarray, np.ndarray]:
        """Check the shape of tokens; return B and the rotary tables of positions start, ..."""
        if tokens.ndim != 2:
            raise ValueError(f"tokens of shape {tokens.shape} given, (batch, sequence) wanted")
        batch, length = tokens.shape
        if start + length > self.config.context_length:
            raise ValueError(
                f"a sequence of {start + length} tokens given, at most the context of "
                f"{self.config.context_length} wanted"
            )
        positions = np.arange(start, start + length)
        cos, sin = rotary_tables(
            positions, self.config.head_width, self.config.rope_base, self.dtype
        )
        return batch, cos, sin


def _require_shapes(config: ModelConfig, values: Mapping[str, np.ndarray]) -> None:
    shapes = config.parameter_shapes()
    if missing := shapes.keys() - values.keys():
        raise ValueError(f"no {min(missing)} among the weights, which this config needs")
    if unexpected := values.keys() - shapes.keys():
        raise ValueError(f"{min(unexpected)} among the weights, which this config has no place for")
    for name, shape in shapes.items():
        if values[name].shape != shape:
            raise ValueError(f"{name} of shape {values[name].shape} given, shape {shape} wanted")
