"""Every figure on a page, from `benchmarks/results`, and tables of what is known: `python docs/figures.py`.

A page holds `<!-- figure: name -->…<!-- end -->`. The command writes what the function of that name below
gives between the two. None of these functions holds a number of its own. The tables in `benchmarks/results`
end with where they come from: command, machine and versions, as the JSON file beside each has them.
"""

from __future__ import annotations

import ast
import functools
import json
import math
import re
import statistics
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from stopdown.report.pages import WORDS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
KNOWLEDGE = ROOT / "src" / "stopdown" / "knowledge"
READMES = [ROOT / "README.md", ROOT / "README.zh-CN.md"]
PAGES = [*READMES, *sorted((ROOT / "docs").rglob("*.md"))]

FIGURES: dict[str, Callable[[], str]] = {}
MARK = re.compile(r"<!-- figure: (\w+) -->(.*?)<!-- end -->", re.DOTALL)


def fill(text: str, page: str) -> str:
    """A page's text with every figure as it is now; a mark that is wrong is a `ValueError`."""

    def write(found: re.Match[str]) -> str:
        if found[1] not in FIGURES:
            raise ValueError(
                f"{page} asks for the figure {found[1]}, which docs/figures.py does not have."
            )
        value = FIGURES[found[1]]()
        value = f"\n\n{value}\n\n" if "\n" in value else value
        return f"<!-- figure: {found[1]} -->{value}<!-- end -->"

    filled = MARK.sub(write, text)
    rest = re.search(r"<!-- figure:.*|<!-- end -->", MARK.sub("", text))
    if rest or any("<!--" in found[2] for found in MARK.finditer(text)):
        raise ValueError(f"{page} has a mark of a figure without its other end.")
    return filled


def _figure(compute: Callable[[], str]) -> Callable[[], str]:
    FIGURES[compute.__name__] = compute
    return compute


