"""``twell convert``: a checkpoint with sparse weights, dense ones, or fewer neurons."""

from typing import TYPE_CHECKING, Any

import click

from twell_numba.cli.options import any_device_option, ignored_seed_option, json_option
from twell_numba.cli.text import bytes_text, print_table
from twell_numba.errors import UsageError
from twell_numba.strict_json import to_json

if TYPE_CHECKING:
    import numpy as np

    from twell_numba.models.tokenizer import TextTokenizer
    from twell_numba.models.transformer import Transformer

# The option's value and the format's name in files.
_FORMATS = {"csr": "csr", "block-ell": "block_ell", "dense": "dense"}


@click.command("convert")
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@click.option(
    "--to",
    "weight_format",
    type=click.Choice(list(_FORMATS)),
    help="How feedforward weights are stored; as in SRC if not given.",
)
@click.option("--block-size", type=int, help="Rows and columns of a block; 16 if not given.")
@click.option(
    "--weight-threshold",
    type=float,
    metavar="X",
    help="Set weights of a smaller magnitude than X to zero; with --to block-ell, blocks of a "
    "smaller root mean square.",
)
@click.option(
    "--target-density",
    type=float,
    metavar="P",
    help="Keep only the fraction P of the weights, the largest; of blocks, with --to block-ell.",
)
@click.option("--per-layer", is_flag=True, help="Keep the fraction P of each matrix.")
@click.option(
    "--remove-dead", is_flag=True, help="Remove neurons that fire for no token of --data."
)
@click.option(
    "--data",
    metavar="SRC",
    help="stdlib, a text file, a folder or a prepared .bin, of which the held-out part is used: "
    "the loss on it is measured before and after.",
)
@click.option(
    "--gguf-type",
    type=click.Choice(["f32", "f16", "bf16", "q8_0"]),
    help="How weights are stored in a GGUF file; f32 if not given.",
)
@click.option("--windows", type=click.IntRange(min=1), help="How many sequences of --data to use.")
@ignored_seed_option
@any_device_option
@json_option
def convert(
    source: str,
    destination: str,
    weight_format: str | None,
    block_size: int | None,
    weight_threshold: float | None,
    target_density: float | None,
    per_layer: bool,
    remove_dead: bool,
    data: str | None,
    gguf_type: str | None,
    windows: int | None,
    device: str,
    as_json: bool,
) -> None:
    """Write a changed copy of SRC, a run folder, a checkpoint or a GGUF file, to the folder DST.

    SRC is left as it is, and DST must not exist yet. twell eval, generate and inspect take DST.
    If DST ends in .gguf, it becomes a GGUF file, which other tools run too.

    \b
    Examples:
      twell convert runs/tiny-1 pruned --to csr --target-density 0.01 --data stdlib
      twell convert runs/tiny-1 smaller --remove-dead --data stdlib
      twell convert pruned dense-again --to dense
      twell convert SmolLM2 smollm2.gguf --gguf-type q8_0
      twell convert smollm2.gguf SmolLM2-again --to dense
    """
    if windows is not None and data is None:
        raise UsageError("--windows given without --data, of which it says how much to use")
    from twell_numba.infer.convert import Conversion
    from twell_numba.infer.convert import convert as convert_checkpoint

    def read_windows(model: "Transformer", tokenizer: "TextTokenizer") -> "np.ndarray":
        from twell_numba.train.held_out import held_out_windows

        tokens, name = held_out_windows(source, model, tokenizer, data=data, count=windows)
        click.echo(
            f"Measuring {len(tokens):,} sequences of {tokens.shape[1] - 1:,} tokens of {name}",
            err=True,
        )
        return tokens

    report = convert_checkpoint(
        source,
        destination,
        Conversion(
            _FORMATS[weight_format] if weight_format else None,
            block_size,
            weight_threshold,
            target_density,
            per_layer,
            remove_dead,
            gguf_type,
        ),
        None if data is None else read_windows,
    )
    if as_json:
        click.echo(to_json(report, indent=2))
    else:
        _print_report(report)


def _print_report(report: dict[str, Any]) -> None:
    rows = [("written", report["destination"]), ("format", report["format"])]
    for title, name in (("all weights", "bytes"), ("FFN weights", "ffn_bytes")):
        before, after = report[f"{name}_before"], report[f"{name}_after"]
        share = f"{after / before:.2%}" if before else "unknown"
        rows.append(
            (title, f"{bytes_text(before)} before, {bytes_text(after)} after, which is {share}")
        )
    alive = [layer["neurons_alive"] for layer in report["layers"]]
    if None not in alive:
        most = max(alive)
        rows.append(
            (
                "neurons",
                f"{report['neurons_before']:,} before, {report['neurons_after']:,} after, as many "
                f"in all layers: {most:,} fire in layer {alive.index(most)}",
            )
        )
    if report["loss_before"] is not None:
        losses = f"{report['loss_before']:.4f} before, {report['loss_after']:.4f} after"
        rows.append(("loss", losses))
    print_table(None, rows)
    click.echo()
    header = ["layer", "density before", "after", "FFN bytes before", "after"]
    with_neurons = any(layer["neurons_alive"] is not None for layer in report["layers"])
    print_table(
        [*header, "neurons that fire"] if with_neurons else header,
        [
            _layer_row(number, layer)[: len(header) + with_neurons]
            for number, layer in enumerate(report["layers"])
        ],
    )


def _layer_row(number: int, layer: dict[str, Any]) -> list[str]:
    before, after = layer["density_before"], layer["density_after"]
    return [
        str(number),
        "unknown" if before is None else f"{before:.3%}",
        f"{after:.3%}",
        f"{layer['ffn_bytes_before']:,}",
        f"{layer['ffn_bytes_after']:,}",
        f"{layer['neurons_alive']}",
    ]
