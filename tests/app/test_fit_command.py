"""stopdown fit: the rows that it shows, for devices that need not be here."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stopdown.app.fit_command import list_worthwhile
from stopdown.devices.device_profiles import find_profile
from stopdown.records import MemoryRow


def test_only_worthwhile_strategies_are_shown() -> None:
    """A strategy that takes longer and no less memory is left out, unless it was chosen."""
    rows = tuple(MemoryRow(name, peak, "", 0, 0) for name, peak in (("a", 9), ("b", 9), ("c", 5)))
    assert [row.strategy for row in list_worthwhile(rows, "")] == ["a", "c"]
    assert [row.strategy for row in list_worthwhile(rows, "a")] == ["a", "c"]
    assert [row.strategy for row in list_worthwhile(rows, "b")] == ["a", "b", "c"]


def test_a_forecast_is_made_for_a_card_that_is_not_here(run: Any) -> None:
    """A run is somewhere, and a profile is refused; for a forecast nothing runs, and it is not."""
    code, _, err = run("generate", "shapes", "a", "--device", "t4")
    assert code == 2
    assert err.startswith("stopdown: --device t4 is a profile of the NVIDIA T4")
    _, _, err = run("fit", "shapes", "--device", "t4", "--memory", "a lot")
    assert "profile" not in err


@pytest.mark.thorough
def test_a_forecast_takes_no_more_than_the_card_has(run: Any) -> None:
    """A limit beyond the card's memory is that of the card, and that is said."""
    code, out, err = run("fit", "shapes", "--device", "t4", "--memory", "64GiB", "--json")
    assert code == 0
    assert json.loads(out)["limit_bytes"] == find_profile("t4").memory_bytes
    assert "NVIDIA T4 has 14.6 GiB, less than the 64.0 GiB of --memory" in err
