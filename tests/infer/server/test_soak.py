"""A server under load for a minute."""

import asyncio
import json
import re
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from twell_numba.infer.engine import Engine
from twell_numba.infer.request import GenerationSettings
from twell_numba.models.checkpoint import load_model

CLIENTS = 64
SECONDS = 60
SECONDS_ALONE = 10
SECONDS_TO_WARM_UP = 15
TOKENS = 200

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def prompts() -> list[str]:
    """Of different lengths, one for each client."""
    return [f"client {number} says {'so ' * (number % 7)}" for number in range(CLIENTS)]


def resident_bytes(process: int) -> int:
    text = Path(f"/proc/{process}/status").read_text()
    return 1024 * int(re.findall(r"VmRSS:\s+(\d+) kB", text)[0])


async def stream(address: tuple[str, int], prompt: str) -> str:
    """Return the text of a greedy stream, read as it comes, over a connection of its own."""
    body = json.dumps(
        {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(head.encode() + body)
        received = await reader.read(-1)
    finally:
        writer.close()
        await writer.wait_closed()
    assert received.startswith(b"HTTP/1.1 200 "), received[:300]
    assert b'"error"' not in received
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    events = re.findall(rb"^data: (\{.*\})$", received, re.MULTILINE)
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


async def load(
    address: tuple[str, int], clients: dict[str, str], seconds: float, process: int
) -> tuple[float, list[int]]:
    """Let clients stream again and again; return tokens a second, and memory second by second.

    Each client's stream is compared with the text that its prompt has alone.
    """
    start = time.monotonic()
    streams = count()
    memory: list[int] = []

    async def client(prompt: str, expected: str) -> None:
        while time.monotonic() < start + seconds:
            text = await asyncio.wait_for(stream(address, prompt), 60)
            assert text == expected, f"{prompt!r} got another text"
            next(streams)

    async def watch() -> None:
        while True:
            memory.append(resident_bytes(process))
            await asyncio.sleep(1)

    watcher = asyncio.ensure_future(watch())
    await asyncio.gather(*(client(*pair) for pair in clients.items()))
    watcher.cancel()
    return next(streams) * TOKENS / (time.monotonic() - start), memory


@pytest.fixture
def server(start: Any) -> Any:
    return start("--cache-tokens", CLIENTS * 300)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
def test_64_streaming_clients_for_a_minute(server: Any, model_folder: Path) -> None:
    model, tokenizer = load_model(model_folder)
    engine = Engine(model, tokenizer, max_sequences=1, cache_tokens=1000)
    settings = GenerationSettings(max_new_tokens=TOKENS, temperature=0)
    expected = {
        prompt: engine.generate([tokenizer.encode(prompt)], settings)[0].text
        for prompt in prompts()
    }
    assert len(set(expected.values())) == CLIENTS

    process = server.process.pid
    one = dict([next(iter(expected.items()))])
    alone, _ = asyncio.run(load(server.address, one, SECONDS_ALONE, process))
    together, memory = asyncio.run(load(server.address, expected, SECONDS, process))
    server.wait_until_idle()

    warm, end = memory[SECONDS_TO_WARM_UP], memory[-1]
    print(
        f"\n1 client: {alone:.0f} tokens/s; {CLIENTS} clients: {together:.0f} tokens/s "
        f"({together / alone:.1f}x); memory after {SECONDS_TO_WARM_UP} s {warm / 1e6:.1f} MB, "
        f"at the end {end / 1e6:.1f} MB"
    )
    assert server.process.poll() is None
    assert not re.search("Error|Traceback", server.stderr.read_text())
    assert together > 3 * alone
    assert end < 1.03 * warm
