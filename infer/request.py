"""What is asked of the inference engine, and what it gives back."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from twell_numba.errors import UsageError

MOST_LOGPROBS = 100
LARGEST_TOP_K = 2**31 - 1
# Within these no penalty makes a finite logit infinite.
LEAST_PENALTY, LARGEST_PENALTY = 0.01, 100.0


@dataclass(frozen=True)
class GenerationSettings:
    """How a text is to be continued.

    Parameters
    ----------
    max_new_tokens : int
        When to stop at the latest.
    temperature : float
        Logits are divided by it; 0 takes the likeliest token.
    top_k : int
        Choose among so many likeliest tokens; 0 keeps all.
    top_p : float
        Then among the fewest likeliest that together have this probability.
    min_p : float
        Then among those that have at least this fraction of the likeliest token's probability.
    repetition_penalty : float
        Logits of tokens in the prompt or the text so far are divided by it where they are positive,
        and multiplied where they are negative (Keskar et al., 2019); 1 changes nothing.
    seed : int
        Tokens are drawn by it alone: the same alone and beside other requests.
    stop : tuple of str
        Texts that end the generation; they are not part of what is given out.
    ignore_eos : bool
        Whether to go on after a token that ends a text.
    logprobs : int, optional
        Also give the log-probability of each token, and of so many likeliest ones beside it: of the
        model's own distribution, before penalty, temperature and cuts.

    Nothing is checked before :meth:`validate` is called.
    """

    max_new_tokens: int = 200
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def validate(self) -> None:
        """Check every field.

        Raises
        ------
        UsageError
            One line naming the setting, the value given and the value wanted.
        TypeError
            If ``stop`` is one text: its characters would be taken for stop texts.
        """
        if isinstance(self.stop, str):
            raise TypeError(f"stop {self.stop!r} given, a tuple of texts wanted")
        for name in ("max_new_tokens", "seed"):
            if getattr(self, name) < 0:
                raise _unfit(self, name, "at least 0 wanted")
        if not 0 <= self.top_k <= LARGEST_TOP_K:
            raise _unfit(self, "top_k", f"0 to {LARGEST_TOP_K} wanted (0 keeps every token)")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise _unfit(self, "temperature", "a finite number of at least 0 wanted")
        if not 0 < self.top_p <= 1:
            raise _unfit(self, "top_p", "above 0 and at most 1 wanted (1 keeps every token)")
        if not 0 <= self.min_p <= 1:
            raise _unfit(self, "min_p", "0 to 1 wanted (0 keeps every token)")
        if not LEAST_PENALTY <= self.repetition_penalty <= LARGEST_PENALTY:
            wanted = f"{LEAST_PENALTY:g} to {LARGEST_PENALTY:g} wanted (1 changes nothing)"
            raise _unfit(self, "repetition_penalty", wanted)
        if not all(self.stop):
            raise UsageError("an empty stop text given, at least one character wanted")
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_LOGPROBS:
            raise _unfit(self, "logprobs", f"0 to {MOST_LOGPROBS} wanted")


@dataclass(frozen=True)
class TokenLogprob:
    """How likely a token was by the model's own distribution.

    Attributes
    ----------
    token : int
    logprob : float
        Natural logarithm of its probability.
    top : tuple of (int, float)
        The likeliest tokens with theirs, as many as asked for, the likeliest first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """A part of a generated text, in whole characters.

    Attributes
    ----------
    text : str
        Empty in a last piece that only says why it is the last.
    tokens : tuple of int
        Drawn since the piece before. Those of a stop text, and one that ends a text, count among
        them though their text is not given out.
    logprobs : tuple of TokenLogprob
        Of these tokens where asked for; else empty.
    finish_reason : {None, "stop", "length", "cancelled", "error"}
        None but in the last piece.
    """

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None


@dataclass(eq=False)
class Request:
    """A text that is being continued; the engine changes it in place.

    Attributes
    ----------
    prompt_tokens : ndarray of int64
    settings : GenerationSettings
    tokens : list of int
        Drawn so far.
    text : str
        Given out so far.
    finish_reason : {None, "stop", "length", "cancelled", "error"}
        ``stop``: a stop text, or a token that ends a text. ``length``: as many tokens as asked for.
        None until then.
    error : str, optional
        What went wrong, where the reason is ``error``.
    token_logprobs : list of TokenLogprob
        One for each token where asked for; else empty.
    is_cancelled : bool
        Whether it shall end; ``finish_reason`` follows at the engine's next step.
    """

    prompt_tokens: np.ndarray
    settings: GenerationSettings
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    token_logprobs: list[TokenLogprob] = field(default_factory=list)
    is_cancelled: bool = False

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None


def check_prompt(prompt_tokens: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """Return a prompt as an array of int64.

    Raises
    ------
    UsageError
        If it is empty, or a token is not in [0, vocab_size).
    """
    tokens = np.asarray(prompt_tokens, np.int64).reshape(-1)
    if tokens.size == 0:
        raise UsageError("an empty prompt given, at least one character wanted")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        wrong = tokens.min() if tokens.min() < 0 else tokens.max()
        raise UsageError(f"token {wrong} given in a prompt, 0 to {vocab_size - 1} wanted")
    return tokens


def _unfit(settings: GenerationSettings, name: str, wanted: str) -> UsageError:
    value = getattr(settings, name)
    return UsageError(f"{name.replace('_', '-')} {value} given, {wanted}")
