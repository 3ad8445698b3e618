"""One training step, and everything that changes from step to step.

A step in order: draw windows; for each micro-batch forward, loss, backward; clip; AdamW; count
which neurons fired; revive dead ones; make feedforward weights zero; freeze these zeros.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from twell_numba.errors import TwellError
from twell_numba.layers.ffn import AutoState
from twell_numba.layers.loss import cross_entropy_loss
from twell_numba.models.tokenizer import TextTokenizer
from twell_numba.models.transformer import Transformer
from twell_numba.train.batches import BatchSampler
from twell_numba.train.config import TrainConfig
from twell_numba.train.corpus import TokenCorpus
from twell_numba.train.failure import Diverged
from twell_numba.train.freezing import freeze_zeros
from twell_numba.train.optimizer import AdamW, clip_scale
from twell_numba.train.schedule import l1_strength, learning_rate
from twell_numba.train.sparsity import DeadNeurons, StepStatistics, l1_scale, revive_dead
from twell_numba.train.weight_sparsity import WeightSparsity


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
    """

    loss: float
    l1_loss: float
    gradient_norm: float
    learning_rate: float
    l1_strength: float
    weight_l1_strength: float
    statistics: StepStatistics


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
        strength = l1_strength(
            step, strength=config.l1_activation, warmup_steps=config.l1_warmup_steps
        )
        rate = learning_rate(
            step,
            peak=config.learning_rate,
            warmup_steps=config.warmup_steps,
            total_steps=config.steps,
            minimum_fraction=config.minimum_learning_rate_fraction,
        )
        windows = self.sampler.draw(config.gradient_accumulation * config.batch_size)
        self._require_known_tokens(windows)
        loss, l1_loss, statistics = self._accumulate_gradients(step, windows, strength)

        norm = self.optimizer.gradient_norm()
        if not math.isfinite(norm):
            where = self._first_bad_gradient()
            raise self._diverged(f"step {step}: the gradient is not finite, {where}", loss, l1_loss)
        self.optimizer.step(rate, clip_scale(norm, config.gradient_clip))

        self.dead_neurons.add_step(statistics.fired)
        if config.revive_dead and self.dead_neurons.window_is_full():
            self._revive_dead()
        weight_strength = self._make_weights_sparse(step, rate)
        return StepResult(loss, l1_loss, norm, rate, strength, weight_strength, statistics)

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
            # What each layer's `auto` path goes by: another path would round differently.
            "ffn_auto": [ffn.auto_state for ffn in self.model.ffn_layers],
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
        self.optimizer.load_state_arrays(moments, state["step"])
        self.sampler.load_state_dict(state["sampler"])
        self._revival_rng.bit_generator.state = state["revival"]
        self.dead_neurons.load_state_dict(state["dead_neurons"])
        for ffn, auto_state in zip(self.model.ffn_layers, state["ffn_auto"], strict=True):
            ffn.auto_state = _auto_state(auto_state)
        if self.weight_sparsity.controller is not None:
            self.weight_sparsity.controller.restore(state["weight_l1_strength"])
        if self.dead_neurons.step != self.step_count:
            raise ValueError(f"dead_neurons is of step {self.dead_neurons.step}")
        # A generator may round or wrap what it cannot hold.
        loaded = self.state_dict()
        for name in ("tokens", "sampler", "revival", "weight_l1_strength"):
            if loaded[name] != state[name]:
                raise ValueError(f"{name} is not what a run of these settings saves")

    def _accumulate_gradients(
        self, step: int, windows: np.ndarray, strength: float
    ) -> tuple[float, float, StepStatistics]:
        """Add up loss and gradients of the micro-batches of one step.

        Every micro-batch divides by the tokens of the whole step, so the sums are the mean over all
        tokens, in whatever parts they come.
        """
        config = self.config
        tokens = config.tokens_per_step
        scale = l1_scale(strength, config.n_layers, tokens)
        statistics = StepStatistics(config.n_layers, config.d_ffn)
        loss = 0.0
        self.optimizer.zero_grad()
        for micro_batch in np.split(windows, config.gradient_accumulation):
            logits, backprop = self.model(micro_batch[:, :-1], l1_scale=scale)
            part, backprop_loss = cross_entropy_loss(logits, micro_batch[:, 1:].ravel(), tokens)
            statistics.add([ffn.statistics for ffn in self.model.ffn_layers])
            loss += part
            l1_loss = scale * float(statistics.absolute_sum.sum())
            if not math.isfinite(loss + l1_loss):
                where = self._first_bad_activation(statistics, loss)
                message = f"step {step}: the loss is {loss + l1_loss}, {where}"
                raise self._diverged(message, loss, l1_loss)
            backprop(backprop_loss())
        return loss, l1_loss, statistics

    def _make_weights_sparse(self, step: int, learning_rate: float) -> float:
        """Take the proximal step, unless zeros are frozen; return its strength."""
        if self.model.weight_format != "dense":
            return 0.0
        strength = self.weight_sparsity.after_step(step, learning_rate, self.model.ffn_parameters)
        if step == self.config.sparse_from:
            freeze_zeros(
                self.model, self.optimizer, self.config.sparse_format, self.config.block_size
            )
            self.parameters = self.model.parameters()
        return strength

    def _revive_dead(self) -> None:
        matrix = "gate_proj" if self.config.ffn == "gated" else "up_proj"
        for layer, dead in enumerate(self.dead_neurons.dead()):
            name = f"model.layers.{layer}.mlp.{matrix}.weight"
            revive_dead(
                self.parameters[name].value,
                self.optimizer.first_moment[name],
                self.optimizer.second_moment[name],
                dead,
                self._revival_rng,
            )

    def _require_known_tokens(self, windows: np.ndarray) -> None:
        if windows.max() >= self.model.config.vocab_size:
            raise TwellError(
                f"token {windows.max()} found in the data, ids below the vocabulary's "
                f"{self.model.config.vocab_size} wanted; the data is damaged, prepare it again"
            )

    def _first_bad_weight(self) -> str | None:
        for name, parameter in self.parameters.items():
            if not np.isfinite(parameter.value).all():
                return name
        return None

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
            if not np.isfinite(parameter.grad_buffer()).all():
                return f"first in {name}"
        return "though each parameter's is: their sum of squares overflows"


def _auto_state(saved: Any) -> AutoState:
    density, unmeasured_tokens = saved
    is_density = density is None or (type(density) in (int, float) and 0 <= density <= 1)
    if not is_density or type(unmeasured_tokens) is not int or unmeasured_tokens < 0:
        raise ValueError(f"{saved!r} in ffn_auto")
    return AutoState(density, unmeasured_tokens)
