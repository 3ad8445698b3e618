"""A training step on a GPU: recorded once, then replayed with little work for the host.

Forward and backward pass of a micro-batch are one graph, clipping and AdamW another. What changes
from step to step (tokens, learning rate, strength of the L1 term) is written to small arrays before
a replay, and all that a step measures comes back as one array. A step of which loss or gradient is
not finite changes nothing: the GPU sees to that by itself.

While the host waits for a step's results and does its own part, the GPU goes on with forward and
backward pass of the next step. Nothing of that touches the weights; should it turn out that the
step is to be another one, its gradients are thrown away.

A micro-batch is recorded for the paths that its feedforward layers take, and for what they have
learned of their tokens. When either is new, the next micro-batch runs unrecorded, so that what it
needs gets compiled, and is recorded after that. Now and then one does for layers to learn anew.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from twell_numba.device.gpu import empty, view, zeros
from twell_numba.device.gpu.pinned import HostCopy
from twell_numba.device.gpu.recorded import Recorded
from twell_numba.kernels.adamw.cuda import (
    adamw_step_recorded,
    clip_scale_on_gpu,
    sum_of_squares_on_gpu,
)
from twell_numba.kernels.cuda_scalars import sum_on_gpu
from twell_numba.kernels.cuda_sums import add_into, add_time, or_into
from twell_numba.layers.ffn import AutoState
from twell_numba.layers.loss import cross_entropy_loss
from twell_numba.models.transformer import Transformer
from twell_numba.train.config import TrainConfig
from twell_numba.train.ffn_paths import paths_undisturbed, possible_paths
from twell_numba.train.measured import Measured
from twell_numba.train.optimizer import AdamW
from twell_numba.train.sparsity import StepStatistics

_MOST_RECORDINGS = 8
# AdamW's coefficients, with weight decay and without.
_COEFFICIENTS = 8
# Places in the array of results: the sum of the losses, the sum of the gradient's squares, the
# GPU's clock at five points (of the first three the sum over micro-batches), and for each layer its
# nonzeros and the sum of |h|.
_LOSS, _SQUARES, _BEGUN, _FORWARDED, _COMPUTED, _UPDATE_BEGUN, _UPDATED, _LAYERS = range(8)


class Batch(NamedTuple):
    """What the gradient of a step is computed from.

    Attributes
    ----------
    windows : ndarray of integers, shape (micro-batches * batch, S + 1)
        Of tokens that the model knows.
    l1_scale : float
    """

    windows: np.ndarray
    l1_scale: float


class _Kernels(NamedTuple):
    """What decides, beside the model, which kernels a micro-batch gives to the GPU.

    Attributes
    ----------
    paths : tuple of str
        Of the feedforward layers.
    learned : tuple of LearnedPattern or None
        By which their blocks of tokens share neurons.
    """

    paths: tuple[str, ...]
    learned: tuple[Any, ...]


class _Ahead(NamedTuple):
    """A gradient that is computed before its step.

    Attributes
    ----------
    batch : Batch
    kernels : _Kernels
        By which it was computed.
    states : list of AutoState
        What the layers are to go by once it is used.
    """

    batch: Batch
    kernels: _Kernels
    states: list[AutoState]


class RecordedStep:
    """Trains a model, all of which is on a GPU.

    Parameters
    ----------
    model : Transformer
    optimizer : AdamW
        Of the model's parameters, which it moves to the GPU.
    config : TrainConfig
    stream : Stream
    dtype : dtype
        In which the model computes: float32 or bfloat16.

    Attributes
    ----------
    flat : FlatParameters
    """

    def __init__(
        self,
        model: Transformer,
        optimizer: AdamW,
        config: TrainConfig,
        stream: Any,
        dtype: np.dtype,
    ) -> None:
        self._model, self._optimizer, self._config, self._stream = model, optimizer, config, stream
        self.flat = optimizer.move_to_gpu(stream, dtype)
        model.compute_on_gpu(stream, dtype)
        self._tokens = empty((2, config.batch_size * config.context_length), np.int64, stream)
        self._l1_scale = zeros(1, np.float32, stream)
        self._coefficients = zeros((2, _COEFFICIENTS), np.float32, stream)
        self._allocate_results(config.n_layers, config.d_ffn)
        self._kernels = _Kernels((), ())
        # Micro-batches by what the layers do: two that differ may take turns.
        self._recorded: dict[_Kernels, Recorded] = {}
        self._run_update = Recorded(self._update, stream)
        # What the gradient in place has been computed from, if it has.
        self._ahead: _Ahead | None = None

    def take(
        self, batch: Batch, learning_rate: float, next_batch: Callable[[], Batch | None]
    ) -> Measured:
        """Take a step.

        Parameters
        ----------
        batch : Batch
        learning_rate : float
        next_batch : callable
            Returns what the next step will be taken with, or None if that is not known yet.
        """
        step = self._optimizer.step_count + 1
        self._coefficients.copy_from(self._optimizer.coefficients(learning_rate, step))
        if not self._take_over(batch):
            self.discard()
            self._compute(batch)
        paths = self._kernels.paths
        self._ahead = None
        self._run_update()
        self._host_results.request()
        # One micro-batch: more would not fit into the gradient before the results are looked at.
        upcoming = next_batch() if self._config.gradient_accumulation == 1 else None
        if upcoming is not None:
            # A run that is resumed after this step has not seen the next one.
            with paths_undisturbed(self._model):
                self._compute(upcoming)
                states = [ffn.auto_state for ffn in self._model.ffn_layers]
                self._ahead = _Ahead(upcoming, self._kernels, states)
        return self._measured(self._host_results.read(), paths)

    def discard(self) -> None:
        """Throw away what is computed of a next step, as weights were changed from outside."""
        self._ahead = None
        self.flat.grad.fill_with_zeros()
        self._sums.fill_with_zeros()

    def forget(self) -> None:
        """Let go of what is recorded of micro-batches, and its memory."""
        self.discard()
        self._stream.synchronize()
        self._recorded.clear()

    def compile(self) -> None:
        """Compile what a step needs, on every path that it may take; changes no weight."""
        self._l1_scale.fill_with_zeros()
        self._tokens.fill_with_zeros()
        chosen = self._model.ffn_path
        with paths_undisturbed(self._model):
            for path in possible_paths(self._model):
                self._model.ffn_path = path
                self._micro_batch()
        self._model.ffn_path = chosen
        # With a loss that is not finite nothing is changed.
        self._results.copy_from(np.full(self._results.shape, np.nan))
        self._run_update()
        self._stream.synchronize()

    def compute_again(self, batch: Batch) -> None:
        """Compute the gradient of a step that was not taken, to see what is wrong with it."""
        self.discard()
        self._compute(batch)
        self._stream.synchronize()

    def release(self) -> None:
        """Let go of everything on the GPU; the optimizer's arrays go back to the host.

        Of no use afterwards.
        """
        self._stream.synchronize()
        self._optimizer.move_to_host()
        vars(self).clear()  # recordings refer to this object, which would keep it

    # ------------------------------------------------------------------ what is recorded

    def _take_over(self, batch: Batch) -> bool:
        """Go by the gradient in place, if it is this batch's, computed as it would be now."""
        if self._ahead is None:
            return False
        (windows, l1_scale), kernels, states = self._ahead
        is_same = windows is batch.windows and l1_scale == batch.l1_scale
        if not is_same or kernels != self._next_kernels():
            return False
        for ffn, after in zip(self._model.ffn_layers, states, strict=True):
            ffn.auto_state = ffn.auto_state._replace(
                learned=after.learned,
                sharing_tokens=after.sharing_tokens,
                densest=after.densest,
            )
        return True

    @property
    def _tokens_at_once(self) -> int:
        return self._config.batch_size * self._config.context_length

    def _next_kernels(self) -> _Kernels:
        layers = self._model.ffn_layers
        return _Kernels(
            tuple(ffn.next_path(self._tokens_at_once) for ffn in layers),
            tuple(ffn.auto_state.learned for ffn in layers),
        )

    def _compute(self, batch: Batch) -> None:
        """Add up loss, statistics and gradients of a step's micro-batches."""
        self._l1_scale.copy_from(np.array([batch.l1_scale], np.float32))
        for windows in np.split(batch.windows, self._config.gradient_accumulation):
            tokens = np.stack([windows[:, :-1].ravel(), windows[:, 1:].ravel()])
            self._tokens.copy_from(tokens)
            self._kernels = kernels = self._next_kernels()
            if self._is_to_be_measured():
                self._recorded.clear()  # also of what was learned before
            is_recorded = kernels in self._recorded
            if not is_recorded:
                self._make_room()
                self._recorded[kernels] = Recorded(self._micro_batch, self._stream)
            self._recorded[kernels]()
            if is_recorded:  # other calls count for themselves
                for ffn in self._model.ffn_layers:
                    ffn.count_sharing_tokens(self._tokens_at_once)
            if self._is_to_be_measured():
                # all layers at once: what is recorded has to be recorded anew for any of them
                for ffn in self._model.ffn_layers:
                    ffn.measure_sharing_anew()

    def _is_to_be_measured(self) -> bool:
        """Return whether a layer is to measure sharing in its next call, which no replay does."""
        tokens = self._tokens_at_once
        return any(
            ffn.measures_sharing(tokens) and ffn.next_path(tokens) == "twell"
            for ffn in self._model.ffn_layers
        )

    def _make_room(self) -> None:
        """Forget what is recorded for other paths, where that takes much of the memory."""
        free, total = self._stream.gpu.memory.free_and_total()
        if len(self._recorded) >= _MOST_RECORDINGS or free < total / 2:
            self._recorded.clear()

    def _micro_batch(self) -> None:
        config = self._config
        inputs = self._tokens[0:1].reshape(config.batch_size, config.context_length)
        targets = self._tokens[1:2].reshape(-1)
        self._note_time(_BEGUN)
        logits, backprop = self._model(inputs, self._l1_scale, config.recompute)
        losses, dlogits = cross_entropy_loss(logits, targets, config.tokens_per_step)
        add_into(self._results[_LOSS : _LOSS + 1], sum_on_gpu(losses))
        for layer, ffn in enumerate(self._model.ffn_layers):
            counted = ffn.take_recorded_statistics()
            place = _LAYERS + 2 * layer
            add_into(self._results[place : place + 2], counted.totals)
            or_into(self._fired[layer : layer + 1], counted.fired)
        del logits, losses, counted
        self._note_time(_FORWARDED)
        backprop(dlogits)
        self._note_time(_COMPUTED)

    def _update(self) -> None:
        """Change the parameters by the gradient, hand the results out, and begin anew."""
        flat = self.flat
        self._note_time(_UPDATE_BEGUN)
        squares = sum_of_squares_on_gpu(flat.grad)
        loss = self._results[_LOSS : _LOSS + 1]
        scale = clip_scale_on_gpu(squares, loss, self._config.gradient_clip)
        for row, part in enumerate((slice(0, flat.decayed), slice(flat.decayed, flat.value.size))):
            adamw_step_recorded(
                flat.value[part],
                flat.grad[part],
                flat.first_moment[part],
                flat.second_moment[part],
                None if flat.copy is None else flat.copy[part],
                self._coefficients[row : row + 1].reshape(-1),
                scale,
            )
        add_into(self._results[_SQUARES : _SQUARES + 1], squares)
        flat.grad.fill_with_zeros()
        self._note_time(_UPDATED)
        self._output.copy_from(self._sums)
        self._sums.fill_with_zeros()

    def _note_time(self, place: int) -> None:
        add_time(self._results[place : place + 1])

    # ------------------------------------------------------------------ results

    def _allocate_results(self, layers: int, neurons: int) -> None:
        """Make one array of all that a step measures, so that it is copied at once."""
        numbers = _LAYERS + 2 * layers
        nbytes = 8 * numbers + layers * neurons
        self._sums = zeros(nbytes, np.uint8, self._stream)
        self._output = zeros(nbytes, np.uint8, self._stream)
        self._host_results = HostCopy(self._output)
        self._results = view(self._sums, 0, (numbers,), np.float64)
        self._fired = view(self._sums, 8 * numbers, (layers, neurons), np.bool_)

    def _measured(self, output: np.ndarray, paths: tuple[str, ...]) -> Measured:
        config = self._config
        numbers = _LAYERS + 2 * config.n_layers
        results = output[: 8 * numbers].view(np.float64)
        by_layer = results[_LAYERS:].reshape(config.n_layers, 2)
        statistics = StepStatistics(config.n_layers, config.d_ffn)
        statistics.tokens = config.tokens_per_step
        statistics.nonzeros[:] = by_layer[:, 0]
        statistics.absolute_sum[:] = by_layer[:, 1]
        statistics.fired[:] = output[8 * numbers :].view(np.bool_).reshape(statistics.fired.shape)
        statistics.paths = list(paths)
        begun, forwarded, computed, update_begun, updated = results[_BEGUN : _UPDATED + 1] / 1e9
        return Measured(
            loss=float(results[_LOSS]) / config.tokens_per_step,
            gradient_norm=float(np.sqrt(results[_SQUARES])),
            statistics=statistics,
            seconds_by_part={
                "forward": float(forwarded - begun),
                "backward": float(computed - forwarded),
                "optimizer": float(updated - update_begun),
            },
        )
