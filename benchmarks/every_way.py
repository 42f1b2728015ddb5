"""Families of Diffusers' pipelines by `quantization_config`, under a guard, and with an encoder's overflow.

`every_pipeline.py` gives each pipeline, with a denoiser that overflows, to `generate`. Here the same folder
is loaded with `quantization_config`, and loaded in plain fp16 and called under `stopdown.guard`, both on
the CPU with the arguments of Diffusers' own test. Then the pipeline is built again, its text encoder is
made to overflow in place of its denoiser, and `generate` gets that folder on a simulated T4 with no
precision flag.

    python benchmarks/every_way.py /tmp/diffusers                 # families that aren't stored, two hours
    python benchmarks/every_way.py /tmp/diffusers --only FluxPipeline
    python benchmarks/every_way.py --table                        # only write the table
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from every_pipeline import (
    ROOT,
    Subject,
    build,
    find_denoiser,
    import_torchvision,
    list_subjects,
    make_in_process,
    make_overflow,
    make_row,
    noise_of_fp32,
    save,
    shorten,
    sign_table,
    warm_up,
)
from every_pipeline import load as load_pipelines

import stopdown
from models.ways_in import (
    LEAST_ERROR,
    REPAIR_SPREAD,
    hear_repairs,
)
from stopdown.devices.environment import describe_machine
from stopdown.errors import StopdownError, take_first_line
from stopdown.numerics import relative_l2

RESULTS = ROOT / "benchmarks" / "results" / "every_way.json"


@dataclass(frozen=True)
class Found:
    """What a pipeline returned.

    Attributes:
        values: all values of its first output, `[n]` fp32.
        bf16: names of components that ran in bf16.
    """

    values: torch.Tensor
    bf16: list[str]


def make_ways(subject: Subject, folder: Path) -> dict[str, Any]:
    """Run one pipeline in each of the other ways; a cell for each."""
    (folder / "encoder").mkdir()
    encoder = make_row(subject, folder / "encoder", find_encoder)
    row = {"family": encoder.get("family", ""), "encoder": read_encoder_row(encoder)}
    pipe, given = build(subject)
    row |= make_overflow(pipe, given, find_denoiser(pipe))
    kind, model = type(pipe), folder / "model"
    save(pipe, model)
    del pipe

    def call(dtype: torch.dtype, arguments: dict[str, Any] = given, **loading: Any) -> Found:
        loaded = kind.from_pretrained(model, torch_dtype=dtype, **loading)
        return Found(take_values(loaded, arguments), list_bf16(loaded))

    def call_by_config(arguments: dict[str, Any] = given) -> Found:
        config = stopdown.quantization(model)
        return call(torch.float16, arguments, quantization_config=config)

    def call_guarded(arguments: dict[str, Any] = given) -> Found:
        loaded = kind.from_pretrained(model, torch_dtype=torch.float16)
        with stopdown.guard(loaded):
            return Found(take_values(loaded, arguments), list_bf16(loaded))

    try:
        want = call(torch.float32).values
    except Exception as error:
        return row | {"says": f"fp32 stops too: {type(error).__name__}: {error}"[:300]}
    bf16 = run_cell(lambda: call(torch.bfloat16), want)
    row |= {"bf16": bf16, "plain": run_cell(lambda: call(torch.float16), want)}
    ways: dict[str, Callable[..., Found]] = {
        "quantization_config": call_by_config,
        "guard": call_guarded,
    }
    for name, make in ways.items():
        row[name] = judge(run_cell(make, want), bf16)
        if row["plain"].get("error") is not None:
            row[name]["outcome"] = "no overflow"
        is_finite = row[name].get("error") is not None
        if row[name]["outcome"] == "wrong" and is_finite and row[name]["in_bf16"]:
            row[name] = compare_by_seeds(row[name], call, make, given)
    return row


SEEDS = (1, 2, 3)
"""Further seeds for a cell in bf16: one error of two roundings to bf16 says little about the next."""


def compare_by_seeds(
    cell: dict[str, Any], call: Callable[..., Found], make: Callable[..., Found], given: Any
) -> dict[str, Any]:
    """Judge a cell that ran in bf16 by the medians of its errors and bf16's over `SEEDS`."""
    errors, bf16 = list[float](), list[float]()
    for seed in SEEDS:
        seeded = {**given, "generator": torch.Generator().manual_seed(seed)}
        want = call(torch.float32, seeded).values
        errors.append(relative_l2(make(seeded).values, want))
        bf16.append(relative_l2(call(torch.bfloat16, seeded).values, want))
    medians = {"error": statistics.median(errors), "bf16_of_seeds": statistics.median(bf16)}
    return judge({**cell, **medians}, {"error": medians["bf16_of_seeds"]})


