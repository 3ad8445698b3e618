"""The options that several commands share: where to compute."""

import click
import pytest
from click.testing import CliRunner

from twell_numba.cli import options, twell
from twell_numba.cli.group import LazyGroup
from twell_numba.device import choice, nvidia
from twell_numba.device.nvidia import Driver, VisibleGPU

GPU = VisibleGPU(0, "New", (9, 0), 2**37)


def run(option, *arguments):
    """Run a command with a device option, which prints the device it gets."""

    @click.command("show")
    @option
    def show(device="none passed on"):
        click.echo(device)

    group = LazyGroup("twell", {"show": "shows"}, package="", help="")
    group.get_command = lambda ctx, name: show  # type: ignore[method-assign]
    result = CliRunner().invoke(group, ["show", *arguments])
    return result.exit_code, result.stdout.strip(), result.stderr.strip()


@pytest.fixture(params=[True, False], ids=["gpu", "no_gpu"])
def has_gpu(request, monkeypatch):
    driver = Driver("13.0", (GPU,), None)
    if not request.param:
        driver = Driver(None, (), nvidia.NO_DRIVER)
    monkeypatch.setattr(choice, "ask_driver", lambda: driver)
    monkeypatch.setattr(choice, "missing_packages", list)
    monkeypatch.delenv("NUMBA_ENABLE_CUDASIM", raising=False)
    return request.param


def test_a_command_for_both_gets_the_device_chosen(has_gpu):
    device, note = ("cuda:0", "Computing on GPU 0, New (--device cpu for the CPU)")
    assert run(options.device_option) == ((0, device, note) if has_gpu else (0, "cpu", ""))
    assert run(options.device_option, "--device", "cpu") == (0, "cpu", "")
    code, out, error = run(options.device_option, "--device", "cuda:0")
    if has_gpu:
        assert (code, out, error) == (0, "cuda:0", "")
    else:
        assert (code, out) == (1, "")
        assert error.startswith("Error: --device cuda:0 given, but no NVIDIA driver found")
        assert error.count("\n") == 0


@pytest.mark.parametrize("wanted", ["auto", "cpu", "cuda", "cuda:3"])
def test_a_command_that_computes_no_model_takes_any_device(has_gpu, wanted):
    assert run(options.any_device_option, "--device", wanted) == (0, "cpu", "")
    assert run(options.common_options, "--device", wanted) == (0, "none passed on", "")


@pytest.mark.parametrize("name", ["device_option", "any_device_option"])
@pytest.mark.parametrize("wrong", ["gpu", "cuda:", "cuda:x", "cuda:-1", "CPU", "cuda:99999", ""])
def test_other_names_are_wrong_use(name, wrong):
    code, out, error = run(getattr(options, name), "--device", wrong)
    assert (code, out) == (2, "")
    assert f"{wrong!r} given; auto, cpu, cuda or cuda:N wanted" in error


@pytest.mark.parametrize("command", ["inspect", "convert", "data", "doctor"])
def test_commands_that_compute_no_model_accept_a_gpu(command, has_gpu, tmp_path):
    missing = str(tmp_path / "missing")
    arguments = {
        "inspect": ["inspect", missing],
        "convert": ["convert", missing, str(tmp_path / "new")],
        "data": ["data", "info", missing],
        "doctor": ["doctor", "extra"],
    }[command]
    result = CliRunner().invoke(twell, [*arguments, "--device", "cuda"])
    assert result.exit_code != 0
    assert "device" not in result.stderr
