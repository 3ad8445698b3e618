import numpy as np
import pytest

from twell_numba.errors import TwellError, UsageError
from twell_numba.infer.sampling import log_probability, penalize_repetition, sample

LOGITS = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))


def draw(count: int, logits: np.ndarray = LOGITS, **settings: float) -> np.ndarray:
    rng = np.random.default_rng(0)
    tokens = [sample(logits, rng, **settings) for _ in range(count)]  # type: ignore[arg-type]
    return np.bincount(tokens, minlength=len(logits)) / count


def test_temperature_zero_is_argmax() -> None:
    assert draw(5, temperature=0.0).tolist() == [0, 1, 0, 0]


def test_temperature_zero_takes_the_first_of_equals() -> None:
    assert sample(np.array([1.0, 3.0, 3.0]), np.random.default_rng(0), temperature=0.0) == 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_softmax(temperature: float) -> None:
    expected = np.array([0.1, 0.4, 0.2, 0.3]) ** (1 / temperature)
    expected /= expected.sum()
    assert draw(4000, temperature=temperature) == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-4])
def test_tiny_temperature_is_argmax(temperature: float) -> None:
    assert draw(5, temperature=temperature).tolist() == [0, 1, 0, 0]


def test_huge_temperature_is_uniform() -> None:
    assert draw(4000, temperature=1e300) == pytest.approx(np.full(4, 0.25), abs=0.03)


def test_top_k() -> None:
    assert draw(4000, top_k=2) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=0.03)
    assert draw(5, top_k=1).tolist() == [0, 1, 0, 0]
    assert draw(50, top_k=100).tolist() == draw(50).tolist()


def test_top_k_with_equals_keeps_the_first() -> None:
    assert draw(100, np.zeros(5), top_k=2)[2:].tolist() == [0, 0, 0]


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    assert draw(4000, top_p=0.6) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=0.03)
    assert draw(4000, top_p=0.75) == pytest.approx([0, 4 / 9, 2 / 9, 3 / 9], abs=0.03)
    assert draw(5, top_p=1e-9).tolist() == [0, 1, 0, 0]
    assert draw(50, top_p=1.0).tolist() == draw(50).tolist()


def test_top_p_applies_to_what_top_k_left() -> None:
    # Of the two kept, the first has 4/7 = 0.57.
    assert draw(5, top_k=2, top_p=0.55).tolist() == [0, 1, 0, 0]


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = np.array([-np.inf, 0.0, -np.inf, 0.0])
    assert draw(500, logits)[[0, 2]].tolist() == [0, 0]


def test_a_seed_fixes_the_draw() -> None:
    first, second = (
        [sample(LOGITS, rng) for _ in range(20)]
        for rng in (np.random.default_rng(7), np.random.default_rng(7))
    )
    assert first == second


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
    ],
)
def test_settings_out_of_range_are_refused(settings: dict) -> None:
    with pytest.raises(UsageError, match=r"given, .* wanted"):
        sample(LOGITS, np.random.default_rng(0), **settings)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_diverged_logits_are_refused(bad: float, temperature: float) -> None:
    logits = np.array([0.0, bad, 1.0])
    with pytest.raises(TwellError, match="diverged"):
        sample(logits, np.random.default_rng(0), temperature=temperature)


def test_min_p() -> None:
    assert draw(4000, min_p=0.6) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=0.03)
    assert draw(5, min_p=1.0).tolist() == [0, 1, 0, 0]
    assert draw(50, min_p=0.0).tolist() == draw(50).tolist()


def test_a_penalty_makes_positive_and_negative_logits_smaller() -> None:
    logits = np.array([2.0, -2.0, 0.0, 2.0, -2.0])
    penalize_repetition(logits, np.array([0, 1, 2, 9]), 4.0)
    assert logits.tolist() == [0.5, -8.0, 0.0, 2.0, -2.0]


def test_log_probabilities() -> None:
    result = log_probability(LOGITS + 3, 2, 3)
    assert result.token == 2
    assert result.logprob == pytest.approx(np.log(0.2), abs=1e-6)
    assert [token for token, _ in result.top] == [1, 3, 2]
    expected = np.log([0.4, 0.3, 0.2])
    assert [logprob for _, logprob in result.top] == pytest.approx(expected, abs=1e-6)


def test_log_probabilities_of_none_of_all_and_of_equal_tokens() -> None:
    assert log_probability(LOGITS, 2, 0).top == ()
    assert len(log_probability(LOGITS, 2, 100).top) == 4
    assert [token for token, _ in log_probability(np.zeros(5), 2, 5).top] == [0, 1, 2, 3, 4]
    forbidden = log_probability(np.array([-np.inf, 0.0]), 1, 2)
    assert forbidden.top == ((1, 0.0), (0, -np.inf))


def test_all_tokens_forbidden_is_an_error() -> None:
    with pytest.raises(TwellError, match="every logit is -inf, which forbids all tokens"):
        sample(np.full(3, -np.inf), np.random.default_rng(0))
