"""A training run from beginning to end: what happens when."""

import dataclasses
import math
import os
import shlex
import time
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from twell_numba.device import single_threaded_blas
from twell_numba.device.memory import peak_memory
from twell_numba.errors import TwellError, UsageError
from twell_numba.infer.evaluate import Evaluation, evaluate
from twell_numba.infer.generate import generate
from twell_numba.layers.loss import cross_entropy_loss
from twell_numba.models.cache import KVCache
from twell_numba.models.tokenizer import ByteTokenizer, TextTokenizer
from twell_numba.models.transformer import Transformer
from twell_numba.train.batches import validation_windows
from twell_numba.train.checkpoints import (
    CLOCK_NAMES,
    load_checkpoint_model,
    read_state,
    restore,
    settings_of,
    write_checkpoint,
)
from twell_numba.train.config import TrainConfig, require_resumable
from twell_numba.train.corpus import TokenCorpus, absolute_source, load_text, tokenize
from twell_numba.train.failure import Diverged, StepFailed
from twell_numba.train.ffn_paths import paths_undisturbed, possible_paths
from twell_numba.train.freezing import slowness, thinned_copy
from twell_numba.train.interrupt import Interrupted, InterruptFlag
from twell_numba.train.prepared import SUFFIX, open_prepared, require_same_tokenizer
from twell_numba.train.report import Reporter, before_table, reporter_for
from twell_numba.train.run_folder import RunFolder
from twell_numba.train.sparsify import evaluate_initial_model, load_initial_model
from twell_numba.train.sparsity import StepStatistics
from twell_numba.train.tokenizer import make_tokenizer
from twell_numba.train.trainer import StepResult, Trainer, compute_dtype
from twell_numba.train.weight_sparsity import weight_statistics

SAMPLE_TEMPERATURE = 0.8
# One for each kernel that a prompt may take with sparse weights, by its length.
PROMPT_LENGTHS = (1, 2, 32, 128)
# Recent steps that the time left is estimated from: sparse steps get faster as training goes on.
_RECENT_STEPS = 100


