"""What weights in 8 bits cost in a component's output, as it comes and rescaled for fp16.

Tiny components with random weights that are made to overflow in fp16, run in fp32 throughout, so that
what is seen is the rounding of weights alone. Four ways to keep the weights of the layers that
Diffusers' layerwise casting takes: a plain cast to fp8, as layerwise casting does it; fp8 with a
power of two for each row; int8 by torchao (linear layers, where it is installed); and none. Each
before and after the exponents that bring the component into the range of fp16 are folded in.

    python benchmarks/eight_bits.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rescale import RESULTS, WAYS, overflow, prepare_class

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from rescaling_models import Call, run_calls  # noqa: E402 (the path is set above)
from stopdown.environment import describe_machine  # noqa: E402
from stopdown.memory.eight_bits import CODES, choose_packed, pack  # noqa: E402
from stopdown.numerics import relative_l2  # noqa: E402
from stopdown.patches import Patches  # noqa: E402
from stopdown.scaling import find_scaling, fold_scaling  # noqa: E402

CLASSES = ("CogVideoX rotary", "T5 gated", "CogView3-Plus", "SD UNet")
WAY = next(iter(WAYS))


def cast_plainly(weight: torch.Tensor) -> torch.Tensor:
    return weight.to(CODES.torch_dtype).to(weight.dtype)


def cast_by_rows(weight: torch.Tensor) -> torch.Tensor:
    return widen(weight, "fp8")


def quantise(weight: torch.Tensor) -> torch.Tensor:
    return widen(weight, "int8")


def widen(weight: torch.Tensor, storage: str) -> torch.Tensor:
    """A weight after a stay in 8 bits."""
    found = torch.empty_like(weight)
    pack(weight, storage).fill(found)
    return found


STORAGES: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "fp8, plain cast": ("fp8", cast_plainly),
    "fp8, rows scaled": ("fp8", cast_by_rows),
}
if find_spec("torchao") is not None:
    STORAGES["int8"] = ("int8", quantise)


def measure_class(name: str) -> dict[str, Any]:
    """Errors of every storage, before and after rescaling."""
    prepared = prepare_class(name)
    module, calls = prepared.module, prepared.calls
    bits, measured = overflow(module, calls, prepared.plain, WAYS[WAY])
    reference = run_calls(calls, torch.float32)
    row: dict[str, Any] = {"class": name, "scaled_bits": bits}
    row["as it comes"] = measure_storages(module, calls, reference)
    scaling = find_scaling(module, measured)
    rescaling = fold_scaling(module, scaling)
    exponents = scaling.exponents.values()
    row["exponents"] = [min(exponents, default=0), max(exponents, default=0)]
    row["fp32_modules"] = len(scaling.fp32_modules)
    row["rescaled"] = measure_storages(module, calls, reference)
    rescaling.undo()
    print(json.dumps(row), flush=True)
    return row


def measure_storages(
    module: torch.nn.Module, calls: list[Call], reference: list[torch.Tensor]
) -> dict[str, float]:
    found = {}
    for label, (storage, change) in STORAGES.items():
        with Patches() as patches:
            for weights in choose_packed(module, {}, storage).values():
                for weight in weights.values():
                    patches.write_tensor(weight, change(weight.detach()))
            outputs = run_calls(calls, torch.float32)
        errors = [float(relative_l2(a, b)) for a, b in zip(outputs, reference, strict=True)]
        found[label] = max(errors)
    return found


def main() -> None:
    rows = [measure_class(name) for name in CLASSES]
    record = {
        "machine": describe_machine(),
        "command": "python benchmarks/eight_bits.py",
        "way": WAY,
        "rows": rows,
    }
    (RESULTS / "eight_bits.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