def find_encoder(pipe: Any) -> Any:
    """Return the first text encoder of a pipeline, or else what encodes its picture."""
    for kind in ("text_encoder", "image_encoder"):
        for name in sorted(x for x in pipe.components if x.startswith(kind)):
            if isinstance(getattr(pipe, name), torch.nn.Module):
                return getattr(pipe, name)
    return None


def list_bf16(pipe: Any) -> list[str]:
    """List the components of a pipeline that have weights in bf16 after its call."""
    modules = {name: x for name, x in pipe.components.items() if isinstance(x, torch.nn.Module)}
    return [
        name
        for name, module in modules.items()
        if any(x.dtype == torch.bfloat16 for x in module.parameters())
    ]


def take_values(pipe: Any, given: dict[str, Any]) -> torch.Tensor:
    """Call a pipeline, and return all values of its first output as one vector."""
    pipe.set_progress_bar_config(disable=True)
    with torch.no_grad(), noise_of_fp32():
        output = pipe(**renew(given))
    first = output[0] if isinstance(output, tuple) else next(iter(output.values()))
    values = list[torch.Tensor]()

    def take(value: Any) -> None:
        if isinstance(value, (list, tuple)):
            for x in value:
                take(x)
        elif isinstance(value, torch.Tensor):
            values.append(value.detach().float().flatten())
        else:
            values.append(torch.from_numpy(np.asarray(value, np.float32)).flatten())

    take(first)
    return torch.cat(values)


def renew(given: dict[str, Any]) -> dict[str, Any]:
    """Copy a call's arguments, with generators in the state that they have now."""

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Generator):
            return value
        made = torch.Generator(value.device)
        made.set_state(value.get_state())
        return made

    return {name: torch.utils._pytree.tree_map(copy, x) for name, x in given.items()}


def run_cell(make: Callable[[], Found], want: torch.Tensor) -> dict[str, Any]:
    """Run one way; its relative error to fp32, or what it stopped with."""
    started = time.perf_counter()
    cell: dict[str, Any] = {}
    with hear_repairs() as repairs:
        try:
            found = make()
        except StopdownError as error:
            cell = {"refused": shorten(take_first_line(error))}
        except Exception as error:
            traceback.print_exc()
            cell = {"stopped": f"{type(error).__name__}: {error}"[:300]}
        else:
            values = found.values
            is_like = values.shape == want.shape and bool(values.isfinite().all())
            cell = {"error": relative_l2(values, want) if is_like else None, "in_bf16": found.bf16}
    return cell | {"repairs": len(repairs), "seconds": round(time.perf_counter() - started, 1)}


def judge(cell: dict[str, Any], bf16: dict[str, Any]) -> dict[str, Any]:
    """Give a cell its word: right, repaired, as bf16 (in bf16, as far off), refused, wrong or stopped.

    A component in bf16 that was loaded in fp16 rounds at other places than one that was loaded in bf16.
    Where the pipeline stops in bf16, a cell with a component in bf16 has no reference.
    """
    if "refused" in cell or "stopped" in cell:
        return cell | {"outcome": "refused" if "refused" in cell else "stopped"}
    if cell.get("in_bf16") and "error" not in bf16 and cell["error"] is not None:
        return cell | {"outcome": "no reference"}
    spread = REPAIR_SPREAD if cell["repairs"] or cell.get("in_bf16") else 1.0
    most = max(LEAST_ERROR, spread * (bf16.get("error") or 0.0))
    if cell["error"] is None or cell["error"] > most:
        return cell | {"outcome": "wrong"}
    if cell["repairs"]:
        return cell | {"outcome": "repaired"}
    return cell | {"outcome": "as bf16" if cell.get("in_bf16") else "right"}


def read_encoder_row(row: dict[str, Any]) -> dict[str, Any]:
    """Take from a row of `every_pipeline` what the table shows."""
    auto = row.get("auto", {})
    plain = row.get("plain", {}).get("code")
    shown = {"outcome": row["outcome"], "overflow": row.get("overflow", ""), "plain": plain}
    said = auto.get("said") or row.get("said", "")
    return shown | {
        "error": auto.get("error"),
        "bf16": row.get("bf16", {}).get("error"),
        "said": said,
    }


def choose(checkout: Path) -> list[Subject]:
    """Choose one pipeline of each family that `generate` runs right though its denoiser overflows.

    It's the quickest of its family; quick ones come first.
    """
    rows, chosen = load_pipelines()["rows"], dict[str, Subject]()
    subjects = [x for x in list_subjects(checkout) if x.name in rows]
    for subject in sorted(subjects, key=lambda x: rows[x.name]["seconds"]):
        row = rows[subject.name]
        if row["outcome"] == "right" and row["overflow"]:
            chosen.setdefault(row["family"], subject)
    return list(chosen.values())


