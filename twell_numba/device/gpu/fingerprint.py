"""A text that names all that a function's compiled form depends on.

Two functions of equal text compile to the same code: it holds the bytecode of the function and of
every function it uses, with all constants and captured variables, however far away they are
defined. (Numba's own cache looks at one file, or at bytecode without the globals.) What cannot be
put into words is refused, so that nothing goes unnoticed.
"""

import builtins
import dis
import hashlib
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np


def fingerprint(function: FunctionType) -> str:
    """Return a hash of the function and of everything it uses.

    Raises
    ------
    TypeError
        If it uses an object whose contents cannot be told, a mutable one for instance.
    """
    words = hashlib.sha256()
    for word in _Walk().function(function):
        words.update(word.encode())
        words.update(b"\0")
    return words.hexdigest()


class _Walk:
    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._kept_alive: list[Any] = []  # an id may not be used again meanwhile

    def function(self, function: FunctionType) -> Iterator[str]:
        if id(function) in self._numbers:
            yield f"function {self._numbers[id(function)]}"
            return
        self._numbers[id(function)] = len(self._numbers)
        self._kept_alive.append(function)
        yield f"def {function.__qualname__}"
        yield from self.code(function.__code__)
        yield from self.value(function.__defaults__, "defaults")
        for name, value in sorted((function.__kwdefaults__ or {}).items()):
            yield from self.value(value, name)
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            yield f"captured {name}"
            try:
                contents = cell.cell_contents
            except ValueError:  # not bound yet
                yield "unbound"
                continue
            yield from self.value(contents, name)
        for name in sorted(_global_names(function.__code__)):
            yield f"global {name}"
            if name in function.__globals__:
                yield from self.value(function.__globals__[name], name)
            else:
                yield "builtin" if hasattr(builtins, name) else "undefined"

    def code(self, code: CodeType) -> Iterator[str]:
        yield code.co_code.hex()
        yield getattr(code, "co_exceptiontable", b"").hex()
        yield f"{code.co_argcount} {code.co_kwonlyargcount} {code.co_flags}"
        yield repr((code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars))
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from self.code(constant)
            else:
                yield from self.value(constant, "constant")

    def value(self, value: Any, name: str) -> Iterator[str]:
        kind = type(value)
        if value is None or value is Ellipsis or kind in (bool, int, str, bytes):
            yield f"{kind.__name__} {value!r}"
        elif kind in (float, complex):
            yield f"{kind.__name__} {value!r} {np.array(value).tobytes().hex()}"
        elif isinstance(value, np.generic):
            yield f"{value.dtype.str} {value.tobytes().hex()}"
        elif isinstance(value, np.dtype):
            yield f"dtype {value.str} {value.name}"
        elif isinstance(value, np.ndarray) and value.dtype.kind != "O":
            yield f"array {value.dtype.str} {value.shape} {value.tobytes().hex()}"
        elif kind in (tuple, list):
            yield f"{kind.__name__} of {len(value)}"
            for item in value:
                yield from self.value(item, name)
        elif kind is frozenset:
            yield f"frozenset {sorted(map(repr, value))}"
        elif kind is dict:
            yield f"dict of {len(value)}"
            for key, item in value.items():
                yield from self.value(key, name)
                yield from self.value(item, name)
        elif isinstance(value, FunctionType):
            yield from self.function(value)
        elif isinstance(value, ModuleType):
            self._require_foreign(value, name)
            yield f"module {value.__name__}"
        elif isinstance(value, type | BuiltinFunctionType | np.ufunc):
            module = getattr(value, "__module__", "")
            yield f"{module} {getattr(value, '__qualname__', value.__name__)}"
        else:
            yield from self.other(value, name)

    def other(self, value: Any, name: str) -> Iterator[str]:
        inner = getattr(value, "py_func", None)  # a device function
        if inner is None:
            inner = getattr(value, "_defn", None)  # an intrinsic
        if isinstance(inner, FunctionType):
            options = getattr(value, "targetoptions", None)
            yield f"compiled {sorted((options or {}).items(), key=str)!r}"
            yield from self.function(inner)
        elif _is_type_name(value):
            yield f"{type(value).__module__} {value!r}"
        elif getattr(type(value), "__module__", "").startswith(("numba.", "llvmlite.")):
            yield f"{type(value).__module__}.{type(value).__qualname__} {_stable(value)}"
        else:
            raise TypeError(
                f"{name} of type {type(value).__name__} given to a kernel; a number, a tuple of "
                "numbers, a device function or an intrinsic wanted"
            )

    @staticmethod
    def _require_foreign(module: ModuleType, name: str) -> None:
        # What a kernel takes from a module is not looked at, so it must not be this package's.
        if module.__name__.partition(".")[0] == "twell_numba":
            raise TypeError(
                f"the module {name} given to a kernel; import what it uses by name, so that a "
                "change of it is noticed"
            )


def _global_names(code: CodeType) -> set[str]:
    names = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _global_names(constant)
    return names


def _is_type_name(value: Any) -> bool:
    """Whether it is one of Numba's types, whose name says all of it."""
    return any(
        cls.__name__ == "Type" and cls.__module__.endswith("types.abstract")
        for cls in type(value).__mro__
    )


def _stable(value: Any) -> str:
    text = repr(value)
    if " at 0x" in text:
        return getattr(value, "__qualname__", getattr(value, "__name__", type(value).__qualname__))
    return text
