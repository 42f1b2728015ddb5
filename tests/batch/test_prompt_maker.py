"""Items made one by one or in tables: checked as those of files are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stopdown.batch.prompt_maker import PromptMaker
from stopdown.errors import InputError


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ({"name": "../x"}, "'../x' is no name of a file."),
        ({"prompt": "a\x00circle"}, "It holds control characters."),
        ({"steps": "many"}, "the field steps holds text and should hold a whole number."),
        ({"step": 2}, "the field 'step' is unknown."),
    ],
)
def test_items_of_programs_are_checked_like_those_of_files(
    said: dict[str, Any], what: str, tmp_path: Path
) -> None:
    """What no line of a prompts file may say is refused in a dict as well, before a model is loaded."""
    maker = PromptMaker("shapes", output=str(tmp_path / "made"))
    with pytest.raises(InputError, match=re.escape(f"is wrong: {what}")):
        maker.make({"prompt": "a circle", **said})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_page_s_example_runs(tmp_path: Path) -> None:
    """The Python blocks of docs/batch.md, those for Ray Data and actors too, run as they stand."""
    pytest.importorskip("pyarrow", reason="Ray Data isn't installed: pip install '.[ray]'")
    page = (Path(__file__).parents[2] / "docs" / "batch.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    for block in blocks:
        command = [sys.executable, "-c", block]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "made" in done.stdout
    assert len(list((tmp_path / "made").glob("*.mp4"))) == 3
