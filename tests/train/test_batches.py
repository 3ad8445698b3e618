"""Windows for training and validation."""

import json

import numpy as np
import pytest

from twell_numba.errors import TwellError
from twell_numba.train.batches import BatchSampler, validation_windows


def sampler(tokens, seed=0, context_length=8):
    return BatchSampler(tokens, context_length, np.random.default_rng(seed))


def test_windows_are_consecutive_tokens():
    windows = sampler(np.arange(100, dtype=np.uint8)).draw(50)
    assert windows.dtype == np.int64
    assert windows.shape == (50, 9)
    np.testing.assert_array_equal(np.diff(windows), 1)


def test_every_position_can_be_drawn_and_none_beyond_the_end():
    starts = sampler(np.arange(20, dtype=np.uint16)).draw(2000)[:, 0]
    assert set(starts) == set(range(12))


def test_the_shortest_text_that_holds_a_window():
    np.testing.assert_array_equal(sampler(np.arange(9)).draw(1), [np.arange(9)])
    with pytest.raises(TwellError, match="8 training tokens given, at least .* 9 wanted"):
        sampler(np.arange(8))


def test_a_resumed_sampler_goes_on_where_the_other_stopped():
    """Fault 70: the sampler's own generator is what must be saved, not a global one."""
    tokens = np.arange(1000)
    whole = sampler(tokens, seed=1)
    whole.draw(3)
    state = json.loads(json.dumps(whole.state_dict()))
    expected = [whole.draw(5) for _ in range(4)]
    resumed = sampler(tokens, seed=2)
    np.random.default_rng().random(10)
    resumed.load_state_dict(state)
    for windows in expected:
        np.testing.assert_array_equal(resumed.draw(5), windows)


def test_taking_a_state_is_not_changed_by_later_draws():
    source = sampler(np.arange(1000))
    state = source.state_dict()
    before = json.dumps(state)
    source.draw(5)
    assert json.dumps(state) == before


def test_validation_windows_are_fixed_spread_and_predict_no_token_twice():
    tokens = np.arange(1000, dtype=np.uint16)
    windows = validation_windows(tokens, 8, 10)
    np.testing.assert_array_equal(windows, validation_windows(tokens, 8, 10))
    assert windows.shape == (10, 9)
    targets = windows[:, 1:].ravel()
    assert len(set(targets)) == targets.size
    assert windows[-1, -1] > 850


@pytest.mark.parametrize(("length", "fitting"), [(9, 1), (16, 1), (17, 2), (80, 9), (81, 10)])
def test_as_many_validation_windows_as_fit(length, fitting):
    windows = validation_windows(np.arange(length), 8, 1000)
    assert len(windows) == fitting
    np.testing.assert_array_equal(windows[:, 1:].ravel(), np.arange(1, fitting * 8 + 1))


def test_too_little_validation_text_is_refused():
    with pytest.raises(TwellError, match="8 held-out tokens given"):
        validation_windows(np.arange(8), 8, 1)
