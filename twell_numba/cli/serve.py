"""``twell serve``: a model behind HTTP, for programs that talk to OpenAI's API."""

import math
from pathlib import Path

import click

from twell_numba.cli.loading import load_noting
from twell_numba.cli.options import (
    device_option,
    dtype_option,
    ffn_path_option,
    float8_option,
    seed_option,
)
from twell_numba.cli.text import note
from twell_numba.errors import UsageError


@click.command("serve")
@click.argument("run", metavar="RUN")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Where to listen; by default only this machine reaches the server.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="0 takes a free one.",
)
@click.option(
    "--api-key",
    metavar="KEY",
    envvar="TWELL_API_KEY",
    show_envvar=True,
    help="What clients must send; better in the environment, where other users do not see it.",
)
@click.option(
    "--model-name", metavar="NAME", help="What clients call the model; RUN's name if not given."
)
@click.option(
    "--max-sequences",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="How many texts are made at once.",
)
@click.option(
    "--cache-tokens",
    type=click.IntRange(1, 2**31 - 1),
    metavar="N",
    help="How many tokens of these texts, with their prompts, are kept at once; by default what "
    "--max-sequences texts as long as the context need, but no more than 1 GiB.",
)
@click.option(
    "--chat-tokens",
    type=click.IntRange(1),
    default=1024,
    show_default=True,
    metavar="N",
    help="The longest answer in a chat where the client sets no limit. Room for it is kept free.",
)
@click.option(
    "--queue",
    type=click.IntRange(0),
    default=64,
    show_default=True,
    help="How many more texts may wait; beyond them clients get status 429.",
)
@click.option(
    "--max-request-bytes",
    type=click.IntRange(1),
    default=4 << 20,
    show_default=True,
    help="The longest body of a request.",
)
@click.option(
    "--timeout",
    type=float,
    default=600,
    show_default=True,
    metavar="SECONDS",
    help="The longest that a request may take, waiting included.",
)
@ffn_path_option
@float8_option
@seed_option(default=None, help="Of requests that give none; by default each gets another.")
@device_option
@dtype_option
def serve(
    run: str,
    host: str,
    port: int,
    api_key: str | None,
    model_name: str | None,
    max_sequences: int,
    cache_tokens: int | None,
    chat_tokens: int,
    queue: int,
    max_request_bytes: int,
    timeout: float,
    ffn_path: str,
    float8: bool,
    seed: int | None,
    device: str,
    dtype: str,
) -> None:
    """Answer other programs with the model in RUN, as OpenAI's API does.

    RUN is a run folder, a checkpoint, a Hugging Face model's folder or a GGUF file. Endpoints:
    /v1/completions, /v1/chat/completions, /v1/models, /health and /metrics. SIGINT (Ctrl-C),
    SIGTERM or SIGHUP ends the server.

    \b
    Example:
      twell serve runs/tiny-1 --port 8000
    """
    _check_settings(api_key, timeout)
    from twell_numba.infer.server.packages import require_packages

    require_packages()
    from twell_numba.infer.chat import NO_TEMPLATE
    from twell_numba.infer.engine import Engine
    from twell_numba.infer.server import run as server
    from twell_numba.infer.server.app import Limits
    from twell_numba.infer.server.service import Service, warm_up

    # Bound before the model is read: a port in use is told at once.
    with server.bind(host, port) as bound:
        if api_key is None and not server.is_loopback(bound):
            note(f"Warning: whoever reaches {host} can use this server; --api-key asks for a key.")
        model, tokenizer = load_noting(
            run, dtype=dtype, ffn_path=ffn_path, device=device, float8=float8
        )
        if tokenizer.chat_template is None:
            note(NO_TEMPLATE)
        engine = Engine(model, tokenizer, cache_tokens=cache_tokens, max_sequences=max_sequences)
        warm_up(engine)
        name = model_name or Path(run).resolve().name.removesuffix(".gguf")
        ready = f"Serving {name} at {server.url_of(bound)}/v1 (Ctrl-C ends)"
        server.serve(
            Service(engine, name, chat_tokens=chat_tokens, seed=seed),
            bound,
            host,
            Limits(max_request_bytes, timeout),
            queue,
            api_key,
            on_ready=lambda: click.echo(ready),
        )


def _check_settings(api_key: str | None, timeout: float) -> None:
    if not (math.isfinite(timeout) and timeout > 0):
        raise UsageError(f"--timeout {timeout} given, a number of seconds above 0 wanted")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key):
        raise UsageError("an empty --api-key, or one with unusual characters, given; ASCII wanted")
    if api_key is not None and " " in api_key:
        raise UsageError("an --api-key with a space given; letters, digits and signs wanted")
