"""One training step, and everything that changes from step to step.

A step in order: draw windows; for each micro-batch forward, loss, backward; clip; AdamW; count
which neurons fired; revive dead ones; make feedforward weights zero; freeze these zeros.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from twell_numba.device.arrays import to_host
from twell_numba.errors import TwellError, UsageError, shown
from twell_numba.kernels.revival import revive_rows
from twell_numba.layers.ffn import AutoState
from twell_numba.layers.loss import cross_entropy_loss
from twell_numba.models.tokenizer import TextTokenizer
from twell_numba.models.transformer import Transformer
from twell_numba.train.batches import BatchSampler
from twell_numba.train.config import TrainConfig
from twell_numba.train.corpus import TokenCorpus
from twell_numba.train.failure import Diverged
from twell_numba.train.freezing import freeze_zeros
from twell_numba.train.learned_patterns import PatternOnHost, put_patterns, take_patterns
from twell_numba.train.measured import Measured
from twell_numba.train.optimizer import AdamW, clip_scale
from twell_numba.train.schedule import l1_strength, learning_rate
from twell_numba.train.sparsity import DeadNeurons, StepStatistics, l1_scale, revive_dead
from twell_numba.train.weight_sparsity import WeightSparsity

if TYPE_CHECKING:
    from twell_numba.train.recorded_step import Batch, RecordedStep

FIRST_WITH_BFLOAT16 = (8, 0)
SMALLEST_BFLOAT16_WIDTH = 512


@dataclass(frozen=True)
class StepResult:
    """What one step measured.

    Attributes
    ----------
    loss : float
        Mean cross entropy of the step's tokens.
    l1_loss : float
        The L1 term, strength included.
    gradient_norm : float
        Before clipping.
    learning_rate, l1_strength, weight_l1_strength : float
        As used in this step.
    statistics : StepStatistics
    seconds_by_part : dict
        See :class:`~twell_numba.train.measured.Measured`.
    """

    loss: float
    l1_loss: float
    gradient_norm: float
    learning_rate: float
    l1_strength: float
    weight_l1_strength: float
    statistics: StepStatistics
    seconds_by_part: dict[str, float]


class Trainer:
    """The state of a training run: model, optimizer, position in the data, sparsity.

    Parameters
    ----------
    config : TrainConfig
    corpus : TokenCorpus
    model : Transformer, optional
        Changed in place by training; drawn from the seed if not given.

    Attributes
    ----------
    step_count, token_count : int
        Steps taken, and tokens trained on.
    """

    def __init__(
        self, config: TrainConfig, corpus: TokenCorpus, model: Transformer | None = None
    ) -> None:
        self.config = config
        self.tokenizer: TextTokenizer = corpus.tokenizer
        # A generator for each use, so that one's draws never shift another's.
        initial, sampling, revival = np.random.SeedSequence(config.seed).spawn(3)
        self.model = model or Transformer(
            config.model_config(corpus.tokenizer.vocab_size),
            np.random.default_rng(initial),
            ffn_path=config.ffn_path,
        )
        self.parameters = self.model.parameters()
        self.optimizer = AdamW(
            self.parameters,
            beta1=config.beta1,
            beta2=config.beta2,
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
        )
        self.sampler = BatchSampler(
            corpus.training, config.context_length, np.random.default_rng(sampling)
        )
        self.dead_neurons = DeadNeurons(config.n_layers, config.d_ffn, config.dead_neuron_window)
        self._revival_rng = np.random.default_rng(revival)
        self.weight_sparsity = WeightSparsity(config)
        self.recorded: RecordedStep | None = None
        # Of a checkpoint, until the model is on a GPU.
        self._patterns: dict[int, PatternOnHost] = {}
        self._stream: Any = None

    @property
    def step_count(self) -> int:
        """Steps taken."""
        return self.optimizer.step_count

    @property
    def token_count(self) -> int:
        """Tokens trained on."""
        return self.step_count * self.config.tokens_per_step

    def take_step(self) -> StepResult:
        """Train on one batch.

        Raises
        ------
        Diverged
            If the loss or the gradient is not finite; weights and moments are then as before.
        StepFailed
            If an FFN weight would be left without an entry.
        """
        config = self.config
        step = self.step_count + 1
        strength, rate = self._l1_strength(step), self._learning_rate(step)
        windows = self.sampler.draw(self._windows_per_step)
        self._require_known_tokens(windows)
        scale = self._l1_scale(step)
        take = self._take_on_cpu if self.recorded is None else self._take_on_gpu
        measured = take(step, windows, scale, rate)
        statistics = measured.statistics
        l1_loss = scale * float(statistics.absolute_sum.sum())

        self.dead_neurons.add_step(statistics.fired)
        if config.revive_dead and self.dead_neurons.window_is_full():
            self._revive_dead()
        weight_strength = self._make_weights_sparse(step, rate)
        return StepResult(
            measured.loss,
            l1_loss,
            measured.gradient_norm,
            rate,
            strength,
            weight_strength,
            statistics,
            measured.seconds_by_part,
        )

    def move_to_gpu(self, stream: Any) -> None:
        """Take all further steps on a GPU, where weights and moments go.

        Parameters
        ----------
        stream : twell_numba.device.gpu.Stream

        Raises
        ------
        UsageError
            If the GPU cannot compute in the precision that is set.
        """
        from twell_numba.train.recorded_step import RecordedStep

        dtype = compute_dtype(self.config, stream.gpu)
        self._stream = stream
        self.recorded = RecordedStep(self.model, self.optimizer, self.config, stream, dtype)
        put_patterns(self.model, self._patterns, stream)
        self._patterns = {}

    @property
    def _windows_per_step(self) -> int:
        return self.config.gradient_accumulation * self.config.batch_size

    def _l1_strength(self, step: int) -> float:
        config = self.config
        return l1_strength(step, strength=config.l1_activation, warmup_steps=config.l1_warmup_steps)

    def _l1_scale(self, step: int) -> float:
        config = self.config
        return l1_scale(self._l1_strength(step), config.n_layers, config.tokens_per_step)

    def _learning_rate(self, step: int) -> float:
        config = self.config
        return learning_rate(
            step,
            peak=config.learning_rate,
            warmup_steps=config.warmup_steps,
            total_steps=config.steps,
            minimum_fraction=config.minimum_learning_rate_fraction,
        )

    def require_finite_state(self) -> None:
        """Check weights and optimizer moments, before they are saved.

        Raises
        ------
        Diverged
        """
        bad = self._first_bad_weight()
        if bad is not None:
            raise Diverged(f"step {self.step_count}: weights are not finite, first in {bad}")
        for name, moment in self.optimizer.state_arrays().items():
            if not np.isfinite(moment).all():
                raise Diverged(f"step {self.step_count}: optimizer state {name} is not finite")

    def state_dict(self) -> dict[str, Any]:
        """Return what a step depends on beside weights and moments, in values JSON can hold."""
        controller = self.weight_sparsity.controller
        return {
            "step": self.step_count,
            "tokens": self.token_count,
            "sampler": self.sampler.state_dict(),
            "revival": self._revival_rng.bit_generator.state,
            "dead_neurons": self.dead_neurons.state_dict(),
            # What each layer's path and kernels go by, with what it has learned: others would
            # round differently.
            "ffn_auto": [_saved_state(ffn.auto_state) for ffn in self.model.ffn_layers],
            "weight_l1_strength": controller.strength if controller else None,
        }

    def load_state(self, state: dict[str, Any], moments: dict[str, np.ndarray]) -> None:
        """Go on from a :meth:`state_dict` and the optimizer's arrays.

        Raises
        ------
        ArithmeticError, LookupError, TypeError, ValueError
            If the state is damaged.
        TwellError
            If the moments belong to another model.
        """
        moments = dict(moments)
        self._patterns = take_patterns(moments, self.model)
        self.optimizer.load_state_arrays(moments, state["step"])
        with _part_of(state, "sampler") as sampler:
            self.sampler.load_state_dict(sampler)
        with _part_of(state, "revival") as revival:
            self._revival_rng.bit_generator.state = revival
        with _part_of(state, "dead_neurons") as dead_neurons:
            self.dead_neurons.load_state_dict(dead_neurons)
        with _part_of(state, "ffn_auto") as auto_states:
            saved_states = zip(self.model.ffn_layers, auto_states, strict=True)
            for layer, (ffn, auto_state) in enumerate(saved_states):
                ffn.auto_state = _auto_state(auto_state, has_pattern=layer in self._patterns)
        if self.weight_sparsity.controller is not None:
            with _part_of(state, "weight_l1_strength") as strength:
                self.weight_sparsity.controller.restore(strength)
        if self.dead_neurons.step != self.step_count:
            raise ValueError(f"dead_neurons is of step {self.dead_neurons.step}")
        # A generator may round or wrap what it cannot hold.
        loaded = self.state_dict()
        for name in ("tokens", "sampler", "revival", "weight_l1_strength"):
            if loaded[name] != state[name]:
                raise ValueError(f"{name} is not what a run of these settings saves")

    def _take_on_cpu(
        self, step: int, windows: np.ndarray, scale: float, learning_rate: float
    ) -> Measured:
        """Add up loss and gradients of the micro-batches of a step, and change the weights.

        Every micro-batch divides by the tokens of the whole step, so the sums are the mean over all
        tokens, in whatever parts they come.
        """
        config = self.config
        statistics = StepStatistics(config.n_layers, config.d_ffn)
        seconds = dict.fromkeys(("forward", "backward", "optimizer"), 0.0)
        loss = 0.0
        self.optimizer.zero_grad()
        for micro_batch in np.split(windows, config.gradient_accumulation):
            with _timed(seconds, "forward"):
                logits, backprop = self.model(micro_batch[:, :-1], scale, config.recompute)
                targets = micro_batch[:, 1:].ravel()
                losses, dlogits = cross_entropy_loss(logits, targets, config.tokens_per_step)
                statistics.add([ffn.statistics for ffn in self.model.ffn_layers])
                loss += float(losses.sum(dtype=np.float64)) / config.tokens_per_step
                self._require_finite_loss(step, loss, scale, statistics)
            with _timed(seconds, "backward"):
                backprop(dlogits)
        with _timed(seconds, "optimizer"):
            norm = self.optimizer.gradient_norm()
            self._require_finite_gradient(step, norm, loss, scale, statistics)
            self.optimizer.step(learning_rate, clip_scale(norm, config.gradient_clip))
        return Measured(loss, norm, statistics, seconds)

    def _take_on_gpu(
        self, step: int, windows: np.ndarray, scale: float, learning_rate: float
    ) -> Measured:
        """Do the same on a GPU, which leaves all as it was if something is not finite."""
        from twell_numba.train.recorded_step import Batch

        assert self.recorded is not None
        measured = self.recorded.take(
            Batch(windows, scale), learning_rate, partial(self._next_batch, step + 1)
        )
        loss, norm, statistics = measured.loss, measured.gradient_norm, measured.statistics
        self._require_finite_loss(step, loss, scale, statistics)
        if not math.isfinite(norm):
            self.recorded.compute_again(Batch(windows, scale))
        self._require_finite_gradient(step, norm, loss, scale, statistics)
        self.optimizer.step_count = step
        if self.model.ffn_path == "auto" and self.model.weight_format == "dense":
            for ffn, nonzeros, path in zip(
                self.model.ffn_layers,
                statistics.nonzeros_per_token(),
                statistics.paths,
                strict=True,
            ):
                ffn.auto_state = ffn.auto_state._replace(
                    density=nonzeros / self.config.d_ffn,
                    unmeasured_tokens=0,
                    took_twell=path == "twell",
                )
        return measured

    def _next_batch(self, step: int) -> "Batch | None":
        """Return what a later step will be taken with; None if weights are changed before it."""
        config = self.config
        is_changed = config.revive_dead or self.weight_sparsity.is_active
        if step > config.steps or is_changed and self.model.weight_format == "dense":
            return None
        from twell_numba.train.recorded_step import Batch

        windows = self.sampler.peek(self._windows_per_step)
        if windows.max() >= self.model.config.vocab_size:
            return None
        return Batch(windows, self._l1_scale(step))

    def _make_weights_sparse(self, step: int, learning_rate: float) -> float:
        """Take the proximal step, unless zeros are frozen; return its strength."""
        if self.model.weight_format != "dense":
            return 0.0
        strength = self.weight_sparsity.after_step(step, learning_rate, self.model.ffn_parameters)
        if self.recorded is not None and self.weight_sparsity.is_active:
            self.recorded.flat.refresh_copy()
        if step == self.config.sparse_from:
            self._freeze_zeros()
        return strength

    def _freeze_zeros(self) -> None:
        """Hold what is left of the weights in a sparse format, made in the host's memory."""
        if self.recorded is not None:
            self.recorded.release()
        freeze_zeros(self.model, self.optimizer, self.config.sparse_format, self.config.block_size)
        self.parameters = self.model.parameters()
        if self.recorded is not None:
            self.move_to_gpu(self._stream)

    def _revive_dead(self) -> None:
        from twell_numba.device.gpu import from_numpy

        matrix = "gate_proj" if self.config.ffn == "gated" else "up_proj"
        for layer, dead in enumerate(self.dead_neurons.dead()):
            name = f"model.layers.{layer}.mlp.{matrix}.weight"
            gate = self.parameters[name].value
            moments = (self.optimizer.first_moment[name], self.optimizer.second_moment[name])
            if self.recorded is None:
                revive_dead(gate, *moments, dead, self._revival_rng)
            else:
                seed = self.config.seed * self.config.n_layers + layer
                revive_rows(gate, *moments, from_numpy(dead, self._stream), seed, self.step_count)
        if self.recorded is not None:
            self.recorded.flat.refresh_copy()

    def _require_known_tokens(self, windows: np.ndarray) -> None:
        if windows.max() >= self.model.config.vocab_size:
            raise TwellError(
                f"token {windows.max()} found in the data, ids below the vocabulary's "
                f"{self.model.config.vocab_size} wanted; the data is damaged, prepare it again"
            )

    def _first_bad_weight(self) -> str | None:
        for name, parameter in self.parameters.items():
            if not np.isfinite(to_host(parameter.value)).all():
                return name
        return None

    def _require_finite_loss(
        self, step: int, loss: float, scale: float, statistics: StepStatistics
    ) -> None:
        l1_loss = scale * float(statistics.absolute_sum.sum())
        if not math.isfinite(loss + l1_loss):
            where = self._first_bad_activation(statistics, loss)
            message = f"step {step}: the loss is {loss + l1_loss}, {where}"
            raise self._diverged(message, loss, l1_loss)

    def _require_finite_gradient(
        self, step: int, norm: float, loss: float, scale: float, statistics: StepStatistics
    ) -> None:
        if not math.isfinite(norm):
            where = self._first_bad_gradient()
            l1_loss = scale * float(statistics.absolute_sum.sum())
            raise self._diverged(f"step {step}: the gradient is not finite, {where}", loss, l1_loss)

    def _diverged(self, message: str, loss: float, l1_loss: float) -> Diverged:
        """Advise to change what is behind the larger part of the loss."""
        l1_is_larger = math.isfinite(loss) and not l1_loss <= loss  # it may be NaN
        if self.config.l1_activation and l1_is_larger:
            return Diverged(message, "try a smaller l1_activation")
        return Diverged(message)

    def _first_bad_activation(self, statistics: StepStatistics, loss: float) -> str:
        bad = self._first_bad_weight()
        if bad is not None:
            return f"as weights in {bad} are not finite"
        for layer, absolute_sum in enumerate(statistics.absolute_sum):
            if not math.isfinite(absolute_sum):
                return f"first seen in the activations of model.layers.{layer}.mlp"
        return "first seen in the " + ("L1 term" if math.isfinite(loss) else "logits")

    def _first_bad_gradient(self) -> str:
        # The backward pass goes from the last parameter to the first, and takes what is not finite
        # with it: it began at the last one that is affected.
        for name, parameter in reversed(self.parameters.items()):
            if not np.isfinite(to_host(parameter.grad_buffer())).all():
                return f"first in {name}"
        return "though each parameter's is: their sum of squares overflows"


