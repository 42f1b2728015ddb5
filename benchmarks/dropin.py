"""Pipelines and text encoders that overflow in fp16, loaded with a `quantization_config`.

Each is tiny, has random weights and is too large for fp16. It is loaded in fp32, in bf16, in plain fp16 and
in fp16 with Stopdown's config, which certifies from the weights. Errors are those of the pixels, or of what
an encoder returns, against fp32. The plans of the configs are also folded into the fp32 models without a
cast: there the result must be the same to the last bit. Import times are those of fresh processes, the
median of five.

    python benchmarks/dropin.py                  # everything (some minutes)
    python benchmarks/dropin.py --only sdxl sd   # some rows; the others are kept
    python benchmarks/dropin.py --table          # only write the table anew
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

import encoders as encoder_table  # noqa: E402 (the path is set above)

import stopdown  # noqa: E402
from models.encoder_models import make_call, make_encoder, run_encoder  # noqa: E402
from models.pipeline_calls import call_pipeline  # noqa: E402
from processes.documented_scripts import ADDED, run_script  # noqa: E402
from stopdown.devices.environment import describe_machine  # noqa: E402
from stopdown.numerics import relative_l2  # noqa: E402
from stopdown.quantizers.script_loading import join_config_plans  # noqa: E402
from stopdown.records import Plan  # noqa: E402
from stopdown.testing import PIPELINE_NAMES, make_pipeline, overflow_  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
ENCODERS = {
    "T5": "T5EncoderModel",
    "umT5": "UMT5EncoderModel",
    "CLIP": "CLIPTextModel",
    "Gemma 2": "Gemma2PreTrainedModel",
    "Gemma 3": "Gemma3ForConditionalGeneration",
    "Qwen2.5-VL": "Qwen2_5_VLForConditionalGeneration",
    "Qwen3": "Qwen3Model",
    "Llama": "LlamaForCausalLM",
    "Mistral": "Mistral3ForConditionalGeneration",
}
"""Families to their classes as pipelines of Diffusers name them."""


FINITE = ("cogvideox-image", "cogview3plus")
"""Kinds whose tiny denoiser is finite in fp16 with large weights as well: their autoencoder overflows."""


def measure_pipeline(name: str, folder: Path) -> dict[str, Any]:
    """One kind of pipeline whose denoiser overflows."""
    from diffusers import DiffusionPipeline

    denoiser = "unet" if name in ("sd", "sdxl", "svd") else "transformer"
    pipe = make_pipeline(name, overflow=denoiser, dtype=torch.bfloat16)
    if name in FINITE:
        overflow_(pipe.vae)
    pipe.save_pretrained(folder)

    def run(dtype: torch.dtype, **options: Any) -> torch.Tensor:
        pipe = DiffusionPipeline.from_pretrained(folder, dtype=dtype, **options)
        pipe.set_progress_bar_config(disable=True)
        return torch.from_numpy(call_pipeline(pipe, name)).float()

    config = stopdown.quantization(folder)
    plan = join_config_plans(config)
    wanted = run(torch.float32)
    pipe = DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    with stopdown.apply_plan(pipe, plan, cast=False):
        folded = torch.from_numpy(call_pipeline(pipe, name)).float()
    found = run(torch.float16, quantization_config=config)
    plain, bf16 = run(torch.float16), run(torch.bfloat16)
    errors = compare(wanted, found, folded, plain=plain, bf16=bf16)
    script = {"documented script": measure_script(name, folder)}
    return describe(name, "pipeline", plan) | errors | script


def measure_script(name: str, folder: Path) -> float:
    """The error of a documented script's pixels, with the argument added."""
    wanted, _ = run_script(name, folder, "float32")
    found, _ = run_script(name, folder, "float16", ADDED)
    return float(relative_l2(torch.from_numpy(found), torch.from_numpy(wanted)))


def measure_encoder(name: str, folder: Path) -> dict[str, Any]:
    """One text encoder by itself, whose values leave fp16 inside of its blocks."""
    class_name = ENCODERS[name]
    module: Any = make_encoder(class_name)
    call = make_call(class_name, module, "right")
    encoder_table.overflow(class_name, module, call, "inner")
    module.to(torch.bfloat16).save_pretrained(folder)
    kind = type(module)

    def run(loaded: torch.nn.Module, dtype: torch.dtype) -> torch.Tensor:
        _, args, kwargs = make_call(class_name, loaded, "right")
        return torch.cat([x.flatten() for x in run_encoder((loaded, args, kwargs), dtype)])

    def load(dtype: torch.dtype, **options: Any) -> Any:
        return kind.from_pretrained(folder, dtype=dtype, **options)

    wide = load(torch.float32)
    wanted = run(wide, torch.float32)
    planned = load(torch.float16, quantization_config=stopdown.StopdownConfig())
    plan = planned.hf_quantizer.applied_plan
    part = SimpleNamespace(components={plan.components[0].component: wide})
    with stopdown.apply_plan(part, plan, cast=False):
        folded = run(wide, torch.float32)
    return describe(name, "text encoder", plan) | compare(
        wanted,
        run(planned, torch.float16),
        folded,
        plain=run(load(torch.float16).half(), torch.float16),
        bf16=run(load(torch.bfloat16), torch.bfloat16),
    )


