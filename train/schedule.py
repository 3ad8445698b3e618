"""How learning rate, L1 strength and weight density change over a run: functions of the step.

Steps are counted from 1, as in reports: step ``s`` is the s-th update, and the last is
``total_steps``.
"""

import math


def learning_rate(
    step: int,
    *,
    peak: float,
    warmup_steps: int,
    total_steps: int,
    minimum_fraction: float,
) -> float:
    """Return the learning rate of a step: a linear rise to ``peak``, then half a cosine wave down.

    For ``step <= warmup_steps``: ``peak * step / warmup_steps``. Afterwards, with
    ``p = (step - warmup_steps) / (total_steps - warmup_steps)``::

        peak * (minimum_fraction + (1 - minimum_fraction) * (1 + cos(pi * p)) / 2)

    which is ``minimum_fraction * peak`` at the last step, and stays there beyond it.
    """
    if step <= warmup_steps:
        return peak * step / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    cosine = (1.0 + math.cos(math.pi * progress)) / 2.0
    return peak * (minimum_fraction + (1.0 - minimum_fraction) * cosine)


def l1_strength(step: int, *, strength: float, warmup_steps: int) -> float:
    """Return the L1 strength of a step: a linear rise over ``warmup_steps``, then constant."""
    if step < warmup_steps:
        return strength * step / warmup_steps
    return strength


def weight_density(step: int, *, target: float, begin: int, end: int) -> float:
    """Return the density of weights that is wanted after a step (Zhu and Gupta, arXiv 1710.01878).

    It is 1 up to step ``begin``, ``target`` from step ``end`` on, and between them, with
    ``p = (step - begin) / (end - begin)``, ``target + (1 - target) (1 - p)^3``: most weights go
    early, while there are many that do nothing.
    """
    if step >= end:
        return target
    progress = max(0, step - begin) / (end - begin)
    return target + (1.0 - target) * (1.0 - progress) ** 3