def compute_dtype(config: TrainConfig, gpu: Any) -> np.dtype:
    """Return the dtype in which a GPU computes a model.

    Parameters
    ----------
    config : TrainConfig
        At the precision ``auto``, only models of a certain width are computed in 16 bits: in
        smaller ones rounding costs more than it saves.
    gpu : twell_numba.device.gpu.GPU

    Raises
    ------
    UsageError
        If the precision is bfloat16, and the GPU is older than those that have it.
    """
    has_bfloat16 = gpu.capability >= FIRST_WITH_BFLOAT16
    if config.precision == "bfloat16" and not has_bfloat16:
        raise UsageError(
            f"precision=bfloat16 given for GPU {gpu.id} ({gpu.name}), which has none; "
            "precision=float32 or auto wanted"
        )
    is_wide = has_bfloat16 and config.d_model >= SMALLEST_BFLOAT16_WIDTH
    is_short = config.precision == "bfloat16" or (config.precision == "auto" and is_wide)
    return np.dtype(ml_dtypes.bfloat16 if is_short else np.float32)


@contextmanager
def _timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    seconds[part] += time.perf_counter() - begin


@contextmanager
def _part_of(state: dict[str, Any], name: str) -> Iterator[Any]:
    """Hand out a part of a checkpoint's state; what fails with it names the part and what it is."""
    part = state[name]
    try:
        yield part
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{name} is {shown(part)}, not what a run saves") from error


