"""What CogVideoX-5B sends and keeps on each of 1 to 8 ranks, without a device, a network or weights.

    python benchmarks/parallel.py            # about 20 s for each number of ranks

The pipeline's own code runs on fake tensors under Diffusers' context parallelism, in a process group
of PyTorch's that sends nothing ("fake"), as its first rank: the one whose parts are largest. Each
collective that the code calls is counted with its bytes; memory is what `stopdown memory` counts.

**Does not count** what a transport adds to its messages, and buffers of its own. Time is not foretold.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from full_folders import write_configs
from torch.testing._internal.distributed.fake_pg import FakeStore

from stopdown.devices.environment import describe_machine
from stopdown.interception.patches import Patches
from stopdown.memory.run_memory import MemoryListener, listen_to_run
from stopdown.memory.strategies import Strategy, predict
from stopdown.pipelines.requests import Request, build_arguments
from stopdown.pipelines.skeletons import build_skeleton
from stopdown.ranks.context_parallel import put_context_parallel
from stopdown.sources.sources import resolve_source

RESULTS = Path(__file__).parent / "results"
NAME, STEPS, GIB = "CogVideoX-5B", 50, 2**30
TEXT_TOKENS, OTHER_TOKENS = 226, 13 * 30 * 45


@dataclass
class Traffic:
    """What one rank sends to others.

    Attributes:
        collectives: name → calls.
        messages: to one other rank each.
        sent_bytes: in all of them.
    """

    ranks: int
    collectives: dict[str, int] = field(default_factory=dict)
    messages: int = 0
    sent_bytes: int = 0

    def count(self, name: str, sent_bytes: float) -> None:
        self.collectives[name] = self.collectives.get(name, 0) + 1
        self.messages += self.ranks - 1
        self.sent_bytes += round(sent_bytes)


def put_counters(traffic: Traffic, patches: Patches) -> None:
    """Count the collectives that Diffusers calls; sizes of parts are answered here, nobody sends them."""
    exchange, gather, gather_parts = (
        functional.all_to_all_single,
        functional.all_gather_tensor,
        dist.all_gather,
    )

    def count_bytes(tensor: torch.Tensor) -> int:
        return tensor.numel() * tensor.element_size()

    def all_to_all_single(x: torch.Tensor, *args: Any) -> Any:
        traffic.count("all_to_all", count_bytes(x) * (traffic.ranks - 1) / traffic.ranks)
        return exchange(x, *args)

    def all_gather_tensor(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        traffic.count("all_gather", count_bytes(x) * (traffic.ranks - 1))
        return gather(x, *args, **kwargs)

    def all_gather(parts: list[torch.Tensor], x: torch.Tensor, **kwargs: Any) -> Any:
        traffic.count("all_gather", count_bytes(x) * (traffic.ranks - 1))
        return gather_parts(parts, x, **kwargs)

    def gather_size_by_comm(size: int, group: Any) -> list[int]:
        traffic.count("all_gather of sizes", 8 * (traffic.ranks - 1))
        return split_known(traffic.ranks)[size]

    import diffusers.hooks.context_parallel as hooks
    import diffusers.models.attention_dispatch as dispatch

    patches.set_attribute(functional, "all_to_all_single", all_to_all_single)
    patches.set_attribute(functional, "all_gather_tensor", all_gather_tensor)
    patches.set_attribute(dist, "all_gather", all_gather)
    for module in (hooks, dispatch):
        patches.set_attribute(module, "gather_size_by_comm", gather_size_by_comm)


def split_known(ranks: int) -> dict[int, list[int]]:
    """Size of the first rank's part → those of all ranks, for text, other tokens and both together."""

    def split(length: int) -> list[int]:
        return [length // ranks + (rank < length % ranks) for rank in range(ranks)]

    text, other = split(TEXT_TOKENS), split(OTHER_TOKENS)
    both = [a + b for a, b in zip(text, other, strict=True)]
    return {sizes[0]: sizes for sizes in (text, other, both)}


def measure(folder: Path, ranks: int) -> dict[str, Any]:
    """One guided step on the first of so many ranks."""
    source = resolve_source(str(folder))
    names = ("text_encoder", "transformer", "vae")
    pipe = build_skeleton(source, dict.fromkeys(names, torch.bfloat16))
    arguments = build_arguments(pipe, Request(prompt="a red ball", steps=1))
    traffic = Traffic(ranks)
    with Patches() as patches:
        if ranks > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
            patches.defer(dist.destroy_process_group)
            put_counters(traffic, patches)
            put_context_parallel(pipe.transformer, patches)
        run = listen_to_run(pipe, arguments, MemoryListener(on_cpu=False))
    call = next(one for one in run.calls if one.component == "transformer")
    whole = predict(run, Strategy(), steps=STEPS)
    return {
        "ranks": ranks,
        "collectives_per_step": traffic.collectives,
        "messages_per_step": traffic.messages,
        "sent_gib_per_step": traffic.sent_bytes / GIB,
        "transformer_weights_gib": run.weigh("transformer") / GIB,
        "transformer_values_gib": call.peak_bytes / GIB,
        "transformer_tflop": call.flops / 1e12,
        "whole_run_gib": whole.peak_bytes / GIB,
        "whole_run_peak_in": whole.component,
    }


def write_table(rows: list[dict[str, Any]]) -> str:
    """The figures as Markdown."""
    lines = [
        f"# {NAME} on 1 to 8 ranks, on paper",
        "",
        "49 frames of 720 × 480, guided (two rows a call), bf16. A step is one call of the transformer; "
        "figures are those of one rank, the first. Written by `python benchmarks/parallel.py`: counted "
        "while the pipeline's own code ran on fake tensors, not measured on devices.",
        "",
        "| ranks | collectives a step | messages | sent, GiB | values in the transformer, GiB | "
        "its weights, GiB | TFLOP |",
        "|--:|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        named = ", ".join(f"{n} {kind}" for kind, n in row["collectives_per_step"].items())
        lines.append(
            f"| {row['ranks']} | {named or 'none'} | {row['messages_per_step']} | "
            f"{row['sent_gib_per_step']:.2f} | {row['transformer_values_gib']:.2f} | "
            f"{row['transformer_weights_gib']:.2f} | {row['transformer_tflop']:.0f} |"
        )
    lines += [
        "",
        "Weights are on every rank in full: context parallelism spreads values and work, not weights. Text "
        "encoder and autoencoder run in full on each rank. With everything resident a whole run peaks at "
        f"{rows[0]['whole_run_gib']:.1f} GiB on one rank, in `{rows[0]['whole_run_peak_in']}`, and at "
        f"{rows[-1]['whole_run_gib']:.1f} GiB on each of {rows[-1]['ranks']}.",
    ]
    return "\n".join(lines) + "\n"


def main(write: Callable[[str], object] = print) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as parent:
        folder = write_configs(NAME, Path(parent) / "model")
        for ranks in range(1, 9):
            rows.append(measure(folder, ranks))
            write(json.dumps(rows[-1]))
    result = {
        "command": "python benchmarks/parallel.py",
        "machine": describe_machine(),
        "rows": rows,
    }
    (RESULTS / "parallel.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "parallel.md").write_text(write_table(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
