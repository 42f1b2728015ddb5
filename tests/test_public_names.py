"""Names that packages load when they are first used."""

from __future__ import annotations

import sys

import pytest

import stopdown
import stopdown.embedding
from stopdown.public_names import load_name, read_homes


def test_the_stub_gives_each_name_its_module() -> None:
    """Verbs come first, then classes, each group sorted."""
    homes = read_homes(stopdown)
    assert homes["rescale_"] == "stopdown.scaling.rescale"
    verbs = [name for name in homes if not name[0].isupper()]
    assert list(homes) == sorted(verbs) + sorted(set(homes) - set(verbs))


def test_a_name_is_kept_in_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is loaded once; a name that the stub does not have is refused as Python does."""
    package = sys.modules["stopdown.embedding"]
    monkeypatch.delitem(vars(package), "examine", raising=False)
    found = load_name("stopdown.embedding", "examine", {"examine": "stopdown.doctor"})
    assert vars(package)["examine"] is found
    with pytest.raises(
        AttributeError, match=r"module 'stopdown.embedding' has no attribute 'other'"
    ):
        load_name("stopdown.embedding", "other", {})
