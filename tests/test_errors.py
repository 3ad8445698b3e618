import numpy as np
import pytest

from twell_numba.errors import shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a  b\n", "'a  b\\n'"),
        (1.5, "1.5"),
        (np.arange(3), "array([0, 1, 2])"),
        (10**5000, "a value of type int too large to show"),
    ],
    ids=["text", "number", "array", "large number"],
)
def test_values_are_shown_as_python_writes_them(value: object, text: str) -> None:
    assert shown(value) == text


@pytest.mark.parametrize("value", ["x" * 1000, np.arange(40), np.eye(3)])
def test_what_is_long_is_one_short_line(value: object) -> None:
    assert "\n" not in shown(value)
    assert len(shown(value)) <= 80
