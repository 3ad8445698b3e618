"""``twell data``: prepare training text, or describe it."""

import json
from pathlib import Path
from typing import Any

import click

from twell_numba.cli.options import common_options, json_option
from twell_numba.cli.text import bytes_text, print_table
from twell_numba.errors import UsageError


@click.group("data", context_settings={"help_option_names": ["-h", "--help"]})
def data() -> None:
    """Prepare training text, or describe it.

    \b
    Examples:
      twell data info stdlib
      twell data prepare my-texts/ my-texts.bin
      twell train --preset tiny --data my-texts.bin
    """


@data.command("prepare")
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@click.option(
    "--tokenizer",
    type=click.Choice(["byte", "bpe"]),
    help="One token a byte, or byte-pair encoding trained on SRC; byte if not given.",
)
@click.option(
    "--bpe-vocab-size",
    type=click.IntRange(257, 2**20),
    help="Token ids of a bpe tokenizer; 4096 if not given.",
)
@click.option(
    "--tokenizer-of",
    "model",
    metavar="MODEL",
    help="Take the tokenizer of this model instead, as 'twell sparsify MODEL' wants it.",
)
@common_options
@json_option
def prepare(
    source: str,
    destination: str,
    tokenizer: str | None,
    bpe_vocab_size: int | None,
    model: str | None,
    as_json: bool,
) -> None:
    """Tokenize SRC once into DST, a .bin file that training maps into memory.

    SRC is stdlib (this Python's own library source), a text file or a folder of text files.

    \b
    Examples:
      twell data prepare stdlib stdlib.bin --tokenizer bpe
      twell data prepare my-texts/ my-texts.bin --tokenizer-of models/SmolLM2-135M
    """
    for option, value in (("--tokenizer", tokenizer), ("--bpe-vocab-size", bpe_vocab_size)):
        if model is not None and value is not None:
            raise UsageError(
                f"{option} {value} given with --tokenizer-of {model}, one of them wanted"
            )
    from twell_numba.train import prepared

    _print_description(
        prepared.prepare(
            source,
            destination,
            tokenizer=tokenizer or "byte",
            bpe_vocab_size=bpe_vocab_size or 4096,
            model=model,
        ),
        as_json,
    )


@data.command("info")
@click.argument("source", metavar="SRC")
@common_options
@json_option
def info(source: str, as_json: bool) -> None:
    """Describe SRC: stdlib, a text file, a folder of text files or a prepared .bin.

    \b
    Example:
      twell data info stdlib
    """
    from twell_numba.train import corpus, prepared

    if Path(source).suffix == prepared.SUFFIX:
        _print_description(prepared.describe(source), as_json)
        return
    text = corpus.load_text(source)
    _print_description(
        {
            "name": text.name,
            "files": text.files,
            "skipped_files": text.skipped,
            "bytes": text.byte_count,
            "training_bytes": sum(map(len, text.training)),
            "validation_bytes": sum(map(len, text.validation)),
        },
        as_json,
    )


def _print_description(description: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(description, indent=2))
        return
    print_table(
        None,
        [(name.replace("_", " "), _value_text(name, value)) for name, value in description.items()],
    )


def _value_text(name: str, value: Any) -> str:
    if not isinstance(value, int):
        return str(value)
    return f"{value:,} ({bytes_text(value)})" if name.endswith("bytes") else f"{value:,}"
