"""How results are written: aligned tables, byte counts, histograms."""

import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress

import click


def print_table(header: Sequence[str] | None, rows: Iterable[Sequence[object]]) -> None:
    """Print rows in aligned columns to stdout; a column of numbers is aligned to the right."""
    body = [[str(cell) for cell in row] for row in rows]
    lines = body if header is None else [list(header), *body]
    columns = range(len(lines[0]) if lines else 0)
    widths = [max(len(line[column]) for line in lines) for column in columns]
    numeric = [bool(body) and all(_is_number(line[column]) for line in body) for column in columns]
    for line in lines:
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ]
        click.echo("  ".join(cells).rstrip())


def note(line: str) -> None:
    """Print a line to stderr; where that is full or closed, only the exit code can speak."""
    with suppress(OSError, ValueError):
        click.echo(line, err=True)


def show_text(text: str) -> None:
    """Write a piece of a model's text to stdout: on a terminal with controls written out."""
    from twell_numba.infer.text_stream import printable

    # With color, click leaves a text as it is.
    click.echo(printable(text) if sys.stdout.isatty() else text, nl=False, color=True)


def bytes_text(count: int) -> str:
    """Return a byte count in the largest binary unit that leaves at least 1 of it."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def print_histogram(counts: Sequence[int], labels: Sequence[str], width: int = 40) -> None:
    """Print one bar a count, the longest ``width`` characters; a count above 0 always shows."""
    longest = max(counts, default=0)
    rows = []
    for label, count in zip(labels, counts, strict=True):
        bar = "#" * (max(1, round(width * count / longest)) if count else 0)
        rows.append((label, count, bar))
    print_table(None, rows)


def _is_number(cell: str) -> bool:
    return cell.replace(",", "").replace(".", "").removesuffix("%").lstrip("-").isdigit()
