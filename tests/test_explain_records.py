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
    reason="The values don't fit in fp16.",
)


@pytest.mark.parametrize(
    ("action", "meaning"), [("rescaled", "repaired (rescaled)"), ("none", "not repaired")]
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
    assert found.title == (
        "No fault found in clip.png. The run that made it had 1 fault, listed below."
    )
    assert found.evidence[0].text == "`transformer` gave 3 NaN."
    assert found.evidence[0].meaning == f"{meaning}, transformer:blocks.1"
    find_record_path(clip).unlink()
    assert explain_file(clip).title == "No fault found in clip.png."


def test_a_record_of_few_steps_says_so_and_lists_what_was_called(tmp_path: Path) -> None:
    """A component that no call reached did not run, and a run of 4 steps isn't called right."""
    idle = dataclasses.replace(RUN.decisions[0], component="vae.encode")
    run = dataclasses.replace(
        RUN, request={"steps": 4}, repairs=(), findings=(), decisions=(*RUN.decisions, idle)
    )
    path = tmp_path / "clip.png.json"
    path.write_text(to_json(run))
    found = explain_file(path)
    assert "vae.encode" not in found.why
    assert " ran in " in found.why
    assert "only 4 steps" in found.remedy[0]
    path.write_text(to_json(dataclasses.replace(run, request={"steps": 20})))
    assert explain_file(path).remedy == ("Nothing to do.",)


@pytest.mark.parametrize(
    ("steps", "said"), [(1, "only 1 step;"), (4, "only 4 steps;"), (20, ""), (None, "")]
)
def test_a_clip_of_few_steps_is_not_called_right(
    tmp_path: Path, steps: int | None, said: str
) -> None:
    """In one step a red circle is a yellow disc, in fp32 as well: what is missing is steps."""
    clip = tmp_path / "clip.png"
    grid = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(grid.repeat(8, 0).repeat(8, 1)).save(clip)
    run = dataclasses.replace(RUN, request={"prompt": "a", "steps": steps}, repairs=())
    find_record_path(clip).write_text(to_json(run))
    found = explain_file(clip)
    assert found.title.startswith("No fault found in clip.png")
    assert said in found.title
    assert bool(said) == ("--steps 20" in found.remedy[0]) == (", but" in found.title)
