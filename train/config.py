"""Every setting of a training run: one flat table, read from and written to TOML.

Settings come from a preset, then a TOML file, then ``key=value`` overrides; each later one wins.
"""

import dataclasses
import difflib
import json
import math
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twell_numba.errors import TwellError, UsageError, shown
from twell_numba.models.config import ACTIVATIONS, ModelConfig
from twell_numba.train.presets import PRESETS, SPARSIFY

DEFAULT_PRESET = "tiny"
FFN_PATHS = ("auto", "dense", "twell")
TOKENIZERS = ("byte", "bpe", "model")
SPARSE_FORMATS = ("csr", "block_ell")
PRECISIONS = ("auto", "float32", "bfloat16")
BYTE_VOCAB_SIZE = 256
LARGEST_BPE_VOCAB_SIZE = 1 << 20

# TOML's whole numbers have 64 bits.
_WHOLE_NUMBERS = range(-(2**63), 2**63)
# More trains nothing: weights, moments or gradients would soon be beyond float32, or the numbers of
# a batch beyond any memory.
_LARGEST = {
    "batch_size": 1 << 16,
    "gradient_accumulation": 1 << 16,
    "learning_rate": 100.0,
    "adam_eps": 1.0,
    "weight_decay": 1000.0,
    "gradient_clip": 1e9,
    "l1_activation": 1000.0,
    "l1_weight": 1000.0,
    "l1_block": 1000.0,
    "weight_threshold": 1000.0,
}
_SMALLEST_ADAM_EPS = 1e-30  # what is much smaller is 0 in float32


