"""One guarded module called from several threads, with inputs that overflow more and more."""

from __future__ import annotations

import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from stopdown.runtime.guard import Guard, guard

ROWS, WIDTH = 4, 16
SIZES = (1.0, 1.0, 1.0, 30.0, 1.0, 120.0, 1.0, 500.0)
"""Of inputs, in turns: the first three fit in fp16, the others overflow one after the other."""


class Stream(nn.Module):
    """Blocks that add to a stream, whose end is normalised: exact at every scale of it."""

    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(blocks)
        )
        self.norm, self.leave = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[N, 16]`, the same again."""
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        made: torch.Tensor = self.leave(self.norm(x))
        return made


def make_streams() -> tuple[Stream, Stream, Stream]:
    """The same weights in fp16, fp32 and bf16."""
    torch.manual_seed(0)
    wide = Stream().eval().requires_grad_(False)
    wide.enter.weight *= 2000.0
    narrow = Stream().eval().requires_grad_(False)
    narrow.load_state_dict(wide.half().float().state_dict())
    half = Stream().eval().requires_grad_(False)
    half.load_state_dict(narrow.state_dict())
    return half.half(), narrow, wide.bfloat16()


def call_from_threads(
    calls: int, threads: int, calls_per_guard: int = 200, first: int = 0
) -> Counter[str]:
    """Call one module under guards, and judge every output.

    Args:
        calls: how many.
        threads: that share them.
        calls_per_guard: calls before a new guard.
        first: number of the first call; each number draws an input of its own.

    Returns:
        Counts of `calls`, `right` (no worse against fp32 than bf16 is, twice that for a small input),
        `wrong`, `not finite`, `raised NAME`, of `faults` and repairs by action, and of `uncounted` calls:
        those that the guards' records do not have.
    """
    module, wide, bf16 = make_streams()
    found: Counter[str] = Counter()
    before = [x.clone() for x in module.parameters()]

    def call(number: int) -> str:
        size = SIZES[number % len(SIZES)]
        draw = torch.Generator().manual_seed(number)
        x = torch.randn(ROWS, WIDTH, generator=draw) * size
        expected = wide(x.half().float())
        try:
            output = module(x.half()).float()
        except Exception as error:  # whatever it is, it is counted
            return f"raised {type(error).__name__}"
        if not bool(torch.isfinite(output).all()):
            return "not finite"
        error = float((output - expected).norm())
        allowed = float((bf16(x.half().bfloat16()).float() - expected).norm())
        return "right" if error <= allowed else "wrong"

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads change places in the middle of everything
    try:
        for begin in range(first, first + calls, calls_per_guard):
            numbers = range(begin, min(begin + calls_per_guard, first + calls))
            with guard(module, announce=lambda text: None) as handle:
                with ThreadPoolExecutor(threads) as pool:
                    found.update(pool.map(call, numbers))
                found.update(_count_guarded(handle, len(numbers)))
    finally:
        sys.setswitchinterval(interval)
    is_left = all(map(torch.equal, before, module.parameters()))
    return found + Counter({"calls": calls, "weights changed": int(not is_left)})


def _count_guarded(handle: Guard, calls: int) -> Counter[str]:
    """What a guard saw of so many calls, and did."""
    counted = sum(one.calls for one in handle.record.calls)
    faults = sum(one.non_finite for one in handle.record.calls)
    done = Counter(f"repair: {one.action}" for one in handle.repairs)
    return done + Counter({"faults": faults, "uncounted": abs(calls - counted)})
