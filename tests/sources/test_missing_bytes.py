"""What a download still needs: bytes of files that are neither here nor begun."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stopdown.sources import hub


def make_file(size: int, blob: str) -> Any:
    """A file as the Hub lists it."""
    return SimpleNamespace(size=size, blob_id=blob, lfs=None)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The index in a cache of a repository with two files of 1,000 bytes in one component."""
    files = {
        "unet/config.json": make_file(1000, "aaaa"),
        "unet/model.safetensors": make_file(1000, "bbbb"),
    }
    monkeypatch.setattr(hub, "_list_files", lambda repo, commit: files)
    monkeypatch.setattr(hub, "choose_files", lambda *given, **options: list(files))
    (tmp_path / "blobs").mkdir()
    snapshot = tmp_path / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    return snapshot / "model_index.json"


@pytest.mark.parametrize(
    ("blob", "missing"),
    [
        ("", 2000),
        ("bbbb.incomplete", 1700),
        ("cccc.incomplete", 2000),
        ("bbbb.0f0f0f0f.incomplete", 2000),
        ("bbbb", 1000),
    ],
)
def test_only_what_can_be_continued_counts_as_here(index: Path, blob: str, missing: int) -> None:
    """300 bytes of another file, or of a download that was killed and begins again, are no progress."""
    if blob:
        (index.parents[2] / "blobs" / blob).write_bytes(bytes(300))
    assert hub.count_missing_bytes(index, "maker/tiny", {"unet": True}) == missing
