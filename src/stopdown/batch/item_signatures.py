"""What determines an item of a batch, as one hash: an item whose hash is known is not made again.

The hash is over the prompt, the seed, sizes and settings, the model's fingerprint, its sampler and the plan
that the batch begins with. It is not over the place of the prompt in its file, the device, or a repair that
was found on the way: the record of an item says which version of the plan made it.

**Does not catch** versions of libraries: after an upgrade finished items stay as they are.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from typing import Any

from stopdown.batch.prompts import Item
from stopdown.batch.settings import Job
from stopdown.pipelines.class_selection import Selection
from stopdown.pipelines.requests import MEDIA, Request
from stopdown.records import Plan
from stopdown.sources.descriptions import read_description


def describe_shared(job: Job, chosen: Selection, plan: Plan) -> dict[str, Any]:
    scheduler = chosen.source.described / "scheduler" / "scheduler_config.json"
    config = read_description(scheduler) if scheduler.is_file() else {}
    return {
        "model": job.fingerprint,
        "pipeline": job.pipeline,
        **({"memory": [memory, job.settings.allow]} if (memory := job.settings.memory) else {}),
        **({"scheduler": name} if (name := chosen.source.scheduler) else {}),
        "sampler": {k: v for k, v in config.items() if not k.startswith("_diffusers")},
        "plan": plan.seal or [(x.component, x.precision) for x in plan.components],
        "file": [job.settings.suffix, job.settings.fps],
    }


def sign_item(shared: dict[str, Any], request: Request, media: str) -> str:
    """The hash of an item, 32 hexadecimal digits.

    Args:
        media: hashes of its pictures and video; "" without any.
    """
    said = describe_request(request)
    text = json.dumps([shared, said, media], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def describe_request(request: Request) -> dict[str, Any]:
    """What of a request is plain data and given."""
    plain = {f.name: getattr(request, f.name) for f in dataclasses.fields(request)}
    return {k: v for k, v in plain.items() if k not in (*MEDIA, "arguments") and v is not None}


def name_item(item: Item, signed: str) -> str:
    """Its name, or words of its prompt and its hash."""
    words = "-".join(re.findall(r"\w+", (item.prompt or "").lower()))[:48].rstrip("-")
    return item.name or f"{words or 'item'}-{signed[:12]}"
