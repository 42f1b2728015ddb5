"""The server of the guide for deploying, run as it is printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from docs.documentation import read_blocks

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "deploy.md"
SMALL = {"prompt": "a red circle moving left on a grey background", "num_inference_steps": 1}


@pytest.mark.thorough
def test_the_server_of_the_guide_serves(tmp_path: Path) -> None:
    """It makes a clip, refuses what the pipeline refuses, counts both, and says so in lines of JSON."""
    (block,) = (x for x in read_blocks(PAGE.read_text(), "python") if x.file == "server.py")
    (tmp_path / "server.py").write_text(block.text)
    words = [sys.executable, str(tmp_path / "server.py"), "shapes", "0"]
    cache = {**os.environ, "STOPDOWN_CACHE": str(tmp_path / "cache")}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=cache) as process:
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            assert ready["event"] == "ready"
            where = f"http://localhost:{ready['port']}"
            with urllib.request.urlopen(f"{where}/health") as answer:
                assert answer.read() == b"ok, 2 of 2 idle\n"
            with urllib.request.urlopen(where, json.dumps(SMALL).encode()) as answer:
                assert answer.read().startswith(b"GIF8")
            with pytest.raises(urllib.error.HTTPError, match="500") as caught:
                urllib.request.urlopen(where, json.dumps({"colour": 1}).encode())
            assert b"unexpected keyword argument 'colour'" in caught.value.read()
            events = [json.loads(process.stdout.readline()) for _ in range(2)]
            assert [event["code"] for event in events] == [200, 500]
            with urllib.request.urlopen(f"{where}/metrics") as answer:
                metrics = dict(line.split() for line in answer.read().decode().splitlines())
            assert metrics["stopdown_requests_total"] == "2"
            assert metrics["stopdown_failures_total"] == "1"
            assert metrics["stopdown_repairs_total"] == "0"
        finally:
            process.kill()
