"""Rotary positions stretched to contexts longer than those a model was first trained on."""

import math
from dataclasses import dataclass

import numpy as np

from twell_numba.errors import UsageError, shown

KINDS = ("linear", "llama3")
# Far beyond any model there is.
LARGEST_FACTOR = 1e6
LARGEST_CONTEXT = 1 << 24


@dataclass(frozen=True)
class RopeScaling:
    """By how much the frequencies of rotary positions are lowered.

    Attributes
    ----------
    kind : {"linear", "llama3"}
        ``linear`` lowers all frequencies alike. ``llama3`` leaves those alone whose wavelength is
        short beside the first context, lowers those alike whose wavelength is long, and goes over
        smoothly in between (Llama 3.1).
    factor : float
        By which frequencies are divided; at least 1.
    low_frequency_factor, high_frequency_factor : float
        Of ``llama3``: wavelengths above ``original_context / low_frequency_factor`` are long, below
        ``original_context / high_frequency_factor`` short.
    original_context : int
        Of ``llama3``: the context that the model was first trained on.
    """

    kind: str
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: int = 8192

    def validate(self) -> None:
        """Check every field.

        Raises
        ------
        UsageError
            One line naming the field, the value given and the value wanted.
        """
        if self.kind not in KINDS:
            raise UsageError(
                f"rotary scaling of kind {shown(self.kind)} given, one of {', '.join(KINDS)} wanted"
            )
        for name in ("factor", "low_frequency_factor", "high_frequency_factor"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise UsageError(
                    f"rotary scaling with {name} {shown(value)} given, a number wanted"
                )
            if not 0 < value <= LARGEST_FACTOR:
                raise UsageError(
                    f"rotary scaling with {name} {shown(value)} given, above 0 and at most "
                    f"{LARGEST_FACTOR:g} wanted"
                )
        if self.factor < 1:
            raise UsageError(f"rotary scaling with factor {self.factor!r} given, at least 1 wanted")
        if self.kind == "llama3" and self.low_frequency_factor >= self.high_frequency_factor:
            raise UsageError(
                f"rotary scaling with low_frequency_factor {self.low_frequency_factor!r} and "
                f"high_frequency_factor {self.high_frequency_factor!r} given, the second has to "
                f"be larger"
            )
        context = self.original_context
        is_whole = isinstance(context, int) and not isinstance(context, bool)
        if not is_whole or not 1 <= context <= LARGEST_CONTEXT:
            raise UsageError(
                f"rotary scaling with original_context {shown(context)} given, a whole number "
                f"from 1 to {LARGEST_CONTEXT} wanted"
            )

    def divisors(self, head_width: int, base: float) -> np.ndarray:
        """Return what each frequency is divided by, float64 of shape (head_width / 2,)."""
        pairs = head_width // 2
        if self.kind == "linear":
            return np.full(pairs, float(self.factor))
        frequencies = float(base) ** (-2.0 * np.arange(pairs) / head_width)
        turns = self.original_context * frequencies / (2 * math.pi)
        # 0 where the wavelength is long, 1 where it is short
        low, high = self.low_frequency_factor, self.high_frequency_factor
        short = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return 1 / ((1 - short) / self.factor + short)
