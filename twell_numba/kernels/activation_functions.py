"""The functions that a feedforward layer applies to what decides which neurons fire.

    relu:   f(x) = max(x, 0)
    silu:   f(x) = x / (1 + exp(-x))       (Elfwing, Uchibe and Doya, 2018); never 0 but at 0
    relu2:  f(x) = max(x, 0)^2             (So et al., 2021)

NaN stays NaN. Where a ReLU or its square cuts a neuron off, nothing of that neuron counts: not even
a NaN of the other projection.
"""

ACTIVATIONS = ("relu", "silu", "relu2")
# What compiled code is told.
RELU, SILU, RELU2 = range(3)


def activation_number(activation: str, allowed: tuple[str, ...] = ACTIVATIONS) -> int:
    """Return the number by which kernels know an activation.

    Raises
    ------
    ValueError
        If it is not one of those allowed.
    """
    if activation not in allowed:
        raise ValueError(f"activation {activation!r} given, one of {', '.join(allowed)} wanted")
    return ACTIVATIONS.index(activation)
