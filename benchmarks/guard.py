"""What watching costs: operations, host reads and time, paired in one run with the plain call.

    python benchmarks/guard.py

Two pieces of work: one call of a transformer with CogVideoX-5B's module tree (42 blocks) and small
width, and a whole run of `shapes`. Five ways to run each: plain; guarded; guarded with the largest
magnitude of each block; with Transformers' `DebugUnderflowOverflow`; and with a hook on every module
that asks whether its output is finite and keeps the answer on the device, read once a call.

*Operations* are those that reach the dispatcher; *host reads* are the values that the host waits for
(`.item()`, `bool()`, `.tolist()`). *Time* is the median of the ratios of pairs that are run in turns,
by the wall and by the processor time of this process, which other programs disturb less. *The same
again* pairs the plain call with itself: that is the noise. A small width makes overhead look large: at
full width the same operations take a smaller share.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stopdown import load, testing
from stopdown.component_calls.components import find_callees
from stopdown.devices.environment import describe_machine
from stopdown.module_calls.call_interception import find_module
from stopdown.numerics import iterate_tensors
from stopdown.pipelines.requests import Request, build_arguments
from stopdown.runtime.guard import guard

RESULTS = Path(__file__).parent / "results"
Work = Callable[[Any], object]
Way = Callable[[Any], AbstractContextManager[object]]


class Counter(TorchDispatchMode):
    """Counts operations, and values that the host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default or _leaves_device(args, output):
            self.reads += 1
        else:
            self.operations += 1
        return output

    @contextlib.contextmanager
    def counting(self) -> Iterator[Counter]:
        """Also `tolist`, which asks no operation for the values of a tensor on the CPU."""
        plain = torch.Tensor.tolist

        def tolist(tensor: torch.Tensor) -> Any:
            self.reads += bool(tensor.dim() and tensor.device.type == "cpu")
            return plain(tensor)

        torch.Tensor.tolist = tolist  # type: ignore[method-assign, assignment]
        try:
            with self:
                yield self
        finally:
            del torch.Tensor.tolist


def _leaves_device(given: Any, made: Any) -> bool:
    """Whether an operation copied from an accelerator to the host."""
    if not isinstance(made, torch.Tensor) or made.device.type != "cpu":
        return False
    return any(x.device.type not in ("cpu", "meta") for x in iterate_tensors(given))


@contextlib.contextmanager
def watched_by_debugger(pipe: Any) -> Iterator[None]:
    """With `DebugUnderflowOverflow` on every component; its hooks are taken off by hand."""
    from transformers.debug_utils import DebugUnderflowOverflow

    modules = list(
        {id(find_module(callee)): find_module(callee) for callee in find_callees(pipe)}.values()
    )
    before = {
        id(part): dict(part._forward_hooks) for module in modules for part in module.modules()
    }
    for module in modules:
        DebugUnderflowOverflow(module)
    try:
        yield
    finally:
        for part in (part for module in modules for part in module.modules()):
            part._forward_hooks.clear()
            part._forward_hooks.update(before[id(part)])


@contextlib.contextmanager
def watched_everywhere(pipe: Any) -> Iterator[None]:
    """With a hook on every module, its answers read once at the end of each component's call."""
    flags: list[torch.Tensor] = []
    handles = []

    def ask(module: Any, args: Any, output: Any) -> None:
        flags.extend(
            torch.isfinite(t).all() for t in iterate_tensors(output) if t.is_floating_point()
        )

    def read(module: Any, args: Any, output: Any) -> None:
        bool(torch.stack(flags).all())
        flags.clear()

    for owner in {id(m): m for m in map(find_module, find_callees(pipe))}.values():
        handles += [part.register_forward_hook(ask) for part in owner.modules()]
        handles.append(owner.register_forward_hook(read))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


WAYS: dict[str, Way] = {
    "plain": lambda pipe: contextlib.nullcontext(),
    "the same again": lambda pipe: contextlib.nullcontext(),
    "guard": guard,
    "guard with block maxima": functools.partial(guard, maxima=True),
    "a hook on every module": watched_everywhere,
    "DebugUnderflowOverflow": watched_by_debugger,
}


def make_tree() -> tuple[Any, Work]:
    """A pipeline whose transformer has the module tree of CogVideoX-5B, 32 wide; one call of it."""
    from diffusers import CogVideoXTransformer3DModel

    torch.manual_seed(0)
    pipe = testing.make_pipeline("cogvideox")
    tiny = dict(pipe.transformer.config)
    config = {name: value for name, value in tiny.items() if not name.startswith("_")}
    pipe.register_modules(
        transformer=CogVideoXTransformer3DModel(**{**config, "num_layers": 42}).eval()
    )
    channels, width = config["in_channels"], config["text_embed_dim"]
    positions = 3 * 4 * 4
    call = {
        "hidden_states": torch.randn(2, 3, channels, 8, 8),
        "encoder_hidden_states": torch.randn(2, 226, width),
        "timestep": torch.tensor([500, 500]),
        "image_rotary_emb": (torch.randn(positions, 16), torch.randn(positions, 16)),
    }
    return pipe, lambda pipe: pipe.transformer(**call)


