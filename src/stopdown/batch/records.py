"""Records of a batch: the result of each prompt, and a summary.

They contain no tensors, so that a page can be made without PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from stopdown.records import SCHEMA, ComponentPlan, Finding, Repair

MOST_ITEMS = 100_000

TRIES = 3
"""Number of workers that may die on an item before it counts as failed."""

MOST_DEATHS = 10
"""Deaths of workers in a row, without a finished item in between, that end a batch."""

MOST_EARLY_DEATHS = 5
"""Deaths in a row of workers that had not received a task, which end a batch."""


Status = Literal["made", "skipped", "failed"]


@dataclass(frozen=True)
class ItemResult:
    """Result of one item: the output for one line of the prompts file.

    Attributes:
        item: hash of everything that determines the output.
        status: `made`, `skipped` (it was finished before) or `failed`.
        output: name of its file in the folder; "" if it failed.
        plan: checksum (`Plan.seal`) of the plan that it was made with; "" without one.
        preview: a few small frames, WebP in base64.
        tries: how often it was begun; more than once if a worker died.
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
    """Summary of a batch.

    Attributes:
        source: the model as the user named it.
        prompts: file that the items came from; "" if all came from the command line.
        output: folder of the outputs.
        command: command line that continues the batch.
        workers: device of each worker, by its number.
        made, skipped, repaired, failed: numbers of items; a repaired one also counts as made.
        item_s: mean seconds per item that was made; None if none was.
        plans: checksums of the versions of the plan, in order; repairs make new ones.
        precision: the requested precision.
        decisions: precision of each component call, if there is no plan with exponents.
        device: device for which the batch was prepared.
        asked: hash of the request, if all items are finished and `digest_request` could compute it.
        items: results in the order of the prompts file.
        notes: sentences about repeated lines and workers that died.
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
