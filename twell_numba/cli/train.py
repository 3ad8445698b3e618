"""``twell train``: train a model, or go on with a run."""

from contextlib import ExitStack

import click

from twell_numba.cli.options import device_option, json_option, seed_option
from twell_numba.cli.training import (
    as_overrides,
    new_run_folder,
    refuse_with_resume,
    require_run_name,
    run_and_print,
)


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
    require_run_name(out)
    named = {"data": data, "steps": steps, "target_density": target_density, "seed": seed}
    given = [*overrides, *as_overrides(named)]
    if deterministic:
        given.append("deterministic=true")
    if resume is not None:
        refuse_with_resume({"--preset": preset, "--config": config_file, "--out": out})
    from twell_numba.train.config import resolve, with_overrides
    from twell_numba.train.run_folder import RunFolder

    with ExitStack() as until_the_end:
        if resume is not None:
            config = with_overrides(RunFolder(resume).read_config(), given)
            folder = resume
        else:
            config = resolve(preset, config_file, given)
            # before the seconds that loading Numba takes
            folder = until_the_end.enter_context(new_run_folder(out, config.preset))
        run_and_print(
            config, folder, resume=resume is not None, quiet=quiet, device=device, as_json=as_json
        )
