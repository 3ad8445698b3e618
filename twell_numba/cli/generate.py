"""``twell generate``: text from a trained model, as it is made."""

import json
import math
import sys
from typing import TYPE_CHECKING, Any

import click

from twell_numba.cli.loading import load_noting
from twell_numba.cli.options import (
    device_option,
    dtype_option,
    ffn_path_option,
    float8_option,
    json_option,
    sampling_options,
    seed_option,
)
from twell_numba.cli.text import show_text
from twell_numba.errors import UsageError

if TYPE_CHECKING:
    from twell_numba.infer.request import TokenLogprob
    from twell_numba.models.tokenizer import TextTokenizer


@click.command("generate")
@click.argument("run", metavar="RUN")
@click.option(
    "--prompt", required=True, metavar="TEXT", help="What to go on from; - reads it from stdin."
)
@click.option(
    "--max-new-tokens", type=int, default=200, show_default=True, help="When to stop at the latest."
)
@sampling_options
@click.option(
    "--stop",
    multiple=True,
    metavar="TEXT",
    help="End before this text comes; may be given several times.",
)
@click.option("--ignore-eos", is_flag=True, help="Go on after a token that ends a text.")
@click.option(
    "--logprobs",
    type=int,
    metavar="N",
    help="With --json: log-probabilities of the tokens, and of the N likeliest ones beside each.",
)
@ffn_path_option
@float8_option
@seed_option(default=0, help="The same seed gives the same text.")
@device_option
@dtype_option
@json_option
def generate(
    run: str,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    stop: tuple[str, ...],
    ignore_eos: bool,
    logprobs: int | None,
    ffn_path: str,
    float8: bool,
    seed: int,
    device: str,
    dtype: str,
    as_json: bool,
) -> None:
    """Stream text from the model in RUN.

    RUN is a run folder, a checkpoint, a Hugging Face model's folder or a GGUF file.

    The prompt and its continuation go to stdout, notes to stderr. On a terminal, control characters
    are written out, as in \\x1b; a file or a pipe gets the text as it is.

    \b
    Example:
      twell generate runs/tiny-1 --prompt "def " --temperature 0.7
    """
    if logprobs is not None and not as_json:
        raise UsageError("--logprobs given without --json, which shows them: add --json")
    if prompt == "-":
        prompt = _read_prompt()
    from twell_numba.infer.generate import generate as generate_text
    from twell_numba.infer.request import GenerationSettings
    from twell_numba.models.tokenizer import valid_unicode

    prompt = valid_unicode(prompt)
    settings = GenerationSettings(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
    )
    settings.validate()  # before the model is read
    model, tokenizer = load_noting(
        run, dtype=dtype, ffn_path=ffn_path, device=device, float8=float8
    )
    generation = generate_text(model, tokenizer, prompt, **vars(settings))
    if as_json:
        text = "".join(generation)
        result: dict[str, Any] = {
            "prompt": prompt,
            "text": text,
            "prompt_tokens": len(generation.prompt_tokens),
            "new_tokens": len(generation.tokens),
            "reason": generation.reason,
        }
        if logprobs is not None:
            result["logprobs"] = [_written_out(own, tokenizer) for own in generation.token_logprobs]
        click.echo(json.dumps(result, indent=2))
        return
    show_text(prompt)
    for piece in generation:
        show_text(piece)
    click.echo()
    if generation.reason == "context":
        click.echo(
            f"Stopped after {len(generation.tokens)} new tokens: the model's context of "
            f"{model.config.context_length} tokens is full.",
            err=True,
        )


def _written_out(logprob: "TokenLogprob", tokenizer: "TextTokenizer") -> dict[str, Any]:
    def entry(token: int, value: float) -> dict[str, Any]:
        text = tokenizer.decode_bytes([token]).decode(errors="replace")
        # JSON has no infinity.
        return {"token": token, "text": text, "logprob": value if math.isfinite(value) else None}

    return entry(logprob.token, logprob.logprob) | {"top": [entry(*pair) for pair in logprob.top]}


def _read_prompt() -> str:
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin is not UTF-8 text ({error.reason}); give text") from error
    # The line break that ends a typed or echoed line is no part of what is to be continued.
    return text.removesuffix("\n").removesuffix("\r")
