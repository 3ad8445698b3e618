"""The exponential of compiled loops, outside of them; its numbers are tested with attention."""

import pytest

from twell_numba.device.exponential import exponential


def test_a_call_from_python_says_what_is_wrong():
    with pytest.raises(NotImplementedError, match="unset NUMBA_DISABLE_JIT"):
        exponential(-1.0)
