"""Probes of a run: record block maxima, samples of block outputs, outputs of calls, and latents.

Each block of a component (a member of a module list, or a module beside the lists) has a forward hook. It
computes, on the device, the smallest and largest output value, the number of values at fp16's maximum, and
a few values at fixed positions. These are copied to the host once per call. The outputs of calls and of the
scheduler's steps are copied to the CPU, except for decoded pictures, which are the frames themselves.

**Catches** NaN, Inf and saturation in the outputs of blocks, the block at which two runs diverge, and the
error of each call.
**Does not catch** values inside a block that do not reach its output.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from stopdown.component_calls.component_interception import intercept_components
from stopdown.component_calls.step_counter import StepCounter
from stopdown.interception.patches import Patches
from stopdown.module_calls.call_interception import find_module
from stopdown.module_calls.callee import Callee
from stopdown.number_formats import FP16
from stopdown.numerics import count_non_finite, iterate_tensors
from stopdown.scaling import ComponentCall, Rank, intercept

SAMPLES = 64
"""Number of values recorded from a block's output."""

_Key = tuple[str, int | None, str]


@dataclass
class Trace:
    """Recorded values of one run.

    Attributes:
        amax: maps component, step and path of a block to its largest output magnitude, which may be NaN
            or Inf.
        samples: maps the same keys to output values of the first such call, `[SAMPLES]` fp32 on the CPU.
        outputs: component, step and output of each call, in its own dtype on the CPU.
        latents: latents after each step, in their own dtype on the CPU.
        non_finite: number of NaN and Inf values in the outputs of calls.
        saturated: number of fp16 values at 65504 in the outputs of blocks.
        clamped: number of values that the clamp of `Probe` replaced.
        probe_s: seconds spent on recording, by stage of the run.
        order: paths of the blocks of each component, in the module's order.
    """

    amax: dict[_Key, float] = field(default_factory=dict)
    samples: dict[_Key, torch.Tensor] = field(default_factory=dict)
    outputs: list[tuple[str, int | None, torch.Tensor]] = field(default_factory=list)
    latents: list[torch.Tensor] = field(default_factory=list)
    non_finite: int = 0
    saturated: int = 0
    clamped: int = 0
    probe_s: dict[str, float] = field(default_factory=dict)
    order: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass
class _Pending:
    """Records of the current call of one module, still on the device.

    Attributes:
        seen: path, smallest and largest value, number of saturated values, and sample of each block.
        clamped: number of values that each clamp replaced.
        elapsed_s: seconds spent in the hooks.
        blocks: paths of the blocks.
        is_over: whether the call has returned; a guard may run it again to find where NaN begins.
    """

    seen: list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = field(
        default_factory=list
    )
    clamped: list[torch.Tensor] = field(default_factory=list)
    elapsed_s: float = 0.0
    blocks: tuple[str, ...] = ()
    is_over: bool = False


