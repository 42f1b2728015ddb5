"""A size that does not fit is refused with one that does, before weights are loaded."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stopdown.app.display import Display
from stopdown.devices.device_choice import Device
from stopdown.errors import OptionError

SaveTiny = Callable[..., Path]


@pytest.mark.thorough
def test_a_size_that_does_not_fit_is_refused_with_one_that_does(save_tiny: SaveTiny) -> None:
    """On a device of 64 MiB 9 frames of 512x512 are refused before weights are loaded."""
    from stopdown.app.size_limits import refuse_too_large
    from stopdown.pipelines.requests import Request
    from stopdown.sources.sources import resolve_source

    source = resolve_source(save_tiny("cogvideox"))
    device = Device("cpu", 0, "a small CPU", None, 2**26)
    request = Request(prompt="a", frames=9, height=512, width=512, steps=1)
    with pytest.raises(OptionError) as caught:
        refuse_too_large(source, request, device, Display())
    found = re.search(r"Use height=(\d+) and width=(\d+)\.", caught.value.remedy)
    assert found is not None
    assert "Making 9 frames of 512x512 needs at least " in caught.value.what
    assert caught.value.what.endswith("and cpu (a small CPU) has 64.0 MiB.")
    smaller = {"height": int(found[1]), "width": int(found[2])}
    refuse_too_large(source, dataclasses.replace(request, **smaller), device, Display())


@pytest.mark.parametrize("command", ["generate", "compare", "batch"])
def test_each_command_refuses_a_size_that_does_not_fit(
    command: str, run: Any, save_tiny: SaveTiny, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8001 frames of 16000 by 16000 pixels fit nowhere: told with a size that does, before loading.

    Which of the sizes that are tried fits is predicted in the test above, and not here.
    """
    from stopdown.memory import smaller_requests

    fit = SimpleNamespace(predictions=[SimpleNamespace(peak_bytes=2**20)])
    monkeypatch.setattr(smaller_requests, "find_largest_size", lambda sizes, *_: (sizes[-1], fit))
    (here / "prompts.txt").write_text("a\n")
    words = {
        "generate": ("a",),
        "compare": ("--prompt", "a"),
        "batch": ("--prompts", "prompts.txt", "-o", "out"),
    }[command]
    sizes = ("--frames", 8001, "--height", 16000, "--width", 16000, "--steps", 1)
    code, out, err = run(command, save_tiny("cogvideox"), *words, *sizes)
    assert (code, out) == (2, "")
    assert re.search(r"Making 8001 frames of 16000x16000 needs at least .*iB", err)
    assert re.search(r"Use --height \d+ and --width \d+\.", err)
    assert "--memory" not in err
    assert [x.name for x in here.iterdir() if not x.name.startswith(".")] == ["prompts.txt"]
