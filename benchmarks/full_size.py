"""Capture and solve at full size, without weights: time and memory, each class in its own process.

The module is built from its public config on fake tensors in fp16, one call at the size that its
authors recommend is captured, and exponents are solved for. Without weights there is nothing to
measure, so magnitudes are made by a model of them: random weights of a typical size, every operation
passes on the root mean square that its kind gives, and what is added to the residual stream is so
large that the stream leaves fp16's range. The figures are times and memory, not a plan.

    python benchmarks/full_size.py
    python benchmarks/full_size.py --classes CogVideoX-5B
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.fx import Node

from stopdown.devices.environment import describe_machine
from stopdown.fake_tensors.fake_modules import build_fake
from stopdown.scaling.exponents.problem import MeasuredCall, split_values
from stopdown.scaling.folding.folds import read_headroom
from stopdown.scaling.graph.capture import Capture, capture_call
from stopdown.scaling.graph.nodes import arguments, is_float, operation, shape_of
from stopdown.scaling.graph.range_measurement import Range
from stopdown.scaling.trials.search import find_scaling

RESULTS = Path(__file__).parent / "results"
Result = TypeVar("Result")
Case = tuple[Callable[[], torch.nn.Module], dict[str, Any]]


def shaped(*size: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def make_cogvideox() -> Case:
    """CogVideoX-5B's transformer, 49 frames of 480x720."""
    from diffusers import CogVideoXTransformer3DModel

    def build() -> torch.nn.Module:
        return CogVideoXTransformer3DModel(
            num_attention_heads=48,
            num_layers=42,
            text_embed_dim=4096,
            use_rotary_positional_embeddings=True,
            patch_bias=True,
        )

    positions = 13 * 30 * 45
    return build, {
        "hidden_states": shaped(1, 13, 16, 60, 90),
        "encoder_hidden_states": shaped(1, 226, 4096),
        "timestep": shaped(1, dtype=torch.int64),
        "image_rotary_emb": (
            shaped(positions, 64, dtype=torch.float32),
            shaped(positions, 64, dtype=torch.float32),
        ),
    }


def make_t5() -> Case:
    """T5 v1.1 XXL's encoder, 226 tokens."""
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=32128,
        d_model=4096,
        d_kv=64,
        d_ff=10240,
        num_layers=24,
        num_heads=64,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
    )
    return lambda: T5EncoderModel(config), {"input_ids": shaped(1, 226, dtype=torch.int64)}


def make_svd() -> Case:
    """Stable Video Diffusion XT's UNet, 25 frames of 576x1024."""
    from diffusers import UNetSpatioTemporalConditionModel

    def build() -> torch.nn.Module:
        return UNetSpatioTemporalConditionModel(num_attention_heads=(5, 10, 20, 20), num_frames=25)

    return build, {
        "sample": shaped(1, 25, 8, 72, 128),
        "timestep": shaped(1, dtype=torch.int64),
        "encoder_hidden_states": shaped(1, 1, 1024),
        "added_time_ids": shaped(1, 3),
    }


def make_flux() -> Case:
    """FLUX.1-dev's transformer, 1024x1024."""
    from diffusers import FluxTransformer2DModel

    def build() -> torch.nn.Module:
        return FluxTransformer2DModel(guidance_embeds=True)

    return build, {
        "hidden_states": shaped(1, 4096, 64),
        "encoder_hidden_states": shaped(1, 512, 4096),
        "pooled_projections": shaped(1, 768),
        "timestep": shaped(1),
        "guidance": shaped(1, dtype=torch.float32),
        "img_ids": shaped(4096, 3),
        "txt_ids": shaped(512, 3),
    }


def make_wan() -> Case:
    """Wan 2.1 14B's transformer, 81 frames of 480x832."""
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel, {
        "hidden_states": shaped(1, 16, 21, 60, 104),
        "encoder_hidden_states": shaped(1, 512, 4096),
        "timestep": shaped(1, dtype=torch.int64),
    }


CASES: dict[str, Callable[[], Case]] = {
    "CogVideoX-5B": make_cogvideox,
    "T5-XXL": make_t5,
    "SVD": make_svd,
    "Flux": make_flux,
    "Wan-14B": make_wan,
}

WEIGHT_RMS = 0.02
BRANCH_RMS = 3e3
PEAK = 6.0
"""Largest magnitude of a value over its root mean square, as for a few thousand normal draws."""
_UNIT = ("softmax", "_softmax", "sigmoid", "tanh", "sin", "cos", "embedding", "arange", "exp")
_NORMS = ("layer_norm", "native_layer_norm", "group_norm", "rms_norm", "_fused_rms_norm")


def make_up_ranges(capture: Capture) -> dict[str, tuple[Range, ...]]:
    """Magnitudes of every float value by a model of them, see the head of this file."""
    blocks, sizes = split_values(capture), dict[Node, float]()
    ranges: dict[str, tuple[Range, ...]] = {}
    for node in capture.graph.graph.nodes:
        if not is_float(node):
            continue
        size = _guess_size(node, capture, sizes)
        sizes[node] = size
        count = len(blocks[node]) if node in blocks else 1
        ranges[node.name] = (Range(size * PEAK, size, size * 1e-5),) * count
    return ranges


