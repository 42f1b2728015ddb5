"""The converted bundled model in plain Diffusers: errors of its fp16 and of bf16 against fp32.

    python benchmarks/convert.py --prompts 5 --steps 8

`stopdown plan` and `stopdown convert` write the folder; everything else runs in a process in which
`stopdown` cannot be imported. Errors are relative L2 over all pixels, each prompt with its own noise,
all in one run. The result goes to results/convert.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from models.conversions import WITHOUT_STOPDOWN
from stopdown.devices.environment import describe_machine
from stopdown.sources.sources import resolve_source

RESULT = Path(__file__).parent / "results" / "convert.json"
PROMPTS = (
    "a red circle moving left on a grey background",
    "a white cross moving up on a pink background",
    "a green triangle moving right on a brown background",
    "a blue square moving down on a beige background",
    "a yellow circle moving up on a cyan background",
)

PLAIN = """
import diffusers, numpy as np, torch
before, after, steps, *prompts = sys.argv[1:]

def run(folder, dtype):
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder, torch_dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    return [
        np.asarray(pipe(prompt, num_inference_steps=int(steps), output_type="np",
                        generator=torch.Generator().manual_seed(seed))[0], dtype=np.float64)
        for seed, prompt in enumerate(prompts)
    ]

def measure(low):
    if not all(np.isfinite(x).all() for x in low):
        return None
    return [float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in zip(low, reference)]

reference = run(before, torch.float32)
print(json.dumps({
    "fp16 plain": measure(run(before, torch.float16)),
    "bf16 plain": measure(run(before, torch.bfloat16)),
    "fp16 converted": measure(run(after, torch.float16)),
    "fp32 converted": measure(run(after, torch.float32)),
}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        plan, folder = f"{place}/plan.json", f"{place}/shapes-fp16"
        call("plan", "shapes", "-o", plan)
        record = json.loads(call("convert", "shapes", folder, "--plan", plan, "--json"))
        source = resolve_source("shapes").path
        prompts = PROMPTS[: options.prompts]
        program = [sys.executable, "-c", WITHOUT_STOPDOWN + PLAIN]
        plain = [*program, str(source), folder, str(options.steps), *prompts]
        done = subprocess.run(plain, capture_output=True, text=True, check=True)
    errors = json.loads(done.stdout.splitlines()[-1])
    pairs = zip(errors["bf16 plain"], errors["fp16 converted"], strict=True)
    ratios = [wide / low for wide, low in pairs]
    result = {
        "command": f"python benchmarks/convert.py --prompts {len(prompts)} --steps {options.steps}",
        "machine": describe_machine(),
        "effects": {entry["component"]: entry["effect"] for entry in record["components"]},
        "errors": errors,
        "bf16_over_converted": {"median": statistics.median(ratios), "worst": min(ratios)},
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["bf16_over_converted"]))


def call(*arguments: str) -> str:
    """What a command of Stopdown prints."""
    command = [sys.executable, "-m", "stopdown.app.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
