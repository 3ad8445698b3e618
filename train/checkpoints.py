"""Saving a training run and going on with it, bit for bit."""

import dataclasses
import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from twell_numba.errors import TwellError, shown
from twell_numba.formats.tensor_file import read_tensors, write_tensors
from twell_numba.models.checkpoint import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    checkpoint_steps,
    load_model,
    save_model,
)
from twell_numba.models.config import ModelConfig
from twell_numba.models.tokenizer import TextTokenizer
from twell_numba.models.transformer import Transformer
from twell_numba.train.config import TrainConfig
from twell_numba.train.corpus import TokenCorpus
from twell_numba.train.failure import Diverged
from twell_numba.train.learned_patterns import pattern_arrays
from twell_numba.train.run_folder import complete_settings
from twell_numba.train.trainer import Trainer

OPTIMIZER_NAME = "optimizer.safetensors"
STATE_NAME = "training_state.json"
# Sums over all sessions of a run: wall time, and the steps whose speed counts.
CLOCK_NAMES = ("seconds", "timed_tokens", "timed_seconds")
_VERSION = 3
# Before feedforward weights could be made sparse.
_DENSE_VERSION = 2
_FINGERPRINT_TOKENS = 1 << 22
_CHUNK_BYTES = 1 << 20

# What is raised where a state is not of the form that was written.
_MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError)


def write_checkpoint(
    folder: Path, trainer: Trainer, corpus: TokenCorpus, clocks: dict[str, float]
) -> None:
    """Write the model, the optimizer's moments and the rest of the state into a folder.

    Parameters
    ----------
    folder : path
        The temporary folder of an atomic write.
    clocks : dict
        By :data:`CLOCK_NAMES`: times that go on counting in a resumed run.
    """
    save_model(folder, trainer.model, trainer.tokenizer)
    arrays = trainer.optimizer.state_arrays() | pattern_arrays(trainer.model)
    write_tensors(folder / OPTIMIZER_NAME, arrays)
    state = {
        "version": _VERSION,
        **trainer.state_dict(),
        "settings": dataclasses.asdict(trainer.config.filled_in()),
        "corpus": corpus_fingerprint(corpus),
        "clocks": clocks,
        "files": {name: file_checksum(folder / name) for name in (WEIGHTS_NAME, OPTIMIZER_NAME)},
    }
    if trainer.config.initial_model:  # of which the settings describe only a part
        state["model"] = dataclasses.asdict(trainer.model.config)
    (folder / STATE_NAME).write_text(json.dumps(state), encoding="utf-8")


def read_state(folder: Path, step: int) -> dict[str, Any]:
    """Read what a checkpoint holds beside its arrays, and check that these belong to it.

    Parameters
    ----------
    folder : path
    step : int
        The step that the folder is named after.

    Raises
    ------
    TwellError
        If a file is missing, damaged, or of another checkpoint.
    """
    path = folder / STATE_NAME
    state = _read_json_object(path)
    if state.get("version") == _DENSE_VERSION:
        state["weight_l1_strength"] = None
    elif state.get("version") != _VERSION:
        raise TwellError(
            f"{path} is of version {shown(state.get('version'))}, {_VERSION} wanted; "
            f"{_way_out(folder)}"
        )
    for key in ("step", "settings", "corpus", "clocks", "files"):
        if key not in state:
            raise _damaged(folder, f"it has no {key!r}")
    if type(state["step"]) is not int or state["step"] != step:
        raise TwellError(
            f"{path} is of step {state['step']!r}, step {step} wanted in a folder of that name; "
            f"put the file, or the folder's name, back as it was"
        )
    _require_files(folder, state["files"])
    return state


def settings_of(folder: Path, state: dict[str, Any]) -> TrainConfig:
    """Return the settings that a checkpoint was trained with.

    Raises
    ------
    TwellError
        If the state is damaged.
    """
    try:
        return complete_settings(state["settings"])
    except (*_MALFORMED, TwellError) as error:
        raise _damaged(folder, error) from error


