"""Which execution paths feedforward layers may take while they are trained."""

from collections.abc import Iterator
from contextlib import contextmanager

from twell_numba.layers.ffn import has_sparse_path
from twell_numba.models.transformer import Transformer


def possible_paths(model: Transformer) -> tuple[str, ...]:
    """Return the paths that a step may take: on ``auto`` each that is open to the activation.

    The last one is ``dense``, if it is among several.
    """
    if model.ffn_path != "auto" or model.weight_format != "dense":
        return (model.ffn_path,)
    has_twell = has_sparse_path(model.config.activation, on_gpu=model.stream is not None)
    return ("twell", "dense") if has_twell else ("dense",)


@contextmanager
def paths_undisturbed(model: Transformer) -> Iterator[None]:
    """Let the next step take the FFN paths it would have taken without what is done in between."""
    states = [ffn.auto_state for ffn in model.ffn_layers]
    yield
    for ffn, state in zip(model.ffn_layers, states, strict=True):
        ffn.auto_state = state
