"""The oracle of every backward pass: finite differences in float64 along random directions."""

from collections.abc import Callable, Sequence

import numpy as np


def check_gradients(
    function: Callable[[], float],
    parameters: Sequence[np.ndarray],
    gradients: Sequence[np.ndarray],
    rng: np.random.Generator,
    *,
    directions: int = 3,
    tolerance: float = 1e-6,
) -> None:
    """Assert that gradients agree with the function's slope along random directions.

    The slope comes from central differences of two steps, extrapolated (Richardson) so that the
    error falls with the fourth power of the step.

    Parameters
    ----------
    function : callable
        Takes nothing; returns the scalar for what ``parameters`` hold at the time.
    parameters : sequence of float64 ndarray
        Moved in place while checking, and put back.
    gradients : sequence of ndarray
        One beside each parameter, of the same shape.
    rng : Generator
        Draws the directions.
    directions : int
    tolerance : float
        Relative to the largest slope that a direction of this length could have had by chance, so
        that directions almost along a level line are no trouble.
    """
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert parameter.dtype == np.float64
        assert gradient.shape == parameter.shape
    originals = [parameter.copy() for parameter in parameters]
    gradient_length = np.sqrt(sum(float(np.sum(gradient**2)) for gradient in gradients))

    def difference(steps: Sequence[np.ndarray], size: float) -> float:
        values = []
        for signed_size in (size, -size):
            for parameter, original, step in zip(parameters, originals, steps, strict=True):
                parameter[...] = original + signed_size * step
            values.append(float(function()))
        for parameter, original in zip(parameters, originals, strict=True):
            parameter[...] = original
        return (values[0] - values[1]) / (2 * size)

    for _ in range(directions):
        steps = [rng.standard_normal(parameter.shape) for parameter in parameters]
        expected = sum(
            float(np.sum(gradient * step)) for gradient, step in zip(gradients, steps, strict=True)
        )
        slope = (4 * difference(steps, 5e-5) - difference(steps, 1e-4)) / 3
        scale = max(abs(slope), gradient_length)
        assert np.isfinite(slope)
        assert abs(expected - slope) <= tolerance * scale, (expected, slope)