def train(
    config: TrainConfig | None,
    run_folder: str | os.PathLike[str],
    resume: bool = False,
    report: Reporter | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Train a model into a run folder.

    Parameters
    ----------
    config : TrainConfig or None
        None, in a resumed run, stands for the run's own settings. Of those, the number of steps,
        the place of the data and what concerns reports may be changed; the run's ``config.toml``
        then follows. All others must be those that the checkpoint was trained with.
    run_folder : path
        Must be new, or with ``resume`` hold a run with a checkpoint.
    resume : bool
        Go on from the newest checkpoint, as if the run had never stopped: the same weights,
        optimizer moments, batches and random numbers, bit for bit.
    report : Reporter, optional
        Default: progress on stderr. ``Reporter()`` shows nothing.
    device : str
        ``cpu``, or a GPU: ``cuda`` or ``cuda:N``. A run may go on elsewhere than it began; bit for
        bit the same it is only where it began.

    Returns
    -------
    dict
        What is written to ``summary.json``.

    Raises
    ------
    TwellError
        If the data, the settings or the folder cannot be used, another process is training the run,
        a number is no longer finite, or a feedforward weight is left without an entry.
    Interrupted
        After a Ctrl-C, SIGTERM or SIGHUP, once the step is finished and saved.
    """
    run = RunFolder(run_folder)
    if resume:
        run.require()
        config = config or run.read_config()
    elif config is None:
        raise UsageError("no settings given, a TrainConfig wanted for a new run")
    else:
        run.require_new()
    config.validate()
    # Absolute, so that the run can be resumed from another directory.
    config = dataclasses.replace(config.filled_in(), data=absolute_source(config.data))
    with single_threaded_blas(), _overflow_unannounced(), report or reporter_for() as reporter:
        return _Run(config, run, reporter, device).execute(resume)


class _Run:
    """One session of a run: from its start, or from a checkpoint, to its end."""

    def __init__(
        self, config: TrainConfig, run: RunFolder, reporter: Reporter, device: str
    ) -> None:
        # Opened first: what is missing for a GPU is said before data is prepared.
        self.stream = None if device == "cpu" else _open_gpu(device, config)
        self.config = config
        self.run = run
        self.reporter = reporter
        self.started = time.monotonic()
        self.saved_step: int | None = None
        # Without this session's wall time, which is added when it is asked for.
        self.clocks = dict.fromkeys(CLOCK_NAMES, 0.0)
        self.recent_ends: deque[float] = deque(maxlen=_RECENT_STEPS)
        self.unlogged_tokens = 0
        self.unlogged_seconds = 0.0

    def execute(self, resume: bool) -> dict[str, Any]:
        return self._resume() if resume else self._start()

    def _start(self) -> dict[str, Any]:
        self._begin()
        self._compile()
        before = self._measure_before() if self.config.initial_model else None
        # Only now is the folder made, so that a run that cannot start leaves none.
        with InterruptFlag() as interrupt, self.run.new(self.config), self.run.lock():
            if before is not None:
                self.run.write_before(before)
            return self._train(interrupt)

    def _resume(self) -> dict[str, Any]:
        with self.run.lock():
            self._load()
            self._compile()
            with InterruptFlag() as interrupt:
                self._reopen_folder()
                return self._train(interrupt)

    def _train(self, interrupt: InterruptFlag) -> dict[str, Any]:
        try:
            evaluation = self._take_steps(interrupt)
        except StepFailed as error:
            raise self._with_advice(error) from None
        return self._finish(evaluation)

    def _begin(self) -> None:
        is_prepared = Path(self.config.data).suffix == SUFFIX
        if self.config.tokenizer == "bpe" and not is_prepared:
            self.reporter.note(f"preparing {self.config.data} with a bpe tokenizer ...")
        model = tokenizer = None
        if self.config.initial_model:
            self.reporter.note(f"reading {self.config.initial_model} and {self.config.data} ...")
            model, tokenizer = load_initial_model(self.config)
        self.corpus = load_corpus(self.config, tokenizer)
        self._note_other_tokenizer()
        self._prepare_validation()
        self.trainer = Trainer(self.config, self.corpus, model)
        self._move_to_device()
        self._report_start()

    def _note_other_tokenizer(self) -> None:
        """Say where prepared data has another tokenizer than the settings ask for."""
        asked, has = self.config.tokenizer, self.corpus.tokenizer
        if asked != "model" and (asked == "byte") != isinstance(has, ByteTokenizer):
            self.reporter.note(
                f"{self.config.data} was prepared with a tokenizer of {has.vocab_size} tokens, "
                f"which is used; tokenizer={asked} is not"
            )

    def _load(self) -> None:
        step, checkpoint = self.run.latest_checkpoint()
        state = read_state(checkpoint, step)
        self._require_settings(settings_of(checkpoint, state))
        if step >= self.config.steps:
            raise TwellError(
                f"{self.run.path} has finished {step} steps of {self.config.steps} wanted; "
                f"to train on, set more steps than {step}, or start a new run"
            )
        model, tokenizer = load_checkpoint_model(checkpoint, self.config, step, state)
        self.corpus = load_corpus(self.config, tokenizer)
        self._prepare_validation()
        self.trainer = Trainer(self.config, self.corpus, model)
        self.clocks = restore(checkpoint, state, self.trainer, self.corpus)
        self.saved_step = step
        self._move_to_device()
        self._report_start()

    def _measure_before(self) -> dict[str, Evaluation]:
        """Measure the model that the run goes on from, as it was and with the run's activation."""
        self.reporter.note("measuring the model before training ...")
        model = self.trainer.model
        source = evaluate_initial_model(self.config, self.windows, model.dtype, model.device)
        before = {"source": source, "switched": self._evaluate()}
        for title, text in before_table(before):
            self.reporter.note(f"{title}: {text}")
        return before

    def _move_to_device(self) -> None:
        if self.stream is not None:
            self.trainer.move_to_gpu(self.stream)
        elif self.config.precision == "bfloat16":
            self.reporter.note("precision=bfloat16 is for GPUs; the CPU computes in float32")

    def _require_settings(self, trained_with: TrainConfig) -> None:
        try:
            require_resumable(trained_with, self.config)
        except UsageError as error:
            raise UsageError(
                f"{error} (settings come from {self.run.config_path}, then from --set)"
            ) from None

    def _reopen_folder(self) -> None:
        """Take back what the run had written after its checkpoint; it is written anew."""
        self.run.remove_leftovers()
        self.run.forget_metrics_after(self.trainer.step_count)
        self.run.summary_path.unlink(missing_ok=True)
        self.run.write_config(self.config)

    def _prepare_validation(self) -> None:
        config = self.config
        self.windows = validation_windows(
            self.corpus.validation, config.context_length, config.eval_batches * config.batch_size
        )
        prompt_length = len(self.corpus.tokenizer.encode(config.sample_prompt))
        if config.sample_interval and prompt_length > config.context_length:
            raise UsageError(
                f"sample_prompt of {prompt_length} tokens given, at most context_length = "
                f"{config.context_length} wanted"
            )

    def _report_start(self) -> None:
        corpus, config = self.corpus, self.config
        model_config = self.trainer.model.config
        facts = {
            "Corpus": f"{corpus.name}: {corpus.files:,} files, {corpus.byte_count:,} bytes; "
            f"{len(corpus.training):,} training and {len(corpus.validation):,} held-out tokens, "
            f"vocabulary {corpus.tokenizer.vocab_size:,}",
            "Parameters": f"{model_config.parameter_count():,}",
            "Device": self._describe_device(),
            "Batch": f"{config.tokens_per_step:,} tokens a step, "
            f"{config.tokens_per_step * config.steps:,} in all",
            "Run folder": str(self.run.path),
        }
        if self.trainer.step_count:
            facts["Resumed"] = f"after step {self.trainer.step_count:,}"
        self.reporter.start(config, facts)

    def _describe_device(self) -> str:
        if self.stream is None:
            return "cpu"
        gpu = self.stream.gpu
        return f"{self.trainer.model.device} ({gpu.name}), {self.trainer.model.dtype}"

    def _compile(self) -> None:
        self.reporter.compiling()
        begin = time.monotonic()
        trainer, config = self.trainer, self.config
        if trainer.recorded is not None:
            trainer.recorded.compile()
            self.reporter.compiled(time.monotonic() - begin)
            return
        with paths_undisturbed(trainer.model):
            compile_kernels(trainer.model, self.windows[0])
        trainer.optimizer.compile()
        if trainer.model.weight_format == "dense":
            trainer.weight_sparsity.compile(trainer.model.dtype)
        if config.sparse_from:
            compile_sparse_path(
                trainer.model,
                config.sparse_format,
                config.block_size,
                config.batch_size * config.context_length,
            )
        self.reporter.compiled(time.monotonic() - begin)

    def _take_steps(self, interrupt: InterruptFlag) -> Evaluation:
        """Train to the last step and return the evaluation made there."""
        evaluation = None
        while self.trainer.step_count < self.config.steps:
            result = self._timed_step()
            step = self.trainer.step_count
            is_last = step == self.config.steps
            if step == self.config.sparse_from and (line := slowness(self.trainer.model)):
                self.reporter.note(line)
            evaluation = None
            if is_last or _is_due(step, self.config.eval_interval):
                evaluation = self._evaluate()
            if evaluation or step == 1 or _is_due(step, self.config.log_interval):
                self._log(result, evaluation)
            self.reporter.step(step, self._seconds_left())
            if self.config.sample_interval and (
                is_last or _is_due(step, self.config.sample_interval)
            ):
                self._sample()
            if is_last or interrupt.is_set or _is_due(step, self.config.checkpoint_interval):
                self._save()
            if interrupt.signal_number is not None and not is_last:
                command = "sparsify" if self.config.initial_model else "train"
                raise Interrupted(
                    f"stopped after step {step} of {self.config.steps} and saved; go on with: "
                    f"twell {command} --resume {shlex.quote(str(self.run.path))}",
                    interrupt.signal_number,
                )
        assert evaluation is not None
        return evaluation

    def _timed_step(self) -> StepResult:
        begin = time.monotonic()
        result = self.trainer.take_step()
        end = time.monotonic()
        # A session's first step is slower than the rest: memory is touched for the first time.
        if self.recent_ends:
            self.unlogged_tokens += self.config.tokens_per_step
            self.unlogged_seconds += end - begin
            self.clocks["timed_tokens"] += self.config.tokens_per_step
            self.clocks["timed_seconds"] += end - begin
        self.recent_ends.append(end)
        return result

    def _seconds_left(self) -> float | None:
        if len(self.recent_ends) < 2:
            return None
        seconds = self.recent_ends[-1] - self.recent_ends[0]
        left = self.config.steps - self.trainer.step_count
        return left * seconds / (len(self.recent_ends) - 1)

    def _evaluate(self) -> Evaluation:
        with paths_undisturbed(self.trainer.model):
            evaluation = evaluate(
                self.trainer.model, self.windows, self.corpus.tokenizer, self.config.batch_size
            )
        if not math.isfinite(evaluation["loss"]):
            self.trainer.require_finite_state()
            raise Diverged(f"step {self.trainer.step_count}: the validation loss is not finite")
        return evaluation

    def _log(self, result: StepResult, evaluation: Evaluation | None) -> None:
        speed = self.unlogged_tokens / self.unlogged_seconds if self.unlogged_seconds else None
        self.unlogged_tokens, self.unlogged_seconds = 0, 0.0
        row: dict[str, Any] = {
            "step": self.trainer.step_count,
            "tokens": self.trainer.token_count,
            "loss": result.loss,
            "l1_loss": result.l1_loss,
            "gradient_norm": result.gradient_norm,
            "learning_rate": result.learning_rate,
            "l1_strength": result.l1_strength,
            "weight_l1_strength": result.weight_l1_strength,
            "tokens_per_second": speed,
            "activation_sparsity": result.statistics.activation_sparsity(),
            "nonzeros_per_token": result.statistics.nonzeros_per_token(),
            "dead_neuron_fraction": self.trainer.dead_neurons.fraction(),
            "ffn_paths": result.statistics.paths,
            "seconds_by_part": result.seconds_by_part,
            "peak_memory_bytes": self._peak_memory(),
            **weight_statistics(self.trainer.model, self.config.weight_block_size),
        }
        if evaluation is not None:
            row["validation_loss"] = evaluation["loss"]
        self.run.append_metrics(row)
        self.reporter.metrics(row, self._seconds_left())

    def _sample(self) -> None:
        """Have the model write, from a seed of the step's own, so that it disturbs nothing."""
        self.trainer.require_finite_state()
        step = self.trainer.step_count
        with paths_undisturbed(self.trainer.model):
            pieces = generate(
                self.trainer.model,
                self.corpus.tokenizer,
                self.config.sample_prompt,
                max_new_tokens=self.config.sample_tokens,
                temperature=SAMPLE_TEMPERATURE,
                seed=self.config.seed + step,
            )
            text = self.config.sample_prompt + "".join(pieces)
        self.run.write_sample(step, text)
        self.reporter.sample(step, text)

    def _save(self) -> None:
        step = self.trainer.step_count
        self.trainer.require_finite_state()
        clocks = self.clocks | {"seconds": self._total_seconds()}
        with self.run.new_checkpoint(step, self.config.keep_checkpoints) as folder:
            write_checkpoint(folder, self.trainer, self.corpus, clocks)
        self.saved_step = step

    def _peak_memory(self) -> int | None:
        """Return the most memory used at once, of the GPU or else by this process."""
        return peak_memory() if self.stream is None else self.stream.gpu.memory.peak()

    def _total_seconds(self) -> float:
        return self.clocks["seconds"] + time.monotonic() - self.started

    def _with_advice(self, error: StepFailed) -> TwellError:
        if self.saved_step is None:
            kept = "no checkpoint had been saved yet"
        else:
            kept = f"the last good checkpoint is {self.run.checkpoint_path(self.saved_step)}"
        return TwellError(f"{error}; {kept}; {error.advice}")

    def _finish(self, evaluation: Evaluation) -> dict[str, Any]:
        timed_seconds = self.clocks["timed_seconds"]
        summary: dict[str, Any] = {
            **evaluation,
            "steps": self.trainer.step_count,
            "tokens": self.trainer.token_count,
            "tokens_per_second": (
                self.clocks["timed_tokens"] / timed_seconds if timed_seconds else None
            ),
            "seconds": self._total_seconds(),
            "device": self.trainer.model.device,
            "seed": self.config.seed,
        }
        if self.config.initial_model:
            summary["before"] = self.run.read_before()
        self.run.write_summary(summary)
        return summary


def _open_gpu(device: str, config: TrainConfig) -> Any:
    from twell_numba.device.gpu import choose, determinism

    if config.activation == "relu2" and config.ffn_path == "twell":
        raise UsageError(
            "ffn_path=twell given with activation=relu2 on a GPU, auto or dense wanted, or the CPU"
        )
    gpu = choose(device)
    compute_dtype(config, gpu)
    determinism.require(config.deterministic)
    return gpu.stream


def load_corpus(config: TrainConfig, tokenizer: TextTokenizer | None = None) -> TokenCorpus:
    """Return the tokens of ``config.data``.

    Parameters
    ----------
    config : TrainConfig
    tokenizer : optional
        The one a resumed run was begun with, or that of the model it goes on from; otherwise one is
        made as the settings say.

    Raises
    ------
    TwellError
        If the data cannot be used.
    """
    if Path(config.data).suffix == SUFFIX:
        corpus = open_prepared(config.data)
        if not config.initial_model or tokenizer is None:
            return corpus
        require_same_tokenizer(config.data, corpus, tokenizer)
        # The model's own also knows its chat template.
        return dataclasses.replace(corpus, tokenizer=tokenizer)
    text = load_text(config.data)
    tokenizer = tokenizer or make_tokenizer(config.tokenizer, text, config.bpe_vocab_size)
    return tokenize(text, tokenizer)


def compile_kernels(model: Transformer, window: np.ndarray) -> None:
    """Compile, or load from the disk, what training and sampling will run.

    Every path that a layer may take later is gone through, so that no step stops to compile. Adds
    into gradients; changes no weight.

    Parameters
    ----------
    model : Transformer
    window : ndarray of integers, shape (S + 1,)
        As long as in training: kernels may differ by length.
    """
    chosen = model.ffn_path
    tokens = window[None, :]
    for path in possible_paths(model):
        model.ffn_path = path
        logits, backprop = model(tokens[:, :-1], l1_scale=1.0)
        _, dlogits = cross_entropy_loss(logits, tokens[:, 1:].ravel())
        backprop(dlogits)
        StepStatistics(model.config.n_layers, model.config.d_ffn).add(
            [ffn.statistics for ffn in model.ffn_layers]
        )
        # A single token, as in a sample, may take kernels of its own.
        model.step(tokens[:, :1], KVCache(model.config, 1, 1, model.dtype))
    model.ffn_path = chosen


def compile_sparse_path(
    model: Transformer, weight_format: str, block_size: int, tokens: int
) -> None:
    """Compile, or load from the disk, what runs once the zeros of the weights are frozen.

    Changes nothing of the model.

    Parameters
    ----------
    model : Transformer
    weight_format : {"csr", "block_ell"}
    block_size : int
        b of ``block_ell``.
    tokens : int
        M, the tokens of a forward pass.
    """
    layer = thinned_copy(model.ffn_layers[0])
    layer.hold_weights(weight_format, block_size)
    # Prompts of samples have fewer tokens, for which there are kernels of their own.
    for count in (tokens, *(number for number in PROMPT_LENGTHS if number < tokens)):
        y, backprop = layer(np.ones((count, model.config.d_model), model.dtype), l1_scale=1.0)
        if count == tokens:
            backprop(y)
        _ = layer.statistics


@contextmanager
def _overflow_unannounced() -> Iterator[None]:
    """Keep NumPy from warning of what this loop checks for, and reports in a line of its own.

    Not ``numpy.errstate``, which does not reach the threads that share the work.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* encountered in ", RuntimeWarning)
        yield


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
