"""Which execution paths feedforward layers may take while they are trained."""

from twell_numba.models.transformer import Transformer


def possible_paths(model: Transformer) -> tuple[str, ...]:
    """Return the paths that a step may take: on ``auto`` each that is open to the activation.

    The last one is ``dense``, if it is among several.
    """
    if model.ffn_path != "auto" or model.weight_format != "dense":
        return (model.ffn_path,)
    activation, on_gpu = model.config.activation, model.stream is not None
    has_twell = activation == "relu" or (activation == "relu2" and not on_gpu)
    return ("twell", "dense") if has_twell else ("dense",)