class Probe:
    """Context manager that fills a `Trace` during one run of a pipeline or another program.

    Args:
        clamps: replace Inf by ±65504 and NaN by 0 in every layer's fp16 output, as users do.

    Cost: three reductions per block; one host read and a copy of the output per call.
    """

    def __init__(self, pipe: Any, *, clamps: bool = False) -> None:
        self.pipe, self.trace, self._clamps = pipe, Trace(), clamps
        self._patches = Patches()
        self._pending: dict[int, _Pending] = {}
        self._steps = StepCounter(pipe, Rank.RECORD, on_step=self._keep_latents)

    def __enter__(self) -> Probe:
        try:
            intercept_components(self.pipe, self._put_layer, self._patches)
            self._steps.follow()
            self._patches.defer(self._steps.stop)
        except BaseException:
            self._patches.undo()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.undo()

    def _put_layer(self, callee: Callee, patches: Patches) -> None:
        module = find_module(callee)  # a direction may have a copy of its own
        if id(module) not in self._pending:
            self._hook(module)
        intercept(callee, self._around, patches, Rank.RECORD)
        # inside the guard, which may run the call again
        intercept(callee, self._run, patches, Rank.COMPONENT)

    def _hook(self, owner: torch.nn.Module) -> None:
        pending = self._pending[id(owner)] = _Pending()
        if self._clamps:
            for module in owner.modules():
                if next(module.children(), None) is None:
                    handle = module.register_forward_hook(functools.partial(_clamp, pending))
                    self._patches.defer(handle.remove)
        pending.blocks = find_block_paths(owner)
        for path in pending.blocks:
            note = functools.partial(_note, pending, path)
            handle = owner.get_submodule(path).register_forward_hook(note)
            self._patches.defer(handle.remove)

    def _keep_latents(self, result: Any) -> None:
        found = next(iterate_tensors(result), None)
        if found is not None:
            self.trace.latents.append(found.detach().to("cpu", copy=True))

    def _around(self, call: ComponentCall) -> Any:
        callee, module = call.callee, find_module(call.callee)
        pending = self._pending[id(module)]
        pending.seen.clear()
        pending.clamped.clear()
        pending.elapsed_s, pending.is_over = 0.0, False
        output = call.proceed()
        step = self._steps.find_step(callee)
        self.trace.order.setdefault(callee.name, pending.blocks)
        self._read(callee, step, pending)
        found = next((x for x in iterate_tensors(output) if x.is_floating_point()), None)
        if found is not None:
            self.trace.non_finite += sum(count_non_finite(found))
            if callee.stage != "decode":
                kept = found.detach().to("cpu", copy=True)
                self.trace.outputs.append((callee.name, step, kept))
        spent = self.trace.probe_s
        spent[callee.stage] = spent.get(callee.stage, 0.0) + pending.elapsed_s
        return output

    def _run(self, call: ComponentCall) -> Any:
        output = call.proceed()
        self._pending[id(find_module(call.callee))].is_over = True
        return output

    def _read(self, callee: Callee, step: int | None, pending: _Pending) -> None:
        """Copy the records of a finished call to the host, and add them to the trace.

        Cost: one host read.
        """
        if pending.clamped:
            self.trace.clamped += int(torch.stack(pending.clamped).sum())
        if not pending.seen:
            return
        device = pending.seen[0][1].device
        rows = [
            torch.cat([torch.stack([low, high, full]).to(device), sample.to(device)])
            for _, low, high, full, sample in pending.seen
        ]
        for (path, *_), row in zip(pending.seen, torch.stack(rows).cpu(), strict=True):
            key = (callee.name, step, path)
            largest = max(abs(float(row[0])), abs(float(row[1])))
            largest = float("nan") if bool(row[:2].isnan().any()) else largest
            known = self.trace.amax.get(key, 0.0)  # NaN stays
            self.trace.amax[key] = largest if largest != largest or largest > known else known
            self.trace.saturated += int(row[2])
            self.trace.samples.setdefault(key, row[3:].clone())


def _note(pending: _Pending, path: str, module: Any, args: Any, output: Any) -> None:
    """Record the bounds, saturation and a sample of a block's first floating output, on its device."""
    if pending.is_over:
        return
    begun = time.perf_counter()
    found = next((x for x in iterate_tensors(output) if x.is_floating_point()), None)
    if found is not None and found.numel() and not isinstance(found, FakeTensor):
        values = found.detach()
        low, high = torch.aminmax(values)
        if values.dtype == torch.float16:
            full = (values.abs() == FP16.largest).sum().float()
        else:
            full = torch.zeros((), device=values.device)
        pending.seen.append((path, low.float(), high.float(), full, _sample(values)))
    pending.elapsed_s += time.perf_counter() - begun


def _sample(values: torch.Tensor) -> torch.Tensor:
    """Return `[SAMPLES]` values in fp32, at positions that depend on the size alone."""
    flat = values.reshape(-1)
    places = torch.linspace(0, flat.numel() - 1, SAMPLES, dtype=torch.float64, device="cpu")
    return flat[places.round().long().to(flat.device)].float()


def _clamp(pending: _Pending, module: Any, args: Any, output: Any) -> Any:
    """Replace NaN by 0 and Inf by ±65504 in an fp16 output; return None for any other output."""
    if not isinstance(output, torch.Tensor) or output.dtype != torch.float16:
        return None
    if not pending.is_over:
        pending.clamped.append((~torch.isfinite(output)).sum())
    # by the operator: a guard takes the function and the method for a clamp of the model
    return torch.ops.aten.nan_to_num(output, nan=0.0, posinf=FP16.largest, neginf=-FP16.largest)


def find_block_paths(owner: torch.nn.Module) -> tuple[str, ...]:
    """Return the paths of a component's blocks: members of module lists, and modules beside the lists."""
    found = []
    for path, module in owner.named_modules():
        if not path or isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            continue
        parent = owner.get_submodule(path.rpartition(".")[0])
        is_member = isinstance(parent, (torch.nn.ModuleList, torch.nn.Sequential))
        if (is_member or _stands_beside(owner, path)) and not isinstance(module, torch.nn.Dropout):
            found.append(path)
    return tuple(found)


def _stands_beside(owner: torch.nn.Module, path: str) -> bool:
    """Return whether a module has module lists as siblings but none inside, such as a final norm."""
    parent = owner.get_submodule(path.rpartition(".")[0])
    module = owner.get_submodule(path)
    return _has_list(parent) and not any(_has_list(child) for child in module.modules())


def _has_list(module: torch.nn.Module) -> bool:
    return any(isinstance(child, torch.nn.ModuleList) for child in module.children())
