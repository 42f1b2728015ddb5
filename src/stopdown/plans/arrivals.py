"""Certify components of a model on the Hub while the others are still downloaded.

A process of its own plans each component once its files are whole, and keeps what it made, so that
`certify_plan` finds it there. When that process fails or is late, nothing is lost but time.

Not covered: single files, LoRAs, and models whose headers cannot be read from the Hub.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

from stopdown.devices.environment import Device, copy_variables
from stopdown.pipelines.class_selection import select_class
from stopdown.pipelines.requests import Request
from stopdown.plans.certified import Scope, certify_plan, list_planned
from stopdown.plans.dry_calls import list_source_calls
from stopdown.plans.plan_choice import find_need
from stopdown.plans.precision import find_plan_path
from stopdown.records import Plan
from stopdown.sources.hub import PLAN_BESIDE, Progress
from stopdown.sources.library_messages import quiet_libraries
from stopdown.sources.sources import (
    Source,
    count_download,
    is_complete,
    narrow_source,
    resolve_source,
)

WORTH_BYTES = 1 << 30
"""A download of fewer bytes ends before another process has imported what it needs."""

PATIENCE_S = 0.5
"""How often the process looks for files that are whole."""


@contextlib.contextmanager
def certified_on_arrival(
    source: Source,
    precision: str | Plan,
    device: Device,
    *,
    request: Request | None = None,
    progress: Progress | None = None,
) -> Iterator[None]:
    """A block that downloads the weights of a source; it ends when they are downloaded and certified.

    Args:
        source: without its weights, from `resolve_source(..., with_weights=False)`.
        precision: what the run asks for, as of `choose_plan`; with a plan nothing is certified.
    """
    command = list[str]()
    if isinstance(precision, str):
        with quiet_libraries():
            command = _write_command(source, precision, device, request)
    if not command:
        yield
        return
    offline = {**copy_variables(), "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(
        command,
        env=offline,
        stdin=subprocess.PIPE,  # the process ends when it is closed
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    ) as process:
        told = list[tuple[str, str, int, int]]()
        reader = threading.Thread(target=_follow, args=(process, told), daemon=True)
        reader.start()
        try:
            yield
            while process.poll() is None:
                if progress is not None and told:
                    progress(*told[-1])
                time.sleep(0.1)
        finally:
            process.kill()
            reader.join()


def _write_command(
    source: Source, precision: str, device: Device, request: Request | None
) -> list[str]:
    """Return what starts the process; nothing where there is too little to download or to plan."""
    if source.kind != "hub" or source.loras or find_plan_path(precision) is not None:
        return []
    if count_download(source) < WORTH_BYTES:
        return []
    need = find_need(source, precision, device)
    if not need.why or (source.path / PLAN_BESIDE).is_file():
        return []
    chosen = select_class(source, request)
    given = chosen.name, chosen.revision, chosen.variant, chosen.pipeline_class, *need.others
    return [sys.executable, "-m", __name__, *given]


def _follow(process: subprocess.Popen[str], told: list[tuple[str, str, int, int]]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        told[:] = [tuple(json.loads(line))]


def _certify_arrivals(
    name: str, revision: str, variant: str, pipeline_class: str, *left: str
) -> None:
    """Plan each component whose files are whole, but those that are left as they are."""
    source = resolve_source(name, revision=revision, variant=variant or None, with_weights=False)
    source = dataclasses.replace(source, pipeline_class=pipeline_class)
    calls, _ = list_source_calls(source)
    waiting = [x for x in list_planned(source) if x not in left and x in calls]
    while waiting:
        whole = [x for x in waiting if is_complete(narrow_source(source, (x,)))]
        for component in whole:
            scope = Scope((component,), calls, keeps=True)
            certify_plan(source, residual="fp32", progress=_tell, scope=scope)
            waiting.remove(component)
        if not whole:
            time.sleep(PATIENCE_S)


def _tell(stage: str, what: str, done: int, total: int) -> None:
    sys.stdout.write(f"{json.dumps([stage, what, done, total])}\n")
    sys.stdout.flush()


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _certify_arrivals(*sys.argv[1:])
