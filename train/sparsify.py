"""Making a pretrained model sparse: its activation becomes ReLU, and training goes on with L1.

A ReLU has exact zeros where SiLU has small numbers. The switch costs quality, which training wins
back while the L1 term on activations makes more and more of them zero (ReLU Strikes Back,
arXiv 2310.04564; the L1 term: arXiv 2603.23198).
"""

import dataclasses
import json
import os
from collections.abc import Iterable

import numpy as np
from numpy.typing import DTypeLike

from twell_numba.errors import TwellError, UsageError
from twell_numba.infer.evaluate import Evaluation, evaluate, require_finite_weights
from twell_numba.models.checkpoint import load_config, load_model, resolve_checkpoint
from twell_numba.models.config import ModelConfig
from twell_numba.models.tokenizer import TextTokenizer
from twell_numba.models.transformer import Transformer
from twell_numba.train.config import TrainConfig, parse_override, resolve
from twell_numba.train.presets import PRESETS, SPARSIFY

# Settings that the model to go on from decides.
MODEL_SETTINGS = (
    "d_model",
    "d_ffn",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "rope_base",
    "norm_eps",
    "tied_embeddings",
    "ffn",
)
_FIXED_SETTINGS = (*MODEL_SETTINGS, "initial_model", "tokenizer", "bpe_vocab_size", "preset")


def sparsify_settings(model: str | os.PathLike[str], overrides: Iterable[str]) -> TrainConfig:
    """Return the settings of a run that makes a model sparse.

    Parameters
    ----------
    model : path
        A Hugging Face folder, a GGUF file, a run of this package or one of its checkpoints.
    overrides : iterable of str
        ``"key=value"``, over the defaults. Training sequences are shorter than the default where
        the model's context is.

    Raises
    ------
    UsageError
        If an override is of a setting that the model decides, or not valid.
    TwellError
        If there is no such model, or it cannot be used.
    """
    given = list(overrides)
    keys = []
    for key, value in map(parse_override, given):
        keys.append(key)
        if key in _FIXED_SETTINGS:
            raise UsageError(f"{key} given, which the model to make sparse decides; leave it out")
        if key == "activation" and value == "silu":
            raise UsageError("activation silu given, relu or relu2 wanted: SiLU has no exact zeros")
    path = resolve_checkpoint(model)
    config = load_config(path)
    settings = {name: getattr(config, name) for name in MODEL_SETTINGS}
    settings["initial_model"] = str(path.absolute())
    if "context_length" not in keys:
        settings["context_length"] = min(PRESETS[SPARSIFY]["context_length"], config.context_length)
    written = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in settings.items()]
    return resolve(SPARSIFY, overrides=[*written, *given])


def load_initial_model(config: TrainConfig) -> tuple[Transformer, TextTokenizer]:
    """Return a copy of the model that a run goes on from, with the run's activation.

    Raises
    ------
    TwellError
        If there is no such model, it cannot be trained, or the settings are not its own.
    """
    source = config.initial_model
    model, tokenizer = load_model(source, np.float32, keep_format=True)
    _require_settings(config, model.config)
    if model.weight_format != "dense":
        raise TwellError(
            f"{source} holds its feedforward weights as {model.weight_format}, dense ones wanted "
            f"to train on; make a dense copy with 'twell convert MODEL COPY --to dense'"
        )
    require_finite_weights(model)
    weights = {name: _writable(each.value) for name, each in model.parameters().items()}
    changed = dataclasses.replace(model.config, activation=config.activation)
    return Transformer(changed, weights, ffn_path=config.ffn_path), tokenizer


def evaluate_initial_model(
    config: TrainConfig, windows: np.ndarray, dtype: DTypeLike, device: str
) -> Evaluation:
    """Measure the model that a run goes on from, as it stands on the disk.

    Raises
    ------
    TwellError
        If there is no such model.
    """
    model, tokenizer = load_model(config.initial_model, dtype, device=device)
    return evaluate(model, windows, tokenizer, config.batch_size)


def _require_settings(config: TrainConfig, model: ModelConfig) -> None:
    for name in MODEL_SETTINGS:
        given, wanted = getattr(config, name), getattr(model, name)
        if given != wanted:
            raise UsageError(
                f"{name}={given!r} given for {config.initial_model}, {name}={wanted!r} wanted: "
                f"'twell sparsify MODEL' takes a model's own sizes"
            )
    if config.context_length > model.context_length:
        raise UsageError(
            f"context_length={config.context_length} given for {config.initial_model}, at most "
            f"{model.context_length} wanted"
        )


def _writable(value: np.ndarray) -> np.ndarray:
    return value if value.flags.writeable else value.copy()
