"""``twell chat``: a conversation with a model in the terminal."""

import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

import click

from twell_numba.cli.loading import load_noting
from twell_numba.cli.options import (
    device_option,
    dtype_option,
    ffn_path_option,
    float8_option,
    sampling_options,
    seed_option,
)
from twell_numba.cli.text import note, show_text
from twell_numba.errors import TwellError

if TYPE_CHECKING:
    from twell_numba.infer.chat import Conversation

# What is meant for this command when it is typed alone, not for the model.
_COMMAND = re.compile(r"/[a-z]+")


@click.command("chat")
@click.argument("run", metavar="RUN")
@click.option("--system", metavar="TEXT", help="What the model is told first, and never forgets.")
@click.option(
    "--max-new-tokens",
    type=int,
    default=512,
    show_default=True,
    help="The longest answer.",
)
@sampling_options
@ffn_path_option
@float8_option
@seed_option(default=0, help="The same seed and messages give the same answers.")
@device_option
@dtype_option
def chat(
    run: str,
    system: str | None,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    ffn_path: str,
    float8: bool,
    seed: int,
    device: str,
    dtype: str,
) -> None:
    """Talk with the model in RUN.

    RUN is a run folder, a checkpoint, a Hugging Face model's folder or a GGUF file.

    /reset begins anew, /exit or Ctrl-D ends, Ctrl-C stops an answer. When the conversation grows
    longer than the model's context, its oldest messages are forgotten; a line says so. Where stdin
    is no terminal, each of its lines is a message. Answers go to stdout, all else to stderr.

    \b
    Example:
      twell chat runs/tiny-1 --system "Answer in one line."
      echo "Hello" | twell chat runs/tiny-1
    """
    from twell_numba.infer.chat import NO_TEMPLATE, Conversation
    from twell_numba.infer.engine import Engine
    from twell_numba.infer.request import GenerationSettings

    settings = GenerationSettings(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    settings.validate()
    model, tokenizer = load_noting(
        run, dtype=dtype, ffn_path=ffn_path, device=device, float8=float8
    )
    if tokenizer.chat_template is None:
        note(NO_TEMPLATE)
    engine = Engine(model, tokenizer, max_sequences=1)
    conversation = Conversation(engine, settings, system, on_notice=note)
    if sys.stdin.isatty():
        _talk(conversation)
    else:
        _answer_lines(conversation)


def _answer_lines(conversation: "Conversation") -> None:
    """Answer a script, in which nothing is stopped and every error ends."""
    for line in sys.stdin.buffer:
        message = line.decode(errors="replace").strip()
        if message == "/exit":
            break
        if message == "/reset":
            conversation.reset()
        elif message:
            conversation.ask(message, show_text)
            click.echo()


def _talk(conversation: "Conversation") -> None:
    with suppress(ImportError):
        import readline  # noqa: F401  input() then edits lines and remembers them
    note("/reset begins anew, /exit or Ctrl-D ends, Ctrl-C stops an answer.")
    for message in _typed_messages():
        if message == "/reset":
            conversation.reset()
            continue
        if _COMMAND.fullmatch(message):
            note(f"{message} given, /reset or /exit wanted; anything else is said to the model")
            continue
        try:
            with _interrupts() as is_interrupted:
                conversation.ask(message, show_text, is_interrupted)
            click.echo()
        except TwellError as error:
            note(f"Error: {error}")


def _typed_messages() -> Iterator[str]:
    while True:
        try:
            message = _typed_line().strip()
        except EOFError:
            note("")
            return
        except KeyboardInterrupt:
            note("\n(/exit or Ctrl-D ends)")
            continue
        except UnicodeDecodeError:
            note("That is not UTF-8 text.")
            continue
        if message == "/exit":
            return
        if message:
            yield message


def _typed_line() -> str:
    if sys.stdout.isatty():
        return input("> ")
    # Answers alone go to a file.
    click.echo("> ", nl=False, err=True)
    return input()


@contextmanager
def _interrupts() -> Iterator["Interrupts"]:
    """Catch Ctrl-C while an answer is made; a second one ends the program."""
    interrupts = Interrupts()
    previous = signal.signal(signal.SIGINT, interrupts.catch)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, previous)


class Interrupts:
    """Whether Ctrl-C has come; asked by calling it."""

    def __init__(self) -> None:
        self._has_come = False

    def __call__(self) -> bool:
        return self._has_come

    def catch(self, number: int, frame: FrameType | None) -> None:
        """Take a signal."""
        if self._has_come:
            raise KeyboardInterrupt
        self._has_come = True
