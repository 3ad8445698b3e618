"""Numbers that are not finite do not get into JSON."""

import json
import math

import pytest

from twell_numba.strict_json import to_json


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_numbers_that_are_not_finite_become_null(number: float) -> None:
    value = {"loss": number, "layers": [1.5, number], "pair": (number, 2), "nested": {"x": number}}
    assert json.loads(to_json(value)) == {
        "loss": None,
        "layers": [1.5, None],
        "pair": [None, 2],
        "nested": {"x": None},
    }


def test_all_else_is_as_json_writes_it() -> None:
    value = {"text": "NaN", "whole": 3, "yes": True, "none": None, "list": [0.1, []]}
    assert to_json(value) == json.dumps(value)
    assert to_json(value, indent=2) == json.dumps(value, indent=2)
