"""One block of the transformer: attention, then the feedforward layer, each beside the residual."""

from collections.abc import Callable, Mapping

import numpy as np

from twell_numba.layers.attention import Attention
from twell_numba.layers.ffn import GatedFFN, TwoMatrixFFN
from twell_numba.layers.parameter import Operand, Parameter
from twell_numba.layers.rms_norm import RMSNorm
from twell_numba.models.cache import LayerCache
from twell_numba.models.config import ModelConfig


class Block:
    """x + attention(norm(x)), then that + ffn(norm(that)): a pre-norm block, as in Llama.

    Parameters
    ----------
    prefix : str
        Of the parameters' names, ``model.layers.N``.
    config : ModelConfig
    values : mapping of str to ndarray
        The values of all parameters but the feedforward layer's by name; held without a copy.
    ffn_weights : mapping of str to ndarray, CSRMatrix or BlockELLMatrix
        The feedforward layer's weights by name; likewise.
    ffn_path : str
        Execution path of the feedforward layer.
    """

    def __init__(
        self,
        prefix: str,
        config: ModelConfig,
        values: Mapping[str, np.ndarray],
        ffn_weights: Mapping[str, Operand],
        ffn_path: str,
    ) -> None:
        self.input_norm = make_norm(f"{prefix}.input_layernorm.weight", config, values)
        self.attention = Attention(
            f"{prefix}.self_attn",
            config.n_heads,
            config.n_kv_heads,
            values[f"{prefix}.self_attn.q_proj.weight"],
            values[f"{prefix}.self_attn.k_proj.weight"],
            values[f"{prefix}.self_attn.v_proj.weight"],
            values[f"{prefix}.self_attn.o_proj.weight"],
        )
        self.post_attention_norm = make_norm(
            f"{prefix}.post_attention_layernorm.weight", config, values
        )
        self.ffn: GatedFFN | TwoMatrixFFN
        up = ffn_weights[f"{prefix}.mlp.up_proj.weight"]
        down = ffn_weights[f"{prefix}.mlp.down_proj.weight"]
        if config.gated:
            gate = ffn_weights[f"{prefix}.mlp.gate_proj.weight"]
            self.ffn = GatedFFN(f"{prefix}.mlp", gate, up, down, ffn_path)
        else:
            self.ffn = TwoMatrixFFN(f"{prefix}.mlp", up, down, ffn_path)

    def __call__(
        self, x: np.ndarray, batch: int, cos: np.ndarray, sin: np.ndarray, l1_scale: float = 0.0
    ) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
        """Return Y (M, D) for X (M, D) of ``batch`` sequences, and the backward pass."""
        normed, backprop_input_norm = self.input_norm(x)
        attended, backprop_attention = self.attention(normed, batch, cos, sin)
        middle = x + attended
        normed, backprop_post_attention_norm = self.post_attention_norm(middle)
        fed, backprop_ffn = self.ffn(normed, l1_scale)
        y = middle + fed

        def backprop(dy: np.ndarray) -> np.ndarray:
            dmiddle = dy + backprop_post_attention_norm(backprop_ffn(dy))
            assert backprop_attention is not None, "attention gives one when it has no cache"
            return dmiddle + backprop_input_norm(backprop_attention(dmiddle))

        return y, backprop

    def step(
        self, x: np.ndarray, batch: int, cos: np.ndarray, sin: np.ndarray, cache: LayerCache
    ) -> np.ndarray:
        """Return Y (M, D) for new tokens that also attend to those in the cache."""
        middle = x + self.attention(self.input_norm(x)[0], batch, cos, sin, cache)[0]
        return middle + self.ffn(self.post_attention_norm(middle)[0])[0]

    def parameters(self) -> list[Parameter]:
        """Return the parameters trained here."""
        return [
            *self.input_norm.parameters(),
            *self.attention.parameters(),
            *self.post_attention_norm.parameters(),
            *self.ffn.parameters(),
        ]


def make_norm(name: str, config: ModelConfig, values: Mapping[str, np.ndarray]) -> RMSNorm:
    """Return an RMSNorm that holds ``values[name]``."""
    norm = RMSNorm(name, config.d_model, config.norm_eps, values[name].dtype)
    norm.weight.value = values[name]
    return norm