def _guess_size(node: Node, capture: Capture, sizes: dict[Node, float]) -> float:
    name = operation(node)
    given = [sizes[x] for x in node.all_input_nodes if x in sizes]
    if node.op == "placeholder":
        return WEIGHT_RMS if node.name in capture.parameters else 1.0
    if not given or name in _UNIT or name in _NORMS:
        return 1.0
    if name in ("linear", "addmm") or name.startswith("conv"):
        return BRANCH_RMS if _writes_a_stream(node, capture) else _multiply_weight(node, sizes)
    if name in ("matmul", "bmm"):
        inner = shape_of(arguments(node)["self"])[-1]
        return math.prod(given) * math.sqrt(inner)
    if name in ("type_as", "expand_as", "view_as"):
        return given[0]
    if name in ("add", "sub", "add_", "cat"):
        return math.sqrt(sum(x * x for x in given))
    if name == "mul":
        return math.prod(given) if len(given) > 1 else given[0]
    if name == "div" and len(given) > 1:
        return given[0] / given[1]
    return max(given) ** {"pow": 2.0, "var": 2.0, "sqrt": 0.5, "rsqrt": -0.5}.get(name, 1.0)


def _multiply_weight(node: Node, sizes: dict[Node, float]) -> float:
    """What random weights of `WEIGHT_RMS` make of their input."""
    given = arguments(node)
    source, weight = given.get("input", given.get("mat1")), given.get("weight", given.get("mat2"))
    fan = math.prod(shape_of(weight)[1:])
    return sizes.get(source, 1.0) * WEIGHT_RMS * math.sqrt(fan)


def _writes_a_stream(node: Node, capture: Capture) -> bool:
    """A linear or convolution that is added, straight or through a gate, to a value of its shape.

    Shifts and scales of a norm, and sums of embeddings of a timestep, are not: they have one row, or
    are added to a parameter.
    """
    follow = list(node.users)
    passes = ("mul", "view", "reshape", "dropout", "clone", "getitem", "to", "type_as", "permute")
    for _ in range(8):
        if any(_adds_to_stream(user, capture) for user in follow):
            return True
        follow = [x for user in follow if operation(user) in passes for x in user.users]
    return False


def _adds_to_stream(node: Node, capture: Capture) -> bool:
    if operation(node) not in ("add", "add_"):
        return False
    parts = [x for x in node.all_input_nodes if is_float(x)]
    alike = all(shape_of(x) == shape_of(node) for x in parts)
    is_stream = len(shape_of(node)) > 2 and math.prod(shape_of(node)[1:-1]) > 6
    return len(parts) == 2 and alike and is_stream and not any(_is_kept(x, capture) for x in parts)


def _is_kept(node: Node, capture: Capture) -> bool:
    """True for a parameter, cast or viewed."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node.name in capture.parameters


def measure(name: str) -> dict[str, Any]:
    """Times in seconds, of the wall and of the processor, peak memory in bytes, and what it needs."""
    build, kwargs = CASES[name]()
    module, built = time_call(lambda: build_fake(build, torch.float16))
    capture, captured = time_call(lambda: capture_call(module, (), kwargs, dtype=torch.float16))
    measured = MeasuredCall(capture, split_values(capture), make_up_ranges(capture))
    scaling, solved = time_call(lambda: find_scaling(module, [measured]))
    return {
        "class": name,
        "parameters": sum(p.numel() for p in module.parameters()),
        "nodes": len(capture.graph.graph.nodes),
        "values": scaling.values,
        "built": built,
        "captured": captured,
        "solved": solved,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "folds": len(scaling.exponents),
        "multiplies": len(scaling.multiplies),
        "fp32_modules": list(scaling.fp32_modules),
        "headroom_bits": read_headroom(scaling),
        "pinned": sorted(scaling.pinned),
    }


def time_call(call: Callable[[], Result]) -> tuple[Result, dict[str, float]]:
    """What a call gives, and its seconds: of the wall, and of the processor (all threads)."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return result, {
        "wall_s": round(time.perf_counter() - wall, 2),
        "cpu_s": round(time.process_time() - cpu, 2),
    }


def write_results(rows: list[dict[str, Any]], command: str) -> None:
    machine = describe_machine()
    report = {"command": command, "machine": machine, "rows": rows}
    (RESULTS / "full_size.json").write_text(json.dumps(report, indent=2) + "\n")
    lines = [
        "# Capture and solve at full size, without weights",
        "",
        "| class | parameters | nodes | capture | solve | both | both on the wall | memory | folds "
        "| multiplies | fp32 modules |",
        f"|---|{'--:|' * 10}",
        *map(format_row, rows),
        "",
        f"`{command}` on {machine['cpu']}, {machine['cores']} cores; torch",
        f"{machine['versions']['torch']}, diffusers {machine['versions']['diffusers']}, transformers"
        f" {machine['versions']['transformers']}. Each class in a process",
        "of its own; seconds are the processor's, those on the wall also count waiting for it. Magnitudes",
        "are made up (see the script): what is measured is time and memory. *solve* states the problem",
        "as well.",
        "",
    ]
    (RESULTS / "full_size.md").write_text("\n".join(lines))


def format_row(row: dict[str, Any]) -> str:
    """One line of the table."""
    captured, solved = row["captured"], row["solved"]
    both = {key: captured[key] + solved[key] for key in captured}
    cells = [
        row["class"],
        f"{row['parameters'] / 1e9:.1f} G",
        str(row["nodes"]),
        f"{captured['cpu_s']:.1f} s",
        f"{solved['cpu_s']:.1f} s",
        f"{both['cpu_s']:.1f} s",
        f"{both['wall_s']:.1f} s",
        f"{row['peak_bytes'] / 2**30:.2f} GiB",
        str(row["folds"]),
        str(row["multiplies"]),
        str(len(row["fp32_modules"])),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--classes", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--one", choices=list(CASES), help="measure one class in this process")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one)))
        return
    rows = []
    for name in options.classes:
        command = [sys.executable, __file__, "--one", name]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        rows.append(json.loads(done.stdout.strip().splitlines()[-1]))
        print(json.dumps(rows[-1]), flush=True)
    write_results(rows, "python benchmarks/full_size.py")


if __name__ == "__main__":
    main()
