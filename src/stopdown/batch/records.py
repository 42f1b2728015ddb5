"""Plain data of a batch: what became of each prompt, and the summary of all.

Nothing here sees a tensor, so a page can be made without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from stopdown.records import SCHEMA, ComponentPlan, Finding, Repair

MOST_ITEMS = 100_000

TRIES = 3
"""How often an item is begun before its workers' deaths are its result."""

MOST_DEATHS = 10
"""Deaths in a row, without an item between them, that end a batch: it is not the items then."""

MOST_EARLY_DEATHS = 5
"""Deaths in a row of workers that have not begun, which end a batch."""


Status = Literal["made", "skipped", "failed"]


@dataclass(frozen=True)
class ItemResult:
    """What became of one item.

    Attributes:
        item: hash of what determines it.
        status: `made`, `skipped` (it was finished before) or `failed`.
        output: name of its file in the folder; "" when it failed.
        plan: seal of the plan that made it; "" without one.
        preview: a few small frames, WebP in base64.
        tries: how often it was begun; more than once after a worker died.
    """

    item: str
    name: str
    line: int
    prompt: str
    status: Status
    output: str = ""
    elapsed_s: float = 0.0
    plan: str = ""
    repairs: tuple[Repair, ...] = ()
    findings: tuple[Finding, ...] = ()
    error: str = ""
    preview: str = ""
    tries: int = 1


@dataclass(frozen=True)
class BatchRecord:
    """What a batch came to.

    Attributes:
        source: the model as it was named.
        prompts: file or URL that the items came from; "" where the command has them all.
        output: folder or URL of the outputs.
        command: what goes on with it, as it is typed.
        workers: what each worker computed on, by its name.
        made, skipped, repaired, failed: how many items; a repaired one is also a made one.
        item_s: seconds per item that was made, their mean; None when none was.
        plans: seals of the plans that were in force, the first one first.
        precision: as it was asked for.
        decisions: how each call runs, if no plan is in force.
        device: that it was prepared for.
        asked: hash of what was asked for, if every item of it is finished and it can be known here.
        items: in the order of the prompts file.
        notes: whole sentences that should be read: repeated lines, workers that died.
    """

    source: str
    fingerprint: str
    pipeline: str
    prompts: str
    output: str
    command: str
    workers: dict[str, str]
    machine: dict[str, Any]
    made: int
    skipped: int
    repaired: int
    failed: int
    item_s: float | None
    elapsed_s: float
    plans: tuple[str, ...]
    items: tuple[ItemResult, ...]
    notes: tuple[str, ...] = ()
    precision: str = ""
    decisions: tuple[ComponentPlan, ...] = ()
    device: str = ""
    asked: str = ""
    kind: str = "batch"
    schema: int = field(default=SCHEMA)