def _auto_state(saved: Any, *, has_pattern: bool) -> AutoState:
    """Return a layer's state as it was saved; older checkpoints hold the first two or four."""
    density, unmeasured_tokens, *sharing = saved
    is_learned, sharing_tokens, *limit = sharing or (False, None)
    densest, took_twell = limit or (0.0, False)
    if (
        not (density is None or _is_density(density))
        or not _is_count(unmeasured_tokens)
        or type(is_learned) is not bool
        or not (sharing_tokens is None or _is_count(sharing_tokens))
        or not _is_density(densest)
        or type(took_twell) is not bool
    ):
        raise ValueError(f"{saved!r} in ffn_auto")
    if is_learned and not (has_pattern and limit):
        sharing_tokens = None  # by what, or up to which density, is still to be measured
    return AutoState(density, unmeasured_tokens, None, sharing_tokens, densest, took_twell)


def _is_density(number: Any) -> bool:
    return type(number) in (int, float) and 0 <= number <= 1


def _is_count(number: Any) -> bool:
    return type(number) is int and number >= 0


def _saved_state(state: AutoState) -> list[Any]:
    """Return a layer's state in values JSON can hold; what it learned is among the arrays."""
    is_learned = state.learned is not None
    return [
        state.density, state.unmeasured_tokens, is_learned, state.sharing_tokens, state.densest,
        state.took_twell,
    ]  # fmt: skip
