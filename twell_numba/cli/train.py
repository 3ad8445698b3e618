"""``twell train``: train a model, or go on with a run."""

import json

import click

from twell_numba.cli.options import device_option, json_option, seed_option
from twell_numba.cli.text import note
from twell_numba.errors import UsageError
from twell_numba.strict_json import to_json


@click.command("train")
@click.option(
    "--preset",
    metavar="NAME",
    help="Settings to start from: tiny (the default), tiny-weight-sparse, small, base, "
    "paper-0.5b, paper-1b, paper-1.5b or paper-2b.",
)
@click.option(
    "--config", "config_file", metavar="F.toml", help="Settings that go over the preset's."
)
@click.option(
    "--set",
    "overrides",
    metavar="KEY=VALUE",
    multiple=True,
    help="One setting, over all of those; may be given many times. Keys: those of any run's "
    "config.toml.",
)
@click.option(
    "--data", metavar="SRC", help="stdlib, a text file, a folder of text files, or a prepared .bin."
)
@click.option("--steps", metavar="N", help="Optimizer steps.")
@click.option(
    "--target-density",
    metavar="P",
    help="Part of the feedforward weights to be left: 0.01 makes 99% of them zeros.",
)
@click.option("--out", metavar="RUN", help="New run folder; runs/PRESET-N if not given.")
@click.option("--resume", metavar="RUN", help="Go on with a run that was stopped.")
@click.option(
    "--deterministic",
    is_flag=True,
    help="On a GPU: the same bits in every run, at some cost in speed.",
)
@click.option("--quiet", is_flag=True, help="Show no progress.")
@seed_option(default=None)
@device_option
@json_option
def train(
    preset: str | None,
    config_file: str | None,
    overrides: tuple[str, ...],
    data: str | None,
    steps: str | None,
    target_density: str | None,
    out: str | None,
    resume: str | None,
    deterministic: bool,
    quiet: bool,
    seed: int | None,
    device: str,
    as_json: bool,
) -> None:
    """Train a sparse transformer into a new run folder.

    Settings come from the preset, then --config, then --set and the options of their own. Without
    any of them, the tiny preset is trained on this Python's library source, in minutes.

    \b
    Examples:
      twell train --preset tiny
      twell train --preset small --data my-texts/ --set l1_activation=5e-4
      twell train --preset tiny-weight-sparse --target-density 0.05
      twell train --device cuda --set precision=float32
      twell train --resume runs/tiny-1
    """
    if out is not None and not out.strip():
        raise UsageError(f"--out {out!r} given, the name of a new run folder wanted")
    named = {"data": data, "steps": steps, "target_density": target_density, "seed": seed}
    if deterministic:
        named["deterministic"] = "true"
    given = [
        *overrides,
        *(_override(key, value) for key, value in named.items() if value is not None),
    ]
    if resume is not None:
        _refuse_with_resume({"--preset": preset, "--config": config_file, "--out": out})
    from twell_numba.train.config import resolve, with_overrides
    from twell_numba.train.run_folder import RunFolder, next_run_path

    if resume is not None:
        config = with_overrides(RunFolder(resume).read_config(), given)
        folder = resume
    else:
        config = resolve(preset, config_file, given)
        folder = out or str(next_run_path(config.preset))
        RunFolder(folder).require_new()  # before the seconds that loading Numba takes
    from twell_numba.device.memory import keep_freed_memory
    from twell_numba.train.loop import train as run_training
    from twell_numba.train.report import Reporter, closing_lines, print_summary

    keep_freed_memory()
    summary = run_training(
        config,
        folder,
        resume=resume is not None,
        report=Reporter() if quiet else None,
        device=device,
    )
    if as_json:
        click.echo(to_json({"run": folder, **summary}, indent=2))
    else:
        print_summary(summary)
    if not quiet:
        for line in closing_lines(config, folder):
            note(line)


def _override(key: str, value: str | int) -> str:
    # Quoted, so that a path keeps blanks and quotes of its own.
    written = json.dumps(value, ensure_ascii=False) if key == "data" else value
    return f"{key}={written}"


def _refuse_with_resume(options: dict[str, str | None]) -> None:
    for option, value in options.items():
        if value is not None:
            raise UsageError(
                f"{option} {value} given with --resume, which goes on with the run's own settings "
                f"in its own folder; leave it out, or start a new run without --resume"
            )
