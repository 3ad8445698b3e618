"""The ``twell`` command.

One click command a file; each parses, calls the library and prints, and holds no logic of its own.
Command modules are imported when their command runs, and import the library inside their functions,
so that ``twell --help`` imports neither NumPy nor Numba.
"""

import io
import os
import sys
from typing import NoReturn

from twell_numba.cli.group import LazyGroup

COMMANDS = {
    "train": "Train a sparse transformer.",
    "sparsify": "Make a sparse model of a dense one.",
    "generate": "Stream text written by a trained model.",
    "chat": "Talk with a model in the terminal.",
    "serve": "Answer other programs over HTTP, as OpenAI's API does.",
    "eval": "Measure a model: loss, perplexity, sparsity by layer.",
    "inspect": "Show what a checkpoint or a saved matrix holds.",
    "convert": "Rewrite a checkpoint: sparse or dense weights, no dead neurons.",
    "bench": "Time each path against dense and check its numbers.",
    "data": "Prepare training text, or describe it.",
    "doctor": "Show versions, CPU, GPU, and what works here.",
}

HELP = """Transformers made fast by making them sparse, on NumPy and Numba.

\b
Start here:
  twell train --preset tiny
  twell generate RUN --prompt "def "
  twell doctor
"""

twell = LazyGroup("twell", COMMANDS, package="twell_numba.cli", help=HELP)


def main() -> NoReturn:
    """Run the command line and exit.

    Codes: 0 done, 1 failed, 2 wrong use, 130 interrupted by Ctrl-C, 143 and 129 training ended by
    SIGTERM and SIGHUP.
    """
    _reopen_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A model may write characters that a terminal's encoding lacks.
            stream.reconfigure(errors="replace")
    twell.main(prog_name="twell")
    raise AssertionError("main exits in standalone mode")


def _reopen_closed_streams() -> None:
    """Put an empty stream for each that whoever started this process has closed.

    Python has None for it. Opened in this order they take the numbers 0, 1 and 2 again, which the
    next files would have been given: what writes to number 2 would have written into such a file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
