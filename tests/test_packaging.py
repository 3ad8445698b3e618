"""What a user installs: a wheel built from the sdist, in an environment of its own."""

import shutil
import site
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
CODE_FOLDERS = ("twell_numba", "formats", "train", "infer", "tests")
METADATA = ("setup.cfg", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md")


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build an sdist of a copy of the sources and a wheel from that sdist; return their folder."""
    source = tmp_path_factory.mktemp("source")
    for name in METADATA:
        shutil.copy(REPOSITORY / name, source)
    for name in CODE_FOLDERS:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, source / name, ignore=ignore)
    output = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", output, source)
    return output


@pytest.fixture(scope="module")
def environment(distributions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel in a new environment that borrows only the dependencies of this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    wheel = next(distributions.glob("*.whl"))
    run(
        sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", wheel
    )
    # Paths in a .pth file come after the environment's own packages, and .pth files inside them are
    # not read: an installed twell_numba of this environment, editable or not, is not seen there.
    borrowed = {
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        *site.getsitepackages(),
    }
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    Path(packages, "borrowed.pth").write_text("\n".join(sorted(borrowed)))
    return python


def run(*command: object, cwd: Path | None = None) -> str:
    """Run a command and return its stdout; if it fails, the test shows what it wrote."""
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def tracked_python_files() -> set[str]:
    return {
        path.relative_to(REPOSITORY).as_posix()
        for folder in CODE_FOLDERS
        for path in (REPOSITORY / folder).rglob("*.py")
    }


def test_sdist_holds_all_code_and_tests(distributions: Path) -> None:
    with tarfile.open(next(distributions.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert tracked_python_files() <= names
    assert {"setup.cfg", "pyproject.toml", "LICENSE", "twell_numba/py.typed"} <= names


def test_wheel_holds_all_code_under_one_name(distributions: Path) -> None:
    with zipfile.ZipFile(next(distributions.glob("*.whl"))) as archive:
        names = set(archive.namelist())
    top = {name.partition("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"twell_numba"}
    wanted = {
        name if name.startswith("twell_numba/") else f"twell_numba/{name}"
        for name in tracked_python_files()
        if not name.startswith("tests/")
    }
    assert wanted | {"twell_numba/py.typed"} <= names


@pytest.mark.parametrize("subpackage", ["formats", "train", "infer"])
def test_installed_wheel_imports_from_elsewhere(
    environment: Path, tmp_path: Path, subpackage: str
) -> None:
    statement = (
        f"import twell_numba.{subpackage} as module, sys; print(module.__file__); print(sys.prefix)"
    )
    file, prefix = run(environment, "-c", statement, cwd=tmp_path).splitlines()
    assert Path(file).is_relative_to(prefix)
    assert Path(file).parent.name == subpackage


def test_installed_command_runs(environment: Path, tmp_path: Path) -> None:
    assert "train" in run(environment.with_name("twell"), "--help", cwd=tmp_path)
    module = run(environment, "-c", "import twell_numba; print(twell_numba.__file__)", cwd=tmp_path)
    assert Path(module.strip()).with_name("py.typed").exists()
