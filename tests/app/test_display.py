"""PyTorch and Diffusers are imported once, and garbage is not looked for meanwhile."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace

import pytest

from stopdown.app import display
from stopdown.app.display import Display, load_libraries


class _Noting(Display):
    """Notes what is imported."""

    def __init__(self, happened: list[object]) -> None:
        self._happened = happened

    def progress(self, stage: str, what: str, done: int, total: int) -> None:
        """Note its name."""
        self._happened.append(what)


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize(
    ("has_pipelines", "name"), [(True, "diffusers.pipelines.pipeline_utils"), (False, "diffusers")]
)
def test_garbage_is_not_looked_for_meanwhile(
    has_pipelines: bool, name: str, missing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector is off while they are imported, leaves them out then, and is on in the end."""
    happened: list[object] = []

    def import_module(found: str) -> None:
        happened.extend((found, gc.isenabled()))
        if missing:
            raise ImportError(found)

    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(display, "importlib", SimpleNamespace(import_module=import_module))
    monkeypatch.setattr(gc, "freeze", lambda: happened.append("frozen"))
    try:
        load_libraries(_Noting(happened), has_pipelines=has_pipelines)
    except ImportError:
        assert missing
    expected = ["PyTorch", "Diffusers", name, False]
    assert happened == (expected if missing else [*expected, "frozen"])
    assert gc.isenabled()


def test_what_is_imported_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second time nothing is frozen that a process has made meanwhile."""
    happened: list[object] = []
    load_libraries(Display())
    monkeypatch.setattr(gc, "freeze", lambda: happened.append("frozen"))
    load_libraries(_Noting(happened))
    assert happened == ["PyTorch", "Diffusers"]
