"""The language model, forward and backward."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from twell_numba.device.arrays import Array
from twell_numba.formats import BlockELLMatrix, CSRMatrix, SparseMatrix
from twell_numba.formats.block_ell import DEFAULT_BLOCK_SIZE
from twell_numba.kernels.embedding import embedding
from twell_numba.kernels.rotary import rotary_tables
from twell_numba.layers.embedding import Embedding
from twell_numba.layers.ffn import AutoState, GatedFFN, TwoMatrixFFN, fastest_format
from twell_numba.layers.linear import Linear
from twell_numba.layers.parameter import Operand, Parameter
from twell_numba.models.block import Block, make_norm
from twell_numba.models.cache import KVCache
from twell_numba.models.config import ModelConfig
from twell_numba.models.initial import initial_values

SHORTEST_ROTARY_TABLE = 256


class Transformer:
    """A Llama-shaped transformer: embedding, L blocks, a last norm, and the output head.

    Parameters
    ----------
    config : ModelConfig
    weights : numpy.random.Generator or mapping of str to ndarray
        Where the parameters' values come from: drawn by a generator, or given by name (see
        :meth:`ModelConfig.parameter_shapes`) and held without a copy. Those of the feedforward
        layers may be sparse matrices, all of one format: CSRMatrix, or BlockELLMatrix with blocks
        of one size.
    dtype : dtype
        float32, or float64 for checking gradients. Given values are converted to it.
    ffn_path : {"auto", "dense", "twell", "csr", "block_ell"}
        Execution path of the feedforward layers, one that their weights are held for; may be set
        later.

    Attributes
    ----------
    config : ModelConfig
        Its ``ffn_weight_format`` is always that of the weights.
    dtype : dtype
        Of activations.
    stream : twell_numba.device.gpu.Stream or None
        Where it computes on a GPU; None on the CPU.
    rotary_on_gpu : tuple of DeviceArray, each of shape (context, head width / 2)
        Cosines and sines of all positions, on a GPU.

    Raises
    ------
    UsageError
        If the config is not valid.
    ValueError
        If dtype is another one, given values lack a parameter, have one too many, one of another
        shape or feedforward weights of several formats or block sizes, or the path does not fit
        these.
    TypeError
        If a given value is neither an array nor a sparse matrix.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: np.random.Generator | Mapping[str, Operand],
        dtype: DTypeLike = np.float32,
        ffn_path: str = "auto",
    ) -> None:
        config.validate()
        self.dtype = np.dtype(dtype)
        if self.dtype not in (np.float32, np.float64):
            raise ValueError(f"dtype {self.dtype} given, float32 or float64 wanted")
        given: Mapping[str, Operand]
        if isinstance(weights, np.random.Generator):
            given = initial_values(config, weights, self.dtype)
        else:
            _require_shapes(config, weights)
            given = weights
        ffn_weights = {
            name: _with_dtype(given[name], self.dtype) for name in config.ffn_weight_names()
        }
        values = {
            name: _dense(name, value, self.dtype)
            for name, value in given.items()
            if name not in ffn_weights
        }
        self.embedding = Embedding("model.embed_tokens.weight", values["model.embed_tokens.weight"])
        self.blocks = [
            Block(f"model.layers.{layer}", config, values, ffn_weights, ffn_path)
            for layer in range(config.n_layers)
        ]
        self.norm = make_norm("model.norm.weight", config, values)
        if config.tied_embeddings:
            self.head = Linear.sharing(self.embedding.table)
        else:
            self.head = Linear("lm_head.weight", values["lm_head.weight"])
        self.config = replace(config, ffn_weight_format=self.weight_format)
        self.stream: Any = None
        self._rotary = self._rotary_tables(np.arange(0), self.dtype)
        self.rotary_on_gpu: tuple[Any, ...] = ()

    def __call__(
        self, tokens: Array, l1_scale: float | Array = 0.0, recompute: bool = False
    ) -> tuple[Array, Callable[[Array], None]]:
        """Return the logits of each token's successor, and the backward pass.

        Parameters
        ----------
        tokens : array of integers, shape (B, S)
        l1_scale : float or DeviceArray of float32, shape (1,)
            Weight of the sum of |h| of each feedforward layer, of which the backward pass adds the
            gradient.
        recompute : bool
            Keep only what comes into each block, and compute the block again in the backward pass:
            a third more work for a fraction of the memory (Chen et al., 2016).

        Returns
        -------
        logits : array, shape (B * S, V)
        backprop : callable
            Takes dlogits (B * S, V) and adds into the gradient of every parameter.

        Raises
        ------
        ValueError
            If tokens has another shape, is longer than the context, or a token is not in [0, V).
        """
        batch, cos, sin = self._positions(tokens)
        x, backprop_embedding = self.embedding(tokens.reshape(-1))
        fed = None
        backprop_blocks = []
        for block in self.blocks:
            call = partial(block, x, fed, batch, cos, sin, l1_scale)
            auto_state = block.ffn.auto_state
            x, fed, backprop_block = call()
            if recompute:
                block.ffn.count_activations()
                backprop_block = _recomputing(block, call, auto_state)
            backprop_blocks.append(backprop_block)
        _, x, backprop_norm = self.norm(x, fed)
        logits, backprop_head = self.head(x)

        def backprop(dlogits: Array) -> None:
            dx = backprop_norm(backprop_head(dlogits))
            while backprop_blocks:  # what a block keeps is let go of once it is done
                dx = backprop_blocks.pop()(dx)
            backprop_embedding(dx)

        return logits, backprop

    def logits(self, tokens: Array, rows: np.ndarray | None = None) -> Array:
        """Return logits for tokens (B, S), keeping the activations of no layer.

        Parameters
        ----------
        tokens : array of integers, shape (B, S)
        rows : ndarray of integers, shape (R,), optional
            Of which of the B * S tokens the successor is wanted; all of them if not given. Where
            the vocabulary is large, the others would take most of the memory.

        Returns
        -------
        array, shape (R, V) or (B * S, V)
        """
        batch, cos, sin = self._positions(tokens)
        x, fed = self.embedding(tokens.reshape(-1))[0], None
        for block in self.blocks:
            x, fed, _ = block(x, fed, batch, cos, sin)
            block.ffn.count_activations()
        if rows is not None:
            x, fed = embedding(rows, x), embedding(rows, fed)
        return self.head(self.norm(x, fed)[1])[0]

    def step(self, tokens: Array, cache: KVCache) -> Array:
        """Take the next tokens of each sequence and return the logits of the last one's successor.

        Parameters
        ----------
        tokens : array of integers, shape (B, S)
            A whole prompt at first, then usually one token. Their positions follow those in the
            cache.
        cache : KVCache
            Changed in place: it then holds these tokens too.

        Returns
        -------
        logits : array, shape (B, V)

        Raises
        ------
        ValueError
            As a call; also if there is no token, or the cache has no room.
        """
        batch, cos, sin = self._positions(tokens, cache.length)
        if tokens.size == 0:
            raise ValueError(f"tokens of shape {tokens.shape} given, at least one token wanted")
        return self.step_at(tokens, cos, sin, cache)

    def step_at(self, tokens: Array, cos: Array, sin: Array, cache: KVCache) -> Array:
        """As :meth:`step`, given the rotary tables of the tokens' positions."""
        batch, length = tokens.shape
        x, fed = self.embedding(tokens.reshape(-1))[0], None
        for block, layer_cache in zip(self.blocks, cache.layers, strict=True):
            x, fed = block.step(x, fed, batch, cos, sin, layer_cache)
        if length > 1:
            last = np.arange(1, batch + 1) * length - 1
            x, fed = embedding(last, x), embedding(last, fed)
        return self.head(self.norm(x, fed)[1])[0]

    def move_to_gpu(self, stream: Any, dtype: DTypeLike) -> None:
        """Hold the parameters on a GPU and compute there from now on.

        Parameters
        ----------
        stream : twell_numba.device.gpu.Stream
            In which all work is done.
        dtype : dtype
            Of parameters and activations: float32, bfloat16, float16 or float64. Sums are in
            float32 or wider.
        """
        for parameter in self.parameters().values():
            parameter.move_to_gpu(stream, dtype)
        self.compute_on_gpu(stream, dtype)

    def compute_on_gpu(self, stream: Any, dtype: DTypeLike) -> None:
        """As :meth:`move_to_gpu`, where the parameters have been moved already."""
        from twell_numba.device.gpu import from_numpy

        self.stream = stream
        self.dtype = np.dtype(dtype)
        sums = np.float64 if self.dtype == np.float64 else np.float32
        config = self.config
        tables = self._rotary_tables(np.arange(config.context_length), sums)
        self.rotary_on_gpu = tuple(from_numpy(table, stream) for table in tables)

    @property
    def device(self) -> str:
        """Where it computes: ``cpu``, or ``cuda:N``."""
        return "cpu" if self.stream is None else f"cuda:{self.stream.gpu.id}"

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
    def ffn_parameters(self) -> list[Parameter]:
        """The parameters of all feedforward layers, layer by layer."""
        return [parameter for ffn in self.ffn_layers for parameter in ffn.parameters()]

    @property
    def ffn_layers(self) -> list[GatedFFN | TwoMatrixFFN]:
        """The feedforward layers, of which each holds the statistics of its last call.

        (Nothing of a call that was recorded for training or decoding.)
        """
        return [block.ffn for block in self.blocks]

    @property
    def ffn_path(self) -> str:
        """Execution path of the feedforward layers; setting it sets them all."""
        return self.blocks[0].ffn.path

    @ffn_path.setter
    def ffn_path(self, path: str) -> None:
        for ffn in self.ffn_layers:
            ffn.path = path

    @property
    def weight_format(self) -> str:
        """How the weights of the feedforward layers are held: ``dense``, ``csr``, ``block_ell``.

        Raises
        ------
        ValueError
            If they, or the sizes of blocks, differ from layer to layer.
        """
        formats = [(ffn.weight_format, ffn.block_size) for ffn in self.ffn_layers]
        for layer, held in enumerate(formats):
            if held != formats[0]:
                raise ValueError(
                    f"layer {layer} holds its weights as {_format_text(*held)}, layer 0 as "
                    f"{_format_text(*formats[0])}; one format for all layers wanted, see "
                    f"hold_ffn_weights"
                )
        return formats[0][0]

    def hold_ffn_weights(self, weight_format: str, block_size: int = DEFAULT_BLOCK_SIZE) -> None:
        """Hold the weights of all feedforward layers in another format.

        See :meth:`twell_numba.layers.ffn.FeedForward.hold_weights`: their parameters are new
        objects afterwards. ``config`` follows.
        """
        for ffn in self.ffn_layers:
            ffn.hold_weights(weight_format, block_size)
        self.config = replace(self.config, ffn_weight_format=weight_format)

    def hold_float8(self) -> None:
        """Hold weights of the feedforward layers as 8-bit floats, for inference.

        See :meth:`twell_numba.layers.ffn.FeedForward.hold_float8`.
        """
        for ffn in self.ffn_layers:
            ffn.hold_float8()

    @property
    def block_size(self) -> int:
        """Size of the blocks that feedforward weights are held in.

        Where they are not, the size to hold them in by default: 16, or less in a smaller model.
        """
        held = self.ffn_layers[0].block_size
        return held or min(DEFAULT_BLOCK_SIZE, self.config.d_model, self.config.d_ffn)

    def hold_fastest(self) -> None:
        """Hold the feedforward weights in the format that computes fastest, for inference.

        One for all layers, see :func:`twell_numba.layers.ffn.fastest_format`; blocks are of
        :attr:`block_size`. They stay as they are if the activation is not ReLU: there are no other
        paths for it.
        """
        if self.config.activation != "relu":
            return
        operands = [parameter.operand for parameter in self.ffn_parameters]
        self.hold_ffn_weights(fastest_format(operands, self.block_size), self.block_size)

    def _positions(self, tokens: Array, start: int = 0) -> tuple[int, Array, Array]:
        """Check the shape of tokens; return B and the rotary tables of positions start, ..."""
        if tokens.ndim != 2:
            raise ValueError(f"tokens of shape {tokens.shape} given, (batch, sequence) wanted")
        batch, length = tokens.shape
        if start + length > self.config.context_length:
            raise ValueError(
                f"a sequence of {start + length} tokens given, at most the context of "
                f"{self.config.context_length} wanted"
            )
        if self.stream is not None:
            cos, sin = self.rotary_on_gpu
            return batch, cos[start : start + length], sin[start : start + length]
        return batch, *self.rotary(np.arange(start, start + length))

    def rotary(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return cosines and sines of positions (S,), each (S, head width / 2), on the CPU."""
        needed = int(positions.max(initial=-1)) + 1
        cos, sin = self._rotary
        if needed > len(cos):
            # Twice as many as before, so that a growing text seldom needs new ones.
            longest = max(needed, 2 * len(cos), SHORTEST_ROTARY_TABLE)
            cos, sin = self._rotary = self._rotary_tables(np.arange(longest), self.dtype)
        return cos[positions], sin[positions]

    def _rotary_tables(self, positions: np.ndarray, dtype: DTypeLike) -> Any:
        config = self.config
        width, base = config.head_width, config.rope_base
        scaling = config.rope_scaling
        divisors = None if scaling is None else scaling.divisors(width, base)
        return rotary_tables(positions, width, base, dtype, divisors)


def _recomputing(
    block: Block, call: Callable[[], Any], auto_state: AutoState
) -> Callable[[Array], Array]:
    """Return a block's backward pass that first computes the block again.

    The feedforward layer takes the path that it took before, by the state that it had.
    """

    def backprop(dy: Array) -> Array:
        with block.ffn.computing_again(auto_state):
            _, _, backprop_block = call()
        return backprop_block(dy)

    return backprop


def _format_text(weight_format: str, block_size: int | None) -> str:
    return weight_format if block_size is None else f"{weight_format} with blocks of {block_size}"


def _dense(name: str, value: Operand, dtype: np.dtype) -> np.ndarray:
    if isinstance(value, SparseMatrix):
        raise ValueError(f"{name} given as a sparse matrix; an array wanted for all but FFNs")
    return np.ascontiguousarray(value, dtype)


def _with_dtype(value: Operand, dtype: np.dtype) -> Operand:
    """Convert values to a dtype; a sparse matrix keeps its pattern, also where they become 0."""
    if not isinstance(value, CSRMatrix | BlockELLMatrix):
        return np.ascontiguousarray(value, dtype)
    if value.dtype == dtype:
        return value
    return value.with_values(value.stored_values.astype(dtype))


def _require_shapes(config: ModelConfig, values: Mapping[str, Operand]) -> None:
    shapes = config.parameter_shapes()
    if missing := shapes.keys() - values.keys():
        raise ValueError(f"no {min(missing)} among the weights, which this config needs")
    if unexpected := values.keys() - shapes.keys():
        raise ValueError(f"{min(unexpected)} among the weights, which this config has no place for")
    for name, shape in shapes.items():
        if not isinstance(values[name], np.ndarray | SparseMatrix):
            raise TypeError(
                f"{name} of type {type(values[name]).__name__} given, a NumPy array or sparse "
                f"matrix wanted"
            )
        if values[name].shape != shape:
            raise ValueError(f"{name} of shape {values[name].shape} given, shape {shape} wanted")
