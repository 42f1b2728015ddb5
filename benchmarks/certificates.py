"""Certificates: how tight bounds are, what share is certified, and what a full-size one costs.

`tightness` compares the bound of every value with the largest that gradient ascent finds and with the
largest in ordinary runs. `share` makes the classes of the rescale table overflow, chooses exponents
from bounds and measures what that loses. `engines` compares the planner's bounds with the checker's, at
full width and reduced depth. `full` writes checkpoints with the shapes of CogVideoX-5B
and T5-XXL and generated weights into a temporary folder, one at a time, and certifies them in a
process of its own.

    python benchmarks/certificates.py tightness [--classes T5 "SD VAE"]
    python benchmarks/certificates.py share [--classes T5 "SD VAE"]
    OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 python benchmarks/certificates.py engines
    python benchmarks/certificates.py full
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

from rescale import describe_error, overflow, run_cast  # noqa: E402

from models.bound_ascent import Bounded, GraphRun, bound_example, climb  # noqa: E402 (the path is set above)
from models.rescaling_models import (  # noqa: E402
    EXAMPLES,
    WAYS,
    make_example,
    measure_call,
    run_calls,
)
from stopdown import rescale_  # noqa: E402
from stopdown.devices.environment import describe_machine  # noqa: E402
from stopdown.errors import StopdownError  # noqa: E402
from stopdown.scaling.folding.folds import cast_  # noqa: E402
from stopdown.scaling.graph.nodes import operation  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
CLIMBS, STEPS = 12, 5
SHARD_BYTES = 1 << 30


def measure_tightness(name: str) -> list[dict[str, Any]]:
    """Rows of one class: each value's bound, the largest by ascent and in an ordinary run."""
    rows = []
    for number, case in enumerate(bound_example(name)):
        rng, best = random.Random(number), dict[str, float]()
        for _ in range(CLIMBS):
            excess = climb(case, rng, STEPS, best)
            if excess:
                raise RuntimeError(f"{name}: {excess[0]}")
        ordinary = run_plainly(case)
        for node in case.list_nodes():
            bound = case.bounds.values[node.name]
            found = max(best[node.name], ordinary[node.name])
            if bound is None or not found or node.meta["val"].dtype != torch.float16:
                continue
            seen = ordinary[node.name]
            rows.append({
                "class": name, "node": node.name, "operation": operation(node),
                "bound": bound.largest, "ascent": found, "ordinary": seen,
            })  # fmt: skip
    return rows


def run_plainly(case: Bounded) -> dict[str, float]:
    """Largest magnitudes with the call's own arguments."""
    run = GraphRun(case, case.inputs, torch.float64)
    with torch.no_grad():
        run.run()
    return {node.name: float(x.abs().max()) if x.numel() else 0.0 for node, x in run.seen.items()}


def measure_share(name: str, way: str) -> dict[str, Any]:
    """One row: a class made to overflow, its exponents from bounds: what is certified and lost.

    Beside it what measured ranges and `auto` lose.
    """
    module, calls = make_example(name)
    overflow(module, calls, [measure_call(*call) for call in calls], WAYS[way])
    reference = run_calls(calls, torch.float32)
    bf16 = run_cast(module, calls, torch.bfloat16, reference)
    found = {ranges: run_ranges(module, calls, ranges, reference)
             for ranges in ("measured", "auto", "bound")}  # fmt: skip
    kinds = defaultdict(int)
    for place in found["bound"].pop("uncertain"):
        kinds[place.rpartition("(")[2].rstrip(")")] += 1
    return {
        "class": name, "way": way, "bf16": bf16["l2"], **found["bound"], "uncertain": dict(kinds),
        "measured": found["measured"]["fp16"],
        "auto": {k: found["auto"][k] for k in ("fp16", "values", "certified", "exact")},
    }  # fmt: skip


