"""How often a model finds the right choice likelier than the others.

The score of a choice is the sum of the log probabilities of its tokens after the context. Which
tokens these are, where a token reaches over the boundary: context and choice are tokenized
together, for each choice, and the context alone; what all of these begin with is the prefix, and
all tokens after it are scored. So the choices of a question are measured after the same prefix,
and a model sees the tokens that it would see in a text.

The best score wins; of equal ones the first. A second measure divides each score by the bytes of
the choice (without the white space that it begins or ends with), which takes away the advantage
that short choices have.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypedDict, TypeVar

import numpy as np

from twell_numba.device.arrays import to_host
from twell_numba.errors import TwellError
from twell_numba.infer.questions import Question
from twell_numba.kernels.cross_entropy import cross_entropy
from twell_numba.models.paged_cache import PAGE_SIZE, PagedKVCache
from twell_numba.models.ragged import Chunk, row_logits
from twell_numba.models.tokenizer import TextTokenizer, valid_unicode
from twell_numba.models.transformer import Transformer

DEFAULT_SEPARATOR = " "
# Enough for products of full speed, and few enough for their logits to fit any memory where the
# vocabulary is large.
DEFAULT_BATCH_TOKENS = 2048
_T = TypeVar("_T")


class TaskResult(TypedDict):
    """How many questions a model answered, and how well.

    ``acc`` and ``acc_norm`` are the fractions answered rightly by the sum of log probabilities, and
    by that sum divided by the bytes of the choice; each with its standard error, which a single
    question has not. ``chance`` is what guessing would give. ``truncated`` counts questions that
    were longer than the model's context.
    """

    questions: int
    acc: float
    acc_stderr: float | None
    acc_norm: float
    acc_norm_stderr: float | None
    chance: float
    truncated: int


class EncodedQuestion(NamedTuple):
    """A question as token ids.

    Attributes
    ----------
    prefix : ndarray of int64, shape (P,)
        At least one token.
    choices : list of ndarray of int64
        The tokens of each choice, at least one.
    is_truncated : bool
        Whether the prefix lacks its beginning, so that the longest choice fits behind it.
    """

    prefix: np.ndarray
    choices: list[np.ndarray]
    is_truncated: bool


def answer_questions(
    model: Transformer,
    tokenizer: TextTokenizer,
    questions: Sequence[Question],
    *,
    separator: str = DEFAULT_SEPARATOR,
    batch_tokens: int = DEFAULT_BATCH_TOKENS,
    progress: Callable[[int, int], None] | None = None,
) -> TaskResult:
    """Measure a model on multiple-choice questions.

    Parameters
    ----------
    model, tokenizer
        As ``load_model`` returns them.
    questions : sequence of Question
        At least one.
    separator : str
        Put between context and choice where neither has white space there.
    batch_tokens : int
        Tokens computed at once; the result depends on it by rounding alone.
    progress : callable, optional
        Given how many tokens are done, and how many there are, after each batch.

    Raises
    ------
    TwellError
        If a choice alone is longer than the model's context, or a score is not finite.
    ValueError
        If there is no question.
    """
    if not questions:
        raise ValueError("no question given, at least one wanted")
    context_length = model.config.context_length
    encoded = [
        encode_question(tokenizer, question, separator, context_length) for question in questions
    ]
    scores = score_choices(model, encoded, batch_tokens, progress)
    by_sum, by_byte = [], []
    for question, sums in zip(questions, scores, strict=True):
        _require_finite(question, sums)
        by_sum.append(question.is_right(int(sums.argmax())))
        by_byte.append(question.is_right(int((sums / _byte_counts(question)).argmax())))
    return TaskResult(
        questions=len(questions),
        acc=float(np.mean(by_sum)),
        acc_stderr=_standard_error(by_sum),
        acc_norm=float(np.mean(by_byte)),
        acc_norm_stderr=_standard_error(by_byte),
        chance=float(np.mean([_chance(question) for question in questions])),
        truncated=sum(each.is_truncated for each in encoded),
    )


def encode_question(
    tokenizer: TextTokenizer, question: Question, separator: str, context_length: int
) -> EncodedQuestion:
    """Return a question's tokens, see the head of this file.

    Where context and choice are longer than ``context_length`` together, the oldest tokens of the
    context are left out, but for the one that begins every text, if the tokenizer has one. They are
    left out for all choices alike.

    Raises
    ------
    TwellError
        If a choice alone does not fit.
    """
    context = question.context
    whole_texts = [context + _between(context, choice, separator) for choice in question.choices]
    alone = tokenizer.encode(context, add_special_tokens=True)
    wholes = [tokenizer.encode(text, add_special_tokens=True) for text in whole_texts]
    shared = _common_prefix([alone, *wholes])
    # Where even the first token reaches over the boundary, nothing could be said of it.
    if shared == 0:
        endings = [tokenizer.encode(text[len(context) :]) for text in whole_texts]
        wholes = [np.concatenate([alone, ending]) for ending in endings]
        shared = len(alone)
    prefix, choices = wholes[0][:shared], [whole[shared:] for whole in wholes]
    if not len(prefix) or not all(map(len, choices)):
        raise TwellError(f"{question.name}: the tokenizer makes no token of a text given there")
    begin = 1 if prefix[0] == tokenizer.bos_token else 0
    # The last token of a choice is predicted, and not fed.
    room = context_length + 1 - max(map(len, choices))
    if room <= begin:
        raise TwellError(
            f"{question.name}: a choice of {max(map(len, choices))} tokens given, at most "
            f"{context_length - begin} wanted, as the model has a context of {context_length}"
        )
    if len(prefix) <= room:
        return EncodedQuestion(prefix, choices, False)
    newest = prefix[len(prefix) - (room - begin) :]
    return EncodedQuestion(np.concatenate([prefix[:begin], newest]), choices, True)


def score_choices(
    model: Transformer,
    questions: Sequence[EncodedQuestion],
    batch_tokens: int = DEFAULT_BATCH_TOKENS,
    progress: Callable[[int, int], None] | None = None,
) -> list[np.ndarray]:
    """Return the sum of log probabilities of each question's choices, float64.

    The prefix of a question is computed once, but for the tokens of its last page of keys and
    values, which each choice goes on writing.

    Parameters
    ----------
    model : Transformer
    questions : sequence of EncodedQuestion
    batch_tokens, progress
        As for :func:`answer_questions`.
    """
    scores = [np.zeros(len(question.choices)) for question in questions]
    plans = [_plan(number, question) for number, question in enumerate(questions)]
    total, done = sum(plan.token_count for plan in plans), 0
    for batch in _groups(plans, lambda plan: plan.token_count, batch_tokens):
        _add_batch(model, batch, batch_tokens, scores)
        done += sum(plan.token_count for plan in batch)
        if progress is not None:
            progress(done, total)
    return scores


class _Scored(NamedTuple):
    """A choice, its tokens, and the place in a sequence of that before the first of them."""

    choice: int
    start: int
    targets: np.ndarray


class _Sequence(NamedTuple):
    """Tokens to feed behind those that the choices share, and the choices scored by them."""

    question: int
    tokens: np.ndarray
    scored: list[_Scored]


class _Plan(NamedTuple):
    """What is fed for a question: once what its choices share, then the rest for each."""

    shared: np.ndarray
    sequences: list[_Sequence]

    @property
    def token_count(self) -> int:
        return len(self.shared) + sum(len(sequence.tokens) for sequence in self.sequences)


def _plan(number: int, question: EncodedQuestion) -> _Plan:
    """Plan a question; a choice whose tokens begin another one is scored along with that.

    So choices of a single token take one sequence in all.
    """
    prefix, choices = question.prefix, question.choices
    shared = (len(prefix) - 1) // PAGE_SIZE * PAGE_SIZE  # only whole pages can be shared
    sequences: list[_Sequence] = []
    for choice in sorted(range(len(choices)), key=lambda index: -len(choices[index])):
        targets = choices[choice]
        tokens = np.concatenate([prefix[shared:], targets[:-1]])
        scored = _Scored(choice, len(prefix) - 1 - shared, targets)
        longer = next((each for each in sequences if _begins(each.tokens, tokens)), None)
        if longer is None:
            sequences.append(_Sequence(number, tokens, [scored]))
        else:
            longer.scored.append(scored)
    return _Plan(prefix[:shared], sequences)


def _groups(parts: Sequence[_T], count: Callable[[_T], int], most: int) -> Iterator[list[_T]]:
    """Yield parts of which the counts add up to at most so many, or one that has more."""
    group: list[_T] = []
    for part in parts:
        if group and sum(map(count, [*group, part])) > most:
            yield group
            group = []
        group.append(part)
    if group:
        yield group


def _add_batch(
    model: Transformer, plans: list[_Plan], batch_tokens: int, scores: list[np.ndarray]
) -> None:
    # Each sequence may leave the last of its pages all but empty.
    room = sum(plan.token_count + PAGE_SIZE * (1 + len(plan.sequences)) for plan in plans)
    cache = PagedKVCache(model.config, room, model.dtype, model.stream)
    begun = {
        plan.sequences[0].question: Chunk(plan.shared, 0, _pages(cache, len(plan.shared)))
        for plan in plans
    }
    if chunks := [chunk for chunk in begun.values() if len(chunk.tokens)]:
        row_logits(model, cache, chunks, np.empty(0, np.int64))
    sequences = [sequence for plan in plans for sequence in plan.sequences]
    for group in _groups(sequences, lambda sequence: len(sequence.tokens), batch_tokens):
        _add_scores(model, cache, begun, group, scores)


def _add_scores(
    model: Transformer,
    cache: PagedKVCache,
    begun: dict[int, Chunk],
    sequences: list[_Sequence],
    scores: list[np.ndarray],
) -> None:
    """Feed sequences behind what their questions begin with, and score their choices."""
    chunks, places, rows, fed = [], [], [], 0
    for question, tokens, scored in sequences:
        before = begun[question]
        table = np.concatenate([before.table, _pages(cache, len(tokens))])
        chunks.append(Chunk(tokens, len(before.tokens), table))
        for choice, start, targets in scored:
            places.append((question, choice, targets))
            rows.append(fed + start + np.arange(len(targets)))
        fed += len(tokens)
    logits = row_logits(model, cache, chunks, np.concatenate(rows))
    all_targets = np.concatenate([targets for _, _, targets in places])
    losses = to_host(cross_entropy(logits, all_targets)[0])
    ends = np.cumsum([len(targets) for _, _, targets in places])[:-1]
    for (question, choice, _), lost in zip(places, np.split(losses, ends), strict=True):
        scores[question][choice] = -lost.sum(dtype=np.float64)


def _pages(cache: PagedKVCache, tokens: int) -> np.ndarray:
    table = cache.take(tokens)
    assert table is not None, "a cache is made with room for its batch"
    return table


def _between(context: str, choice: str, separator: str) -> str:
    """Return the choice with what separates it from the context."""
    is_separate = context[-1].isspace() or choice[0].isspace()
    return choice if is_separate else separator + choice


def _common_prefix(sequences: list[np.ndarray]) -> int:
    """Return how many tokens all sequences begin with; a token of each but the first is left."""
    first, *others = sequences
    shared = min(len(first), *(len(other) - 1 for other in others))
    for other in others:
        differing = np.flatnonzero(first[:shared] != other[:shared])
        shared = int(differing[0]) if len(differing) else shared
    return max(shared, 0)


def _begins(longer: np.ndarray, tokens: np.ndarray) -> bool:
    return np.array_equal(longer[: len(tokens)], tokens)


def _byte_counts(question: Question) -> np.ndarray:
    return np.array([len(valid_unicode(choice.strip()).encode()) for choice in question.choices])


def _chance(question: Question) -> float:
    count = len(question.choices)
    return sum(question.is_right(choice) for choice in range(count)) / count


def _standard_error(right: list[bool]) -> float | None:
    if len(right) < 2:
        return None
    return float(np.std(right, ddof=1) / math.sqrt(len(right)))


def _require_finite(question: Question, sums: np.ndarray) -> None:
    if not np.isfinite(sums).all():
        raise TwellError(
            f"{question.name}: a choice's log probability is not finite: the model has diverged, "
            f"use an earlier checkpoint"
        )
