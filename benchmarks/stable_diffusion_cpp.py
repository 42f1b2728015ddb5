"""Files before and after `stopdown convert` in stable-diffusion.cpp: models × formats.

    pip install stable-diffusion-cpp-python
    python benchmarks/stable_diffusion_cpp.py

A tiny Flux and its decoder (`models/single_file_models.py`) make a picture in one step. Attention values
of the Flux and the stream of the decoder are beyond fp16. A difference is the mean over the bytes of a
picture, of 255: for the Flux that of its latents, drawn by the program, from the same file in fp32; for
decoders from the picture of Diffusers in fp32. A file that overflows gives a white picture, 125 and more
off. Decoders of SDXL run without and with the factor that the program has for their convolutions, behind a
UNet of zeros. The result goes to results/stable_diffusion_cpp.json, and as a table to
results/stable_diffusion_cpp.md.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from readers.sdcpp_runs import (  # noqa: E402
    DECODER,
    DENOISER,
    FACTOR,
    GGUF,
    SDXL,
    describe_build,
    measure,
    measure_gguf,
    measure_sdxl,
)
from stopdown.devices.environment import describe_machine  # noqa: E402

RESULT = Path(__file__).parent / "results" / "stable_diffusion_cpp.json"
FILES = {
    "fp32": ("exact", "converted fp32"),
    "fp16": ("fp16", "converted fp16"),
    "bf16": ("bf16", ""),
}


def main() -> None:
    """Measure both models in every format."""
    found, packed, wide = (run_apart(x) for x in (measure, measure_gguf, measure_sdxl))
    rows: list[dict[str, Any]] = [
        {
            "model": model,
            "file": file,
            "original": found[name][old],
            "converted": found[name].get(new),
        }
        for name, model in ((DENOISER, "Flux"), (DECODER, "its decoder"))
        for file, (old, new) in FILES.items()
    ]
    rows += [
        {
            "model": "Flux",
            "file": f"GGUF {kind}{key.removeprefix('before')}",
            "original": packed[kind][key],
            "converted": packed[kind][key.replace("before", "after")],
        }
        for kind in GGUF
        for key in packed[kind]
        if key.startswith("before")
    ]
    rows.sort(key=lambda row: row["model"] != "Flux")
    rows += [
        {
            "model": f"decoder of SDXL, values to 2^{wide[name]['power']:.1f}",
            "file": f"bf16{factor}",
            "original": wide[name][f"before{factor}"],
            "converted": wide[name][f"after{factor}"],
        }
        for name in SDXL
        for factor in ("", FACTOR)
    ]
    result = {
        "command": "python benchmarks/stable_diffusion_cpp.py",
        "machine": describe_machine(),
        "stable-diffusion-cpp-python": importlib.metadata.version("stable-diffusion-cpp-python"),
        "build": describe_build(),
        "from Diffusers": found[DENOISER]["Diffusers"],
        "rows": rows,
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    RESULT.with_suffix(".md").write_text(describe(result), encoding="utf-8")


def run_apart(
    measure: Callable[[Path], dict[str, dict[str, float]]],
) -> dict[str, dict[str, float]]:
    """What is measured in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return measure(Path(folder))


def describe(result: dict[str, Any]) -> str:
    """The rows as a Markdown table."""
    lines = ["| model | file | original | converted |", "|---|---|--:|--:|"]
    for row in result["rows"]:
        cells = ["" if row[key] is None else f"{row[key]:.4f}" for key in ("original", "converted")]
        lines.append(f"| {row['model']} | {row['file']} | {' | '.join(cells)} |")
    note = (
        "Mean difference of the bytes of a picture, of 255. The Flux in fp32 and its converted decoder are "
        f"{result['from Diffusers']:.4f} from Diffusers. stable-diffusion-cpp-python "
        f"{result['stable-diffusion-cpp-python']}, compiled with {result['build']}."
    )
    return "\n".join(lines) + f"\n\n{note}\n"


if __name__ == "__main__":
    main()