def run_ranges(
    module: torch.nn.Module, calls: list[Any], ranges: str, reference: list[torch.Tensor]
) -> dict[str, Any]:
    """Exponents that rest on one kind of ranges, and the error of fp16 with them."""
    rescaling = rescale_(module, calls=calls, ranges=ranges)
    exact = all(map(torch.equal, run_calls(calls, torch.float32), reference))
    cast_(module, torch.float16, rescaling)
    fp16 = describe_error(run_calls(calls, torch.float16), reference)
    rescaling.undo()
    scaling = rescaling.scaling
    return {
        "exact": exact, "values": scaling.values,
        "certified": scaling.values - len(scaling.uncertain), "fp32_modules": list(scaling.fp32_modules),
        "multiplies": len(scaling.multiplies), "headroom_bits": rescaling.headroom_bits,
        "fp16": fp16["l2"], "uncertain": scaling.uncertain, "note": scaling.range_note,
    }  # fmt: skip


def run_tightness(names: list[str]) -> None:
    stored = _load("certificates_tightness")
    rows = [row for row in stored.get("rows", []) if row["class"] not in names]
    for name in names:
        rows += measure_tightness(name)
        print(name, len(rows), flush=True)
        _store("certificates_tightness", rows, "python benchmarks/certificates.py tightness")
    write_tightness(rows)


def run_share(names: list[str]) -> None:
    stored = {(r["class"], r["way"]): r for r in _load("certificates_share").get("rows", [])}
    for name in names:
        for way in EXAMPLES[name].ways:
            try:
                row = measure_share(name, way)
            except (StopdownError, ValueError) as error:
                row = {"class": name, "way": way, "failure": str(error)[:300]}
            stored[(name, way)] = row
            print(row, flush=True)
        rows = list(stored.values())
        _store("certificates_share", rows, "python benchmarks/certificates.py share")
        write_share(rows)


ENGINES: dict[str, dict[str, Any]] = {
    "CogVideoX-5B": {"num_layers": 3},
    "T5-XXL": {"num_layers": 2},
    "Z-Image": {"n_layers": 2},
    "SVD-XT": {
        "block_out_channels": [64, 128, 256, 256],
        "num_attention_heads": [1, 2, 4, 4],
    },
}
"""Checkpoint to what is changed of its configuration, so that it is planned in a minute."""


def run_engines() -> None:
    """Store coverage, tightness and seconds of both derivations of the bounds, one row a component."""
    import certificate_files
    import full_size_runs

    rows = []
    for name, changed in ENGINES.items():
        case = full_size_runs.CASES[name]
        full_size_runs.CASES[name] = replace(case, changed=case.changed | changed)
        place = Path(tempfile.mkdtemp(prefix="engines-"))
        try:
            certificate_files.write_model(name, place / "model")
            rows += [{"name": name, **row} for row in compare_engines(place)]
        finally:
            shutil.rmtree(place)
        print(json.dumps(rows[-3:], indent=1), flush=True)
    command = "OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 python benchmarks/certificates.py engines"
    _store("certificates_engines", rows, command)


