"""Which part of the package may import which: downwards only, and Numba's CUDA in one place."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDERS = {
    "formats": REPOSITORY / "formats",
    "kernels": REPOSITORY / "twell_numba" / "kernels",
    "device": REPOSITORY / "twell_numba" / "device",
    "layers": REPOSITORY / "twell_numba" / "layers",
    "models": REPOSITORY / "twell_numba" / "models",
    "infer": REPOSITORY / "infer",
    "train": REPOSITORY / "train",
    "cli": REPOSITORY / "twell_numba" / "cli",
}
# Each part's own row of the layout table, and with it all that lies below.
MAY_IMPORT = {
    "device": set(),
    "formats": set(),
    "kernels": {"formats", "device"},
    "layers": {"kernels", "formats", "device"},
    "models": {"layers", "kernels", "formats", "device"},
    "infer": {"models", "layers", "kernels", "formats", "device"},
    "train": {"infer", "models", "layers", "kernels", "formats", "device"},
    "cli": {"train", "infer", "models", "layers", "kernels", "formats", "device"},
}
# What a part may import inside a function only.
MAY_IMPORT_AT_CALL_TIME = {"formats": {"device", "kernels"}}
COMPILERS = {"numba", "llvmlite"}
GPU_PACKAGES = {"cuda", "numba_cuda", "cupy", "nvmath", "cudnn"}
ONLY_IN = {
    "click": {"cli"},
    "gguf": {"models"},
    "jinja2": {"models"},
    "matplotlib": {"infer"},
    "rich": {"cli", "train"},
    "safetensors": {"formats"},
    "starlette": {"infer"},
    "threadpoolctl": {"device"},
    "uvicorn": {"infer"},
}

FILES = [
    pytest.param(part, path, id=path.relative_to(REPOSITORY).as_posix())
    for part, folder in FOLDERS.items()
    for path in sorted(folder.rglob("*.py"))
]


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Yield the full name of all that is imported: ``from a import b`` yields ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute in this package"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def at_call_time(tree: ast.Module) -> set[str]:
    functions = (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return {name for function in functions for name in imported_modules(function)}


def type_checking_only(tree: ast.Module) -> set[str]:
    blocks = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    return {name for block in blocks for child in block.body for name in imported_modules(child)}


@pytest.mark.parametrize(("part", "path"), FILES)
def test_imports_go_down_the_layout_table(part: str, path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    late = at_call_time(tree)
    for name in set(imported_modules(tree)) - type_checking_only(tree):
        package, _, rest = name.partition(".")
        if package != "twell_numba":
            continue
        target = rest.partition(".")[0]
        if target not in FOLDERS or target == part:
            continue
        allowed = MAY_IMPORT[part]
        if name in late:
            allowed = allowed | MAY_IMPORT_AT_CALL_TIME.get(part, set())
        assert target in allowed, f"{part} imports {name}"


@pytest.mark.parametrize(("part", "path"), FILES)
def test_packages_are_imported_where_they_belong(part: str, path: Path) -> None:
    for name in imported_modules(ast.parse(path.read_text(encoding="utf-8"))):
        package = name.partition(".")[0]
        if package in COMPILERS:
            assert part in {"device", "kernels"}, f"{part} imports {name}"
        if package in GPU_PACKAGES or name.startswith("numba.cuda"):
            assert part == "device", f"{part} imports {name}"
        assert part in ONLY_IN.get(package, {part}), f"{part} imports {name}"


def test_every_source_file_belongs_to_a_part() -> None:
    files = {path for folder in FOLDERS.values() for path in folder.rglob("*.py")}
    elsewhere = set((REPOSITORY / "twell_numba").rglob("*.py")) - files
    assert {path.name for path in elsewhere} == {
        "__init__.py",
        "__main__.py",
        "atomic.py",
        "errors.py",
        "strict_json.py",
    }


def test_every_folder_of_code_is_a_listed_package() -> None:
    listed = (REPOSITORY / "setup.cfg").read_text(encoding="utf-8")
    packages = {line.strip() for line in listed.splitlines()}
    for part, folder in FOLDERS.items():
        for file in folder.rglob("*.py"):
            inside = file.parent.relative_to(folder).parts
            assert ".".join(("twell_numba", part, *inside)) in packages, file


def test_only_declared_packages_are_imported() -> None:
    declared = {"numpy", "scipy", "numba", "llvmlite", "threadpoolctl", "ml_dtypes", "safetensors"}
    declared |= {"tokenizers", "click", "rich", "twell_numba"}
    optional = GPU_PACKAGES | {"gguf", "jinja2", "matplotlib", "starlette", "uvicorn"}
    for parameters in FILES:
        path = parameters.values[1]
        assert isinstance(path, Path)
        for name in imported_modules(ast.parse(path.read_text(encoding="utf-8"))):
            package = name.partition(".")[0]
            assert package in declared | optional | sys.stdlib_module_names, f"{path}: {name}"
