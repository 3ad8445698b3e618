"""Turns the strength of an L1 term up and down for the density that is wanted."""

# Most that the strength is multiplied or divided by in a step.
LARGEST_FACTOR = 1.05
# Smallest strength as a part of the largest: it does nothing, and is soon back from there.
SMALLEST_PART = 1e-3


class DensityController:
    """Raises a strength while the density is above the wanted one, and lowers it while below.

    In each step the strength is multiplied by density / wanted density, within bounds.

    Parameters
    ----------
    largest : float
        What the strength begins with, and never exceeds.

    Attributes
    ----------
    strength : float
        The only thing that changes from step to step.
    """

    def __init__(self, largest: float) -> None:
        self._largest = largest
        self._smallest = largest * SMALLEST_PART
        self.strength = largest

    def update(self, density: float, wanted: float) -> None:
        """Set the strength of the next step, given what this one led to."""
        factor = min(max(density / wanted, 1 / LARGEST_FACTOR), LARGEST_FACTOR)
        self.strength = min(max(self.strength * factor, self._smallest), self._largest)

    def restore(self, strength: object) -> None:
        """Go on with a saved strength.

        Raises
        ------
        ValueError
            If it is none that a controller with this largest one reaches.
        """
        if type(strength) is not float or not self._smallest <= strength <= self._largest:
            raise ValueError(f"L1 strength {strength!r} on weights")
        self.strength = strength
