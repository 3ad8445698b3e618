"""What is said where a model is read whose activations have no exact zeros."""

import os
import shlex

from twell_numba.models.config import ModelConfig


def silu_note(config: ModelConfig, path: str | os.PathLike[str]) -> str | None:
    """Return one line about a SiLU model: why it runs dense, and what makes it sparse.

    Parameters
    ----------
    config : ModelConfig
    path : path
        Of the model, as the user gave it.

    Returns
    -------
    str or None
        None for a model of which the zeros are exact.
    """
    if config.activation != "silu":
        return None
    return (
        f"SiLU has no exact zeros, so this model runs dense; "
        f"'twell sparsify {shlex.quote(os.fspath(path))} --data SRC' makes a sparse one of it"
    )
