"""The program that a `Certifier` starts: it plans components of a model and caches each plan."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import time
from typing import Any

import torch

from stopdown.plans.certified import Scope, certify_plan
from stopdown.plans.dry_calls import list_source_calls
from stopdown.sources.source import narrow_source
from stopdown.sources.sources import is_complete, resolve_source

PATIENCE_S = 0.5
"""Seconds between checks for files that are still being downloaded."""

_threads = list[int]()
"""The new number of threads that this process may use, once the parent waits for it; else empty."""


def certify_components(task: dict[str, Any]) -> None:
    """Plan and cache each component of a model as soon as its files are downloaded.

    Args:
        task: what `Certifier` sends as JSON: source, components, residual, threads, and whether files
            are being downloaded.
    """
    torch.set_num_threads(max(1, task["threads"]))
    source = resolve_source(
        task["source"],
        revision=task["revision"],
        variant=task["variant"],
        cache_dir=task["cache_dir"],
        with_weights=False,
    )
    source = dataclasses.replace(
        source, pipeline_class=task["pipeline_class"], scheduler=task["scheduler"]
    )
    calls, _ = list_source_calls(source)
    waiting = [name for name in task["components"] if name in calls]
    while waiting:
        is_all_here = not task["downloads"] or bool(_threads)
        whole = [x for x in waiting if is_all_here or is_complete(narrow_source(source, (x,)))]
        for component in whole:
            scope = Scope((component,), calls, keeps=True)
            certify_plan(source, residual=task["residual"], progress=_tell, scope=scope)
            waiting.remove(component)
        if not whole:
            time.sleep(PATIENCE_S)


def _tell(stage: str, what: str, done: int, total: int) -> None:
    if _threads:
        torch.set_num_threads(_threads[0])
    sys.stdout.write(f"{json.dumps([stage, what, done, total])}\n")
    sys.stdout.flush()


def _listen() -> None:
    for line in sys.stdin:
        _threads[:] = [int(line)]
    os._exit(1)  # whoever began this process has ended


if __name__ == "__main__":
    task = json.loads(sys.stdin.readline())
    threading.Thread(target=_listen, daemon=True).start()
    certify_components(task)
