"""One block of the transformer: attention, then the feedforward layer, each beside the residual."""

from collections.abc import Callable, Mapping

from twell_numba.device.arrays import Array
from twell_numba.layers.attention import Attention, KeyValueStore
from twell_numba.layers.ffn import GatedFFN, TwoMatrixFFN
from twell_numba.layers.parameter import Operand, Parameter
from twell_numba.layers.rms_norm import RMSNorm
from twell_numba.models.config import ModelConfig


class Block:
    """x + attention(norm(x)), then that + ffn(norm(that)): a pre-norm block, as in Llama.

    Parameters
    ----------
    prefix : str
        Of the parameters' names, ``model.layers.N``.
    config : ModelConfig
    values : mapping of str to array
        The values of all parameters but the feedforward layer's by name; held without a copy.
    ffn_weights : mapping of str to array, CSRMatrix or BlockELLMatrix
        The feedforward layer's weights by name; likewise.
    ffn_path : str
        Execution path of the feedforward layer.
    """

    def __init__(
        self,
        prefix: str,
        config: ModelConfig,
        values: Mapping[str, Array],
        ffn_weights: Mapping[str, Operand],
        ffn_path: str,
    ) -> None:
        self.input_norm = make_norm(f"{prefix}.input_layernorm.weight", config, values)
        attention = f"{prefix}.self_attn"
        self.attention = Attention(
            attention,
            config.n_heads,
            config.n_kv_heads,
            *(values[f"{attention}.{part}_proj.weight"] for part in "qkvo"),
            *(values.get(f"{attention}.{part}_proj.bias") for part in "qkvo"),
        )
        self.post_attention_norm = make_norm(
            f"{prefix}.post_attention_layernorm.weight", config, values
        )
        self.ffn: GatedFFN | TwoMatrixFFN
        up = ffn_weights[f"{prefix}.mlp.up_proj.weight"]
        down = ffn_weights[f"{prefix}.mlp.down_proj.weight"]
        if config.gated:
            gate = ffn_weights[f"{prefix}.mlp.gate_proj.weight"]
            self.ffn = GatedFFN(f"{prefix}.mlp", gate, up, down, ffn_path, config.activation)
        else:
            self.ffn = TwoMatrixFFN(f"{prefix}.mlp", up, down, ffn_path, config.activation)

    def __call__(
        self,
        x: Array,
        addend: Array | None,
        batch: int,
        cos: Array,
        sin: Array,
        l1_scale: float | Array = 0.0,
    ) -> tuple[Array, Array, Callable[[Array], Array]]:
        """Compute a block for M tokens of ``batch`` sequences.

        The residual stream comes and goes in two parts, of which the sum is meant: so that the next
        norm can add them in the pass in which it reads them.

        Parameters
        ----------
        x : array, shape (M, D)
        addend : array, shape (M, D), or None
        batch : int
        cos, sin : array
            See :class:`twell_numba.layers.attention.Attention`.
        l1_scale : float or DeviceArray
            See :class:`twell_numba.layers.ffn.FeedForward`.

        Returns
        -------
        middle, fed : array, shape (M, D)
            The stream after attention, and what the feedforward layer adds to it.
        backprop : callable
            Takes the gradient of ``middle + fed``, and returns that of ``x + addend``.
        """
        x, normed, backprop_input_norm = self.input_norm(x, addend)
        attended, backprop_attention = self.attention(normed, batch, cos, sin)
        middle, normed, backprop_post_attention_norm = self.post_attention_norm(x, attended)
        fed, backprop_ffn = self.ffn(normed, l1_scale)

        def backprop(dy: Array) -> Array:
            dmiddle = backprop_post_attention_norm(backprop_ffn(dy), dy)
            assert backprop_attention is not None, "attention gives one when it has no cache"
            return backprop_input_norm(backprop_attention(dmiddle), dmiddle)

        return middle, fed, backprop

    def step(
        self,
        x: Array,
        addend: Array | None,
        batch: int,
        cos: Array,
        sin: Array,
        cache: KeyValueStore,
    ) -> tuple[Array, Array]:
        """Return ``middle`` and ``fed`` for new tokens that also attend to those in the cache."""
        x, normed, _ = self.input_norm(x, addend)
        attended, _ = self.attention(normed, batch, cos, sin, cache)
        middle, normed, _ = self.post_attention_norm(x, attended)
        return middle, self.ffn(normed)[0]

    def parameters(self) -> list[Parameter]:
        """Return the parameters trained here."""
        return [
            *self.input_norm.parameters(),
            *self.attention.parameters(),
            *self.post_attention_norm.parameters(),
            *self.ffn.parameters(),
        ]


def make_norm(name: str, config: ModelConfig, values: Mapping[str, Array]) -> RMSNorm:
    """Return an RMSNorm that holds ``values[name]``."""
    norm = RMSNorm(name, config.d_model, config.norm_eps, values[name].dtype)
    norm.weight.value = values[name]
    return norm
