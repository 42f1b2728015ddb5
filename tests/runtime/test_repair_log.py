"""What a guard did: reported once for people, logged each time for services."""

from __future__ import annotations

import dataclasses
import logging
from typing import get_args, get_type_hints

import pytest

from stopdown.records import Repair
from stopdown.runtime.repair_log import RepairLog, describe_repair
from stopdown.runtime.repair_order import Remedy

REPAIR = Repair(
    component="text_encoder",
    module_path="text_encoder:encoder.block.0",
    kind="range",
    step=2,
    evidence="`text_encoder` returned only NaN (8 values) in fp16.",
    action="rescaled",
    reason="Its activations now fit in fp16, and it still computes the same function.",
    elapsed_s=1.25,
    verdict="Overflow in the text encoder: an activation reached 113,000, above fp16's maximum of 65,504.",
)


def test_each_repair_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """A service sees every repair in its log, with the record beside; people hear of the first."""
    said: list[str] = []
    log = RepairLog(said.append)
    with caplog.at_level(logging.WARNING, logger="stopdown"):
        log.keep(REPAIR)
        log.keep(REPAIR)
    assert [x.getMessage() for x in caplog.records] == 2 * [
        "repair action=rescaled component=text_encoder module=text_encoder:encoder.block.0 kind=range "
        "step=3 seconds=1.250"
    ]
    assert vars(caplog.records[0])["repair"]["evidence"] == REPAIR.evidence
    assert len(said) == 1


def test_nothing_is_printed_where_no_log_is_set_up(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a handler of the program, Python would print warnings of libraries to stderr."""
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        RepairLog(lambda text: None).keep(REPAIR)
    finally:
        root.handlers = handlers
    assert capsys.readouterr().err == ""


def test_a_repair_begins_with_the_verdict() -> None:
    """What happened, whether the result is right and where it began; evidence if it wasn't repaired."""
    assert describe_repair(REPAIR) == (
        "Overflow in the text encoder: an activation reached 113,000, above fp16's maximum of 65,504. "
        "Repaired; the result isn't affected. The fault begins at `text_encoder:encoder.block.0`. "
        "Rescaled `text_encoder` by powers of two. Its activations now fit in fp16, and it still "
        "computes the same function."
    )
    left = describe_repair(dataclasses.replace(REPAIR, action="none"))
    assert " It wasn't repaired. `text_encoder` returned only NaN (8 values) in fp16. " in left


def test_each_remedy_has_words() -> None:
    """A new action without a sentence would end a run with a `KeyError` in the middle of a repair."""
    remedies = set(get_args(get_type_hints(Remedy)["action"]))
    actions = remedies - {"cast"} | {
        "bf16",
        "fp32",
        "cast-inputs",
        "none",
    }  # a cast is named by its dtype
    said = {describe_repair(dataclasses.replace(REPAIR, action=x, verdict="")) for x in actions}
    assert len(said) == len(actions) == 7
