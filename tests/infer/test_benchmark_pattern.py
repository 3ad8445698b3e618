"""Layers that follow a pattern from a file: which neurons fire, and what is timed."""

import json
import zipfile

import numpy as np
import pytest
from click.testing import CliRunner
from scipy.sparse import csr_array

from twell_numba.cli import twell
from twell_numba.errors import TwellError, UsageError
from twell_numba.infer import ffn_pattern, timing
from twell_numba.infer.benchmark_pattern import benchmark_pattern, mean_rows
from twell_numba.infer.ffn_pattern import firing_neurons_of, follow, load_patterns
from twell_numba.infer.ffn_problem import FFNProblem, FFNShape

NEURONS = 120


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(timing, "PAUSE_SECONDS", 0.0)


def random_pattern(tokens, seed=0):
    """Return an uneven pattern: two busy tokens, one without any, and dead neurons."""
    rng = np.random.default_rng(seed)
    fires = rng.random((tokens, NEURONS)) < rng.random(NEURONS) * 0.1
    fires[0], fires[1:3] = False, rng.random((2, NEURONS)) < 0.3
    fires[:, 5::3] = False
    fires[3, -1] = True
    return fires


def save(path, **patterns):
    arrays = {}
    for name, fires in patterns.items():
        arrays[f"{name}_counts"] = fires.sum(axis=1).astype(np.uint16)
        arrays[f"{name}_columns"] = np.nonzero(fires)[1].astype(np.uint16)
    np.savez(path, **arrays)
    return str(path)


def fires_in(problem):
    return problem.x.astype(np.float32) @ problem.gate.astype(np.float32).T > 0


