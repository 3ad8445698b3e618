"""Training: corpora, tokenizers, batches, optimizer, schedules, sparsity terms, the loop, reports.

>>> from twell_numba.train import resolve, train
>>> summary = train(resolve("tiny", overrides=["steps=100"]), "runs/mine")  # doctest: +SKIP
"""

from typing import TYPE_CHECKING, Any

from twell_numba.train.config import TrainConfig, resolve
from twell_numba.train.interrupt import Interrupted

if TYPE_CHECKING:
    from twell_numba.train.loop import train

__all__ = ["Interrupted", "TrainConfig", "resolve", "train"]


def __getattr__(name: str) -> Any:
    """Import the loop, and with it Numba, when it is first asked for; settings do not need it."""
    if name == "train":
        from twell_numba.train.loop import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