@functools.cache
def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _make_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    lines = [headings, ["---"] + ["--:"] * (len(headings) - 1), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"


# Rescaling


def _rows() -> list[dict[str, Any]]:
    return list(_read("rescale")["rows"].values())


def _ratios(rows: Iterable[dict[str, Any]], name: str) -> list[float]:
    return [x["bf16"]["l2"] / x[name]["l2"] for x in rows if x.get(name)]


@_figure
def rescale_classes() -> str:
    return str(len({x["class"] for x in _rows()}))


@_figure
def rescale_cases() -> str:
    return str(len(_rows()))


@_figure
def rescale_exact() -> str:
    return str(sum(x["exact"] for x in _rows()))


_OVERFLOW = r"\b(NaN|Inf)\b|[Oo]verflow|not finite|black|grey"
"""Words of what plain fp16 stopped with when values left its range, as in `every_pipeline.py`."""


def _overflowing() -> dict[str, list[bool]]:
    """By class of pipeline: whether each of its rows that overflows in plain fp16 is right."""
    found: dict[str, list[bool]] = {}
    for row in _read("every_pipeline")["rows"].values():
        said = row.get("plain", {}).get("said", "")
        if row.get("fp32", {}).get("code") == 0 and re.search(_OVERFLOW, said):
            found.setdefault(row["class"], []).append(row["outcome"] == "right")
    return found


@_figure
def pipelines_overflowing() -> str:
    return str(len(_overflowing()))


@_figure
def pipelines_right() -> str:
    return str(sum(map(all, _overflowing().values())))


@_figure
def rescale_ratio() -> str:
    return f"{statistics.median(_ratios(_rows(), 'rescaled fp16')):.1f}"


@_figure
def rescale_healthy_ratio() -> str:
    return f"{statistics.median(x['healthy'] for x in _rows()):.1f}"


@_figure
def residual_cases() -> str:
    return str(len(_ratios(_rows(), "fp32 residual")))


@_figure
def residual_ratio() -> str:
    return f"{statistics.median(_ratios(_rows(), 'fp32 residual')):.1f}"


@_figure
def rescale_multiplies() -> str:
    counts = [x["multiplies"] for x in _rows()]
    return f"{sum(n == 0 for n in counts)} of {len(counts)}"


def _worst_words(name: str) -> float:
    """Error of the prompt that the model never saw, at guidance 6."""
    rows = _read("error_by_step")["rows"]
    found = (x for x in rows if "standing still" in x["prompt"] and x["guidance"] == 6)
    return float(next(found)["errors"][name][-1])


@_figure
def wide_encoder() -> str:
    worst = _worst_words("bf16")
    plain, wide = (worst / _worst_words(x) for x in ("fp16", "denoiser alone in fp16"))
    return (
        f"the error is {plain:.1f} times smaller than that of bf16 if everything is in fp16, "
        f"and {wide:.0f} times smaller if the encoder is in fp32"
    )


def _full(name: str, stage: str) -> dict[str, Any]:
    found: dict[str, Any] = _read("full_size_runs")["rows"][name].get(stage, {})
    return found


def _full_error(name: str, stage: str) -> str:
    row = _full(name, stage)
    return _percent(row["call_error"]) if row.get("call_error") is not None else "–"


@_figure
def full_runs_table() -> str:
    """Error of one call in each format, and what its certificates cover."""
    rows = []
    for name in _read("full_size_runs")["rows"]:
        shares = [_full(name, f"certify{end}") for end in (", fp32 residual", "")]
        runs = ("by certificate, fp32 residual", "by plan", "by certificate")
        rows.append(
            [
                name,
                _full_error(name, "bf16"),
                *(_full_error(name, f"fp16 {x}") for x in runs),
                *(
                    f"{100 * x['bounded'] // x['values']}%" if x.get("values") else "–"
                    for x in shares
                ),
            ]
        )
    heads = ("checkpoint", "bf16", "`auto`", "measured in fp32", "stream in fp16",
              "certified: `auto`", "certified: stream in fp16")  # fmt: skip
    made = [n for n in range(len(heads)) if any(row[n] != "–" for row in rows)]
    return _make_table([heads[n] for n in made], [[row[n] for n in made] for row in rows])


_H3_CASES = {"width": "all widths, 2 of 50 blocks", "depth": "all 50 blocks, narrow"}
_H3_VARIANTS = {"bf16": "bf16", "fp16": "plain fp16", "rescaled": "measured",
                "rescaled, fp32 residual": "from the weights"}  # fmt: skip


@_figure
def h3_table() -> str:
    """Error of MiniMax H3's video in each format."""
    rows = _read("minimax_h3")["rows"]
    return _make_table(
        ["model", *_H3_VARIANTS.values()],
        [
            [title, *(_h3_error(rows[case]["variants"][x]) for x in _H3_VARIANTS)]
            for case, title in _H3_CASES.items()
        ],
    )


def _h3_error(variant: dict[str, Any]) -> str:
    return "NaN" if variant["video"] is None else _percent(variant["video"])


@_figure
def h3_magnitudes() -> str:
    """The residual stream that users report, and the benchmark's."""
    rows = _read("minimax_h3")["rows"]
    streams = [rows[case]["stream"] for case in _H3_CASES]
    reported = {"sinks, first block": ("sinks", 0, "81 thousand"),
                "sinks, last block": ("sinks", -1, "4.3 million"),
                "other rows, last block": ("others", -1, "small")}  # fmt: skip
    return _make_table(
        ["residual stream", "reported", *_H3_CASES.values()],
        [
            [name, words, *(f"{float(f'{x[kind][at]:.2g}'):,.0f}" for x in streams)]
            for name, (kind, at, words) in reported.items()
        ],
    )


@_figure
def h3_memory() -> str:
    return _gib(_read("minimax_h3")["rows"]["width"]["rss_bytes"])


@_figure
def h3_weights() -> str:
    count = _read("minimax_h3")["published_parameters"]
    return f"{count / 1e9:.0f} billion weights, {2 * count / 1e9:.0f} GB"


@_figure
def encoders_summary() -> str:
    """What the table of encoders comes to."""
    rows = _read("encoders")["rows"]
    solved = [x for x in rows if math.isfinite(x.get("fp16", math.inf))]
    ratio = statistics.median(x["bf16"] / x["fp16"] for x in solved)
    shares = [x["certified"] or 0 for x in solved if x["ranges"] == "bound"]
    return (
        f"Of {len(rows)} calls of {len({x['class'] for x in rows})} classes, "
        f"{sum(x.get('exact', False) for x in rows)} are the same in fp32 bit for bit, and {len(solved)} "
        f"finite in fp16. Their error is {ratio:.1f} times (median) lower than bf16's. Bounds were "
        f"asked for in {len(shares)} of these calls; they certify 90 % of the values or more in "
        f"{sum(x >= 0.9 for x in shares)}."
    )


def _trained(name: str) -> dict[str, Any]:
    return next(x for x in _read("trained")["rows"] if x["model"].startswith(name))


@_figure
def trained_summary() -> str:
    """What plain fp16 makes of trained weights, and what is left of a model's words."""
    gemma, terrain = _trained("Gemma"), _trained("consistency")
    assert gemma["plain fp16"]["error"] is None
    assert terrain["plain fp16"]["error"] is None
    assert gemma["certified"]["share"] == 1
    words = (gemma[x]["same words"] for x in ("bf16", "rescaled", "certified"))
    return (
        f"Plain fp16 returns NaN at every word of Gemma 3 270M, whose values reach {gemma['largest']:.3g}, "
        "and at every place of a network that draws terrain, whose values reach "
        f"{terrain['largest']:.3g}. Gemma's likeliest word is that of fp32 "
        "in {:.0%} of all places in bf16, in {:.0%} rescaled, and in {:.0%} "
        "with bounds, which certify all of its values.".format(*words)
    )


@_figure
def full_5b_residual() -> str:
    return _full_error("CogVideoX-5B", "fp16 by certificate, fp32 residual")


@_figure
def full_5b_certificate() -> str:
    return _full_error("CogVideoX-5B", "fp16 by certificate")


@_figure
def full_5b_bf16() -> str:
    return _full_error("CogVideoX-5B", "bf16")


@_figure
def full_sdxl_plain() -> str:
    return _full_error("SDXL, healthy", "fp16")


@_figure
def full_sdxl_auto() -> str:
    return _full_error("SDXL, healthy", "fp16 by certificate, fp32 residual")


@_figure
def certify_5b_seconds() -> str:
    """Seconds by the clock for the plan of a whole CogVideoX-5B, in two processes."""
    row = _read("default_run")["rows"]["CogVideoX-5B, 15 GiB"]
    return f"{row['certificate']['elapsed_s']:.0f}"


@_figure
def full_memory() -> str:
    row = _full("CogVideoX-2B", "fp16 by plan")
    peaks = (row[x] / 2**30 for x in ("measured_bytes", "predicted_bytes", "load_peak_bytes"))
    return (
        "{:.2f} GiB while it runs ({:.2f} were predicted) and {:.2f} GiB while it is loaded".format(
            *peaks
        )
    )


@_figure
def forgotten() -> str:
    rows = [x["errors"] for x in _read("error_by_step")["rows"] if x["kind"] == "language"]
    plain = [x["fp32, from fp16's first step"] for x in rows]
    return f"{statistics.median(x[0] / x[-1] for x in plain):.0f}"


@_figure
def largest_score() -> str:
    return f"{_read('encoder_rounding')['largest_score']:.0f}"


@_figure
def shapes_ratio() -> str:
    return f"{_read('shapes_fp16')['bf16_over_planned_median']:.1f}"


@_figure
def shapes_ratio_worst() -> str:
    return f"{_read('shapes_fp16')['bf16_over_planned_worst']:.1f}"


@_figure
def shapes_prompts() -> str:
    return str(_read("shapes_fp16")["prompts"])


@_figure
def converted_ratio() -> str:
    return f"{_read('convert')['bf16_over_converted']['median']:.1f}"


@_figure
def converted_ratio_worst() -> str:
    return f"{_read('convert')['bf16_over_converted']['worst']:.1f}"


@_figure
def converted_prompts() -> str:
    return str(len(_read("convert")["errors"]["bf16 plain"]))


def _list_nearer() -> list[float]:
    """How many times nearer to fp32 than bf16 converted files are."""
    return [row["bf16"] / row["converted fp16"] for row in _read("single_files")["rows"]]


@_figure
def single_files_most() -> str:
    return f"{max(x['converted fp32'] for x in _read('single_files')['rows']):.1e}"


@_figure
def single_files_models() -> str:
    return str(len({row["model"] for row in _read("single_files")["rows"]}))


@_figure
def single_files_worst() -> str:
    return f"{min(_list_nearer()):.0f}"


@_figure
def single_files_median() -> str:
    return f"{statistics.median(_list_nearer()):.0f}"


@_figure
def single_files_exact() -> str:
    rows = _read("single_files")["rows"]
    return f"{sum(row['converted fp32'] == 0 for row in rows)} of {len(rows)}"


# What it costs


@_figure
def speed_ratio() -> str:
    return f"{_read('speed')['ratio_median']:.3f}"


@_figure
def speed_table() -> str:
    rows = _read("speed")["rows"]
    return _make_table(
        ("class", "multiplies", "rescaled over plain, median", "quartiles"),
        [
            [
                x["class"],
                x["multiplies"],
                f"{x['ratio_median']:.3f}",
                "–".join(f"{q:.3f}" for q in x["ratio_quartiles"]),
            ]
            for x in rows
        ],
    )


@_figure
def own_share() -> str:
    return _percent(_read("generate")["own_share_median"])


@_figure
def guard_added() -> str:
    rows = [x for x in _read("guard")["rows"] if x["work"].startswith("CogVideoX")]
    plain, watched = (next(x for x in rows if x["way"] == way) for way in ("plain", "guard"))
    added = watched["operations"] - plain["operations"]
    return f"{added:,} (+{_percent(watched['operations_ratio'] - 1)})"


@_figure
def guard_operations() -> str:
    rows = [x for x in _read("guard")["rows"] if x["work"].startswith("CogVideoX")]
    return f"{next(x['operations'] for x in rows if x['way'] == 'plain'):,}"


@_figure
def certificate_table() -> str:
    rows = []
    for x in _read("certificates_full")["rows"]:
        named, shown = {
            "T5-XXL": ("text_encoder", "T5-XXL"),
            "CogVideoX-5B": ("transformer", "CogVideoX-5B, transformer"),
        }[x["name"]]
        (own,) = (c for c in x["components"] if c["component"] == named)
        rows.append(
            [
                shown,
                f"{x['weight_bytes'] / 1e9:.1f} GB",
                f"{x['elapsed_s']:.0f} s",
                _gib(x["peak_bytes"]),
                f"{own['bounded']:,} of {own['values']:,}",
            ]
        )
    return _make_table(("component", "weights", "time", "peak memory", "certified values"), rows)


# Fixed questions


@_figure
def forgeries() -> str:
    found = _read("random_forgeries")
    refused = f"{found['refused']:,} of {found['forgeries']:,} refused"
    return f"{refused}, {found['true']:,} true, {found['false']:,} false"


@_figure
def faults_repaired() -> str:
    rows = _read("fault_matrix")["rows"]
    return f"{sum(x['passes'] for x in rows)} of {len(rows)}"


@_figure
def faults_switched_off() -> str:
    rows = _read("fault_matrix")["rows"]
    return f"{sum(x['passes_switched_off'] for x in rows)} of {len(rows)}"


@_figure
def fault_pipelines() -> str:
    return str(len({x["pipeline"] for x in _read("fault_matrix")["rows"]}))


@_figure
def fault_schedulers() -> str:
    """Schedulers that were named; a pipeline's own is one of them."""
    return str(len({x["scheduler"] for x in _read("fault_matrix")["rows"] if x["scheduler"]}))


@_figure
def check_found() -> str:
    faults = _read("check")["faults"]
    return f"{sum(x['found'] for x in faults)} of {len(faults)}"


@_figure
def check_before_loading() -> str:
    return str(sum(x["when"] == "before loading" for x in _read("check")["faults"]))


@_figure
def check_healthy() -> str:
    rows = _read("check")["healthy"]
    return f"{sum(not x['findings'] for x in rows)} of {len(rows)}"


@_figure
def check_table() -> str:
    return _make_table(
        ("model", "time", "peak memory", "findings"),
        [
            [
                x["model"],
                f"{x['elapsed_s']:.0f} s",
                _gib(x["peak_bytes"]),
                len(x["findings"]),
            ]
            for x in _read("check")["full_size"]
        ],
    )


@_figure
def predicted_table() -> str:
    """Weights of well-known models, and what PyTorch's allocator reserves under their strategies."""
    rows = []
    for model, entry in _read("memory_predicted")["results"].items():
        parameters = sum(entry["parameters"].values())
        peaks = entry["reserved_bytes"]
        shown = [_gib(peaks[name]) if name in peaks else "–" for name in SHOWN_STRATEGIES]
        least = next(name for name in peaks if peaks[name] == min(peaks.values()))
        rows.append(
            [
                model,
                entry["precision"],
                f"{2 * parameters / 1e9:.1f} GB",
                f"{4 * parameters / 1e9:.1f} GB",
                *shown,
                f"{_gib(peaks[least])} ({least})",
            ]
        )
    headings = ("model", "precision", "weights", "in fp32", *SHOWN_STRATEGIES, "smallest")
    return _make_table(headings, rows)


SHOWN_STRATEGIES = ("resident", "component", "component+tiling")


@_figure
def first_forecast() -> str:
    """Tensors that were forecast for the first run on a GPU, which ran out of memory."""
    (model,) = _read("memory_reserved")["results"].values()
    return _gib(model["forecast_then"]["peak_bytes"])


@_figure
def memory_table() -> str:
    """Predictions beside what others measured on a GPU and published."""
    rows = [
        [
            model,
            x["precision"],
            _describe_size(x),
            x["strategy"],
            f"{x['published']:g} {'GiB' if model.startswith('CogVideoX') else 'GB'}",
            f"{x['predicted_gib']:.1f} GiB",
        ]
        for model, entry in _read("memory_published")["results"].items()
        for x in entry["rows"]
    ]
    headings = ("model", "precision", "size", "strategy", "published", "predicted")
    return _make_table(headings, rows)


def _describe_size(row: dict[str, Any]) -> str:
    size = row["size"]
    return f"{size['width']} × {size['height']}" if size else "default"


@_figure
def memory_error() -> str:
    """How far predicted peaks are from measured ones, over all models and strategies on the CPU."""
    ratios = [
        abs(s["predicted_over_measured"] - 1)
        for model in _read("memory_measured")["results"].values()
        for s in model["strategies"]
    ]
    return (
        f"{_percent(statistics.median(ratios))} (worst {_percent(max(ratios))}, {len(ratios)} runs)"
    )


@_figure
def compare_table() -> str:
    """The bundled model on 20 prompts in six precisions."""
    record = _read("compare")["comparison"]
    rows = []
    for name in ("fp32", "bf16", "fp16", "autocast", "clamp", "plan"):
        x = record[name]
        is_measured = x["psnr_db_worst"] is not None
        worst = f"{x['psnr_db_worst']:.1f} dB" if is_measured else "–"
        rmse = f"{x['rmse_median']:.4f}" if is_measured else "–"
        shown = {"fp16": "fp16-plain", "plan": "plan.json"}.get(name, name)
        rows.append([f"`{shown}`", WORDS.get(x["verdict"], x["verdict"]), worst, rmse])
    return _make_table(("precision", "verdict", "worst PSNR", "median RMSE"), rows)


@_figure
def compare_prompts() -> str:
    return str(_read("compare")["report"]["prompts"])


@_figure
def report_size() -> str:
    """How large the page of the largest comparison is, and how fast it opens."""
    made = _read("compare")["report"]
    return (
        f"{made['prompts']} prompts in {made['precisions']} precisions has {made['megabytes']:.1f} MB "
        f"and opens in {made['opening_median_s']:.1f} s"
    )


@_figure
def score() -> str:
    return _percent(_read("shapes_score")["rows"][0]["all_four"])


@_figure
def score_prompts() -> str:
    return str(_read("shapes_score")["rows"][0]["prompts"])


@_figure
def shapes_parameters() -> str:
    """Millions of parameters of the bundled model, from the headers of its files."""
    from stopdown.sources.headers import read_header

    files = (ROOT / "src" / "stopdown" / "models" / "shapes").rglob("*.safetensors")
    stored = [tensor for file in files for tensor in read_header(file).values()]
    return f"{sum(math.prod(tensor.shape) for tensor in stored) / 1e6:.1f}"


@_figure
def public_scripts() -> str:
    return str(len(_read("public_scripts")["rows"]))


@_figure
def reported_failures() -> str:
    cases = tomllib.loads((ROOT / "benchmarks/cases/failures.toml").read_text(encoding="utf-8"))
    return str(len(cases["case"]))


# What is known, from the files that the commands read


@_figure
def devices() -> str:
    """The devices that `--device` knows, by their titles."""
    files = sorted((KNOWLEDGE / "devices").glob("*.toml"))
    known = [tomllib.loads(file.read_text(encoding="utf-8")) for file in files]
    rows = [f"| `{entry['name']}` | {entry['title']} |" for entry in known]
    return "\n".join(["| `--device` | device |", "|---|---|", *rows])


@_figure
def results_table() -> str:
    """Every stored result with what it measures, the command that made it, and its seconds."""
    rows = []
    for path in sorted(RESULTS.glob("*.json")):
        table = path.with_suffix(".md")
        shown = table if table.exists() else path
        command = _name_command(path.stem)
        (script, *_) = re.findall(r"python (\w+/\w+\.py)", command)
        text = (ROOT / script).read_text(encoding="utf-8")
        purpose = (ast.get_docstring(ast.parse(text)) or "").splitlines()[0].rstrip(".")
        seconds = _read(path.stem).get("made", {}).get("elapsed_s")
        taken = "–" if seconds is None else f"{seconds:.0f} s"
        name = f"[{path.stem}](../benchmarks/results/{shown.name})"
        rows.append([name, purpose, f"`{command}`", taken])
    return "\n".join(
        ["| result | what is measured | command | time |", "|---|---|---|--:|",
         *("| " + " | ".join(row) + " |" for row in rows)]
    )  # fmt: skip


@_figure
def measured_devices() -> str:
    """Every device that `stopdown bench` was run on: times over fp32's, and errors."""
    tables = []
    known = tomllib.loads(
        (ROOT / "src/stopdown/knowledge/rules/measured.toml").read_text(encoding="utf-8")
    )
    for device in known["device"]:
        rows = [
            [f"{row['subject']}, {row['way']}", f"{row['time_ratio']:.3g}", _name_error(row)]
            for row in device["rows"]
        ]
        title = f"[{device['name']}](../{device['source']}), {device['backend']}, torch {device['torch']}"
        tables.append(f"{title}:\n\n{_make_table(['way', 'time over fp32', 'error'], rows)}")
    return "\n\n".join(tables)


def _name_error(row: dict[str, Any]) -> str:
    return f"{100 * row['rel_err']:.2g} %" if "rel_err" in row else "NaN"


@_figure
def machine() -> str:
    """The machine of the rescaling results."""
    return _name_machine("rescale")


def _name_command(result: str) -> str:
    """The command that made a result, or those that made its parts."""
    known = _read(result)
    parts = [known] if "command" in known else [x for x in known.values() if "command" in x]
    return "`, `".join(part["command"] for part in parts)


def _name_machine(result: str) -> str:
    known = _read(result)["machine"]
    versions = ", ".join(
        f"{name} {known['versions'][name]}" for name in ("torch", "diffusers", "transformers")
    )
    return f"{known['cpu']}, {known['cores']} cores; Python {known['python']}, {versions}"


ORIGIN = "Stored by `"
TABLES = [path for path in sorted(RESULTS.glob("*.md")) if path.with_suffix(".json").exists()]


def sign(text: str, result: str) -> str:
    """A table with its origin as its last line: command, machine and versions."""
    body = text.partition(f"\n{ORIGIN}")[0].rstrip("\n")
    return f"{body}\n\n{ORIGIN}{_name_command(result)}` on {_name_machine(result)}.\n"


def main() -> None:
    """Write every figure into its page, and its origin under every table."""
    for page in [*PAGES, *TABLES]:
        text = page.read_text(encoding="utf-8")
        filled = sign(text, page.stem) if page in TABLES else fill(text, page.name)
        if filled != text:
            page.write_text(filled, encoding="utf-8")


if __name__ == "__main__":
    main()
