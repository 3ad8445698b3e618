"""The held-out windows that a trained model is measured on."""

import os
from pathlib import Path

import numpy as np

from twell_numba.errors import TwellError, UsageError
from twell_numba.models.reading import is_file, is_folder
from twell_numba.models.tokenizer import TextTokenizer
from twell_numba.models.transformer import Transformer
from twell_numba.train.batches import validation_windows
from twell_numba.train.config import TrainConfig
from twell_numba.train.corpus import encode_documents, load_text
from twell_numba.train.prepared import SUFFIX, open_prepared, require_same_tokenizer
from twell_numba.train.run_folder import RunFolder

# Where there are no settings of a run to say how many, and how long: logits of the whole context
# of a model with a large vocabulary would take gigabytes.
DEFAULT_WINDOWS = 128
DEFAULT_LENGTH = 1024


def held_out_windows(
    run: str | os.PathLike[str],
    model: Transformer,
    tokenizer: TextTokenizer,
    *,
    data: str | None = None,
    count: int | None = None,
    length: int | None = None,
) -> tuple[np.ndarray, str]:
    """Return windows of held-out text for a model, and the name of their source.

    With none of ``data``, ``count`` and ``length``, they are those that the run's validations used.

    Parameters
    ----------
    run : path
        A run folder, or a checkpoint; one that lies in a run folder is taken as part of it.
    model, tokenizer
        As loaded from there.
    data : str, optional
        As ``twell train --data``; the run's own if not given.
    count : int, optional
        Windows wanted; as many as fit if that is fewer.
    length : int, optional
        S, at most the model's context. Default: that of the run's training, or of the model's
        context up to 1024 tokens; or what the text has, if that is less.

    Returns
    -------
    windows : ndarray of int64, shape (N, S + 1)
    source : str

    Raises
    ------
    UsageError
        If the windows are to be longer than the model's context.
    TwellError
        If there are no settings to take the data from, or the data cannot be used.
    """
    context = model.config.context_length
    if length is not None and length > context:
        raise UsageError(
            f"sequences of {length} tokens given, at most the model's context of {context} wanted"
        )
    config = _settings_around(Path(run))
    if data is None:
        if config is None:
            raise TwellError(f"{run} is not part of a run, which would name its data; give --data")
        data = config.data
    if count is None:
        count = config.eval_batches * config.batch_size if config else DEFAULT_WINDOWS
    tokens, source = _held_out_tokens(data, tokenizer)
    if length is None:
        length = config.context_length if config else DEFAULT_LENGTH
        length = max(1, min(length, context, len(tokens) - 1))
    return validation_windows(tokens, length, count), source


def _settings_around(path: Path) -> TrainConfig | None:
    """Return the settings of the run that a path is, or is a checkpoint of."""
    path = path.resolve()
    for folder in (path, path.parent, path.parent.parent):
        run = RunFolder(folder)
        if is_file(run.config_path) and is_folder(run.checkpoints_path):
            return run.read_config()
    return None


def _held_out_tokens(data: str, tokenizer: TextTokenizer) -> tuple[np.ndarray, str]:
    if Path(data).suffix != SUFFIX:
        text = load_text(data)
        return encode_documents(text.validation, tokenizer), text.name
    corpus = open_prepared(data)
    require_same_tokenizer(data, corpus, tokenizer)
    return corpus.validation, corpus.name
