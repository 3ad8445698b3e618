"""Fields of a request's JSON, taken one by one and checked by hand."""

import difflib
import json
import math
from collections.abc import Collection, Mapping
from typing import Any

from twell_numba.infer.server.errors import ApiError, invalid

# Of what a client wrote, repeated in an error.
_LONGEST_SHOWN = 60


def parse_json_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object that a request's body is.

    Raises
    ------
    ApiError
        If it is not UTF-8, not JSON, nested too deeply, has a number that JSON does not have, or is
        no object.
    """
    try:
        content = json.loads(body.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise invalid(f"the body is not UTF-8 ({error.reason} at byte {error.start})") from None
    except RecursionError:
        raise invalid("the body is nested too deeply, a flat JSON object wanted") from None
    except ValueError as error:
        # also a whole number of thousands of digits
        raise invalid(f"the body is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise invalid(f"the body is {shown(content)}, a JSON object wanted")
    return content


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON's")


def shown(value: object) -> str:
    """Return a value as it stands in an error: short, and on one line."""
    try:
        text = json.dumps(value)
    except (RecursionError, ValueError):
        text = f"a nested {type(value).__name__}"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."


class Fields:
    """The fields of an object, each taken at most once.

    ``null`` is the same as a field that is not given. Every method raises an :class:`ApiError` of
    status 400 that names the field, the value and what is wanted.
    """

    def __init__(self, content: Mapping[str, Any], prefix: str = "") -> None:
        self._left = {name: value for name, value in content.items() if value is not None}
        self._known: set[str] = set()
        self._prefix = prefix

    def take(self, name: str) -> Any:
        """Return a field of any type, None if it is not given."""
        self._known.add(name)
        return self._left.pop(name, None)

    def flag(self, name: str) -> bool:
        """Return true or false; false if it is not given."""
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise self.unfit(name, value, "true or false wanted")
        return bool(value)

    def text(self, name: str) -> str | None:
        """Return a string."""
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise self.unfit(name, value, "a string wanted")
        return value

    def whole(self, name: str, low: int, high: int) -> int | None:
        """Return a whole number of ``low`` to ``high``."""
        value = self.take(name)
        if value is None:
            return None
        # JSON has one kind of number: 2.0 is whole.
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not is_whole or not low <= value <= high:
            raise self.unfit(name, value, f"a whole number from {low} to {high} wanted")
        return int(value)

    def number(
        self, name: str, default: float, low: float, high: float, above_low: bool = False
    ) -> float:
        """Return a finite number of ``low`` (or only above it) to ``high``."""
        value = self.take(name)
        if value is None:
            return default
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (above_low and value == low):
            start = f"above {low:g}, up" if above_low else f"from {low:g}"
            raise self.unfit(name, value, f"a number {start} to {high:g} wanted")
        return float(value)

    def refuse(self, neutral: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuse fields that would change the answer, unless their value leaves it as it is."""
        for name, values in neutral.items():
            value = self.take(name)
            if value is not None and not any(_same(value, allowed) for allowed in values):
                where = self._prefix + name
                raise invalid(f"{where} {shown(value)} given, which is not supported", where)

    def ignore(self, names: Collection[str]) -> None:
        """Take fields that cannot change the answer."""
        for name in names:
            self.take(name)

    def finish(self) -> None:
        """Refuse what has not been taken: a misspelt field would change the answer in silence."""
        for name in self._left:
            near = difflib.get_close_matches(name, sorted(self._known), n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            where = self._prefix + name
            raise invalid(f"field {shown(where)} given, which is not known{hint}", where)

    def unfit(self, name: str, value: object, wanted: str) -> ApiError:
        """Return the error for a value that does not fit."""
        where = self._prefix + name
        return invalid(f"{where} {shown(value)} given, {wanted}", where)


def _same(value: Any, allowed: Any) -> bool:
    # True equals 1 in Python, and no number is a flag here.
    if isinstance(value, bool) or isinstance(allowed, bool):
        return value is allowed
    if isinstance(value, float) and math.isnan(value):
        return False
    return bool(value == allowed)
