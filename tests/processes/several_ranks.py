"""Several ranks on one machine: processes with one thread each that share a gloo process group.

They are forked from a server that has imported everything once, so a rank costs no imports. Nothing
hangs: the group has a time limit, and so has the run, after which every process that was started is
killed by its own handle.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

_PRELOADED = (
    *("torch", "torch.distributed", "diffusers", "transformers", "stopdown.testing"),
    *("stopdown.runtime.guard", "stopdown.plans.certified", "stopdown.pipelines.loader"),
)


SWITCHED_OFF = "STOPDOWN_TESTS_SWITCHED_OFF"
"""Variable with the name of the detector that is off, in the ranks too (`switching_off`)."""


@dataclass(frozen=True)
class Outcome:
    """How one rank ended.

    Attributes:
        code: exit code; negative for a signal, None when it had to be killed at the time limit.
        result: what its work returned.
        error: the traceback of what its work raised.
    """

    code: int | None
    result: Any = None
    error: str = ""


def run_ranks(
    work: Callable[..., Any],
    count: int,
    *given: Any,
    limit_s: float = 240,
    group_limit_s: float = 60,
) -> list[Outcome]:
    """How each rank ended that ran `work(rank, *given)` in a group of so many.

    Args:
        work: a function at the head of its module.
        limit_s: when all is killed.
        group_limit_s: time limit of the process group.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_enter, args=(rank, count, folder, group_limit_s, work, given))
            for rank in range(count)
        ]
        for process in ranks:
            process.start()
        ends_at = time.monotonic() + limit_s
        try:
            for process in ranks:
                process.join(max(0.0, ends_at - time.monotonic()))
            codes = [process.exitcode for process in ranks]
        finally:
            for process in ranks:
                if process.exitcode is None:
                    process.kill()
                    process.join()
        return [_read(Path(folder), rank, code) for rank, code in enumerate(codes)]


def gather_results(outcomes: list[Outcome]) -> list[Any]:
    """What the ranks returned, where all of them ended well."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.code == 0, f"rank {rank} ended with {outcome.code}\n{outcome.error}"
    return [outcome.result for outcome in outcomes]


def _read(folder: Path, rank: int, code: int | None) -> Outcome:
    import torch

    path = folder / f"{rank}.pt"
    if not path.exists():
        return Outcome(code)
    result, error = torch.load(path, weights_only=False)
    return Outcome(code, result, error)


def _enter(
    rank: int,
    count: int,
    folder: str,
    limit_s: float,
    work: Any,
    given: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if name := os.environ.get(SWITCHED_OFF):
        from processes.switching_off import switch_off

        switch_off(name)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=limit_s),
    )
    result, error = None, ""
    try:
        result = work(rank, *given)
    except BaseException:
        error = traceback.format_exc()
        raise
    finally:
        torch.save((result, error), Path(folder) / f"{rank}.part")
        (Path(folder) / f"{rank}.part").rename(Path(folder) / f"{rank}.pt")
        if not error:
            dist.destroy_process_group()
