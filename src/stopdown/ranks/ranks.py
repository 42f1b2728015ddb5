"""What the ranks of one run agree on: whether a call failed, where it began, what is tried.

Ranks that make one video together must go the same way: a fault that one of them sees is a fault of all,
and a repair is put on all or none. Each rank checks its own output. One all_reduce a call makes what one
rank saw known to all before any of them decides, so all of them run the call again, in step. Where a fault
began is looked for on every rank; the earliest operation is the culprit.

    torchrun --nproc-per-node 2 -m stopdown generate SOURCE PROMPT -o clip.mp4

Each process loads the whole model on a device of its own. The first one plans, writes and speaks.

**Catches** faults of one rank alone; ranks that were started with another plan, model, precision,
version or noise.
**Does not catch** ranks whose finite values differ. Which rank was lost is named by `torchrun`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from stopdown.component_calls.call import ComponentCall
from stopdown.component_calls.components import find_callees, find_components, read_precisions
from stopdown.devices.environment import Device, RankSettings, choose_device, describe_machine
from stopdown.errors import InputError, OptionError, RankError, StopdownError, take_one_line
from stopdown.interception.patches import Patches
from stopdown.number_formats import name_dtype
from stopdown.numerics import count_non_finite, iterate_tensors
from stopdown.plans.weight_fingerprints import sample_weights
from stopdown.records import Plan
from stopdown.runtime.call_check import CallCheck
from stopdown.runtime.consensus import Consensus
from stopdown.runtime.culprit import Culprit
from stopdown.runtime.fault_texts import Fault, name_fault

_LOST = re.compile(r"gloo|nccl|connection|socket|broken pipe|peer", re.IGNORECASE)
"""Words of what PyTorch says when a rank cannot be reached any more."""

_SAMPLE, _TOLERANCE = 1024, 0.01
"""Values of the noise that are compared, and how far they may lie apart: sums may round otherwise."""


class Ranks(Consensus):
    """The ranks of a process group, as one of them sees them."""

    is_alone = False

    def __init__(self, group: Any = None) -> None:
        """
        Args:
            group: the process group; None for that of all ranks.
        """
        self._group = group
        self.number, self.count = dist.get_rank(group), dist.get_world_size(group)
        self._device = torch.device("cpu")
        if "cpu" not in str(dist.get_backend_config(group)):
            self._device = torch.device(torch.accelerator.current_accelerator() or "cpu")
        self._has_noise = False

    def agree(self, *flags: bool) -> tuple[bool, ...]:
        """Whether each flag is set on any rank.

        Cost: one all_reduce of so many integers, and a host read.
        """
        seen = torch.tensor(flags, dtype=torch.int32, device=self._device)
        dist.all_reduce(seen, op=dist.ReduceOp.MAX, group=self._group)
        return tuple(map(bool, seen.tolist()))

    def gather(self, value: Any) -> list[Any]:
        """What every rank gave, in their order; plain data or tensors on the CPU."""
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value, group=self._group)
        return found

    def share(self, value: Any) -> Any:
        """What rank 0 gave, on every rank; values of the others are dropped."""
        found = [value]
        dist.broadcast_object_list(found, group=self._group, group_src=0)
        return found[0]

    def lead(self, action: Callable[[], Any]) -> Any:
        """What rank 0 gets of doing something that only one may do; None on the others."""
        result, told = None, None
        if self.number == 0:
            try:
                result = action()
            except StopdownError as error:
                told = (type(error), error.what, error.expected, error.remedy)
        if (told := self.share(told)) is not None:
            kind, what, expected, remedy = told
            raise self.told_by_first(kind(what, expected=expected, remedy=remedy))
        return result

    def follow(self, action: Callable[[], Any]) -> Any:
        """What doing something gives, which rank 0 does first and the others then find done."""
        result = self.lead(action)
        return result if self.number == 0 else action()

    def told_by_first(self, error: StopdownError) -> StopdownError:
        """An error that every rank raises, and that only rank 0 says."""
        error.is_told_elsewhere = self.number > 0
        return error

    def refuse_differences(self, what: str, described: Mapping[str, Any], remedy: str) -> None:
        """Refuse, on every rank alike, ranks that were not started alike.

        Args:
            what: is described: "plan".
            described: name → plain value, of this rank.
        """
        first, *others = self.gather(dict(described))
        differences = [
            f"{name} is {first.get(name)!r} on rank 0 and {other.get(name)!r} on rank {number}"
            for number, other in enumerate(others, 1)
            for name in dict.fromkeys((*first, *other))
            if first.get(name) != other.get(name)
        ]
        if differences:
            raise self.told_by_first(
                InputError(
                    f"The ranks differ in their {what}: {'; '.join(differences)}.",
                    expected="Ranks that make one output together run the same model on the same "
                    "values.",
                    remedy=remedy,
                )
            )

    # Around a guard and its runs

    def begin(self, pipe: Any, plan: Plan | None) -> None:
        """Refuse ranks with another plan, model, precision or version than rank 0; compared once."""
        described: dict[str, Any] = {"plan": plan.seal if plan is not None else None}
        described |= {"pipeline": type(pipe).__name__, "versions": describe_machine()["versions"]}
        for name, module in find_components(pipe).items():
            precisions = [name_dtype(dtype) for dtype in read_precisions(module)]
            described |= {
                f"{name}'s precision": precisions,
                f"{name}'s weights": sample_weights(module),
            }
        remedy = "Start every rank with the same files, options and packages."
        self.refuse_differences("plan or model", described, remedy)

    def begin_run(self) -> None:
        """Compare the noise at the next denoising step."""
        self._has_noise = False

    def begin_call(self, call: ComponentCall) -> None:
        """Refuse ranks whose first step begins from something else than that of rank 0."""
        if call.callee.stage != "denoise" or self._has_noise:
            return
        self._has_noise = True
        given = iterate_tensors((call.args, call.kwargs))
        tensors = (x for x in given if x.is_floating_point() and x.dim() > 1)
        values = next(tensors, torch.zeros(1)).detach().flatten()
        mine = values[:: max(1, values.numel() // _SAMPLE)][:_SAMPLE].float().cpu()
        first, *others = self.gather(mine)
        reach = float(first.abs().max()) * _TOLERANCE
        differing = [
            number
            for number, other in enumerate(others, 1)
            if other.shape != first.shape or float((other - first).abs().max()) > reach
        ]
        if differing:
            error = InputError(
                f"Rank{'s' * (len(differing) > 1)} {', '.join(map(str, differing))} of {self.count} began "
                "from other noise than rank 0.",
                expected="Ranks that make one output together begin from the same values.",
                remedy="Give each rank a generator of the same seed: torch.Generator().manual_seed(0).",
            )
            raise self.told_by_first(error)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Explain an error that says another rank cannot be reached."""
        try:
            yield
        except StopdownError:
            raise
        except Exception as error:
            if not is_lost(error):
                raise
            raise RankError(
                f"Another rank is gone: it failed, was killed, or lost its network "
                f"({type(error).__name__}: {take_one_line(error, 200)}). torchrun names the rank that "
                "failed first when all have ended."
            ) from error

    # What each rank found, as all of them go by it

    def agree_on_check(self, check: CallCheck) -> CallCheck:
        """Return what a call showed on any rank.

        Cost: one all_reduce of three integers; names are gathered only when one of them is set.
        """
        seen = (not check.is_finite, bool(check.clamped), bool(check.inputs))
        is_bad, is_clamped, is_spoilt = self.agree(*seen)
        if not (is_bad or is_clamped or is_spoilt):
            return check
        named = self.gather((check.clamped, check.inputs))
        return dataclasses.replace(
            check,
            is_finite=not is_bad,
            clamped=tuple(dict.fromkeys(name for clamped, _ in named for name in clamped)),
            inputs=tuple(dict.fromkeys(name for _, inputs in named for name in inputs)),
        )

    def agree_on_counts(self, counts: tuple[int, int, int]) -> tuple[int, int, int]:
        return max(self.gather(counts)) if any(self.agree(sum(counts[:2]) > 0)) else counts

    def agree_on_fault(self, fault: Fault) -> Fault:
        outputs = [x for x in iterate_tensors(fault.output) if x.is_floating_point()]
        is_mine = bool(fault.check.clamped) or any(sum(count_non_finite(x)) for x in outputs)
        told = self.gather(name_fault(fault) if is_mine and not fault.check.is_good else "")
        having = [number for number, text in enumerate(told) if text]
        if not having:
            return fault
        found = told[having[0]]
        if len(having) < self.count:
            named = ", ".join(map(str, having))
            found += f" It was so on rank{'s' * (len(having) > 1)} {named} alone."
        return dataclasses.replace(fault, found=found)

    def agree_on_culprit(self, culprit: Culprit) -> Culprit:
        """Return where a fault began: the earliest operation that any rank found."""
        found = self.gather(culprit)
        return min(found, key=lambda one: (one.kind == "intermittent", one.order))

    def agree_on_failure(self, told: str) -> str:
        return next(filter(None, self.gather(told))) if any(self.agree(bool(told))) else ""

    def raise_if_lost(self, error: Exception) -> None:
        """Raise an error which says that another rank is gone: nothing can be run again without it."""
        if is_lost(error):
            raise error

    @contextlib.contextmanager
    def spread(self, pipe: Any) -> Iterator[str]:
        """Spread each step of a pipeline over the ranks by its tokens; yield how, in words."""
        from stopdown.ranks.context_parallel import put_context_parallel

        with Patches() as patches:
            for callee in find_callees(pipe):
                if callee.stage == "denoise":
                    put_context_parallel(callee.owner, patches)
            yield f"context parallel over {self.count} processes"