def _setting(default: Any, section: str, meaning: str) -> Any:
    return field(default=default, metadata={"section": section, "meaning": meaning})


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run; each field's ``metadata["meaning"]`` says what it does.

    A step trains on ``gradient_accumulation * batch_size * context_length`` tokens. Nothing is
    checked before :meth:`validate` is called; :func:`resolve` calls it.
    """

    preset: str = _setting(DEFAULT_PRESET, "Run", "the preset these settings started from")
    data: str = _setting("stdlib", "Run", "stdlib, a text file, a folder or a prepared .bin")
    initial_model: str = _setting(
        "", "Run", "model to go on from, whose sizes the settings then are; empty: from scratch"
    )
    seed: int = _setting(0, "Run", "seed of every random choice")
    steps: int = _setting(1000, "Run", "optimizer steps")

    d_model: int = _setting(128, "Model", "D, width of the residual stream")
    d_ffn: int = _setting(512, "Model", "F, hidden neurons of each feedforward layer")
    n_layers: int = _setting(4, "Model", "L, layers")
    n_heads: int = _setting(4, "Model", "query heads")
    n_kv_heads: int = _setting(0, "Model", "key and value heads; 0: as many as query heads")
    context_length: int = _setting(128, "Model", "tokens in a training sequence")
    rope_base: float = _setting(10000.0, "Model", "base of the rotary positions' wavelengths")
    norm_eps: float = _setting(1e-5, "Model", "added to the mean square inside RMSNorm")
    tied_embeddings: bool = _setting(True, "Model", "the output head is the embedding table")
    ffn: str = _setting("gated", "Model", "gated or two_matrix")
    activation: str = _setting(
        "relu", "Model", "relu, relu2 or silu, whose hidden activations have no exact zeros"
    )
    ffn_path: str = _setting("auto", "Model", "how feedforward layers run: auto, dense or twell")

    tokenizer: str = _setting(
        "byte", "Data", "byte, bpe trained on the training text, or model: that of initial_model"
    )
    bpe_vocab_size: int = _setting(4096, "Data", "token ids of a bpe tokenizer")
    batch_size: int = _setting(16, "Data", "sequences in a forward pass")
    gradient_accumulation: int = _setting(1, "Data", "forward passes in a step")

    precision: str = _setting(
        "auto", "Computation", "float32, bfloat16 (on a GPU), or auto: that from a width of 512 on"
    )
    recompute: bool = _setting(
        False, "Computation", "compute blocks again in the backward pass, to keep less in memory"
    )
    deterministic: bool = _setting(
        False, "Computation", "the same bits in every run on one GPU; always so on the CPU"
    )

    learning_rate: float = _setting(1e-3, "Optimizer", "its highest value, after the warm-up")
    warmup_steps: int = _setting(0, "Optimizer", "steps in which the learning rate rises")
    minimum_learning_rate_fraction: float = _setting(
        0.1, "Optimizer", "last learning rate, as a fraction of the highest"
    )
    beta1: float = _setting(0.9, "Optimizer", "decay of AdamW's mean of gradients")
    beta2: float = _setting(0.95, "Optimizer", "decay of AdamW's mean of squared gradients")
    adam_eps: float = _setting(1e-8, "Optimizer", "added to AdamW's denominator")
    weight_decay: float = _setting(0.1, "Optimizer", "decoupled, on matrices only")
    gradient_clip: float = _setting(1.0, "Optimizer", "largest norm of the gradient; 0: no limit")

    l1_activation: float = _setting(0.0, "Sparsity", "strength of the L1 term on activations")
    l1_warmup_steps: int = _setting(0, "Sparsity", "steps in which L1 strengths rise")
    revive_dead: bool = _setting(False, "Sparsity", "push dead neurons' gate rows at random")
    dead_neuron_window: int = _setting(
        100, "Sparsity", "a neuron is dead if it fired for no token of so many steps"
    )
    l1_weight: float = _setting(
        0.0, "Sparsity", "strength of the L1 term on FFN weights; largest with a target"
    )
    l1_block: float = _setting(0.0, "Sparsity", "the same on blocks of FFN weights")
    block_size: int = _setting(16, "Sparsity", "b, rows and columns of a block")
    weight_threshold: float = _setting(
        0.0, "Sparsity", "smaller FFN weights become zero; blocks by their root mean square"
    )
    target_density: float = _setting(
        1.0, "Sparsity", "part of the FFN weights to be left in the end; 1: all"
    )
    target_density_step: int = _setting(
        0, "Sparsity", "step that reaches it; 0: sparse_from, or the last"
    )
    sparse_from: int = _setting(
        0, "Sparsity", "step that freezes zeros: the rest trains sparse; 0: never"
    )
    sparse_format: str = _setting("csr", "Sparsity", "how weights are then held: csr or block_ell")

    log_interval: int = _setting(10, "Reports", "steps between lines of metrics.jsonl")
    eval_interval: int = _setting(100, "Reports", "steps between validations; 0: only at the end")
    eval_batches: int = _setting(8, "Reports", "batches of held-out windows in a validation")
    sample_interval: int = _setting(0, "Reports", "steps between text samples; 0: none")
    sample_prompt: str = _setting("def ", "Reports", "what a text sample goes on from")
    sample_tokens: int = _setting(100, "Reports", "tokens in a text sample")
    checkpoint_interval: int = _setting(
        500, "Reports", "steps between checkpoints; 0: only at the end"
    )
    keep_checkpoints: int = _setting(2, "Reports", "how many of the newest checkpoints are kept")

    @property
    def tokens_per_step(self) -> int:
        """Tokens behind one optimizer step, M_total."""
        return self.gradient_accumulation * self.batch_size * self.context_length

    def filled_in(self) -> "TrainConfig":
        """Return the same settings, with a number for each that follows another one."""
        density_step = self.target_density_step
        if self.target_density < 1:
            density_step = density_step or self.sparse_from or self.steps
        return dataclasses.replace(
            self,
            n_kv_heads=self.n_kv_heads or self.n_heads,
            target_density_step=density_step,
        )

    @property
    def weight_block_size(self) -> int:
        """Rows and columns of what becomes zero as a whole in an FFN weight; 1: single weights."""
        return self.block_size if self._has_blocks else 1

    def weight_format_after(self, step: int) -> str:
        """Return how FFN weights are held after a step: dense, csr or block_ell."""
        return self.sparse_format if 0 < self.sparse_from <= step else "dense"

    @property
    def _has_blocks(self) -> bool:
        return self.l1_block > 0 or self.sparse_format == "block_ell"

    def model_config(self, vocab_size: int) -> ModelConfig:
        """Return the model these settings describe, for a tokenizer of ``vocab_size`` ids.

        With an ``initial_model`` that is not all of it: biases, and how rotary positions are
        stretched, are the model's own.
        """
        return ModelConfig(
            vocab_size=vocab_size,
            d_model=self.d_model,
            d_ffn=self.d_ffn,
            n_layers=self.n_layers,
            n_heads=self.n_heads,
            n_kv_heads=self.filled_in().n_kv_heads,
            context_length=self.context_length,
            rope_base=self.rope_base,
            norm_eps=self.norm_eps,
            tied_embeddings=self.tied_embeddings,
            ffn=self.ffn,
            activation=self.activation,
        )

    def validate(self) -> None:
        """Check every value and how they fit together.

        Raises
        ------
        UsageError
            One line naming the setting, the value given and the value wanted.
        """
        if self.preset not in PRESETS:
            raise UsageError(_unknown_preset(self.preset))
        for name in _FIELDS:
            _require_type(name, getattr(self, name))
        for name in (
            "steps",
            "batch_size",
            "gradient_accumulation",
            "dead_neuron_window",
            "block_size",
            "log_interval",
            "eval_batches",
            "sample_tokens",
            "keep_checkpoints",
        ):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)} given, at least 1 wanted")
        for name in (
            "seed",
            "n_kv_heads",
            "warmup_steps",
            "l1_warmup_steps",
            "eval_interval",
            "sample_interval",
            "checkpoint_interval",
            "weight_decay",
            "gradient_clip",
            "l1_activation",
            "l1_weight",
            "l1_block",
            "weight_threshold",
            "target_density_step",
            "sparse_from",
        ):
            if getattr(self, name) < 0:
                raise UsageError(f"{name}={getattr(self, name)} given, at least 0 wanted")
        for name in ("learning_rate", "adam_eps"):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name}={getattr(self, name)} given, a number above 0 wanted")
        if self.adam_eps < _SMALLEST_ADAM_EPS:
            raise UsageError(
                f"adam_eps={self.adam_eps} given, at least {_SMALLEST_ADAM_EPS:g} wanted"
            )
        for name, largest in _LARGEST.items():
            if getattr(self, name) > largest:
                raise UsageError(f"{name}={getattr(self, name)} given, at most {largest:g} wanted")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(
                    f"{name}={getattr(self, name)} given, at least 0 and less than 1 wanted"
                )
        if not 0 <= self.minimum_learning_rate_fraction <= 1:
            raise UsageError(
                f"minimum_learning_rate_fraction={self.minimum_learning_rate_fraction} given, "
                f"a number from 0 to 1 wanted"
            )
        for name, choices in (
            ("ffn_path", FFN_PATHS),
            ("activation", ACTIVATIONS),
            ("tokenizer", TOKENIZERS),
            ("sparse_format", SPARSE_FORMATS),
            ("precision", PRECISIONS),
        ):
            if getattr(self, name) not in choices:
                raise UsageError(
                    f"{name}={shown(getattr(self, name))} given, one of {', '.join(choices)} wanted"
                )
        if self.tokenizer == "bpe":
            require_bpe_vocab_size(self.bpe_vocab_size)
        for name, description in _FIELDS.items():
            if description.type is str and not _is_unicode(getattr(self, name)):
                raise UsageError(f"{name}={shown(getattr(self, name))} given, valid Unicode wanted")
        if not self.data:
            raise UsageError("data='' given; stdlib, a file, a folder or a prepared .bin wanted")
        if not self.sample_prompt:
            raise UsageError("sample_prompt='' given, at least one character wanted")
        self._validate_model()
        self._validate_weight_sparsity()

    def _validate_model(self) -> None:
        if (self.tokenizer == "model") != bool(self.initial_model):
            raise UsageError(
                f"tokenizer={self.tokenizer} given with initial_model={self.initial_model!r}, "
                f"tokenizer=model and a model wanted, or neither; 'twell sparsify MODEL' sets both"
            )
        if self.activation == "silu" and self.ffn_path == "twell":
            raise UsageError(
                "ffn_path=twell given with activation=silu, auto or dense wanted: SiLU leaves no "
                "exact zeros to skip"
            )
        if not self.initial_model:
            is_bpe = self.tokenizer == "bpe"
            self.model_config(self.bpe_vocab_size if is_bpe else BYTE_VOCAB_SIZE).validate()

    def _validate_weight_sparsity(self) -> None:
        require_target_density("target_density", self.target_density)
        if self.l1_weight and self._has_blocks:
            other = f"l1_block={self.l1_block}" if self.l1_block else "sparse_format=block_ell"
            wanted = "one of them" if self.l1_block else "l1_block for weights in blocks"
            raise UsageError(f"l1_weight={self.l1_weight} given with {other}, {wanted} wanted")
        smallest = min(self.d_model, self.d_ffn)
        if self._has_blocks and self.block_size > smallest:
            raise UsageError(
                f"block_size={self.block_size} given, 1 to {smallest} wanted for FFN weights of "
                f"{self.d_ffn} x {self.d_model}"
            )
        if self.target_density < 1:
            self._validate_target_density()
        elif self.target_density_step:
            raise UsageError(
                f"target_density_step={self.target_density_step} given without a target_density "
                f"below 1, both or none wanted"
            )
        if self.sparse_from:
            self._validate_sparse_from()
        elif self.weight_threshold and self.l1_warmup_steps >= self.steps:
            raise UsageError(
                f"l1_warmup_steps={self.l1_warmup_steps} given, fewer than steps={self.steps} "
                f"wanted: weight_threshold acts after them"
            )

    def _validate_target_density(self) -> None:
        entries = self.target_density * self.d_ffn * self.d_model
        if entries < self.weight_block_size**2:
            raise UsageError(
                f"target_density={self.target_density} given, which leaves less than one "
                f"{'block' if self._has_blocks else 'entry'} of an FFN weight of {self.d_ffn} x "
                f"{self.d_model}; a larger one wanted"
            )
        step = self.filled_in().target_density_step
        last = "sparse_from" if self.sparse_from else "steps"
        if step > getattr(self, last):
            raise UsageError(
                f"target_density_step={step} given, at most {last}={getattr(self, last)} wanted"
            )
        if step <= self.l1_warmup_steps:
            raise UsageError(
                f"l1_warmup_steps={self.l1_warmup_steps} given, fewer than {step} wanted: in step "
                f"{step} target_density is to be reached"
            )

    def _validate_sparse_from(self) -> None:
        if self.sparse_from > self.steps:
            raise UsageError(
                f"sparse_from={self.sparse_from} given, at most steps={self.steps} wanted"
            )
        if self.activation != "relu":
            raise UsageError(
                f"sparse_from={self.sparse_from} given with activation={self.activation}, relu "
                f"wanted: sparse weights are for it alone"
            )
        is_dense = self.target_density == 1
        if is_dense and not (self.l1_weight or self.l1_block or self.weight_threshold):
            raise UsageError(
                f"sparse_from={self.sparse_from} given, but nothing that makes weights zero before "
                f"it; a target_density below 1, l1_weight, l1_block or weight_threshold wanted, or "
                f"sparse_from=0 (--set sparse_from=0) to keep all weights"
            )
        if self.sparse_from <= self.l1_warmup_steps:
            raise UsageError(
                f"l1_warmup_steps={self.l1_warmup_steps} given, fewer than "
                f"sparse_from={self.sparse_from} wanted"
            )
        if self.ffn_path != "auto":
            raise UsageError(
                f"ffn_path={self.ffn_path} given with sparse_from={self.sparse_from}, auto wanted: "
                f"sparse weights have a path of their own"
            )
        if self.revive_dead:
            raise UsageError(
                f"revive_dead=true given with sparse_from={self.sparse_from}, one of them wanted: "
                f"revival changes weights that sparse_from has left out"
            )

    def to_toml(self) -> str:
        """Return the settings as a TOML document that :func:`read_toml` reads back equal."""
        lines: list[str] = []
        section = None
        for name, description in _FIELDS.items():
            if description.metadata["section"] != section:
                section = description.metadata["section"]
                lines += ["", f"# {section}"] if lines else [f"# {section}"]
            value = f"{name} = {_toml_value(getattr(self, name))}"
            lines.append(f"{value:<40} # {description.metadata['meaning']}")
        return "\n".join(lines) + "\n"


_FIELDS = {description.name: description for description in dataclasses.fields(TrainConfig)}

# Given as numbers of steps, these follow the length of the run when only `steps` is changed.
_SCALED_WITH_STEPS = ("warmup_steps", "l1_warmup_steps")
# 0 would have another meaning in these.
_SCALED_TO_AT_LEAST_1 = ("target_density_step", "sparse_from")


def resolve(
    preset: str | None = None,
    config_file: str | os.PathLike[str] | None = None,
    overrides: Iterable[str] = (),
) -> TrainConfig:
    """Return valid settings from a preset, then a TOML file, then ``key=value`` overrides.

    Where ``steps`` differs from the preset's, the preset's other numbers of steps up to which
    something goes on (warm-ups, ``sparse_from``) are scaled with it, unless they are set as well.

    Parameters
    ----------
    preset : str, optional
        Wins over a ``preset`` key in the overrides or the file. Default: ``"tiny"``.
    config_file : path, optional
        Flat TOML with keys named as the fields of :class:`TrainConfig`.
    overrides : iterable of str
        ``"key=value"``; a value is written as in TOML, strings with or without quotes.

    Raises
    ------
    UsageError
        An unknown preset or key (with a suggestion), or a value of the wrong type or range.
    TwellError
        If the file cannot be read.
    """
    given = dict(read_toml(config_file)) if config_file is not None else {}
    for override in overrides:
        key, value = parse_override(override)
        given[key] = value
    if preset is not None:
        given["preset"] = preset
    name = given.setdefault("preset", DEFAULT_PRESET)
    if name not in PRESETS:
        raise UsageError(_unknown_preset(str(name)))
    settings = PRESETS[name] | given
    if isinstance(settings["steps"], int):
        for key in (*_SCALED_WITH_STEPS, *_SCALED_TO_AT_LEAST_1):
            if key not in given and key in settings:
                scaled = round(settings[key] * settings["steps"] / PRESETS[name]["steps"])
                settings[key] = max(scaled, 1 if key in _SCALED_TO_AT_LEAST_1 else 0)
    return from_settings(settings)


# What a resumed run may change.
# Data may have been moved: that its tokens are the same is checked when it is read.
_RESUMABLE = frozenset({"steps", "data", "recompute", "deterministic"}) | {
    name for name, description in _FIELDS.items() if description.metadata["section"] == "Reports"
}


def with_overrides(config: TrainConfig, overrides: Iterable[str]) -> TrainConfig:
    """Return valid settings with ``key=value`` overrides applied.

    Raises
    ------
    UsageError
        As :func:`resolve`.
    """
    changed = dataclasses.replace(config, **dict(map(parse_override, overrides)))
    changed.validate()
    return changed


def require_target_density(name: str, density: float) -> None:
    """Refuse what is no part of the weights that could be left.

    Raises
    ------
    UsageError
        One line that begins with ``name``.
    """
    if not 0 < density <= 1:
        raise UsageError(f"{name}={density} given, a number above 0 and at most 1 wanted")


def require_bpe_vocab_size(size: int) -> None:
    """Refuse a number of token ids that no byte-pair encoding is trained to.

    Raises
    ------
    UsageError
    """
    if size <= BYTE_VOCAB_SIZE:
        raise UsageError(
            f"bpe_vocab_size={shown(size)} given, more than {BYTE_VOCAB_SIZE} wanted: "
            f"every byte has an id of its own, so that any text can be encoded"
        )
    if size > LARGEST_BPE_VOCAB_SIZE:
        raise UsageError(
            f"bpe_vocab_size={shown(size)} given, at most {LARGEST_BPE_VOCAB_SIZE} wanted"
        )


def require_resumable(recorded: TrainConfig, config: TrainConfig) -> None:
    """Refuse to resume a run with settings that it was not begun with.

    Raises
    ------
    UsageError
    """
    recorded, config = recorded.filled_in(), config.filled_in()
    for name in _FIELDS:
        before, now = getattr(recorded, name), getattr(config, name)
        if now != before and name not in _RESUMABLE:
            raise UsageError(
                f"{name}={now!r} given to resume a run with {name}={before!r}; "
                f"leave it as it was, or start a new run"
            )


def from_settings(settings: Mapping[str, Any]) -> TrainConfig:
    """Return valid settings from a table of fields; those not named keep their defaults.

    Raises
    ------
    UsageError
        An unknown key, or a value of the wrong type or range.
    """
    for key in settings:
        _require_known(key)
    values = {key: _require_type(key, value) for key, value in settings.items()}
    config = TrainConfig(**values)
    config.validate()
    return config


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a flat table of settings; keys and types are checked, ranges are not.

    Raises
    ------
    TwellError
        If the file is missing, unreadable or not TOML.
    UsageError
        An unknown key, or a value of the wrong type.
    """
    file = Path(path)
    try:
        # Some editors begin a file with a byte order mark, which TOML does not have.
        table = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise TwellError(f"no config file {file}; give the path of a TOML file") from None
    except OSError as error:
        raise TwellError(
            f"cannot read config file {file}: {error.strerror or error}; "
            f"give a TOML file that can be read"
        ) from error
    except (ValueError, RecursionError) as error:
        # Beside what is not TOML: a number of thousands of digits, and what is nested too deeply.
        raise TwellError(
            f"{file} is not a TOML file ({error}); lines like 'steps = 1000' are wanted"
        ) from error
    for key, value in table.items():
        if isinstance(value, dict) and key not in _FIELDS:
            raise UsageError(
                f"section [{key}] given in {file}, but settings have no sections; "
                f"write them as 'key = value' above any section"
            )
        _require_known(key)
    return {key: _require_type(key, value) for key, value in table.items()}


