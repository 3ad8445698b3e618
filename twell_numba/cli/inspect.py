"""``twell inspect``: what a checkpoint or a saved matrix holds."""

import json
from pathlib import Path
from typing import Any

import click

from twell_numba.cli.options import common_options, json_option
from twell_numba.cli.text import bytes_text, note, print_histogram, print_table
from twell_numba.errors import TwellError, UsageError
from twell_numba.models.reading import exists, is_file, is_gguf


@click.command("inspect")
@click.argument("path", metavar="PATH")
@click.option(
    "--plot",
    "picture",
    metavar="FILE.png",
    help="Also draw a saved matrix: its pattern and the lengths of its rows.",
)
@common_options
@json_option
def inspect(path: str, picture: str | None, as_json: bool) -> None:
    """Show what PATH holds: a run, a checkpoint, a GGUF file, or a saved sparse matrix.

    \b
    Examples:
      twell inspect runs/tiny-1
      twell inspect activations.safetensors
      twell inspect activations.safetensors --plot pattern.png
    """
    if picture is not None and Path(picture).suffix.lower() != ".png":
        raise UsageError(f"--plot {picture} given, a file name that ends in .png wanted")
    if not exists(path):
        raise TwellError(
            f"{path} does not exist; a run, a checkpoint, a GGUF file or a saved matrix wanted"
        )
    from twell_numba.infer import describe
    from twell_numba.infer.silu_note import silu_note
    from twell_numba.models.checkpoint import load_config
    from twell_numba.models.weight_files import INDEX_NAME, WEIGHTS_NAME

    if Path(path).name in (WEIGHTS_NAME, INDEX_NAME):
        path = str(Path(path).parent)
    is_matrix = is_file(path) and not is_gguf(path)
    if picture is not None and not is_matrix:
        raise UsageError(f"--plot given, but {path} is no saved matrix; leave --plot out")
    if is_matrix:
        description = describe.describe_matrix(path)
        show = _show_matrix
    else:
        description = describe.describe_checkpoint(path)
        show = _show_checkpoint
        config = load_config(description["checkpoint"])
        for remark in (_remark(description), silu_note(config, path)):
            if remark:
                note(remark)
    if picture is not None:
        from twell_numba.formats import load
        from twell_numba.infer.plot import plot_matrix

        plot_matrix(load(path), picture)
        click.echo(f"drawn: {picture}", err=True)
    if as_json:
        click.echo(json.dumps(description, indent=2))
    else:
        show(description)


def _remark(description: dict[str, Any]) -> str | None:
    """Say in one line why figures are missing from the description of a checkpoint."""
    missing = description["missing_tensors"]
    if missing:
        return (
            f"{description['checkpoint']} lacks {missing[0]} ({len(missing)} in all), "
            f"without which the model cannot be used; fetch or save it again"
        )
    if any(layer["nonzeros"] is None for layer in description["ffn_layers"]):
        return (
            f"{description['checkpoint']} holds feedforward weights of a dtype that is not "
            f"supported, so that their zeros are not counted; save it as float32 or bfloat16"
        )
    return None


def _show_checkpoint(description: dict[str, Any]) -> None:
    step = description["step"]
    training = "none" if step is None else f"step {step:,}"
    if step is not None and not description["resumable"]:
        training += ", cannot be resumed (no optimizer state)"
    print_table(
        None,
        [
            ("checkpoint", description["checkpoint"]),
            ("training state", training),
            ("parameters", f"{description['parameters']:,}"),
            ("weights", bytes_text(description["bytes"])),
            *((name, value) for name, value in description["config"].items() if value is not None),
        ],
    )
    click.echo()
    print_table(
        ("FFN layer", "format", "zeros", "nonzeros", "bytes", "of dense"),
        [(layer, *_layer_row(ffn)) for layer, ffn in enumerate(description["ffn_layers"])],
    )
    click.echo()
    print_table(
        ("tensor", "shape", "dtype", "bytes"),
        [
            (
                tensor["name"],
                " x ".join(map(str, tensor["shape"])),
                tensor["dtype"],
                f"{tensor['bytes']:,}",
            )
            for tensor in description["tensors"]
        ],
    )


def _layer_row(ffn: dict[str, Any]) -> tuple[str, ...]:
    counted, dense = ffn["nonzeros"] is not None, ffn["dense_bytes"]
    return (
        ffn["format"],
        f"{1 - ffn['density']:.2%}" if counted else "unknown",
        f"{ffn['nonzeros']:,} of {ffn['weights']:,}" if counted else "unknown",
        f"{ffn['bytes']:,}",
        f"{ffn['bytes'] / dense:.2%}" if dense else "unknown",
    )


def _show_matrix(description: dict[str, Any]) -> None:
    stored, dense = description["bytes"], description["dense_bytes"]
    share = f", {stored / dense:.1%} of {bytes_text(dense)} dense" if dense else ""
    print_table(
        None,
        [
            ("file", description["path"]),
            ("format", description["format"]),
            ("shape", " x ".join(map(str, description["shape"]))),
            ("dtype", description["dtype"]),
            ("stored entries", f"{description['stored']:,}"),
            ("nonzeros", f"{description['nonzeros']:,}"),
            ("density", f"{description['density']:.4%}"),
            ("size", f"{bytes_text(stored)}{share}"),
        ],
    )
    click.echo()
    print_table(
        ("array", "shape", "dtype"),
        [
            (name, " x ".join(map(str, array["shape"])), array["dtype"])
            for name, array in description["arrays"].items()
        ],
    )
    bins = description["row_lengths"]
    if bins:
        click.echo("\nrows by number of nonzeros")
        labels = [
            str(part["low"]) if part["low"] == part["high"] else f"{part['low']}-{part['high']}"
            for part in bins
        ]
        print_histogram([part["rows"] for part in bins], labels)