def is_lost(error: Exception) -> bool:
    """Whether an exception says that another rank cannot be reached."""
    return isinstance(error, dist.DistError) or bool(_LOST.search(str(error)))


def find_group(pipe: Any) -> tuple[Any] | None:
    """The process group over which calls of a pipeline's components are spread; None for one alone.

    Returns:
        The group in a tuple, because None is the group of all ranks.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    for part in find_components(pipe).values():
        config = getattr(vars(part).get("_parallel_config"), "context_parallel_config", None)
        if config is not None:
            return (config._flattened_mesh.get_group(),)
    return None


def find_ranks(pipe: Any) -> Ranks | None:
    """Return the ranks over which calls of a pipeline are spread; None for a process alone."""
    group = find_group(pipe)
    return None if group is None else Ranks(*group)


_LIMIT_S = 1800.0
"""How long a rank waits for another one: planning and loading lie between exchanges."""

_TOGETHER_S = 5.0
"""How long a rank that fails waits for the others to fail as well."""


def name_device(asked: str, settings: RankSettings) -> str:
    """The device of one process: of `auto` and `cuda` the one with its number on this machine."""
    count = torch.cuda.device_count()
    if asked not in ("auto", "cuda") or (asked == "auto" and not count):
        return asked
    if settings.local >= count:
        raise OptionError(
            f"This machine has {count} CUDA device{'s' * (count != 1)}, and at least "
            f"{settings.local + 1} processes were started.",
            expected="Each process needs its own device.",
            remedy=f'Use torchrun --nproc-per-node {max(1, count)}, or device="cpu".',
        )
    return f"cuda:{settings.local}"


@contextlib.contextmanager
def joined(device: Device, limit_s: float = _LIMIT_S) -> Iterator[Ranks]:
    """The ranks of this process and of those that were started with it.

    Args:
        device: of this process; CUDA devices exchange through NCCL, others through gloo.
        limit_s: after which an exchange that does not come is an error.
    """
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.set_device(device.torch_name)
    backend = "cpu:gloo,cuda:nccl" if is_cuda else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=limit_s))
    yield Ranks()
    dist.destroy_process_group()  # not after an error: ranks that are gone would be waited for


@contextlib.contextmanager
def join_ranks(device: str, settings: RankSettings) -> Iterator[tuple[str, Ranks]]:
    """Join the processes that were started with this one; yield its device, and the ranks."""
    device = name_device(device, settings)
    with joined(choose_device(device)) as ranks, ranks.running():
        try:
            yield device, ranks
        except RankError:
            raise
        except StopdownError as error:
            raise ranks.told_by_first(error) if _have_all_failed() else error from None


def _have_all_failed() -> bool:
    """Wait for the other ranks to end with an error, too; return whether all of them do."""
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=_TOGETHER_S))
    except Exception:  # some rank goes on, or is gone: this one has to speak for itself
        return False
    return True
