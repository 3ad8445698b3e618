"""JSON that any reader takes: NaN and infinities, which JSON does not have, become null."""

import json
import math
from typing import Any


def to_json(value: Any, indent: int | None = None) -> str:
    """Return dicts, lists, text and numbers as JSON; a number that is not finite as null."""
    return json.dumps(_with_nulls(value), indent=indent, allow_nan=False)


def _with_nulls(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _with_nulls(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_nulls(item) for item in value]
    return value
