"""The command line's frame: lazy imports, one-line errors, exit codes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from twell_numba.cli import COMMANDS, twell
from twell_numba.cli.group import LazyGroup
from twell_numba.device.nvidia import NO_DRIVER, Driver
from twell_numba.errors import TwellError, UsageError


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(twell, arguments, prog_name="twell")


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )


def failing_group(error: BaseException) -> LazyGroup:
    """Return a group whose only command raises."""
    group = LazyGroup("twell", {}, package="", help="")

    @click.command("fail")
    def fail() -> None:
        raise error

    group.get_command = lambda ctx, name: fail  # type: ignore[method-assign]
    group._summaries["fail"] = "fails"
    return group


def test_help_lists_every_command_and_imports_neither_numpy_nor_numba() -> None:
    result = run_python(
        "import sys; sys.argv = ['twell', '--help']\n"
        "from twell_numba.cli import main\n"
        "try: main()\n"
        "except SystemExit as exit: print('code', exit.code)\n"
        "print('loaded', sorted({'numpy', 'numba', 'scipy', 'rich'} & sys.modules.keys()))"
    )
    assert result.stdout.splitlines()[-2:] == ["code 0", "loaded []"]
    assert all(name in result.stdout for name in COMMANDS)


def test_help_is_quick() -> None:
    def seconds() -> float:
        start = time.perf_counter()
        assert run_python("import sys; sys.argv = ['twell', '--help']\n"
                          "from twell_numba.cli import main; main()").returncode == 0  # fmt: skip
        return time.perf_counter() - start

    assert min(seconds() for _ in range(3)) < 0.5


def test_importing_the_package_is_quick_and_leaves_numba_out() -> None:
    result = run_python(
        "import sys, time; start = time.perf_counter(); import twell_numba, twell_numba.errors\n"
        "print(time.perf_counter() - start < 0.3, 'numba' in sys.modules)"
    )
    assert result.stdout.split() == ["True", "False"]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command_shows_an_example(name: str) -> None:
    result = invoke(name, "--help")
    assert result.exit_code == 0
    assert f"Example:\n    twell {name}" in result.stdout or (
        f"Examples:\n    twell {name}" in result.stdout
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_imports_neither_numpy_nor_numba(name: str) -> None:
    result = run_python(
        f"import sys; sys.argv = ['twell', {name!r}, '--help']\n"
        "from twell_numba.cli import main\n"
        "try: main()\n"
        "except SystemExit: print(sorted({'numpy', 'numba', 'scipy'} & sys.modules.keys()))"
    )
    assert result.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "no command 'trian' (did you mean 'train'?)"),
        (["doctor", "--jsn"], "--json"),
        (["doctor", "extra"], "unexpected extra argument"),
        (["doctor", "--seed", "-1"], "--seed"),
        (["doctor", "--device", "tpu"], "'tpu' given; auto, cpu, cuda or cuda:N wanted"),
        (["data", "prepare", "only-one"], "DST"),
        (["train", "--preset"], "--preset"),
        (["generate", "run"], "--prompt"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert message in line


def test_wrong_use_says_where_help_is() -> None:
    assert "(see 'twell data info --help')" in invoke("data", "info").stderr


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:1"])
@pytest.mark.parametrize(
    "command",
    [
        ["train"],
        ["generate", "run", "--prompt", "x"],
        ["chat", "run"],
        ["serve", "run"],
        ["eval", "run"],
        ["bench", "ffn"],
    ],
    ids=lambda command: command[0],
)
def test_a_gpu_that_is_not_there_is_refused_in_one_line(
    command: list[str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(None, (), NO_DRIVER)
    monkeypatch.setattr("twell_numba.device.choice.ask_driver", lambda: driver)
    result = invoke(*command, "--device", device)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"Error: --device {device} given")
    assert "--device cpu" in line


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (TwellError("a given,\n b wanted"), 1, "Error: a given, b wanted\n"),
        (UsageError("wrong"), 2, "Error: wrong\n"),
        (OSError(28, "No space left on device", "run/x"), 1,
         "Error: run/x: No space left on device\n"),
        (click.ClickException("plain"), 1, "Error: plain\n"),
    ],
)  # fmt: skip
def test_errors_of_the_user_become_one_line(error: Exception, code: int, message: str) -> None:
    result = CliRunner().invoke(failing_group(error), ["fail"])
    assert (result.exit_code, result.stderr) == (code, message)


@pytest.mark.parametrize(
    ("error", "start"),
    [
        (MemoryError("40 GiB"), "Error: not enough memory (40 GiB); "),
        (MemoryError(), "Error: not enough memory; "),
    ],
)
@pytest.mark.parametrize(
    ("command", "advice"),
    [("train", "batch_size"), ("generate", "shorter prompt"), ("fail", "something smaller")],
)
def test_too_little_memory_says_what_needs_less(
    error: MemoryError, start: str, command: str, advice: str
) -> None:
    group = failing_group(error)
    group._summaries[command] = "fails"
    result = CliRunner().invoke(group, [command])
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith(start)
    assert advice in line


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TWELL_NUM_THREADS", "0"),
        ("TWELL_NUM_THREADS", "many"),
        ("NUMBA_DISABLE_JIT", "1"),
        ("NUMBA_NUM_THREADS", "0"),
        ("NUMBA_NUM_THREADS", "abc"),
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        ["train"],
        ["generate", "run", "--prompt", "x"],
        ["chat", "run"],
        ["serve", "run"],
        ["eval", "run"],
        ["bench", "ffn"],
        ["bench", "formats"],
    ],
    ids=lambda command: command[0],
)
def test_nothing_is_computed_in_an_environment_that_does_not_allow_it(
    command: list[str], variable: str, value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(variable, value)
    result = invoke(*command)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert variable in line
    assert "unset it" in line
    assert list(tmp_path.iterdir()) == []
    assert invoke(command[0], "--help").exit_code == 0


def test_the_package_runs_as_a_module() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "twell_numba", "--help"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.returncode == 0
    assert result.stdout.startswith("Usage: twell ")


@pytest.mark.skipif(sys.platform == "win32", reason="streams are closed by a POSIX shell")
@pytest.mark.parametrize("closing", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(("arguments", "code"), [("--help", 0), ("inspect missing", 1)])
def test_closed_standard_streams_do_no_harm(closing: str, arguments: str, code: int) -> None:
    result = subprocess.run(
        f'"{sys.executable}" -m twell_numba {arguments} {closing}',
        shell=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.returncode == code
    assert "Traceback" not in result.stdout + result.stderr
    if code and "2>" not in closing:
        assert result.stderr.startswith("Error: missing does not exist")


def test_an_interrupt_exits_with_130() -> None:
    result = CliRunner().invoke(failing_group(KeyboardInterrupt()), ["fail"])
    assert result.exit_code == 130
    assert result.stderr.split() == ["Error:", "interrupted"]


def test_an_unexpected_exception_keeps_its_traceback() -> None:
    error = ZeroDivisionError("a fault of ours")
    assert CliRunner().invoke(failing_group(error), ["fail"]).exception is error


def test_no_command_shows_the_help() -> None:
    result = invoke()
    assert result.exit_code == 2
    assert "Commands:" in result.stderr


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    result = subprocess.run(
        [sys.executable, "-c", "from twell_numba.cli import main; main()", "--help"],
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )
    os.close(write_end)
    assert result.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_stdout_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-c", "from twell_numba.cli import main; main()", "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    assert result.returncode == 1
    assert result.stderr == "Error: No space left on device\n"
