"""What rounding costs in a deep transformer, by where it happens: is an fp32 residual stream worth it?

CogVideoX's transformer with random weights, small and within fp16's range, of several depths. Its
call is captured as it would run in 16 bits, with the residual stream as it is and in fp32; the graph
is run in fp32, and each value that would have 16 bits is rounded to them and back. Then only some of
them: weights, what is cast for products, what products give, everything else. Emulation, because
fp16 is hundreds of times slower than fp32 on a processor.

    python benchmarks/depth.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT / "tests"))

from models.rescaling_models import measure_call, randomise  # noqa: E402 (the path is set above)
from stopdown.devices.environment import describe_machine  # noqa: E402
from stopdown.numerics import relative_l2  # noqa: E402
from stopdown.scaling.graph.capture import Capture, capture_call, flatten_call  # noqa: E402
from stopdown.scaling.graph.nodes import operation  # noqa: E402
from stopdown.scaling.graph.range_measurement import _Runner  # noqa: E402
from stopdown.scaling.trials.call_search import plan_stream  # noqa: E402
from stopdown.scaling.trials.measurement import Captures  # noqa: E402

DEPTHS = (2, 12, 42)
SEEDS = (0, 1, 2)

EVERYTHING = frozenset({"weights", "casts", "products", "between"})
PRODUCTS = ("linear", "conv2d", "matmul", "bmm", "scaled_dot_product_attention")
CASES: dict[str, tuple[str, torch.dtype, frozenset[str]]] = {
    "bf16": ("plain", torch.bfloat16, EVERYTHING),
    "fp16": ("plain", torch.float16, EVERYTHING),
    "fp16 with fp32 residual": ("streamed", torch.float16, EVERYTHING),
    "of that: weights alone": ("streamed", torch.float16, frozenset({"weights"})),
    "of that: casts before products alone": ("streamed", torch.float16, frozenset({"casts"})),
    "of that: what products give alone": ("streamed", torch.float16, frozenset({"products"})),
    "of that: everything else alone": ("streamed", torch.float16, frozenset({"between"})),
    "if products gave fp32": ("streamed", torch.float16, EVERYTHING - {"products"}),
}
"""Graph, format and what is rounded to it."""


class Rounded(_Runner):
    """Runs a captured graph in fp32 and rounds what would have 16 bits."""

    dtype: torch.dtype
    where: frozenset[str]

    def run_node(self, n: Node) -> Any:
        result = self._load(n) if n.op == "placeholder" else self._compute(n)
        if not isinstance(result, torch.Tensor) or n.meta["val"].dtype != torch.float16:
            return result
        if name_stage(n, self.capture) not in self.where:
            return result
        if operation(n).endswith("_"):
            return result.copy_(result.to(self.dtype))
        given = [x for y in n.all_input_nodes if isinstance(x := self.env[y], torch.Tensor)]
        if any(
            x.untyped_storage().data_ptr() == result.untyped_storage().data_ptr() for x in given
        ):
            return result  # a view, of what is rounded already; in-place writes must pass through
        return result.to(self.dtype).float()


def name_stage(node: Node, capture: Capture) -> str:
    """Which of `EVERYTHING` a value belongs to."""
    if node.op == "placeholder":
        return "weights" if node.name in capture.parameters else "casts"
    if operation(node) in PRODUCTS:
        return "products"
    source = node.args[0] if node.args else None
    value = source.meta.get("val") if isinstance(source, Node) else None
    is_cast = getattr(value, "dtype", None) == torch.float32
    return "casts" if is_cast and operation(node) in ("to", "_to_copy") else "between"


def run_rounded(
    capture: Capture,
    module: torch.nn.Module,
    call: dict[str, Any],
    dtype: torch.dtype,
    where: frozenset[str],
) -> torch.Tensor:
    """The output of a captured call with these values rounded."""
    tensors = dict(zip(capture.inputs, flatten_call((), call), strict=True))
    runner = Rounded(capture, module, tensors)
    runner.dtype, runner.where = dtype, where
    with torch.no_grad():
        output: torch.Tensor = runner.run()[0]
    return output


def make_model(depth: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A transformer of this depth in fp32, and a call of it."""
    from diffusers import CogVideoXTransformer3DModel

    torch.manual_seed(0)
    module = CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=32,
        in_channels=4,
        out_channels=4,
        time_embed_dim=32,
        text_embed_dim=32,
        num_layers=depth,
        sample_width=8,
        sample_height=8,
        sample_frames=5,
        max_text_seq_length=16,
        use_rotary_positional_embeddings=True,
    ).eval()
    module.requires_grad_(False)
    angles = torch.randn(32, 32)
    return module, {
        "hidden_states": torch.randn(1, 2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(1, 16, 32),
        "timestep": torch.tensor([500]),
        "image_rotary_emb": (angles.cos(), angles.sin()),
        "return_dict": False,
    }


def measure_depth(depth: int) -> dict[str, Any]:
    """Medians over the seeds of the errors, and of bf16's error over each of them."""
    module, call = make_model(depth)
    stream = plan_stream(module, [(module, (), call)], Captures())
    graphs = {
        "plain": capture_call(module, (), call, dtype=torch.float16),
        "streamed": measure_call(module, (), call, stream=stream).capture,
    }
    drawn = [measure_errors(module, call, graphs, seed) for seed in SEEDS]
    errors = {case: statistics.median(x[case] for x in drawn) for case in CASES}
    ratios = {case: statistics.median(x["bf16"] / x[case] for x in drawn) for case in CASES}
    return {"blocks": depth, "errors": errors, "ratios": ratios}


def measure_errors(
    module: torch.nn.Module, call: dict[str, Any], graphs: dict[str, Capture], seed: int
) -> dict[str, float]:
    """Relative 2-norm errors against fp32 with one draw of weights, by what is rounded."""
    torch.manual_seed(seed)
    randomise(module)
    with torch.no_grad():
        reference = module(**call)[0]
    return {
        case: relative_l2(run_rounded(graphs[graph], module, call, dtype, where), reference)
        for case, (graph, dtype, where) in CASES.items()
    }


def write_results(rows: list[dict[str, Any]]) -> None:
    depths = " ".join(str(row["blocks"]) for row in rows)
    command = f"python benchmarks/depth.py --depths {depths}"
    report = {"command": command, "machine": describe_machine(), "seeds": len(SEEDS), "rows": rows}
    (RESULTS / "depth.json").write_text(json.dumps(report, indent=1) + "\n")
    ratios = {case: [f"{row['ratios'][case]:.1f}" for row in rows] for case in CASES}
    own = ", ".join(f"{row['errors']['bf16']:.4f}" for row in rows)
    heads = " | ".join(f"{row['blocks']} blocks" for row in rows)
    lines = [
        "# Where rounding costs, by depth",
        "",
        f"`{command}`: bf16's error over that of what is named, medians of {len(SEEDS)} draws of a",
        "CogVideoX transformer of width 64 with random weights, rounding emulated.",
        "",
        f"| rounded | {heads} |",
        f"|---|{'--:|' * len(rows)}",
        *(f"| {case} | {' | '.join(ratios[case])} |" for case in CASES if case != "bf16"),
        "",
        f"bf16's own error: {own}.",
        "",
    ]
    (RESULTS / "depth.md").write_text("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--depths", nargs="*", type=int, default=DEPTHS)
    rows = []
    for depth in parser.parse_args().depths:
        rows.append(measure_depth(depth))
        print(json.dumps(rows[-1]), flush=True)
        write_results(rows)


if __name__ == "__main__":
    main()
