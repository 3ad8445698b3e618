"""What a model looks like: its sizes and the choices that set its parameters' shapes."""

import math
from dataclasses import dataclass

from twell_numba.errors import UsageError, shown
from twell_numba.models.rope_scaling import RopeScaling

FFN_KINDS = ("gated", "two_matrix")
# Of these, silu leaves no exact zeros: its models run on the dense path alone.
ACTIVATIONS = ("relu", "silu", "relu2")
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
    """Sizes and choices of a Llama-shaped transformer.

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
        Query heads.
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
        ``(a(x Wg) * (x Wu)) Wd`` or ``a(x Wu) Wd``, where a is the activation.
    activation : {"relu", "silu", "relu2"}
        ``relu2`` is the square of ``relu``. ``silu`` makes no exact zeros.
    ffn_weight_format : {"dense", "csr", "block_ell"}
        How the weights of the feedforward layers are held, and written to a checkpoint.
    head_dim : int or None
        The width of a head, which must be even (rotary positions turn pairs); None: D / n_heads.
    attention_bias : bool
        Whether the projections to queries, keys and values have biases, as in Qwen2.
    output_bias : bool
        Whether attention's output projection has one.
    rope_scaling : RopeScaling or None
        How rotary positions are stretched.

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
    head_dim: int | None = None
    attention_bias: bool = False
    output_bias: bool = False
    rope_scaling: RopeScaling | None = None

    @property
    def head_width(self) -> int:
        """The width of one attention head."""
        return self.head_dim or self.d_model // self.n_heads

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
        for name in ("tied_embeddings", "attention_bias", "output_bias"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise UsageError(f"{name}={shown(value)} given, true or false wanted")
        if self.ffn not in FFN_KINDS:
            raise UsageError(f"ffn={shown(self.ffn)} given, one of {', '.join(FFN_KINDS)} wanted")
        if self.activation not in ACTIVATIONS:
            raise UsageError(
                f"activation={shown(self.activation)} given, one of {', '.join(ACTIVATIONS)} wanted"
            )
        if self.ffn_weight_format not in FFN_WEIGHT_FORMATS:
            raise UsageError(
                f"ffn_weight_format={shown(self.ffn_weight_format)} given, one of "
                f"{', '.join(FFN_WEIGHT_FORMATS)} wanted"
            )
        if self.activation != "relu" and self.ffn_weight_format != "dense":
            raise UsageError(
                f"ffn_weight_format={self.ffn_weight_format} given with "
                f"activation={self.activation}, dense wanted: sparse weights are for relu alone"
            )
        self._validate_head_width()
        if self.n_heads % self.n_kv_heads:
            raise UsageError(
                f"n_heads={self.n_heads} is not divisible by n_kv_heads={self.n_kv_heads}: "
                f"every key and value head must serve the same number of query heads"
            )
        if self.rope_scaling is not None:
            self.rope_scaling.validate()

    def _validate_head_width(self) -> None:
        width = self.head_dim
        if width is None:
            if self.d_model % self.n_heads:
                raise UsageError(
                    f"d_model={self.d_model} is not divisible by n_heads={self.n_heads}: "
                    "choose n_heads so that every head has the same width"
                )
            if self.head_width % 2:
                raise UsageError(
                    f"d_model={self.d_model} with n_heads={self.n_heads} gives heads "
                    f"{self.head_width} wide: rotary positions need an even width, change one of "
                    f"them"
                )
            return
        if isinstance(width, bool) or not isinstance(width, int) or width < 2 or width % 2:
            raise UsageError(f"head_dim={shown(width)} given, an even whole number wanted")
        if width > LARGEST["d_model"]:
            raise UsageError(f"head_dim={shown(width)} given, at most {LARGEST['d_model']} wanted")

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return every parameter's shape in memory by its checkpoint name, in the model's order.

        Feedforward weights are neuron-major, ``[F, D]``, whatever their format; all others are
        ``[output, input]``.
        """
        hidden = (self.d_ffn, self.d_model)
        query = (self.n_heads * self.head_width, self.d_model)
        key_value = (self.n_kv_heads * self.head_width, self.d_model)
        output = query[::-1]
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, self.d_model)
        }
        for layer in range(self.n_layers):
            prefix = f"model.layers.{layer}."
            shapes[prefix + "input_layernorm.weight"] = (self.d_model,)
            for part, shape, bias in (
                ("q", query, self.attention_bias),
                ("k", key_value, self.attention_bias),
                ("v", key_value, self.attention_bias),
                ("o", output, self.output_bias),
            ):
                shapes[f"{prefix}self_attn.{part}_proj.weight"] = shape
                if bias:
                    shapes[f"{prefix}self_attn.{part}_proj.bias"] = shape[0:1]
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
