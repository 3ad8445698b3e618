"""What a model looks like: its sizes and the choices that set its parameters' shapes."""

import math
from dataclasses import dataclass
from typing import Any

from twell_numba.errors import UsageError

FFN_KINDS = ("gated", "two_matrix")
ACTIVATIONS = ("relu",)
FFN_WEIGHT_FORMATS = ("dense", "csr", "block_ell")

# Far beyond any model there is, and small enough that a wrong number is refused before anything is
# made of its size.
LARGEST = {
    "vocab_size": 1 << 24,
    "d_model": 1 << 16,
    "d_ffn": 1 << 20,
    "n_layers": 1 << 12,
    "n_heads": 1 << 16,
    "n_kv_heads": 1 << 16,
    "context_length": 1 << 24,
}
# Within these, what float32 is given stays finite and above zero.
RANGES = {"rope_base": (1.0, 1e15), "norm_eps": (1e-30, 1.0)}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a Llama-shaped transformer with ReLU feedforward layers.

    Parameters
    ----------
    vocab_size : int
        V, the number of token ids; at most 2^24.
    d_model : int
        D, the width of the residual stream; at most 2^16.
    d_ffn : int
        F, the number of hidden neurons of each feedforward layer; at most 2^20.
    n_layers : int
        L; at most 4096.
    n_heads : int
        Query heads; D / n_heads, the width of a head, must be even (rotary positions turn pairs).
    n_kv_heads : int
        Key and value heads; each is shared by n_heads / n_kv_heads query heads.
    context_length : int
        The most tokens a sequence may have; at most 2^24.
    rope_base : float
        Base of the rotary positions' wavelengths, 1 to 1e15.
    norm_eps : float
        Added to the mean square inside RMSNorm, 1e-30 to 1.
    tied_embeddings : bool
        Whether the output head is the embedding table.
    ffn : {"gated", "two_matrix"}
        ``(relu(x Wg) * (x Wu)) Wd`` or ``relu(x Wu) Wd``.
    activation : {"relu"}
    ffn_weight_format : {"dense", "csr", "block_ell"}
        How the weights of the feedforward layers are held, and written to a checkpoint.

    Nothing is checked before :meth:`validate` is called.
    """

    vocab_size: int
    d_model: int
    d_ffn: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    context_length: int
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    tied_embeddings: bool = True
    ffn: str = "gated"
    activation: str = "relu"
    ffn_weight_format: str = "dense"

    @property
    def head_width(self) -> int:
        """The width of one attention head, D / n_heads."""
        return self.d_model // self.n_heads

    @property
    def gated(self) -> bool:
        """Whether the feedforward layers have a gate."""
        return self.ffn == "gated"

    def validate(self) -> None:
        """Check every field and how they fit together.

        Raises
        ------
        UsageError
            One line naming the field, the value given and the value wanted.
        """
        for name, largest in LARGEST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(
                    f"{name}={shown(value)} given, a whole number of at least 1 wanted"
                )
            if value > largest:
                raise UsageError(f"{name}={shown(value)} given, at most {largest} wanted")
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise UsageError(f"{name}={shown(value)} given, a number wanted")
            if not low <= value <= high:
                raise UsageError(
                    f"{name}={shown(value)} given, a number from {low:g} to {high:g} wanted"
                )
        if not isinstance(self.tied_embeddings, bool):
            raise UsageError(
                f"tied_embeddings={shown(self.tied_embeddings)} given, true or false wanted"
            )
        if self.ffn not in FFN_KINDS:
            raise UsageError(f"ffn={shown(self.ffn)} given, one of {', '.join(FFN_KINDS)} wanted")
        if self.activation not in ACTIVATIONS:
            raise UsageError(
                f"activation={shown(self.activation)} given, only relu is supported: "
                f"its zeros are exact, which sparse paths need"
            )
        if self.ffn_weight_format not in FFN_WEIGHT_FORMATS:
            raise UsageError(
                f"ffn_weight_format={shown(self.ffn_weight_format)} given, one of "
                f"{', '.join(FFN_WEIGHT_FORMATS)} wanted"
            )
        if self.d_model % self.n_heads:
            raise UsageError(
                f"d_model={self.d_model} is not divisible by n_heads={self.n_heads}: "
                f"choose n_heads so that every head has the same width"
            )
        if self.head_width % 2:
            raise UsageError(
                f"d_model={self.d_model} with n_heads={self.n_heads} gives heads "
                f"{self.head_width} wide: rotary positions need an even width, change one of them"
            )
        if self.n_heads % self.n_kv_heads:
            raise UsageError(
                f"n_heads={self.n_heads} is not divisible by n_kv_heads={self.n_kv_heads}: "
                f"every key and value head must serve the same number of query heads"
            )

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return every parameter's shape in memory by its checkpoint name, in the model's order.

        Feedforward weights are neuron-major, ``[F, D]``, whatever their format; all others are
        ``[output, input]``.
        """
        hidden = (self.d_ffn, self.d_model)
        key_value = (self.n_kv_heads * self.head_width, self.d_model)
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, self.d_model)
        }
        for layer in range(self.n_layers):
            prefix = f"model.layers.{layer}."
            shapes[prefix + "input_layernorm.weight"] = (self.d_model,)
            shapes[prefix + "self_attn.q_proj.weight"] = (self.d_model, self.d_model)
            shapes[prefix + "self_attn.k_proj.weight"] = key_value
            shapes[prefix + "self_attn.v_proj.weight"] = key_value
            shapes[prefix + "self_attn.o_proj.weight"] = (self.d_model, self.d_model)
            shapes[prefix + "post_attention_layernorm.weight"] = (self.d_model,)
            if self.gated:
                shapes[prefix + "mlp.gate_proj.weight"] = hidden
            shapes[prefix + "mlp.up_proj.weight"] = hidden
            shapes[prefix + "mlp.down_proj.weight"] = hidden
        shapes["model.norm.weight"] = (self.d_model,)
        if not self.tied_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, self.d_model)
        return shapes

    def ffn_weight_names(self) -> list[str]:
        """Return the checkpoint names of the feedforward layers' weights, layer by layer."""
        parts = ("gate", "up", "down") if self.gated else ("up", "down")
        return [
            f"model.layers.{layer}.mlp.{part}_proj.weight"
            for layer in range(self.n_layers)
            for part in parts
        ]

    def parameter_count(self) -> int:
        """Return how many weights there are, zeros among them; a tied embedding counts once."""
        return sum(math.prod(shape) for shape in self.parameter_shapes().values())


def shown(value: Any) -> str:
    """Return a value as a message shows it: cut off where it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        # Python writes out no whole number of thousands of digits, and nothing nested too deeply.
        return f"a value of type {type(value).__name__} too large to show"
    return text if len(text) <= 80 else f"{text[:77]}..."