def describe(name: str, kind: str, plan: Plan) -> dict[str, Any]:
    """What a plan does, over its components."""
    return {
        "name": name,
        "kind": kind,
        "certified": sum(x.in_force.certified for x in plan.components),
        "components": len(plan.components),
        "in fp16": sum(x.precision == "fp16" for x in plan.components),
        "fp32 modules": sum(len(x.in_force.fp32_modules) for x in plan.components),
        "fp32 streams": sum(x.in_force.stream is not None for x in plan.components),
    }


def compare(
    wanted: torch.Tensor,
    found: torch.Tensor,
    folded: torch.Tensor,
    *,
    plain: torch.Tensor,
    bf16: torch.Tensor,
) -> dict[str, Any]:
    """Errors against fp32; None for values that are not finite."""

    def measure(values: torch.Tensor) -> float | None:
        error = float(relative_l2(values, wanted))
        return error if math.isfinite(error) else None

    return {
        "plain fp16": measure(plain),
        "bf16": measure(bf16),
        "fp16": measure(found),
        "exact in fp32": torch.equal(folded, wanted),
    }


def measure_imports() -> dict[str, Any]:
    """Seconds that `import stopdown` takes in a fresh process, and what it loads."""
    code = (
        "import json, sys, time\nstart = time.perf_counter()\nimport stopdown\n"
        "heavy = {'torch', 'diffusers', 'transformers'} & set(sys.modules)\n"
        "print(json.dumps([time.perf_counter() - start, sorted(heavy)]))"
    )
    runs = [
        json.loads(subprocess.run([sys.executable, "-c", code], stdout=-1, check=True).stdout)
        for _ in range(5)
    ]
    return {"import_s": statistics.median(x for x, _ in runs), "loads": runs[0][1]}


def measure(only: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows, one after the other."""
    for names, function in ((PIPELINE_NAMES, measure_pipeline), (ENCODERS, measure_encoder)):
        for name in names:
            if not only or name in only:
                with tempfile.TemporaryDirectory() as folder:
                    yield function(name, Path(folder) / "model")


def write_table(record: dict[str, Any], path: Path) -> None:
    """The rows as Markdown, and what they come to."""
    rows = record["rows"]
    finite = sum(row["fp16"] is not None for row in rows)
    exact = sum(row["exact in fp32"] for row in rows)
    lines = [
        "# Pipelines and text encoders by `quantization_config` alone",
        "",
        f"{len(rows)} models; {finite} finite in fp16, {exact} exact in fp32. "
        f"`import stopdown` takes {record['imports']['import_s']:.3f} s and loads "
        f"{', '.join(record['imports']['loads']) or 'neither PyTorch nor a library of models'}.",
        "",
        "| model | kind | plain fp16 | bf16 | fp16 by the config | documented script | exact in fp32 "
        "| components in fp16 | certified | fp32 modules | fp32 streams |",
        "| --- | --- | --: | --: | --: | --: | --- | --: | --: | --: | --: |",
    ]
    for row in rows:
        errors = (
            "not finite" if row[x] is None else f"{row[x]:.2g}"
            for x in ("plain fp16", "bf16", "fp16")
        )
        parts = f"{row['in fp16']} of {row['components']}"
        script = f"{row['documented script']:.2g}" if "documented script" in row else "–"
        lines.append(
            f"| {row['name']} | {row['kind']} | {' | '.join(errors)} | {script} | "
            f"{'yes' if row['exact in fp32'] else 'no'} | {parts} | {row['certified']} | "
            f"{row['fp32 modules']} | {row['fp32 streams']} |"
        )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    """Measure, and write the record and the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=(), help="some rows; the others are kept")
    parser.add_argument("--table", action="store_true", help="only write the table anew")
    options = parser.parse_args()
    path = RESULTS / "dropin.json"
    record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"rows": []}
    if not options.table:
        warnings.simplefilter("ignore")
        with tempfile.TemporaryDirectory() as cache:
            os.environ["STOPDOWN_CACHE"] = cache
            record["imports"] = measure_imports()
            for row in measure(options.only):
                print(json.dumps(row), flush=True)
                others = [x for x in record["rows"] if x["name"] != row["name"]]
                order = [*PIPELINE_NAMES, *ENCODERS]
                rows = sorted([*others, row], key=lambda row: order.index(row["name"]))
                record["rows"] = rows
                path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            record |= {"command": "python benchmarks/dropin.py", "machine": describe_machine()}
            path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    write_table(record, RESULTS / "dropin.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
