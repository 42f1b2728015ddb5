"""stopdown run: a script's own arguments, streams and exit code, and what is said of its repairs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SaveTiny = Callable[..., Path]


def test_run_keeps_what_is_the_scripts_own(run: Any, here: Path) -> None:
    """Its arguments, also those that look like options, its standard output and its exit code."""
    (here / "own.py").write_text("import sys\nprint(sys.argv[1:])\nsys.exit(5)")
    code, out, err = run("run", "own.py", "--device", "gpu", "--help", "-m")
    assert (code, out) == (5, "['--device', 'gpu', '--help', '-m']\n")
    assert err == "stopdown: own.py called no torch module: there was nothing to guard.\n"
    code, out, err = run("run", "--json", "own.py")
    assert (code, err) == (5, "")
    record = json.loads(out.removeprefix("[]\n"))
    assert (record["kind"], record["exit_code"], record["runs"]) == ("script", 5, [])


@pytest.mark.thorough
def test_run_says_what_was_repaired(run: Any, save_tiny: SaveTiny, here: Path) -> None:
    """A pipeline that overflows: a sentence when it is repaired, and a line at the end."""
    folder = save_tiny("cogview3plus", overflow="vae")
    (here / "paint.py").write_text(
        "import sys, torch\nfrom diffusers import CogView3PlusPipeline as Pipeline\n"
        "pipe = Pipeline.from_pretrained(sys.argv[1], dtype=torch.float16)\n"
        "pipe('a', height=32, width=32, max_sequence_length=16, num_inference_steps=1)\n"
    )
    code, out, err = run("run", "paint.py", folder)
    assert (code, out) == (0, "")
    assert err.count("Rescaled `vae.decode` by powers of two. ") == 1
    assert re.search(
        r"^stopdown: run 1, CogView3PlusPipeline: repaired vae.*\(rescaled, 1 call", err, re.M
    )