def test_patterns_come_back_from_a_file(tmp_path):
    first, second = random_pattern(20), random_pattern(30, seed=1)[:, :60]
    path = save(tmp_path / "patterns.npz", first=first, second=second)
    patterns = load_patterns(path)
    assert list(patterns) == ["first", "second"]
    np.testing.assert_array_equal(patterns["first"].toarray() > 0, first)
    assert patterns["second"].shape == (30, NEURONS)  # as wide as the widest
    np.testing.assert_array_equal(patterns["second"].toarray()[:, :60] > 0, second)
    assert list(load_patterns(path, ("second",))) == ["second"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_exactly_the_pattern_fires(dtype):
    fires = random_pattern(50)
    problem = FFNProblem(FFNShape(50, 128, NEURONS + 4, 60), 0, dtype)
    gate, x = problem.gate.copy(), problem.x.copy()
    followed, agreement = follow(problem, csr_array(fires.astype(np.float32)))
    assert agreement == (1, 1)
    np.testing.assert_array_equal(fires_in(followed)[:, :NEURONS], fires)
    assert not fires_in(followed)[:, NEURONS:].any()
    assert followed.x.dtype == followed.gate.dtype == problem.dtype
    assert followed.shape.nonzeros == pytest.approx(fires.sum() / 50)
    np.testing.assert_array_equal(problem.gate, gate)  # left as they were
    np.testing.assert_array_equal(problem.x, x)


def test_more_tokens_than_the_pattern_has_begin_again():
    fires = random_pattern(20)
    problem = FFNProblem(FFNShape(50, 128, NEURONS, 60), 0)
    followed, _ = follow(problem, csr_array(fires.astype(np.float32)))
    np.testing.assert_array_equal(fires_in(followed), np.vstack([fires, fires, fires[:10]]))


def test_projections_are_needed_and_put_signs_right(monkeypatch):
    """In many panels, the last not full."""
    monkeypatch.setattr(ffn_pattern, "PANEL_ROWS", 7)
    pattern = csr_array(random_pattern(50).astype(np.float32))
    problem = FFNProblem(FFNShape(50, 64, NEURONS, 60), 0)
    followed, agreement = follow(problem, pattern)
    assert agreement == (1, 1)
    np.testing.assert_array_equal(fires_in(followed), pattern.toarray() > 0)
    monkeypatch.setattr(ffn_pattern, "MOST_PROJECTIONS", 1)
    assert follow(problem, pattern)[1].precision < 1


def test_what_cannot_be_followed_is_counted():
    """120 neurons in 4 dimensions; dead ones do not fire all the same."""
    fires = random_pattern(50)
    problem = FFNProblem(FFNShape(50, 4, NEURONS, 60), 0)
    followed, (recall, precision) = follow(problem, csr_array(fires.astype(np.float32)))
    fired = fires_in(followed)
    right = np.count_nonzero(fired & fires)
    assert recall == pytest.approx(right / fires.sum())
    assert precision == pytest.approx(right / fired.sum())
    assert 0 < precision < 0.9
    assert not fired[:, ~fires.any(axis=0)].any()


@pytest.mark.parametrize("backward", [False, True])
def test_a_layer_without_its_dead_neurons_gives_the_same(backward):
    pattern = csr_array(random_pattern(40).astype(np.float32))
    whole, _ = follow(FFNProblem(FFNShape(40, 128, NEURONS, 60), 0), pattern)
    alive = firing_neurons_of(pattern)
    part = whole.with_neurons(alive)
    assert part.shape.neurons == len(alive) < NEURONS
    np.testing.assert_allclose(part.exact.y, whole.exact.y, atol=1e-12)
    np.testing.assert_allclose(part.exact.dx, whole.exact.dx, atol=1e-12)
    for of_part, of_whole in zip(part.exact.gradients, whole.exact.gradients, strict=True):
        np.testing.assert_allclose(of_part, of_whole[alive], atol=1e-12)


def test_rows():
    fires = random_pattern(40)
    problem = FFNProblem(FFNShape(40, 128, NEURONS, 60), 0)
    pattern = csr_array(fires.astype(np.float32))
    parts = list(benchmark_pattern(problem, "middle", pattern, rounds=1, remove_dead=True))
    alive = len(firing_neurons_of(pattern))
    assert [(part[0]["operation"], part[0]["shape"]["F"]) for part in parts] == [
        ("forward", NEURONS),
        ("forward", alive),
        ("forward+backward", NEURONS),
        ("forward+backward", alive),
    ]
    for part in parts:
        assert [row["path"].partition(" ")[0] for row in part] == ["auto", "dense", "twell"]
        for row in part:
            assert row["pattern"] == "middle"
            assert row["dead_removed"] == (row["shape"]["F"] == alive)
            assert (row["pattern_recall"], row["pattern_precision"]) == (1, 1)
            assert row["nonzeros_per_token"] == pytest.approx(fires.sum() / 40)
            assert 0 < row["max_relative_error"] < 1e-5


def test_the_mean_of_several_patterns():
    def row(path, dense, this, **others):
        return {
            "operation": "forward", "path": path, "pattern": "x", "dead_removed": False,
            "shape": {"M": 1, "D": 2, "F": 10}, "dense_ms": dense, "sparse_ms": this,
            "nonzeros_per_token": 4.0, "dense_peak_bytes": None, "sparse_peak_bytes": None,
            "max_relative_error": 1e-6, "pattern_recall": 1.0, "pattern_precision": 1.0,
        } | others  # fmt: skip

    auto, twell_row = mean_rows([
        row("auto (twell)", 3.0, 1.0),
        row("twell", 3.0, 1.0),
        row("auto (dense)", 5.0, 3.0, max_relative_error=1e-3, shape={"M": 1, "D": 2, "F": 20}),
        row("twell", 5.0, 1.0, dense_peak_bytes=4),
    ])  # fmt: skip
    assert (auto["path"], auto["pattern"], auto["speedup"]) == ("auto", "mean", 2.0)
    assert (auto["max_relative_error"], auto["shape"]["F"]) == (1e-3, 15)
    assert (twell_row["path"], twell_row["speedup"]) == ("twell", 4.0)


@pytest.mark.parametrize("as_json", [True, False])
def test_command(tmp_path, as_json):
    path = save(tmp_path / "p.npz", low=random_pattern(16), high=random_pattern(16, seed=1))
    arguments = ["--pattern", path, "--remove-dead", "--tokens", "8", "--width", "64"]
    arguments += ["--device", "cpu", *(["--json"] if as_json else [])]
    result = CliRunner().invoke(twell, ["bench", "ffn", *arguments])
    assert result.exit_code == 0, result.output
    if as_json:
        rows = json.loads(result.stdout)
        assert len(rows) == 3 * 2 * 2 * 3
        assert [row["pattern"] for row in rows[::12]] == ["low", "high", "mean"]
        assert rows[0]["shape"] == {"M": 8, "D": 64, "F": NEURONS}
    else:
        assert "(high, dead neurons removed; as the pattern says)" in result.stderr
        assert result.stdout.count(" mean ") == 12
    one = CliRunner().invoke(
        twell, ["bench", "ffn", *arguments[:2], *arguments[3:], "--pattern-layer", "low"]
    )
    assert one.exit_code == 0, one.output
    assert "mean" not in one.stdout


def test_a_pattern_that_is_too_large_for_its_layer_is_said_to_be(tmp_path):
    path = save(tmp_path / "p.npz", low=random_pattern(16))
    arguments = ["bench", "ffn", "--pattern", path, "--width", "4", "--tokens", "16"]
    result = CliRunner().invoke(twell, [*arguments, "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert "% of the pattern fire, " in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--remove-dead"], "--remove-dead given without --pattern FILE"),
        (["--pattern-layer", "low"], "--pattern-layer given without --pattern FILE"),
        (["--pattern", "PATH", "--density", "0.1"], "--pattern given with --density"),
        (["--pattern", "PATH", "--skew", "1"], "--pattern given with --density"),
        (["--pattern", "PATH", "--pattern-layer", "top"], "top given, PATH has low"),
        (["--pattern", "PATH", "--hidden-width", "100"], "at least 120 wanted"),
        (["--pattern", "PATH", "--layers", "0"], "0"),
        (["--pattern", "PATH", "--float8"], "--float8 given on the CPU, a GPU wanted"),
        (["--skew", "nan"], "a number from 0 to 4 wanted"),
    ],
)
def test_what_does_not_fit_is_one_line(tmp_path, arguments, message):
    path = save(tmp_path / "p.npz", low=random_pattern(16))
    arguments = [path if argument == "PATH" else argument for argument in arguments]
    result = CliRunner().invoke(twell, ["bench", "ffn", *arguments, "--device", "cpu"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert message.replace("PATH", path) in result.stderr


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": np.ones(3)}, "holds no pattern"),
        ({"a_counts": [1, 2], "a_columns": [0, 1]}, "a of PATH: 2 columns given, 3 wanted"),
        ({"a_counts": [1, 2], "a_columns": [0, 1, 1]}, "columns that do not ascend"),
        ({"a_counts": [0, 2], "a_columns": [4, 3]}, "columns that do not ascend"),
        ({"a_counts": [1, -1], "a_columns": np.zeros(0, int)}, "counts and columns"),
        ({"a_counts": [1.0], "a_columns": [0.5]}, "counts and columns"),
        ({"a_counts": [1], "a_columns": [-1]}, "counts and columns"),
        ({"a_counts": np.zeros(0, int), "a_columns": np.zeros(0, int)}, "no token given"),
        ({"a_counts": [1], "a_columns": [2**20]}, "1048576 given as a count or column, less than"),
        ({"a_counts": [1], "a_columns": np.array([2**63], np.uint64)}, "less than 1048576"),
        ({"a_counts": np.array([2**63] * 2, np.uint64), "a_columns": [0]}, "less than 1048576"),
        ({"a_counts_counts": [1], "a_columns_columns": [0]}, "holds no pattern"),
        (np.arange(3), "is no file of patterns"),
        ("no archive", "is no file of patterns"),
        ("", "is no file of patterns"),
    ],
)
def test_files_that_are_refused(tmp_path, arrays, message):
    path = tmp_path / "p.npz"
    if isinstance(arrays, str):
        path.write_text(arrays)
    elif isinstance(arrays, np.ndarray):
        with path.open("wb") as file:
            np.save(file, arrays)
    else:
        np.savez(path, **arrays)
    with pytest.raises(TwellError) as caught:
        load_patterns(str(path))
    assert not isinstance(caught.value, UsageError)
    assert message.replace("PATH", str(path)) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_damaged_archives_are_refused(tmp_path):
    path = tmp_path / "p.npz"
    np.savez_compressed(path, a_counts=[200], a_columns=np.cumsum(np.arange(200) % 7 + 1))
    content = bytearray(path.read_bytes())
    start = content.find(b"a_columns.npy") + 40
    for position in range(start, start + 20):
        content[position] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(TwellError, match="is no file of patterns"):
        load_patterns(str(path))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a_counts.npy", "no array")
        archive.writestr("a_columns.npy", "")
    with pytest.raises(TwellError, match="counts and columns wanted"):
        load_patterns(str(path))


def test_a_layer_in_which_nothing_fires_cannot_lose_its_dead_neurons(tmp_path):
    path = save(tmp_path / "p.npz", dead=np.zeros((3, 8), bool), low=random_pattern(4))
    arguments = ["bench", "ffn", "--pattern", path, "--remove-dead", "--device", "cpu"]
    result = CliRunner().invoke(twell, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"no neuron of dead of {path} ever fires" in result.stderr


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(TwellError, match="is no file of patterns"):
        load_patterns(str(tmp_path / "nothing.npz"))