def make_shapes(steps: int) -> tuple[Any, Work]:
    """The bundled pipeline, and a whole run of it."""
    pipe = load("shapes", precision="fp32", device="cpu")
    pipe.set_progress_bar_config(disable=True)
    request = Request(prompt="a red circle moving left on a grey background", steps=steps)
    return pipe, lambda pipe: pipe(**build_arguments(pipe, request))


def count(pipe: Any, work: Work, way: Way) -> tuple[int, int]:
    """Operations and host reads of one piece of work."""
    counter = Counter()
    with way(pipe), torch.no_grad(), counter.counting():
        work(pipe)
    return counter.operations, counter.reads


def take_time(pipe: Any, work: Work) -> tuple[float, float]:
    """Seconds by the wall and by the processor, after once without a clock: a run has many calls."""
    with torch.no_grad():
        work(pipe)
    wall, own = time.perf_counter(), time.process_time()
    with torch.no_grad():
        work(pipe)
    return time.perf_counter() - wall, time.process_time() - own


def pair(pipe: Any, work: Work, way: Way, repeats: int) -> list[tuple[float, ...]]:
    """Seconds of the plain run by the wall and by the processor, and those of the other beside it."""
    pairs = []
    for turn in range(repeats):
        if turn % 2:
            plain = take_time(pipe, work)
        with way(pipe):
            watched = take_time(pipe, work)
        if not turn % 2:
            plain = take_time(pipe, work)
        pairs.append((*plain, *watched))
    return pairs


def measure(name: str, pipe: Any, work: Work, repeats: int) -> list[dict[str, Any]]:
    """One row for each way."""
    rows: list[dict[str, Any]] = []
    calls = count_calls(pipe, work)
    for way_name, way in WAYS.items():
        operations, reads = count(pipe, work, way)
        few = max(3, repeats // 8) if way_name == "DebugUnderflowOverflow" else repeats
        pairs = pair(pipe, work, way, few) if way_name != "plain" else [(1.0,) * 4]
        wall, own = ([times[i + 2] / times[i] for times in pairs] for i in (0, 1))
        fastest = [min(times[i] for times in pairs) for i in range(4)]
        first = rows[0] if rows else {"operations": operations, "host_reads": reads}
        rows.append(
            {
                "work": name,
                "way": way_name,
                "component_calls": calls,
                "operations": operations,
                "operations_ratio": operations / first["operations"],
                "host_reads": reads,
                "host_reads_a_call": (reads - first["host_reads"]) / calls,
                "wall_ratio": statistics.median(wall),
                "wall_ratio_range": [min(wall), max(wall)],
                "processor_ratio": statistics.median(own),
                "processor_ratio_quartiles": quartiles(own),
                "fastest_processor_ratio": fastest[3] / fastest[1],
                "pairs": len(pairs),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def quartiles(values: list[float]) -> list[float]:
    """First and third."""
    if len(values) < 2:
        return [values[0], values[0]]
    first, _, third = statistics.quantiles(values, n=4)
    return [first, third]


def count_calls(pipe: Any, work: Work) -> int:
    """How often components are called."""
    with guard(pipe) as handle, torch.no_grad():
        work(pipe)
    return sum(call.calls for call in handle.record.calls)


def write_results(rows: list[dict[str, Any]], command: str) -> None:
    """All of it as JSON, and the table for people."""
    content = {"command": command, "machine": describe_machine(), "rows": rows}
    (RESULTS / "guard.json").write_text(json.dumps(content, indent=1) + "\n")
    lines = ["# What watching costs", "", f"Made by `{command}`, which says what is measured.", ""]
    lines += [
        "| work | way | operations | host reads a call | wall time | processor time | fastest |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        share = f"{row['operations']} ({100 * (row['operations_ratio'] - 1):+.2f} %)"
        first, third = row["processor_ratio_quartiles"]
        lines.append(
            f"| {row['work']} | {row['way']} | {share} | {row['host_reads_a_call']:.4g} | "
            f"{row['wall_ratio']:.3f} | {row['processor_ratio']:.3f} ({first:.3f}–{third:.3f}) | "
            f"{row['fastest_processor_ratio']:.3f} |"
        )
    lines += [
        "",
        "Times are medians of the ratios of pairs, with the first and third quartile; the last column "
        "is the fastest run over the fastest plain one, by the processor.",
        "",
    ]
    (RESULTS / "guard.md").write_text("\n".join(lines))


def main() -> None:
    """Measure both pieces of work, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tree, call = make_tree()
    rows = measure("CogVideoX-5B's tree, 32 wide, one call", tree, call, options.repeats)
    shapes, run = make_shapes(options.steps)
    rows += measure(f"shapes, {options.steps} steps", copy.copy(shapes), run, options.repeats)
    command = f"python benchmarks/guard.py --repeats {options.repeats} --steps {options.steps}"
    write_results(rows, command)


if __name__ == "__main__":
    main()