def load_checkpoint_model(
    folder: Path, config: TrainConfig, step: int, state: dict[str, Any]
) -> tuple[Transformer, TextTokenizer]:
    """Return the model and tokenizer of a checkpoint, to train on after that step.

    Raises
    ------
    TwellError
        If a file is missing or damaged, or the model is not the one that the settings describe, or,
        where they describe only a part of it, the one that was saved.
    """
    model, tokenizer = load_model(folder, np.float32, config.ffn_path, keep_format=True)
    wanted = dataclasses.asdict(config.model_config(tokenizer.vocab_size))
    if config.initial_model:
        wanted |= _saved_model(folder, state)
    wanted["ffn_weight_format"] = config.weight_format_after(step)
    for name, value in dataclasses.asdict(model.config).items():
        if value != wanted[name]:
            raise TwellError(
                f"{folder / CONFIG_NAME} describes a model with {name}={value!r}, but it was "
                f"trained with {name}={wanted[name]!r}; put the file back as it was saved"
            )
    return model, tokenizer


def restore(
    folder: Path, state: dict[str, Any], trainer: Trainer, corpus: TokenCorpus
) -> dict[str, float]:
    """Set a trainer, made with the checkpoint's model, to the checkpoint's state.

    Parameters
    ----------
    folder : path
    state : dict
        From :func:`read_state`.
    trainer : Trainer
        Changed in place.
    corpus : TokenCorpus

    Returns
    -------
    dict
        The clocks, by :data:`CLOCK_NAMES`.

    Raises
    ------
    TwellError
        If the state is damaged, the corpus is not the one trained on, or a number is not finite.
    """
    if state["corpus"] != corpus_fingerprint(corpus):
        raise TwellError(
            f"the data ({corpus.name}) is not what {folder} was trained on: its tokens differ; "
            f"bring back the data as it was, or start a new run"
        )
    try:
        trainer.load_state(state, read_tensors(folder / OPTIMIZER_NAME))
        clocks = _checked_clocks(state["clocks"])
    except _MALFORMED as error:
        raise _damaged(folder, error) from error
    try:
        trainer.require_finite_state()
    except Diverged as error:
        step = _earlier_step(folder)
        advice = "start a new run" if step is None else f"delete it to resume from step {step}"
        raise TwellError(f"{folder} cannot be trained on ({error}); {advice}") from None
    return clocks


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


def file_checksum(path: Path) -> int:
    """Return the CRC-32 of a file's bytes."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def _saved_model(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    saved = state.get("model")
    names = {field.name for field in dataclasses.fields(ModelConfig)}
    if not isinstance(saved, dict) or not saved.keys() <= names:
        raise _damaged(folder, f"model={saved!r}")
    return saved


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        way_out = "a checkpoint of 'twell train' wanted"
        if _earlier_step(path.parent) is not None:
            way_out = _way_out(path.parent)
        raise TwellError(f"cannot read {path}: {error.strerror or error}; {way_out}") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path.parent, f"not JSON: {error}") from error
    if not isinstance(state, dict):
        raise _damaged(path.parent, "not a JSON object")
    return state


def _require_files(folder: Path, checksums: Any) -> None:
    """Refuse arrays that were changed, damaged, or copied from another checkpoint."""
    if not isinstance(checksums, dict):
        raise _damaged(folder, f"files={checksums!r}")
    for name in (WEIGHTS_NAME, OPTIMIZER_NAME):
        path = folder / name
        try:
            checksum = file_checksum(path)
        except OSError as error:
            raise TwellError(
                f"cannot read {path}: {error.strerror or error}; {_way_out(folder)}"
            ) from error
        if checksums.get(name) != checksum:
            raise TwellError(
                f"{path} is not the file that was saved with the {STATE_NAME} beside it: it was "
                f"replaced, changed or damaged; {_way_out(folder)}"
            )


def _checked_clocks(clocks: Any) -> dict[str, float]:
    if not isinstance(clocks, dict) or clocks.keys() != set(CLOCK_NAMES):
        raise ValueError(f"clocks={clocks!r}")
    for name, value in clocks.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < 0:
            raise ValueError(f"{name}={value!r} in clocks")
    return {name: float(clocks[name]) for name in CLOCK_NAMES}


def _damaged(folder: Path, reason: object) -> TwellError:
    return TwellError(f"{folder / STATE_NAME} is damaged ({reason}); {_way_out(folder)}")


def _way_out(folder: Path) -> str:
    """Say what to do about a damaged file in a checkpoint."""
    step = _earlier_step(folder)
    if step is None:
        return "put it back as it was saved, or start a new run"
    return f"put it back as it was saved, or delete {folder} to resume from step {step}"


def _earlier_step(folder: Path) -> int | None:
    """Return the step that resuming would go on from if this checkpoint, the newest, were gone."""
    steps = checkpoint_steps(folder.parent)
    return max((step for step, path in steps.items() if path != folder), default=None)
