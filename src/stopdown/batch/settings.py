"""What a batch is asked to do, and what its workers share, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from stopdown.records import Plan
from stopdown.runtime.repair_order import OnFault


@dataclass(frozen=True)
class Settings:
    """What is asked for all items of a batch.

    Attributes:
        output: folder.
        precision: as for `--precision`.
        device: as for `choose_device`; the plan is made for it.
        fps: frames per second of the files.
        suffix: of the outputs; "" takes `.mp4` for videos and `.png` for pictures.
        journal: folder of the journals of items that are being made; None keeps none.
        lora: LoRAs, each a file with its weight: `style.safetensors:0.8`; every worker can read them.
        scheduler: in the place of the model's own.
        memory: what each item is to stay within, `8GiB`; None and `auto` take all that the device has,
            `none` sets no limit.
        allow: what may change for that: `smaller`, the size of what is made.
    """

    source: str
    output: str
    revision: str | None = None
    config: str | None = None
    precision: str = "auto"
    device: str = "auto"
    fps: float = 8.0
    suffix: str = ""
    on_fault: OnFault = "repair"
    journal: str | None = None
    variant: str | None = None
    lora: tuple[str, ...] = ()
    scheduler: str | None = None
    memory: str | None = None
    allow: tuple[str, ...] = ()


@dataclass(frozen=True)
class Job:
    """What all workers of a batch share, as plain data.

    Attributes:
        settings: as asked, with the suffix.
        pipeline: class that serves the items.
        fingerprint: of the model, which each worker compares.
        decided: the precision of each call, if the batch has no plan with exponents.
    """

    settings: Settings
    pipeline: str
    fingerprint: str
    decided: Plan | None = None
