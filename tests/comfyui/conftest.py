"""A ComfyUI that runs here, headless and on the processor, with tiny models and the node pack.

STOPDOWN_COMFYUI names a checkout of ComfyUI. Its packages come from this environment and from PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).parent
PACK = HERE.parents[1] / "integrations" / "comfyui"
CHECKOUT = os.environ.get("STOPDOWN_COMFYUI", "")
WAIT_S = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a checkout there is nothing to start."""
    reason = "STOPDOWN_COMFYUI names no checkout of ComfyUI"
    for item in items:
        if HERE in item.path.parents and not CHECKOUT:
            item.add_marker(pytest.mark.skip(reason=reason))


@dataclass
class Answer:
    """What a prompt came to.

    Attributes:
        error: of the node that failed; "" when it succeeded.
        texts: that nodes show.
        picture: `[H, W, 3]` of the first saved image, 0 to 255; None without one.
    """

    error: str
    texts: tuple[str, ...]
    picture: np.ndarray[Any, Any] | None

    def find_difference(self, other: Answer) -> float:
        """The mean difference of two pictures, of 255."""
        assert self.picture is not None, self.error
        assert other.picture is not None, other.error
        return float(np.abs(self.picture - other.picture).mean())


@dataclass
class Server:
    """A running ComfyUI.

    Attributes:
        folder: its base directory.
        url: where it answers.
    """

    folder: Path
    url: str
    log: Path

    def ask(self, path: str, data: Any = None) -> Any:
        """One answer of its HTTP API."""
        body = None if data is None else json.dumps(data).encode()
        head = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", body, head)
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from error

    def run(self, prompt: dict[str, Any]) -> Answer:
        """Queue a prompt and wait for it; skips where this ComfyUI is older than its model."""
        names = [node["inputs"].get("unet_name") for node in prompt.values()]
        for name in filter(None, names):
            if not (self.folder / "models" / "diffusion_models" / name).exists():
                pytest.skip(f"this ComfyUI is older than the model of {name}")
        return self.wait(self.ask("/prompt", {"prompt": prompt})["prompt_id"])

    def wait(self, number: str) -> Answer:
        """What a prompt came to, once it has."""
        from PIL import Image

        end = time.monotonic() + WAIT_S
        while not (found := self.ask(f"/history/{number}")):
            assert time.monotonic() < end, self.log.read_text()[-3000:]
            time.sleep(0.1)
        done = found[number]
        outputs = [x for x in done["outputs"].values() if x]
        said = [fields for kind, fields in done["status"]["messages"] if kind == "execution_error"]
        saved = [x for output in outputs for x in output.get("images", ()) if x["type"] == "output"]
        picture = None
        if saved:
            path = self.folder / "output" / saved[0]["subfolder"] / saved[0]["filename"]
            picture = np.asarray(Image.open(path).convert("RGB"), dtype=np.float64)
        texts = tuple(text for output in outputs for text in output.get("text", ()))
        return Answer(said[0]["exception_message"] if said else "", texts, picture)


def _find_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny checkpoints in ComfyUI's model folders."""
    folder = tmp_path_factory.mktemp("comfyui") / "models"
    subprocess.run([sys.executable, HERE / "make_models.py", CHECKOUT, folder], check=True)
    return folder


@pytest.fixture(scope="session")
def start(
    models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Server]]:
    """Starts ComfyUI with the pack; all that were started end with the session."""
    running: list[subprocess.Popen[bytes]] = []

    def start_one(**environment: str) -> Server:
        folder, port = tmp_path_factory.mktemp("server"), _find_port()
        for name in ("input", "output", "custom_nodes"):
            (folder / name).mkdir()
        (folder / "models").symlink_to(models)
        (folder / "custom_nodes" / "stopdown").symlink_to(PACK)
        (folder / "custom_nodes" / "narrow_models").symlink_to(HERE / "narrow_models")
        options = ["--cpu", "--disable-api-nodes", "--database-url", "sqlite:///:memory:"]
        command = [sys.executable, str(HERE / "launch.py"), CHECKOUT, *options]
        log = folder / "server.log"
        with log.open("wb") as written:
            process = subprocess.Popen(
                [*command, "--base-directory", str(folder), "--port", str(port)],
                stdout=written,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "PYTHONDONTWRITEBYTECODE": "1",
                    "STOPDOWN_CACHE": str(folder / "cache"),
                    **environment,
                },
            )
        running.append(process)
        server = Server(folder, f"http://127.0.0.1:{port}", log)
        end = time.monotonic() + WAIT_S
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end, log.read_text()[-3000:]
            try:
                server.ask("/system_stats")
                return server
            except OSError:
                time.sleep(0.2)

    yield start_one
    for process in running:
        process.terminate()
        process.wait(WAIT_S)


@pytest.fixture(scope="session")
def server(start: Callable[..., Server]) -> Server:
    """One ComfyUI for the tests that need no other options."""
    return start()
