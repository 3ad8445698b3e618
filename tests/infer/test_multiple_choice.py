"""Scores of choices against each choice alone, computed in float64 by the definition."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from twell_numba.errors import TwellError
from twell_numba.infer.multiple_choice import (
    EncodedQuestion,
    answer_questions,
    encode_question,
    score_choices,
)
from twell_numba.infer.questions import Question
from twell_numba.models.paged_cache import PAGE_SIZE
from twell_numba.models.tokenizer import ByteTokenizer
from twell_numba.models.transformer import Transformer
from twell_numba.train.tokenizer import train_bpe


def question(context: str, *choices: str, answer: int = 0) -> Question:
    return Question(context, choices, answer, "a question")


QUESTIONS = [
    question("def ", "f(x):", "g", "return x", answer=2),
    question("2 + 2 =", "4", "5", answer=1),
    question("x", " yes", " no", " yes and no", " yesterday"),
    question("a longer context, of many words", "b", "bc"),
    question("tied", "same", "same", "other"),
]


class ByteTokenizerWithBegin(ByteTokenizer):
    """Begins each text with the byte 1."""

    bos_token = 1

    def encode(
        self, text: str, *, add_special_tokens: bool = False, allow_special: bool = False
    ) -> np.ndarray:
        begin = [1] if add_special_tokens else []
        return np.concatenate([np.array(begin, np.int64), super().encode(text)])


def text_of(tokens: np.ndarray) -> bytes:
    return ByteTokenizer().decode_bytes(tokens)


def log_probabilities(model: Transformer, tokens: np.ndarray) -> np.ndarray:
    """Return those of all next tokens (S, V), in float64."""
    parameters = {name: each.value for name, each in model.parameters().items()}
    exact = Transformer(model.config, parameters, np.float64, ffn_path="dense")
    logits = exact.logits(tokens[None, :])
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def by_definition(model: Transformer, prefix: np.ndarray, choice: np.ndarray) -> float:
    tokens = np.concatenate([prefix, choice])
    rows = log_probabilities(model, tokens[:-1])
    positions = range(len(prefix) - 1, len(tokens) - 1)
    return sum(float(rows[position, tokens[position + 1]]) for position in positions)


def encoded(questions: list[Question], context_length: int = 48) -> list[EncodedQuestion]:
    return [encode_question(ByteTokenizer(), each, " ", context_length) for each in questions]


def test_scores_are_sums_of_log_probabilities(byte_model: Transformer) -> None:
    asked = encoded(QUESTIONS)
    for each, scores in zip(asked, score_choices(byte_model, asked), strict=True):
        expected = [by_definition(byte_model, each.prefix, choice) for choice in each.choices]
        np.testing.assert_allclose(scores, expected, rtol=1e-5)


@pytest.mark.parametrize("batch_tokens", [1, 40, 1000])
def test_batches_do_not_matter(byte_model: Transformer, batch_tokens: int) -> None:
    asked = encoded(QUESTIONS)
    expected = score_choices(byte_model, asked, 100)
    for one, other in zip(score_choices(byte_model, asked, batch_tokens), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("length", [1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 2 * PAGE_SIZE + 1])
def test_what_choices_share_is_computed_once(byte_model: Transformer, length: int) -> None:
    context = "".join(chr(ord("a") + n % 26) for n in range(length))
    asked = encoded(
        [question(context, " yes", " no", " y"), question("other" + context, " a", "b")]
    )
    fed: list[tuple[int, int]] = []
    scores = score_choices(byte_model, asked, 10_000, lambda *done: fed.append(done))
    for each, found in zip(asked, scores, strict=True):
        expected = [by_definition(byte_model, each.prefix, choice) for choice in each.choices]
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    rest = [(len(each.prefix) - 1) % PAGE_SIZE + 1 for each in asked]
    shared = sum(len(each.prefix) for each in asked) - sum(rest)
    # The last token is not fed: " yes" also scores " y", and " a" also " b".
    total = shared + rest[0] + 3 + rest[0] + 2 + rest[1] + 1
    assert fed == [(total, total)]


def test_order_does_not_matter(byte_model: Transformer) -> None:
    asked = encoded(QUESTIONS)
    expected = score_choices(byte_model, asked)
    for one, other in zip(score_choices(byte_model, asked[::-1])[::-1], expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_choices_that_begin_others_take_no_sequence_of_their_own(byte_model: Transformer) -> None:
    fed = []
    score_choices(
        byte_model, encoded([question("x", " 1", " 2", " 23")]), 1, lambda *done: fed.append(done)
    )
    # "x 2" is fed to score " 1", " 2" and " 23"; its last token is what is fed least.
    assert fed == [(3, 3)]


def test_accuracy_by_sum_and_by_byte(byte_model: Transformer) -> None:
    asked = encoded(QUESTIONS)
    by_sum, by_byte = [], []
    for each, tokens in zip(QUESTIONS, asked, strict=True):
        scores = [by_definition(byte_model, tokens.prefix, choice) for choice in tokens.choices]
        best = int(np.argmax(scores))
        normed = [s / len(c.strip()) for s, c in zip(scores, each.choices, strict=True)]
        by_sum.append(each.choices[best] == each.choices[each.answer])
        by_byte.append(each.choices[int(np.argmax(normed))] == each.choices[each.answer])
    result = answer_questions(byte_model, ByteTokenizer(), QUESTIONS)
    assert result == {
        "questions": 5,
        "acc": np.mean(by_sum),
        "acc_stderr": pytest.approx(np.std(by_sum, ddof=1) / np.sqrt(5)),
        "acc_norm": np.mean(by_byte),
        "acc_norm_stderr": pytest.approx(np.std(by_byte, ddof=1) / np.sqrt(5)),
        "chance": pytest.approx((1 / 3 + 1 / 2 + 1 / 4 + 1 / 2 + 2 / 3) / 5),
        "truncated": 0,
    }
    assert len({*by_sum}) == 2, "the test shows nothing where all answers are alike"


def test_length_is_in_bytes_and_without_white_space(byte_model: Transformer) -> None:
    for parameter in byte_model.parameters().values():
        if parameter.value.ndim == 2:
            parameter.value[:] = 0  # each byte has the same probability
    short, long = question("x", "ab", "ä", "a"), question("x", " a ", "bc", "d")
    # By sum the shortest wins; by byte what has the fewest tokens a byte, of equal ones the first.
    for asked, by_sum, by_byte in ((short, 2, 0), (long, 2, 1)):
        for answer in range(3):
            changed = dataclasses.replace(asked, answer=answer)
            result = answer_questions(byte_model, ByteTokenizer(), [changed], separator="")
            assert (result["acc"], result["acc_norm"]) == (answer == by_sum, answer == by_byte)


def test_of_equal_scores_the_first_wins(byte_model: Transformer) -> None:
    for parameter in byte_model.parameters().values():
        if parameter.value.ndim == 2:
            parameter.value[:] = 0
    for answer, right in ((0, 1.0), (1, 0.0)):
        asked = [question("x", "a", "b", answer=answer)]
        assert answer_questions(byte_model, ByteTokenizer(), asked)["acc"] == right


def test_a_single_question_has_no_standard_error(byte_model: Transformer) -> None:
    result = answer_questions(byte_model, ByteTokenizer(), QUESTIONS[:1])
    assert result["acc_stderr"] is None
    assert result["acc_norm_stderr"] is None


def test_a_separator_stands_where_there_is_no_white_space() -> None:
    for context, choice in (("x", "y"), ("x ", "y"), ("x", " y")):
        (asked,) = encoded([question(context, choice, choice + "z")])
        assert text_of(asked.prefix) + text_of(asked.choices[0]) == b"x y"
    kept = encode_question(ByteTokenizer(), question("x", "y", "z"), "", 48)
    assert text_of(kept.prefix) + text_of(kept.choices[0]) == b"xy"


def test_tokens_over_the_boundary_are_scored_for_all_choices() -> None:
    tokenizer = train_bpe(["abc abc abd"] * 50, 264)
    alone, reaching, plain = (list(tokenizer.encode(f"abc ab{end}")) for end in ("", "c", "z"))
    assert reaching[: len(alone)] != alone, "no token reaches over the boundary"
    asked = encode_question(tokenizer, question("abc ab", "c", "z"), "", 48)
    assert tokenizer.decode_bytes(asked.prefix) == b"abc"
    assert [[*asked.prefix, *choice] for choice in asked.choices] == [reaching, plain]


def test_a_context_that_vanishes_into_the_first_token() -> None:
    tokenizer = train_bpe(["abc abd"] * 50, 270)
    assert len(tokenizer.encode("abc")) == 1
    asked = encode_question(tokenizer, question("ab", "c", "d"), "", 48)
    assert list(asked.prefix) == list(tokenizer.encode("ab"))
    assert [tokenizer.decode_bytes(choice) for choice in asked.choices] == [b"c", b"d"]


def test_texts_begin_as_the_model_wants(byte_model: Transformer) -> None:
    asked = encode_question(ByteTokenizerWithBegin(), question("xy", " a", " b"), "", 48)
    assert text_of(asked.prefix) == b"\x01xy"


def test_control_tokens_in_a_text_are_text() -> None:
    asked = encode_question(ByteTokenizer(), question("<|im_end|>", "a", "b"), "", 48)
    assert text_of(asked.prefix) == b"<|im_end|>"


def test_of_a_long_context_the_newest_tokens_are_kept(byte_model: Transformer) -> None:
    asked = question("0123456789", "ab", "c")
    exact = encode_question(ByteTokenizer(), asked, "", 11)
    assert (text_of(exact.prefix), exact.is_truncated) == (b"0123456789", False)
    cut = encode_question(ByteTokenizer(), asked, "", 10)
    assert (text_of(cut.prefix), cut.is_truncated) == (b"123456789", True)
    begun = encode_question(ByteTokenizerWithBegin(), asked, "", 10)
    assert (text_of(begun.prefix), begun.is_truncated) == (b"\x0123456789", True)
    result = answer_questions(byte_model, ByteTokenizer(), [question("x" * 99, "y", "z")])
    assert result["truncated"] == 1


def test_a_choice_longer_than_the_context_is_refused() -> None:
    asked = question("x", "y" * 10, "z")
    assert len(encode_question(ByteTokenizer(), asked, "", 10).prefix) == 1
    with pytest.raises(
        TwellError, match="a question: a choice of 10 tokens given, at most 9 wanted"
    ):
        encode_question(ByteTokenizer(), asked, "", 9)
    with pytest.raises(TwellError, match="at most 9 wanted"):
        encode_question(ByteTokenizerWithBegin(), asked, "", 10)


def test_a_score_that_is_not_finite_is_refused(byte_model: Transformer) -> None:
    byte_model.parameters()["model.norm.weight"].value[:] = np.nan
    with pytest.raises(TwellError, match="a question: .* not finite"):
        answer_questions(byte_model, ByteTokenizer(), QUESTIONS)


def test_no_question_is_refused(byte_model: Transformer) -> None:
    with pytest.raises(ValueError, match="no question"):
        answer_questions(byte_model, ByteTokenizer(), [])


def test_a_gpu_gives_the_same_scores(byte_model: Transformer, machine: Any) -> None:
    asked = encoded(
        [question("a context of more than a page", " y", " no"), question("x", "a", "b")]
    )
    expected = score_choices(byte_model, asked)
    byte_model.move_to_gpu(machine.gpu.stream, np.float32)
    for one, other in zip(score_choices(byte_model, asked), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4)
