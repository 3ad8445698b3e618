"""``twell sparsify``: make a sparse model of a dense one."""

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
from twell_numba.errors import UsageError


@click.command("sparsify")
@click.argument("model", metavar="MODEL", required=False)
@click.option(
    "--data",
    metavar="SRC",
    help="Text to train on: stdlib, a text file, a folder of text files, or a .bin prepared with "
    "the model's tokenizer.",
)
@click.option("--out", metavar="RUN", help="New run folder; runs/sparsify-N if not given.")
@click.option("--steps", metavar="N", help="Optimizer steps.")
@click.option(
    "--l1", "l1_activation", metavar="STRENGTH", help="Of the L1 term: more makes more zeros."
)
@click.option(
    "--l1-warmup", "l1_warmup_steps", metavar="N", help="Steps in which that strength rises."
)
@click.option("--learning-rate", metavar="RATE", help="Its highest value.")
@click.option(
    "--warmup", "warmup_steps", metavar="N", help="Steps in which the learning rate rises."
)
@click.option("--batch-size", metavar="N", help="Sequences in a forward pass.")
@click.option("--context", "context_length", metavar="N", help="Tokens in a training sequence.")
@click.option(
    "--set",
    "overrides",
    metavar="KEY=VALUE",
    multiple=True,
    help="One more setting, as of 'twell train'; may be given many times.",
)
@click.option("--resume", metavar="RUN", help="Go on with a run that was stopped.")
@click.option("--quiet", is_flag=True, help="Show no progress.")
@seed_option(default=None)
@device_option
@json_option
def sparsify(
    model: str | None,
    overrides: tuple[str, ...],
    out: str | None,
    resume: str | None,
    quiet: bool,
    device: str,
    as_json: bool,
    **named: str | int | None,
) -> None:
    """Make a sparse copy of MODEL: ReLU in place of its activation, then training with L1.

    MODEL is a folder as of Hugging Face, a GGUF file, or a run of 'twell train'; it is only read.
    RUN is a run folder, whose checkpoints other tools open too.

    \b
    Examples:
      twell sparsify models/SmolLM2-135M --data my-texts/ --out runs/sparse
      twell sparsify model.gguf --data stdlib --steps 200 --l1 1e-3
      twell sparsify --resume runs/sparse
    """
    require_run_name(out)
    given = [*overrides, *as_overrides(named)]
    if resume is not None:
        refuse_with_resume({"MODEL": model, "--out": out})
    elif model is None:
        raise UsageError("no MODEL given, a folder or GGUF file to make sparse wanted, or --resume")
    elif named["data"] is None:
        raise UsageError("no --data given: stdlib, a file or folder of text, or a .bin wanted")
    from twell_numba.train.config import with_overrides
    from twell_numba.train.run_folder import RunFolder

    with ExitStack() as until_the_end:
        if resume is not None:
            config = with_overrides(RunFolder(resume).read_config(), given)
            folder = resume
        else:
            assert model is not None
            folder = until_the_end.enter_context(new_run_folder(out, "sparsify"))
            from twell_numba.train.sparsify import sparsify_settings

            config = sparsify_settings(model, given)
        run_and_print(
            config, folder, resume=resume is not None, quiet=quiet, device=device, as_json=as_json
        )
