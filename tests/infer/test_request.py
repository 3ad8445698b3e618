import numpy as np
import pytest

from twell_numba.errors import UsageError
from twell_numba.infer.request import GenerationSettings, check_prompt


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": -1}, "max-new-tokens -1 given, at least 0 wanted"),
        ({"temperature": -0.5}, "temperature -0.5 given, a finite number of at least 0 wanted"),
        ({"temperature": float("nan")}, "temperature nan given"),
        ({"temperature": float("inf")}, "temperature inf given"),
        ({"top_k": -1}, "top-k -1 given, 0 to 2147483647 wanted"),
        ({"top_k": 10**30}, "top-k 1000000000000000000000000000000 given"),
        ({"top_p": 0.0}, "top-p 0.0 given, above 0"),
        ({"top_p": float("nan")}, "top-p nan given"),
        ({"min_p": -0.1}, "min-p -0.1 given, 0 to 1 wanted"),
        ({"min_p": 1.1}, "min-p 1.1 given"),
        ({"min_p": float("nan")}, "min-p nan given"),
        ({"repetition_penalty": 0.0}, "repetition-penalty 0.0 given, 0.01 to 100 wanted"),
        ({"repetition_penalty": 1e-320}, "repetition-penalty 1e-320 given"),
        ({"repetition_penalty": float("nan")}, "repetition-penalty nan given"),
        ({"repetition_penalty": float("inf")}, "repetition-penalty inf given"),
        ({"seed": -1}, "seed -1 given"),
        ({"stop": ("a", "")}, "an empty stop text given"),
        ({"logprobs": -1}, "logprobs -1 given, 0 to 100 wanted"),
        ({"logprobs": 101}, "logprobs 101 given"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        GenerationSettings(**settings).validate()


def test_one_stop_text_is_not_taken_for_its_characters() -> None:
    with pytest.raises(TypeError, match="stop 'END' given, a tuple of texts wanted"):
        GenerationSettings(stop="END").validate()  # type: ignore[arg-type]


def test_the_ends_of_the_ranges_are_taken() -> None:
    GenerationSettings(max_new_tokens=0, temperature=0, top_p=1, min_p=1, logprobs=0).validate()
    GenerationSettings(min_p=0, repetition_penalty=0.01, logprobs=100, stop=("\n",)).validate()
    GenerationSettings(top_k=2**31 - 1, repetition_penalty=100).validate()


def test_prompts() -> None:
    tokens = check_prompt([1, 2], 3)
    assert tokens.dtype == np.int64
    assert tokens.tolist() == [1, 2]
    with pytest.raises(UsageError, match="empty prompt"):
        check_prompt([], 3)
    with pytest.raises(UsageError, match="token 3 given in a prompt, 0 to 2 wanted"):
        check_prompt([1, 3], 3)
