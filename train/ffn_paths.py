"""Which execution paths feedforward layers may take while they are trained."""

from twell_numba.models.transformer import Transformer


def possible_paths(model: Transformer) -> tuple[str, ...]:
    """Return the paths that a step may take: on ``auto`` each that is open to the activation.

    The last one is ``dense``, if it is among several.
    """
    if model.ffn_path != "auto" or model.weight_format != "dense":
        return (model.ffn_path,)
    return ("dense",) if model.config.activation == "silu" else ("twell", "dense")
