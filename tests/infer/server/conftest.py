"""A small model, and servers of it as processes of their own."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twell_numba.models.checkpoint import save_model
from twell_numba.models.config import ModelConfig
from twell_numba.models.tokenizer import ByteTokenizer
from twell_numba.models.transformer import Transformer

SECONDS_TO_START = 120  # in a new checkout kernels are compiled first
CONTEXT = 32768


@dataclass
class Answer:
    """What a plain HTTP client gets."""

    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, which has exactly OpenAI's fields."""
        assert self.json.keys() == {"error"}
        error = self.json["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert "\n" not in error["message"]
        return error


@dataclass
class RunningServer:
    """A server, its address, and where its stderr goes."""

    process: subprocess.Popen[bytes]
    url: str
    stderr: Path

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def request(
        self, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str = ""
    ) -> Answer:
        """Send a request without any client library; a body that is not bytes goes as JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        given = {"Content-Type": "application/json", **(headers or {})}
        request = urllib.request.Request(
            self.url + path, data=data, headers=given, method=method or None
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return Answer(response.status, response.headers, response.read())
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, error.headers, error.read())

    def metric(self, name: str, headers: dict[str, str] | None = None) -> float:
        """Return the value of a metric without labels."""
        text = self.request("/metrics", headers=headers).body.decode()
        (value,) = re.findall(rf"^{name} (\S+)$", text, re.MULTILINE)
        return float(value)

    def wait_until_idle(self, headers: dict[str, str] | None = None, seconds: float = 10) -> None:
        """Wait until nothing runs or waits."""
        end = time.monotonic() + seconds
        names = ("twell_requests_running", "twell_requests_waiting", "twell_cache_tokens_used")
        while any(busy := [self.metric(name, headers) for name in names]):
            assert time.monotonic() < end, f"running, waiting, cache: {busy}"
            time.sleep(0.05)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout=20)


def start_server(folder: Path, log: Path, *options: object, **environment: str) -> RunningServer:
    # Warnings are errors there as here.
    command = [sys.executable, "-W", "error", "-m", "twell_numba", "serve", folder, "--port", 0]
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [str(part) for part in (*command, *options)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, **environment},
        )
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], SECONDS_TO_START)
    line = process.stdout.readline().decode() if ready else ""
    found = re.fullmatch(r"Serving (\S+) at (http://\S+)/v1 \(Ctrl-C ends\)\n", line)
    if found is None:
        process.kill()
        process.wait()
        process.stdout.close()
        raise AssertionError(f"{line!r} printed, and on stderr: {log.read_text()}")
    return RunningServer(process, found[2], log)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model over bytes that writes printable ASCII and has room for long texts."""
    config = ModelConfig(
        vocab_size=256,
        d_model=32,
        d_ffn=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        context_length=CONTEXT,
        tied_embeddings=False,
    )
    model = Transformer(config, np.random.default_rng(3))
    for parameter in model.parameters().values():
        if parameter.value.ndim == 2:
            parameter.value *= 12
    head = model.parameters()["lm_head.weight"].value
    head[: ord(" ")] = 0
    head[ord("~") + 1 :] = 0
    folder = tmp_path_factory.mktemp("models") / "little"
    save_model(folder, model, ByteTokenizer())
    return folder


Start = Callable[..., RunningServer]


@pytest.fixture(scope="session")
def start(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """``start(*options, **environment)`` starts a server, which ends with the tests."""
    with ExitStack() as stack:

        def started(*options: object, **environment: str) -> RunningServer:
            log = tmp_path_factory.mktemp("log") / "stderr"
            server = start_server(model_folder, log, *options, **environment)
            assert server.process.stdout is not None
            stack.callback(server.process.stdout.close)
            stack.callback(_end, server.process)
            return server

        yield started


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
