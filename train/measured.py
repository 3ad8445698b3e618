"""What comes of the batch of one step."""

from dataclasses import dataclass

from twell_numba.train.sparsity import StepStatistics


@dataclass(frozen=True)
class Measured:
    """What a step measured.

    Attributes
    ----------
    loss : float
        Mean cross entropy of the step's tokens.
    gradient_norm : float
        Before clipping.
    statistics : StepStatistics
    seconds_by_part : dict
        ``forward`` (the loss included), ``backward`` and ``optimizer``; on a GPU, how long that
        was busy with each.
    """

    loss: float
    gradient_norm: float
    statistics: StepStatistics
    seconds_by_part: dict[str, float]
