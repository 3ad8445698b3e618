"""Makes weights of the feedforward layers exact zeros while a model trains.

After each step of the optimizer, with learning rate a and strength s, comes a proximal step for the
L1 term: every weight is moved by ``a s`` towards zero, and what is no larger becomes zero (or, for
blocks, as :func:`twell_numba.kernels.proximal.block_soft_threshold` says). A weight that is zero
keeps its gradient, and comes back when this is worth more than the term. AdamW moves a weight by
about ``a`` at most, so a strength of 1 lets hardly any live. With a threshold, weights of a smaller
magnitude then become zero, or blocks of which the root of the mean square is smaller.

With a target density, what is left follows :func:`twell_numba.train.schedule.weight_density`: the
smallest weights are cut off where it is more, and the strength is turned down where it is less.
The term alone could do it too, were it several times as strong; but it pulls at those weights as
well that stay, and the loss is lower if most of the work is left to the cut.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from twell_numba.infer.weight_cut import cut_below, cut_to_density, entries_left
from twell_numba.kernels.proximal import block_soft_threshold, soft_threshold
from twell_numba.layers.parameter import Parameter, SparseParameter
from twell_numba.models.transformer import Transformer
from twell_numba.train.config import TrainConfig
from twell_numba.train.density_controller import DensityController
from twell_numba.train.failure import StepFailed
from twell_numba.train.schedule import l1_strength, weight_density

# Largest strengths with a target density, unless given. The mean of a block hardly moves, so that
# all blocks of a weight that does little go at about the same strength.
TARGET_STRENGTH = 0.1
TARGET_BLOCK_STRENGTH = 0.01


class WeightSparsity:
    """Takes the proximal steps of a run, up to the one that freezes the zeros.

    Parameters
    ----------
    config : TrainConfig

    Attributes
    ----------
    controller : DensityController or None
        What changes the strength from step to step, if there is a target density.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._strength = config.l1_weight or config.l1_block
        self._target_step = config.filled_in().target_density_step
        self._block_size = config.weight_block_size
        self.controller: DensityController | None = None
        self._default_strength = TARGET_STRENGTH if self._block_size == 1 else TARGET_BLOCK_STRENGTH
        if config.target_density < 1:
            self.controller = DensityController(self._strength or self._default_strength)

    @property
    def is_active(self) -> bool:
        """Whether anything is done after a step."""
        return (
            self.strength > 0
            or self._config.weight_threshold > 0
            or self.controller is not None
            or self._config.sparse_from > 0
        )

    @property
    def strength(self) -> float:
        """Of the L1 term on weights, once it is warm."""
        return self._strength if self.controller is None else self.controller.strength

    def after_step(self, step: int, learning_rate: float, parameters: Sequence[Parameter]) -> float:
        """Make weights zero that the optimizer has just changed.

        Parameters
        ----------
        step : int
            Counted from 1.
        learning_rate : float
            Of this step.
        parameters : sequence of Parameter
            All weights of all feedforward layers, held dense. Their values are changed in place.

        Returns
        -------
        float
            The strength that was used.

        Raises
        ------
        StepFailed
            If nothing is left of one of them.
        """
        config = self._config
        is_warm = step > config.l1_warmup_steps
        strength = l1_strength(step, strength=self.strength, warmup_steps=config.l1_warmup_steps)
        values = [parameter.value for parameter in parameters]
        if strength > 0:
            left = [self._shrink(value, learning_rate * strength) for value in values]
            self._require_entries(step, parameters, left, self._l1_advice())
        if config.weight_threshold > 0 and is_warm:
            left = [cut_below(value, self._block_size, config.weight_threshold) for value in values]
            self._require_entries(step, parameters, left, self._threshold_advice())
        if self.controller is not None and is_warm:
            wanted = self._wanted_density(step)
            self.controller.update(sum(left) / sum(value.size for value in values), wanted)
            cut_to_density(values, self._block_size, wanted)
        return strength

    def compile(self, dtype: np.dtype) -> None:
        """Compile the kernels that the settings call for."""
        value = np.zeros((1, 1), dtype)
        if self.strength > 0:
            self._shrink(value, 0.0)
        if self._config.weight_threshold > 0:
            cut_below(value, self._block_size, 0.0)
        if self.controller is not None and self._block_size == 1:
            cut_to_density([np.ones((2, 2), dtype)], 1, 0.5)

    def _shrink(self, value: np.ndarray, amount: float) -> int:
        if self._block_size > 1:
            return block_soft_threshold(value, self._block_size, amount)
        return soft_threshold(value, amount)

    def _wanted_density(self, step: int) -> float:
        return weight_density(
            step,
            target=self._config.target_density,
            begin=self._config.l1_warmup_steps,
            end=self._target_step,
        )

    def _require_entries(
        self, step: int, parameters: Sequence[Parameter], left: Sequence[int], advice: str
    ) -> None:
        for parameter, entries in zip(parameters, left, strict=True):
            if entries == 0:
                raise StepFailed(
                    f"step {step}: no weight of {parameter.name} is left but zeros, "
                    f"so that its layer would do nothing",
                    advice,
                )

    def _l1_advice(self) -> str:
        if self._strength:
            return f"try a smaller {self._l1_name}"
        default = f"{self._default_strength:g}, its value with a target_density"
        return f"try {self._l1_name} below {default}"

    def _threshold_advice(self) -> str:
        # The L1 term may have brought the weights below it.
        also = f" or {self._l1_name}" if self._strength else ""
        return f"try a smaller weight_threshold{also}"

    @property
    def _l1_name(self) -> str:
        in_blocks = self._config.l1_block or self._config.sparse_format == "block_ell"
        return "l1_block" if in_blocks else "l1_weight"


def weight_statistics(model: Transformer, block_size: int) -> dict[str, Any]:
    """Return what ``metrics.jsonl`` says about the weights of the feedforward layers.

    Parameters
    ----------
    model : Transformer
    block_size : int
        While they are held dense, elements of b x b blocks that are not zero count as left.

    Returns
    -------
    dict
        ``ffn_weight_density`` (by matrix, a list by layer, of the part that is left),
        ``ffn_weight_format`` and ``ffn_weight_bytes``, in memory.
    """
    parameters = model.ffn_parameters
    density: dict[str, list[float]] = {}
    for parameter in parameters:
        matrix = parameter.name.split(".")[-2]
        if isinstance(parameter, SparseParameter):
            left = parameter.matrix.nnz
        else:
            left = entries_left(parameter.value, block_size)
        density.setdefault(matrix, []).append(left / parameter.size)
    return {
        "ffn_weight_density": density,
        "ffn_weight_format": model.weight_format,
        "ffn_weight_bytes": sum(parameter.nbytes for parameter in parameters),
    }