def parse_override(text: str) -> tuple[str, Any]:
    """Split ``"key=value"`` and give the value its setting's type.

    Raises
    ------
    UsageError
        If there is no ``=``, the key is unknown, or the value is not of its type.
    """
    key, equals, written = text.partition("=")
    key, written = key.strip(), written.strip()
    if not equals:
        raise UsageError(f"{shown(text)} given, key=value wanted, as in steps=1000")
    _require_known(key)
    if _FIELDS[key].type is str:
        return key, _unquoted(written)
    try:
        value = _toml_value_of(written)
    except ValueError:
        value = written
    return key, _require_type(key, value)


def _toml_value_of(written: str) -> Any:
    """Return a value written as in TOML; what is not TOML is a ValueError."""
    try:
        table = tomllib.loads(f"value = {written}")
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if table.keys() != {"value"}:
        raise UsageError(
            f"{shown(written)} given as one value, but it holds more settings; "
            f"give each a --set of its own"
        )
    return table["value"]


def _unquoted(written: str) -> str:
    if written[:1] in ("'", '"'):
        try:
            return str(_toml_value_of(written))
        except ValueError:
            return written
    return written


def _require_known(key: str) -> None:
    if key not in _FIELDS:
        raise UsageError(_unknown("setting", key, _FIELDS))


def _unknown_preset(given: str) -> str:
    trained = {name: preset for name, preset in PRESETS.items() if name != SPARSIFY}
    return _unknown("preset", given, trained)


def _unknown(kind: str, given: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(given, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return f"no {kind} is called {shown(given)}; {hint}"


def _require_type(key: str, value: Any) -> Any:
    """Return ``value`` as its field's type; a whole number will do for a float."""
    wanted: Any = _FIELDS[key].type
    if isinstance(value, int) and value not in _WHOLE_NUMBERS:
        raise UsageError(f"{key}={shown(value)} given, a number that fits 64 bits wanted")
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not wanted:
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
        raise UsageError(f"{key}={shown(value)} given, {words[wanted]} wanted")
    if wanted is float and not math.isfinite(value):
        raise UsageError(f"{key}={value!r} given, a finite number wanted")
    return value


def _is_unicode(text: str) -> bool:
    """Say whether UTF-8 can hold the text: undecodable command-line bytes become what it cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _toml_value(value: bool | int | float | str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped as well.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    # repr gives the shortest digits that read back equal; TOML reads both 1e-05 and 0.1.
    return repr(value)
