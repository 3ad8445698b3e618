"""Saving a training run and going on with it, bit for bit."""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from twell_numba.errors import TwellError
from twell_numba.formats.tensor_file import read_tensors, write_tensors
from twell_numba.models.checkpoint import load_model, save_model
from twell_numba.models.tokenizer import TextTokenizer
from twell_numba.models.transformer import Transformer
from twell_numba.train.corpus import TokenCorpus
from twell_numba.train.trainer import Trainer

OPTIMIZER_NAME = "optimizer.safetensors"
STATE_NAME = "training_state.json"
_VERSION = 1
_FINGERPRINT_TOKENS = 1 << 22


def write_checkpoint(
    folder: Path, trainer: Trainer, corpus: TokenCorpus, clocks: dict[str, float]
) -> None:
    """Write the model, the optimizer's moments and the rest of the state into a folder.

    Parameters
    ----------
    folder : path
        The temporary folder of an atomic write.
    clocks : dict
        Times that go on counting in a resumed run.
    """
    save_model(folder, trainer.model, trainer.tokenizer)
    write_tensors(folder / OPTIMIZER_NAME, trainer.optimizer.state_arrays())
    state = {
        "version": _VERSION,
        **trainer.state_dict(),
        "corpus": corpus_fingerprint(corpus),
        "clocks": clocks,
    }
    (folder / STATE_NAME).write_text(json.dumps(state), encoding="utf-8")


def load_checkpoint_model(folder: Path, ffn_path: str) -> tuple[Transformer, TextTokenizer]:
    """Return the model and tokenizer of a checkpoint, to train on."""
    return load_model(folder, np.float32, ffn_path)


def restore(folder: Path, trainer: Trainer, corpus: TokenCorpus) -> dict[str, float]:
    """Set a trainer, made with the checkpoint's model, to the checkpoint's state.

    Returns
    -------
    dict
        The clocks.

    Raises
    ------
    TwellError
        If a file is missing or damaged, or the corpus is not the one trained on.
    """
    path = folder / STATE_NAME
    state = _read_state(path)
    if state.get("corpus") != corpus_fingerprint(corpus):
        raise TwellError(
            f"the data ({corpus.name}) is not what {folder} was trained on: its tokens differ; "
            f"bring back the data as it was, or start a new run"
        )
    try:
        trainer.load_state(state, read_tensors(folder / OPTIMIZER_NAME))
        return {name: float(value) for name, value in state["clocks"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TwellError(
            f"{path} is damaged ({error}); delete {folder} to resume from an earlier checkpoint"
        ) from error


def corpus_fingerprint(corpus: TokenCorpus) -> dict[str, Any]:
    """Return what tells one corpus from another: counts, and a checksum of the first tokens."""
    return {
        "training_tokens": len(corpus.training),
        "validation_tokens": len(corpus.validation),
        "checksum": [
            zlib.crc32(np.ascontiguousarray(tokens[:_FINGERPRINT_TOKENS]).data)
            for tokens in (corpus.training, corpus.validation)
        ],
    }


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TwellError(
            f"cannot read {path}: {error.strerror or error}; a checkpoint of 'twell train' wanted"
        ) from error
    except ValueError as error:
        raise TwellError(
            f"{path} is not JSON ({error}); delete {path.parent} to resume from an earlier one"
        ) from error
    if not isinstance(state, dict) or state.get("version") != _VERSION:
        raise TwellError(f"{path} is not a training state of version {_VERSION}; start a new run")
    return state