def compare_engines(place: Path) -> list[dict[str, Any]]:
    """Plan a folder and write its certificate; compare the bound of each value that both derive.

    Returns:
        For each component: values that both know, those with a bound, quantiles of the checker's bound over
        the planner's, and processor seconds of both.
    """
    import stopdown_verify
    from stopdown.plans.certificate_files import write_certificate
    from stopdown.plans.certified import Scope, certify_plan
    from stopdown.scaling import certificate
    from stopdown.scaling.trials.traced_calls import TracedCalls
    from stopdown.sources.sources import resolve_source

    source, traced = resolve_source(place / "model"), dict[str, TracedCalls]()
    bounds, seconds = dict[int, Any](), Counter[str]()
    with contextlib.ExitStack() as patches:
        bound_call, check = certificate.bound_call, stopdown_verify.check_component

        def timed_bounds(capture: Any, *arguments: Any) -> Any:
            begun = time.process_time()
            made = bounds[id(capture)] = bound_call(capture, *arguments)
            seconds[f"planner {capture.component}"] += time.process_time() - begun
            return made

        def timed_check(stated: Any, *arguments: Any, **options: Any) -> Any:
            begun = time.process_time()
            made = check(stated, *arguments, **options)
            seconds[f"checker {stated['component']}"] += time.process_time() - begun
            return made

        for module, name, timed in (
            (certificate, "bound_call", timed_bounds),
            (stopdown_verify, "check_component", timed_check),
        ):
            patches.enter_context(mock.patch.object(module, name, timed))
        plan = certify_plan(source, residual="fp32", scope=Scope(()), traced=traced)
        made = write_certificate(plan, source, place / "certificate.json", traced)
    rows = []
    for stated in made["components"]:
        entry = next(x for x in plan.components if x.component == stated["component"])
        captures = [x[0] for x in traced[entry.component].capture(entry.in_force.stream)]
        pairs = []
        for capture, graph in zip(captures, stated["graphs"], strict=True):
            known = bounds[id(capture)].values
            pairs += [(known[n["id"]], n["bound"]) for n in graph["nodes"]
                      if n["dtype"] != "int" and n["id"] in known]  # fmt: skip
        ratios = sorted(float(stopdown_verify.read_number(stated)) / bound.largest
                        for bound, stated in pairs if bound and stated and bound.largest)  # fmt: skip
        rows.append({
            "component": entry.component,
            "values": len(pairs),
            "planner": sum(bound is not None for bound, _ in pairs),
            "checker": sum(stated is not None for _, stated in pairs),
            "ratios": {str(x): ratios[int(x * (len(ratios) - 1))] for x in (0, 0.5, 0.95, 1)},
            "planner_s": seconds[f"planner {captures[0].component}"],
            "checker_s": seconds[f"checker {entry.component}"],
        })  # fmt: skip
    return rows


def run_full(only: str | None) -> None:
    rows = {row["name"]: row for row in _load("certificates_full").get("rows", [])}
    for name in [only] if only else list(FULL):
        folder = Path(tempfile.mkdtemp(prefix="certificate-"))
        try:
            size, largest = write_checkpoint(name, folder)
            command = [sys.executable, __file__, "one", "--folder", str(folder)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            row = json.loads(done.stdout.strip().splitlines()[-1])
        finally:
            shutil.rmtree(folder)
        rows[name] = {"name": name, "weight_bytes": size, "largest_bytes": largest, **row}
        print(json.dumps(rows[name], indent=1)[:3000], flush=True)
        _store("certificates_full", list(rows.values()), "python benchmarks/certificates.py full")
    write_full(list(rows.values()))


def certify_one(folder: str) -> dict[str, Any]:
    """Certify a folder in this process: seconds, peak memory, and what came out."""
    import stopdown.pipelines.tiny_pipelines  # noqa: F401 (the libraries, so that only the work is timed)
    from stopdown.plans.certified import certify_plan

    torch.set_num_threads(2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    begun, cpu = time.perf_counter(), time.process_time()
    plan = certify_plan(folder)
    return {
        "elapsed_s": time.perf_counter() - begun,
        "cpu_s": time.process_time() - cpu,
        "before_bytes": before,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "components": [
            {"component": x.component, "class": x.class_name, "precision": x.precision,
             "certified": x.in_force.certified, "values": x.in_force.values,
             "bounded": x.in_force.bounded,
             "fp32_modules": list(x.in_force.fp32_modules), "headroom_bits": x.in_force.headroom_bits,
             "reasons": x.reasons}
            for x in plan.components
        ],
    }  # fmt: skip


def write_checkpoint(name: str, folder: Path) -> tuple[int, int]:
    """A CogVideoX folder with generated weights; bytes of all weights and of the largest tensor."""
    from diffusers import CogVideoXDDIMScheduler

    parts = FULL[name]()
    index: dict[str, Any] = {"_class_name": "CogVideoXPipeline", "_diffusers_version": "0.42.1"}
    index |= {key: ["diffusers", type_name] for key, (type_name, _) in parts.items()}
    index["text_encoder"] = ["transformers", "T5EncoderModel"]
    index["tokenizer"] = ["transformers", "T5Tokenizer"]
    index["scheduler"] = ["diffusers", "CogVideoXDDIMScheduler"]
    (folder / "model_index.json").write_text(json.dumps(index))
    CogVideoXDDIMScheduler().save_pretrained(folder / "scheduler")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer_config.json").write_text(
        json.dumps({"model_max_length": 226, "tokenizer_class": "T5Tokenizer"})
    )
    sizes = [_write_component(folder / key, *part) for key, part in parts.items()]
    return sum(total for total, _ in sizes), max(largest for _, largest in sizes)


def _write_component(folder: Path, class_name: str, config: dict[str, Any]) -> tuple[int, int]:
    from safetensors.torch import save_file

    module, stem = _build_empty(class_name, config, folder)
    generator = torch.Generator().manual_seed(0)
    shard: dict[str, torch.Tensor] = {}
    files: dict[str, str] = {}
    held = total = largest = 0

    def flush() -> None:
        nonlocal held
        name = f"{stem}-part{len(set(files.values())):05d}.safetensors"
        files.update(dict.fromkeys(shard, name))
        save_file(shard, folder / name, metadata={"format": "pt"})
        shard.clear()
        held = 0

    for name, parameter in module.named_parameters():
        tensor = _draw(name, parameter.shape, generator)
        size = tensor.numel() * tensor.element_size()
        shard[name], held = tensor, held + size
        total, largest = total + size, max(largest, size)
        if held > SHARD_BYTES:
            flush()
    flush()
    _rename_shards(folder, stem, files, total)
    return total, largest


def _rename_shards(folder: Path, stem: str, files: dict[str, str], total: int) -> None:
    """Shards are called by their number and how many there are, and an index names them."""
    names = sorted(set(files.values()))
    final = {
        name: f"{stem}.safetensors" if len(names) == 1
        else f"{stem}-{number + 1:05d}-of-{len(names):05d}.safetensors"
        for number, name in enumerate(names)
    }  # fmt: skip
    for name, new in final.items():
        (folder / name).rename(folder / new)
    if len(names) > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {k: final[v] for k, v in files.items()},
        }
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))


