"""PyTorch and Diffusers are imported once, and garbage is not looked for meanwhile."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace

import pytest

from stopdown.pipelines import library_imports
from stopdown.pipelines.library_imports import import_libraries


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
    monkeypatch.setattr(library_imports, "importlib", SimpleNamespace(import_module=import_module))
    monkeypatch.setattr(gc, "freeze", lambda: happened.append("frozen"))
    try:
        import_libraries(happened.append, has_pipelines=has_pipelines)
    except ImportError:
        assert missing
    expected = ["PyTorch", "Diffusers", name, False]
    assert happened == (expected if missing else [*expected, "frozen"])
    assert gc.isenabled()


def test_what_is_imported_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second time nothing is frozen that a process has made meanwhile."""
    happened: list[object] = []
    import_libraries(lambda _: None)
    monkeypatch.setattr(gc, "freeze", lambda: happened.append("frozen"))
    import_libraries(happened.append)
    assert happened == ["PyTorch", "Diffusers"]
