"""`explain` of a clip: what the record beside it says of its run comes first."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from models.comparisons import RUN
from stopdown.diagnosis.explained import explain_file
from stopdown.files.outputs import find_record_path
from stopdown.records import Repair, to_json

REPAIR = Repair(
    component="transformer",
    module_path="transformer:blocks.1",
    kind="range",
    step=0,
    evidence="`transformer` gave 3 NaN.",
    action="rescaled",
    reason="The values do not fit into fp16.",
)


@pytest.mark.parametrize(
    ("action", "meaning"), [("rescaled", "repaired, rescaled"), ("none", "not repaired")]
)
def test_a_clip_of_a_run_with_faults_is_not_only_healthy(
    tmp_path: Path, action: str, meaning: str
) -> None:
    """Its frames show nothing; the faults of its run are the first thing that is said."""
    clip = tmp_path / "clip.png"
    draw = np.random.default_rng(0)
    grid = draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    smooth = grid.repeat(8, 0).repeat(8, 1)
    Image.fromarray(smooth).save(clip)
    run = dataclasses.replace(RUN, repairs=(dataclasses.replace(REPAIR, action=action),))
    find_record_path(clip).write_text(to_json(run))
    found = explain_file(clip)
    assert found.fault == "repaired"
    assert found.title == ("clip.png looks fine. The run that made it had 1 fault, listed below.")
    assert found.evidence[0].text == "`transformer` gave 3 NaN."
    assert found.evidence[0].meaning == f"{meaning}, transformer:blocks.1"
    find_record_path(clip).unlink()
    assert explain_file(clip).title == "clip.png looks fine."