def draw(stored: dict[str, Any]) -> str:
    """Draw the table, a row for each family."""
    rows, counts = stored["rows"], count(stored["rows"])
    lines = [
        "# Each family of Diffusers' pipelines in the other ways",
        "",
        f"`{stored['command']}`, {stored['date']}. One pipeline of each family, tiny, with the arguments "
        "of Diffusers' own test. `quantization_config` and `guard`: the folder of the table of every "
        "pipeline, whose denoiser overflows, on the CPU; errors are relative to fp32, in per cent. "
        "Encoder: the text encoder overflows instead, through `generate` on a simulated T4; errors are "
        "mean differences, of 255; *none found*: no weights were found that make it overflow. No overflow: "
        "plain fp16 is finite with this call. *r*: repaired and reported. *b*: in bf16, as this "
        "processor has it and the plan gave no exponents. *m*: the median of three other seeds, as "
        "with the first it was further from fp32 than bf16. *n*: in bf16, and not judged, as the "
        "pipeline stops in plain bf16.",
        "",
        *(
            f"- {way}: {', '.join(f'{n} {x}' for x, n in found.items())}."
            for way, found in counts.items()
        ),
        "",
        "| family | class | quantization_config | guard | bf16 | plain fp16 | encoder | bf16 | its way |",
        "|---|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for name, row in sorted(rows.items(), key=lambda x: (x[1].get("family", ""), x[0])):
        if "encoder" not in row:
            lines.append(f"| | {name} | {row.get('outcome', '')} | | | | | | |")
            continue
        cells = [show(row.get(x), 100) for x in ("quantization_config", "guard", "bf16", "plain")]
        encoder = row["encoder"]
        if "says" in row:
            cells[0] = row["says"].replace("|", "/")
        ends = [show(encoder, 1), show({"error": encoder["bf16"]}, 1), name_overflow(encoder)]
        lines.append(f"| {row['family']} | {name} | {' | '.join([*cells, *ends])} |")
    return "\n".join(lines) + "\n"


UNMEASURED = ("refused", "stopped", "not built", "failed", "traceback", "no overflow")


def count(rows: dict[str, Any]) -> dict[str, Counter[str]]:
    """Count the outcomes of each way."""
    return {
        way: Counter(x[way]["outcome"] for x in rows.values() if way in x)
        for way in ("quantization_config", "guard", "encoder")
    }


def name_overflow(encoder: dict[str, Any]) -> str:
    """Name the way in which an encoder was made to overflow, and what plain fp16 did."""
    if not encoder["overflow"]:
        return "none found"
    return encoder["overflow"] + ("" if encoder["plain"] else "; plain fp16 runs")


def show(cell: dict[str, Any] | None, factor: float) -> str:
    """Show an error, or the word for what came instead."""
    if cell is None:
        return ""
    if cell.get("outcome") in UNMEASURED:
        return str(cell["outcome"])
    if cell.get("error") is None:
        return str(cell.get("outcome") or ("stops" if "stopped" in cell else "not finite"))
    marks = {"repaired": " *r*", "as bf16": " *b*", "wrong": " **wrong**", "no reference": " *n*"}
    median = " *m*" if "bf16_of_seeds" in cell else ""
    return f"{factor * cell['error']:.2g}{marks.get(cell.get('outcome', ''), '')}{median}"


def load() -> dict[str, Any]:
    """Load what is stored."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": {}}


def draw_signed(stored: dict[str, Any]) -> str:
    """Draw the table, with where it comes from as its last line."""
    return sign_table(draw(stored), RESULTS.stem)


def write(stored: dict[str, Any]) -> None:
    """Write the results and their table."""
    RESULTS.write_text(json.dumps(stored, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(draw_signed(stored))


def main() -> None:
    """Fill the rows that are asked for, and store each with those that were stored before."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, nargs="?", help="of Diffusers' repository")
    parser.add_argument("--only", nargs="+", help="these rows, again, in this order")
    parser.add_argument("--table", action="store_true", help="only write the table")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    stored = load()
    if not options.table:
        import_torchvision()
        sys.path.insert(0, str(options.checkout))
        if options.only:
            named = {x.name: x for x in list_subjects(options.checkout)}
            subjects = [named[x] for x in options.only]
        else:
            subjects = [x for x in choose(options.checkout) if x.name not in stored["rows"]]
        warm_up()
        for subject in subjects:
            row = make_in_process(subject, make_ways)
            stored["rows"][row.pop("name")] = row
            stored["rows"] = dict(sorted(stored["rows"].items()))
            stored |= {"command": "python benchmarks/every_way.py CHECKOUT"}
            stored |= {"machine": describe_machine(), "date": time.strftime("%Y-%m-%d")}
            write(stored)
            words = [
                row.get(x, {}).get("outcome") for x in ("quantization_config", "guard", "encoder")
            ]
            print(
                subject.name,
                *words,
                row.get("says", row.get("said", "")),
                row["seconds"],
                flush=True,
            )
    write(stored)


if __name__ == "__main__":
    main()
