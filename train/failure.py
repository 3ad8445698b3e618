"""Why training stops on its own."""

from twell_numba.errors import TwellError


class StepFailed(TwellError):
    """Training cannot go on; what was saved before is left as it is.

    Attributes
    ----------
    advice : str
        What to change.
    """

    def __init__(self, message: str, advice: str) -> None:
        super().__init__(message)
        self.advice = advice


class Diverged(StepFailed):
    """A loss, gradient, weight or optimizer moment is no longer a finite number."""

    def __init__(
        self, message: str, advice: str = "try a lower learning_rate or a longer warm-up"
    ) -> None:
        super().__init__(message, advice)
