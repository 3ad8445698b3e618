"""The commands about sparse matrices: ``bench formats`` and ``inspect`` of a saved matrix."""

import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner, Result

from twell_numba.cli import twell
from twell_numba.formats import (
    BlockELLMatrix,
    CSRMatrix,
    HybridELLMatrix,
    SparseMatrix,
    TwELLMatrix,
)
from twell_numba.infer import timing
from twell_numba.infer.plot import pattern_picture

FORMATS = [CSRMatrix, BlockELLMatrix, TwELLMatrix, HybridELLMatrix]
KEYS = {
    "operation",
    "path",
    "device",
    "dtype",
    "shape",
    "density",
    "dense_ms",
    "scipy_ms",
    "sparse_ms",
    "speedup",
    "speedup_over_scipy",
    "max_relative_error",
}


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(twell, list(map(str, arguments)), prog_name="twell")


@pytest.fixture
def small_bench(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    monkeypatch.setattr(timing, "PAUSE_SECONDS", 0)
    return ["bench", "formats", "--rows", 50, "--columns", 40, "--right-columns", 20]


def test_bench_formats_times_every_product_of_every_format(small_bench: list[object]) -> None:
    result = invoke(*small_bench, "--density", 0.2, "--density", 0.9, "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    paths = {"csr", "hybrid_ell", "twell", "block_ell"}
    operations = {"A @ X", "A.T @ X", "X @ A", "sampled", "from_dense"}
    assert {(row["path"], row["operation"]) for row in rows} == {
        (path, operation) for path in paths for operation in operations
    }
    assert len(rows) == 2 * len(paths) * len(operations)
    for row in rows:
        assert set(row) == KEYS
        assert row["shape"] == {"M": 50, "K": 40, "N": 20}
        assert row["max_relative_error"] < 1e-6
        assert row["speedup"] == pytest.approx(row["dense_ms"] / row["sparse_ms"])
        assert row["speedup_over_scipy"] == pytest.approx(row["scipy_ms"] / row["sparse_ms"])
    assert {round(row["density"], 1) for row in rows if row["path"] == "csr"} == {0.2, 0.9}


@pytest.mark.parametrize("density", ["nan", "0", "1.5", "-1"])
def test_bench_formats_refuses_what_is_no_density(small_bench: list[object], density: str) -> None:
    result = invoke(*small_bench, "--density", density)
    assert result.exit_code == 2
    assert "'--density'" in result.stderr
    assert density in result.stderr


def test_bench_formats_prints_a_table(small_bench: list[object]) -> None:
    result = invoke(*small_bench, "--density", 0.2)
    assert result.exit_code == 0, result.output
    assert "SciPy" in result.stdout
    assert "block_ell" in result.stdout
    assert "measured: sampled of block_ell" in result.stderr


def saved(cls: type[SparseMatrix], folder: Path) -> Path:
    dense = np.zeros((30, 20), ml_dtypes.bfloat16)
    dense[3, 4:8] = 2.0
    dense[7] = np.nan
    path = folder / "matrix.safetensors"
    cls.from_dense(dense).save(path)
    return path


@pytest.mark.parametrize("cls", FORMATS)
def test_inspection_describes_every_format(cls: type[SparseMatrix], tmp_path: Path) -> None:
    path = saved(cls, tmp_path)
    description = json.loads(invoke("inspect", path, "--json").stdout)
    assert description["format"] == cls.__name__
    assert description["shape"] == [30, 20]
    assert description["dtype"] == "bfloat16"
    assert description["nonzeros"] == 24
    assert description["density"] == pytest.approx(24 / 600)
    assert description["dense_bytes"] == 1200
    lengths = {part["low"]: part["rows"] for part in description["row_lengths"]}
    assert lengths == {0: 28, 1: 0, 2: 0, 4: 1, 8: 0, 16: 1}
    table = invoke("inspect", path).stdout
    assert "4.0000%" in table
    assert "rows by number of nonzeros" in table


@pytest.mark.parametrize("cls", FORMATS)
def test_a_matrix_without_elements_can_be_inspected(
    cls: type[SparseMatrix], tmp_path: Path
) -> None:
    path = tmp_path / "empty.safetensors"
    cls.from_dense(np.zeros((0, 0))).save(path)
    result = invoke("inspect", path)
    assert result.exit_code == 0, result.output
    assert "0 x 0" in result.stdout


@pytest.mark.parametrize("cls", FORMATS)
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:matplotlib", "ignore::DeprecationWarning:pyparsing"
)
def test_inspection_draws_a_matrix(cls: type[SparseMatrix], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.png"
    result = invoke("inspect", saved(cls, tmp_path), "--plot", picture, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["shape"] == [30, 20]
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")


def test_the_pattern_is_counted_in_cells() -> None:
    picture = pattern_picture(np.array([0, 1, 1023]), np.array([0, 1, 2]), (1024, 3))
    assert picture.shape == (512, 3)
    np.testing.assert_array_equal(picture[0], [0.5, 0.5, 0])
    assert picture[511, 2] == 0.5
    assert picture.sum() == 1.5
    assert pattern_picture(np.zeros(0, int), np.zeros(0, int), (0, 0)).sum() == 0


def test_a_plot_without_matplotlib_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = invoke("inspect", saved(CSRMatrix, tmp_path), "--plot", tmp_path / "x.png")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "pip install 'twell_numba[plot]'" in result.stderr


def test_plots_that_cannot_be_are_refused(tmp_path: Path) -> None:
    path = saved(CSRMatrix, tmp_path)
    result = invoke("inspect", path, "--plot", tmp_path / "x.pdf")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "ends in .png wanted" in result.stderr
    result = invoke("inspect", tmp_path, "--plot", tmp_path / "x.png")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no saved matrix" in result.stderr
