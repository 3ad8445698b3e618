"""Reading the model that a command is about."""

from typing import TYPE_CHECKING

from twell_numba.cli.options import dtype_of
from twell_numba.cli.text import note

if TYPE_CHECKING:
    from twell_numba.models.tokenizer import TextTokenizer
    from twell_numba.models.transformer import Transformer


def load_noting(
    run: str, *, dtype: str, ffn_path: str, device: str, float8: bool
) -> "tuple[Transformer, TextTokenizer]":
    """Read a model and its tokenizer; a line says so if its activations have no exact zeros.

    Parameters
    ----------
    run : str
        As ``load_model`` takes it.
    dtype, ffn_path, device, float8
        The values of the options that commands share.

    Raises
    ------
    TwellError
        As ``load_model``, and if the device cannot compute in the dtype.
    """
    from twell_numba.infer.silu_note import silu_note
    from twell_numba.models.checkpoint import load_model

    model, tokenizer = load_model(
        run, dtype_of(dtype, device), ffn_path, device=device, float8=float8
    )
    if line := silu_note(model.config, run):
        note(line)
    return model, tokenizer
