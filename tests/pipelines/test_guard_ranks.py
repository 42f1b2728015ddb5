"""The guard across ranks: one flag a call, the same repair on all, the culprit of the rank that has it."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from models.injected_faults import inject
from models.snapshots import assert_untouched
from processes.several_ranks import call_small, gather_results, make_with_heads, run_ranks
from stopdown.errors import InputError
from stopdown.interception.patches import Patches
from stopdown.ranks.context_parallel import put_context_parallel
from stopdown.runtime import culprit
from stopdown.runtime.guard import guard

pytestmark = pytest.mark.thorough

CALLS = (
    ("text_encoder", 0),
    ("text_encoder", 1),
    ("transformer", 0),
    ("transformer", 1),
    ("vae.decode", 0),
)
"""Each component call of a small run: component, number of the call."""


def plant(
    rank: int, name: str, faulty: int, cases: tuple[dict[str, Any], ...], half: bool
) -> dict[str, Any]:
    """What comes of faults on one rank alone: bits as planned or not, and what the guards did."""
    pipe = make_with_heads(name, 2 if dist.get_world_size() == 2 else 6)
    for part in (pipe.transformer, pipe.vae, pipe.text_encoder) if half else ():
        part.half()
    found = []
    with assert_untouched(pipe), Patches() as patches:
        put_context_parallel(pipe.transformer, patches)
        planned = call_small(pipe)
        with guard(pipe, announce=lambda text: None) as guarding:
            silent = torch.equal(call_small(pipe), planned) and not guarding.repairs
        for case in cases:
            is_mine = rank == faulty
            fault = inject(pipe, **case) if is_mine else contextlib.nullcontext()
            with fault, guard(pipe, announce=lambda text: None) as guarding:
                frames = call_small(pipe)
            repairs = [dataclasses.replace(x, elapsed_s=0.0) for x in guarding.repairs]
            found.append((torch.equal(frames, planned), frames, repairs))
    return {"silent": silent, "found": found, "planned": planned}


@pytest.mark.parametrize(
    ("name", "count", "faulty"),
    [
        ("cogvideox", 2, 1),
        pytest.param("cogvideox", 3, 2, marks=pytest.mark.slow),
        pytest.param("cogview3plus", 2, 0, marks=pytest.mark.slow),
        pytest.param("cogview3plus", 3, 1, marks=pytest.mark.slow),
        pytest.param("wan", 2, 1, marks=pytest.mark.slow),
        pytest.param("wan", 3, 0, marks=pytest.mark.slow),
    ],
)
def test_a_fault_of_one_rank_is_repaired_on_all(name: str, count: int, faulty: int) -> None:
    """NaN on one rank, at each component and step: found there, run again on all, frames as planned."""
    inner = [{"component": "transformer", "step": 1, "module_path": "transformer_blocks.0.attn1"}]
    if name == "wan":
        inner[0]["module_path"] = "blocks.0.attn1"
    calls = [
        one for one in CALLS if name != "cogview3plus" or one != ("text_encoder", 1)
    ]  # one text
    cases = (*({"component": part, "step": step} for part, step in calls), *inner)
    results = gather_results(run_ranks(plant, count, name, faulty, cases, False))
    for result in results:
        assert result["silent"]
        for (is_planned, _, repairs), (_, _, first), case in zip(
            result["found"], results[0]["found"], cases, strict=True
        ):
            assert is_planned, case
            (repair,) = repairs
            assert repairs == first  # the same on every rank
            assert (repair.component, repair.action) == (case["component"], "replayed")
            assert repair.kind == "intermittent"
            if "module_path" not in case:  # inside, an exchange hands it on to all
                assert f"It was so on rank {faulty} alone." in repair.evidence


class Exchanging(torch.nn.Module):
    """A value that does not fit into fp16 on the last rank, gathered on all."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.grow, self.out = torch.nn.Linear(4, 4), torch.nn.Identity()
        self.half()
        torch.nn.init.constant_(self.grow.weight, 2.0**15 if rank else 1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[N, 4]` to `[ranks * N, 4]`."""
        group = dist.group.WORLD.group_name
        x = torch.ops._c10d_functional.all_gather_into_tensor(
            self.grow(x), dist.get_world_size(), group
        )
        return self.out(torch.ops._c10d_functional.wait_tensor(x))


def exchange_late(rank: int) -> culprit.Culprit:
    """The culprit of a call whose exchange cannot be complete when its result is looked at first."""
    store, look = dist.distributed_c10d._get_default_store(), culprit._Tracer._look

    def look_and_tell(self: Any, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        is_early = bool(rank) and "all_gather" in str(func)
        if is_early:
            result.zero_()  # or whatever was in that memory before
        look(self, func, args, kwargs, result)
        if is_early:
            store.set("looked", "")

    def wait(*_: Any) -> None:
        if not rank:
            store.wait(["looked"])

    module = Exchanging(rank)
    module.grow.register_forward_hook(wait)
    with Patches() as patches, torch.no_grad():
        patches.set_class_attribute(culprit._Tracer, "_look", look_and_tell)
        x = torch.ones(2, 4, dtype=torch.float16)
        return culprit.find_culprit(module, lambda: module(x), {"x": x})[0]


def test_values_of_an_exchange_may_come_late() -> None:
    """A rank whose own module fails names it, though what it sends has not arrived when it looks."""
    first, second = gather_results(run_ranks(exchange_late, 2))
    assert (second.path, second.kind) == ("grow", "range")
    assert first.operation in ("all_gather_into_tensor", "wait_tensor")
    assert second.order < first.order


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_culprit_is_that_of_the_rank_that_has_it(count: int) -> None:
    """A module that fails in fp16 on one rank, whose values reach all: named on all, in fp32 on all."""
    path = "transformer_blocks.1.ff.net.2"
    fault = {"component": "transformer", "step": 0, "module_path": path, "lasting": True}
    results = gather_results(run_ranks(plant, count, "cogvideox", count - 1, (fault,), True))
    for result in results:
        ((_, frames, repairs),) = result["found"]
        (repair,) = repairs
        assert repairs == results[0]["found"][0][2]
        assert torch.equal(frames, results[0]["found"][0][1])
        assert frames.isfinite().all()
        assert repair.module_path == f"transformer:{path}"
        assert (frames - result["planned"]).abs().max() < 0.02


def differ(rank: int, folder: str) -> dict[str, str]:
    """What is said of ranks that were not started alike."""
    pipe = make_with_heads("cogvideox", 2)
    with Patches() as patches:
        put_context_parallel(pipe.transformer, patches)
        with guard(pipe, announce=lambda text: None):
            noise = catch(lambda: call_small(pipe, generator=torch.Generator().manual_seed(rank)))
            if rank:
                pipe.vae.half()
        precision = catch(lambda: guard(pipe))
        journal = catch(lambda: guard(pipe, journal=folder))
    return {"noise": noise, "precision": precision, "journal": journal}


def catch(call: Any) -> str:
    try:
        call()
    except InputError as error:
        return str(error)
    return ""


def test_ranks_that_were_not_started_alike_are_refused(tmp_path: Path) -> None:
    """Other noise, another precision, and a journal: refused on every rank, in the same words."""
    first, second = gather_results(run_ranks(differ, 2, str(tmp_path)))
    assert first == second
    assert first["noise"] == (
        "Rank 1 of 2 began from other noise than rank 0. Ranks that make one output together begin from "
        "the same values. Give each rank a generator of the same seed: torch.Generator().manual_seed(0)."
    )
    assert first["precision"].startswith(
        "The ranks differ in their plan or model: vae's precision is ['fp32'] on rank 0 and ['fp16'] on "
        "rank 1;"
    )
    assert first["journal"] == (
        "A journal was requested for 2 processes. A journal contains the calls of one process. Leave the "
        "journal out, or start one process."
    )
    assert not list(tmp_path.iterdir())