def _build_empty(
    class_name: str, config: dict[str, Any], folder: Path
) -> tuple[torch.nn.Module, str]:
    folder.mkdir()
    with torch.device("meta"):
        if class_name == "T5EncoderModel":
            from transformers import T5Config, T5EncoderModel

            made = T5Config(**config)
            made.architectures = ["T5EncoderModel"]
            made.save_pretrained(folder)
            return T5EncoderModel(made), "model"
        import diffusers

        module = getattr(diffusers, class_name)(**config)
        module.save_config(folder)
        return module, "diffusion_pytorch_model"


def _draw(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Values as of a trained model, roughly: unit gain, norms near one, small biases."""
    tensor = torch.empty(shape, dtype=torch.float32)
    if len(shape) > 1:
        tensor.normal_(0, math.prod(shape[1:]) ** -0.5, generator=generator)
    else:
        tensor.normal_(0, 0.05, generator=generator)
        tensor += 0.0 if name.endswith("bias") else 1.0
    return tensor.bfloat16()


_T5_XXL: dict[str, Any] = {"vocab_size": 32128, "d_model": 4096, "d_kv": 64, "d_ff": 10240,
    "num_layers": 24, "num_heads": 64, "feed_forward_proj": "gated-gelu", "dropout_rate": 0.0}  # fmt: skip
_TRANSFORMER: dict[str, Any] = {"num_attention_heads": 48, "num_layers": 42, "text_embed_dim": 4096,
    "use_rotary_positional_embeddings": True}  # fmt: skip
_VAE: dict[str, Any] = {"down_block_types": ("CogVideoXDownBlock3D",) * 4,
    "up_block_types": ("CogVideoXUpBlock3D",) * 4, "block_out_channels": (8, 8, 8, 8),
    "latent_channels": 16, "layers_per_block": 1, "norm_num_groups": 2}  # fmt: skip


def _make_cogvideox() -> dict[str, tuple[str, dict[str, Any]]]:
    small = {**_T5_XXL, "num_layers": 1, "d_ff": 64, "num_heads": 1, "vocab_size": 64}
    return {
        "transformer": ("CogVideoXTransformer3DModel", _TRANSFORMER),
        "text_encoder": ("T5EncoderModel", small),
        "vae": ("AutoencoderKLCogVideoX", _VAE),
    }


def _make_t5() -> dict[str, tuple[str, dict[str, Any]]]:
    small = {**_TRANSFORMER, "num_layers": 1, "num_attention_heads": 1}
    return {
        "transformer": ("CogVideoXTransformer3DModel", small),
        "text_encoder": ("T5EncoderModel", _T5_XXL),
        "vae": ("AutoencoderKLCogVideoX", _VAE),
    }


FULL = {"CogVideoX-5B": _make_cogvideox, "T5-XXL": _make_t5}
"""Checkpoint to its components: the one that it is named for at full size, the others tiny."""


def _load(name: str) -> dict[str, Any]:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def _store(name: str, rows: list[Any], command: str) -> None:
    report = {"command": command, "machine": describe_machine(), "rows": rows}
    (RESULTS / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")


def write_tightness(rows: list[dict[str, Any]]) -> None:
    """The table by class, the table by operation, and the plot."""
    by_class, by_operation = defaultdict(list), defaultdict(list)
    for row in rows:
        by_class[row["class"]].append(row)
        by_operation[row["operation"]].append(row)
    lines = ["# How tight the bounds are", "",
             "Every fp16 value: its bound over the largest that gradient ascent found, and over the",
             "largest in one ordinary run. Tiny models with random weights.", ""]  # fmt: skip
    for title, groups in (("class", by_class), ("operation", by_operation)):
        lines += [f"| {title} | values | bound : ascent, median | worst | bound : ordinary, median "
                  "| worst |", "|---|--:|--:|--:|--:|--:|"]  # fmt: skip
        lines += [_format_tightness(key, group) for key, group in sorted(groups.items())]
        lines.append("")
    lines += ["`python benchmarks/certificates.py tightness`", ""]
    (RESULTS / "certificates_tightness.md").write_text("\n".join(lines))
    plot_tightness(by_class)


def _format_tightness(key: str, rows: list[dict[str, Any]]) -> str:
    found = [r["bound"] / r["ascent"] for r in rows]
    seen = [r["bound"] / r["ordinary"] for r in rows if r["ordinary"] > 1e-9]
    numbers = [statistics.median(found), max(found)]
    numbers += [statistics.median(seen), max(seen)] if seen else [math.nan, math.nan]
    return f"| {key} | {len(rows)} | " + " | ".join(f"{x:.3g}" for x in numbers) + " |"


def plot_tightness(groups: dict[str, list[dict[str, Any]]]) -> None:
    """One line of dots a class: bound over ascent, on a logarithmic axis from 1 to 100,000."""
    from PIL import Image, ImageDraw, ImageFont

    scale, left, line, decades = 2, 245, 22, 5
    width, height = 910 * scale, (line * len(groups) + 70) * scale
    picture = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(picture)
    font = ImageFont.load_default(size=13 * scale)
    span = (880 - left) * scale / decades

    def across(ratio: float) -> float:
        return left * scale + span * min(max(math.log10(ratio), 0.0), decades)

    bottom = (line * len(groups) + 40) * scale
    for decade in range(decades + 1):
        x = across(10.0**decade)
        draw.line([(x, 30 * scale), (x, bottom)], fill="#dddddd", width=scale)
        place, text = (x, bottom + 2 * scale), f"{10**decade:,}"
        draw.text(place, text, fill="black", font=font, anchor="ma")
    title = "bound : largest found by ascent, every fp16 value (line: median)"
    draw.text((10 * scale, 6 * scale), title, fill="black", font=font)
    for number, (name, rows) in enumerate(sorted(groups.items())):
        y = (40 + line * number) * scale
        draw.text((10 * scale, y - 8 * scale), name, fill="black", font=font)
        ratios = [r["bound"] / r["ascent"] for r in rows]
        for ratio in ratios:
            x = across(ratio)
            draw.ellipse([x - 3, y - 3, x + 3, y + 3], outline="#4477aa")
        middle = across(statistics.median(ratios))
        draw.line(
            [(middle, y - 7 * scale), (middle, y + 7 * scale)], fill="#cc3311", width=2 * scale
        )
    picture.save(RESULTS / "certificates_tightness.png", optimize=True)


def write_share(rows: list[dict[str, Any]]) -> None:
    """One line for each class and way."""
    lines = ["# Exponents from bounds", "",
             "Tiny models made to overflow fp16, exponents from bounds (`ranges=\"bound\"`): what share of",
             "the fp16 values and weights rests on bounds, and how many times less fp16 loses than bf16:",
             "with ranges from bounds, from measurements, and with bounds where they cost nothing (`auto`,",
             "whose share stands behind it). What has no bound, or one beyond fp16 where nothing may scale",
             "it, is named in the last column: the guard watches it.", "",
             "| class | overflow | certified | fp32 modules | exact in fp32 | bf16 | fp16 | bf16 : fp16 | "
             "measured | auto | certified by auto | not certified |",
             "|---|---|--:|--:|---|--:|--:|--:|--:|--:|--:|---|"]  # fmt: skip
    lines += [_format_share(row) for row in sorted(rows, key=lambda r: (r["class"], r["way"]))]
    lines += ["", "`python benchmarks/certificates.py share`", ""]
    (RESULTS / "certificates_share.md").write_text("\n".join(lines))


def _format_share(row: dict[str, Any]) -> str:
    if "failure" in row:
        return f"| {row['class']} | {row['way']} | {row['failure'][:80]} | | | | | | | | | |"
    rest = ", ".join(f"{name} {count}" for name, count in row["uncertain"].items())
    ratios = [row["fp16"], row.get("measured"), row.get("auto", {}).get("fp16")]
    numbers = [f"{row['bf16'] / x:.1f}" if x else "" for x in ratios]
    return (
        f"| {row['class']} | {row['way']} | {_name_share(row)} | {len(row['fp32_modules'])} "
        f"| {'yes' if row['exact'] else 'no'} | {row['bf16']:.5f} | {row['fp16']:.5f} "
        f"| {' | '.join(numbers)} | {_name_share(row.get('auto', {}))} | {rest} |"
    )


def _name_share(row: dict[str, Any]) -> str:
    if not row.get("values"):
        return "none" if row else ""
    return f"{math.floor(1000 * row['certified'] / row['values']) / 10:g} % of {row['values']}"


def write_full(rows: list[dict[str, Any]]) -> None:
    """One line for each checkpoint."""
    lines = ["# Certificates at full size", "",
             "Generated weights in bf16, on disk; `beyond` is peak memory of the process less its largest",
             "tensor. The named component has its full size, the others of the pipeline are tiny.", "",
             "| checkpoint | weights | largest tensor | time | CPU time | peak memory | beyond | certified "
             "| fp32 modules |", "|---|--:|--:|--:|--:|--:|--:|---|---|"]  # fmt: skip
    for row in rows:
        beyond = (row["peak_bytes"] - row["largest_bytes"]) / 2**30
        said = "; ".join(
            f"{c['component']} {c['bounded']} of {c['values']}" for c in row["components"]
        )
        fp32_modules = "; ".join(str(len(c["fp32_modules"])) for c in row["components"])
        lines.append(
            f"| {row['name']} | {row['weight_bytes'] / 1e9:.1f} GB | {row['largest_bytes'] / 1e6:.0f} MB "
            f"| {row['elapsed_s']:.0f} s | {row['cpu_s']:.0f} s | {row['peak_bytes'] / 2**30:.2f} GiB "
            f"| {beyond:.2f} GiB | {said} | {fp32_modules} |"
        )
    lines += ["", "`python benchmarks/certificates.py full`", ""]
    (RESULTS / "certificates_full.md").write_text("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("tightness", "share", "engines", "full", "one"))
    parser.add_argument("--classes", nargs="*", default=list(EXAMPLES))
    parser.add_argument("--only", choices=list(FULL))
    parser.add_argument("--folder")
    options = parser.parse_args()
    if options.what == "one":
        print(json.dumps(certify_one(options.folder)))
    elif options.what == "engines":
        run_engines()
    elif options.what == "full":
        run_full(options.only)
    elif options.what == "share":
        run_share(options.classes)
    else:
        run_tightness(options.classes)


if __name__ == "__main__":
    main()
