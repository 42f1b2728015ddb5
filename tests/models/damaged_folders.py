"""A tiny model's folder that tests damage, and the error that a call on it raises."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stopdown.errors import SourceError
from stopdown.sources.source_checks import verify_source
from stopdown.sources.sources import resolve_source


def read_error(call: Callable[[], object]) -> str:
    """The message of the SourceError that a call raises; SourceErrors exit with 2."""
    with pytest.raises(SourceError) as caught:
        call()
    assert caught.value.exit_code == 2
    return str(caught.value)


def verify(folder: Path) -> None:
    verify_source(resolve_source(folder))


def edit_json(path: Path, **entries: Any) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **entries}))
