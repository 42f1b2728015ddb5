"""Rescaling of the classes in Diffusers' own tests, with configurations drawn at random.

Each draw takes a class with the configuration and arguments that Diffusers tests it with, random weights
by its seed, and one of the ways in which its weights make it overflow fp16, by a random number of bits.
`rescale_` gets that call; what it gives is held against bf16, in fp32 to the last bit and cast to fp16.
Diffusers' tests are no part of its package: take them from its repository, and install what they import
(`pip install parameterized requests-mock`).

    git clone --depth 1 --branch v0.42.1 https://github.com/huggingface/diffusers /tmp/diffusers
    python benchmarks/zoo.py /tmp/diffusers                                  # a hundred draws
    python benchmarks/zoo.py /tmp/diffusers --classes OvisImage --draws 8 --print
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import random
import statistics
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from models.rescaling_models import (  # noqa: E402 (the path is set above)
    WAYS,
    cast_tree,
    randomise,
    scale_weights,
)
from stopdown.devices.environment import describe_machine  # noqa: E402
from stopdown.errors import StopdownError  # noqa: E402
from stopdown.numerics import iterate_tensors, measure_amax, relative_l2  # noqa: E402
from stopdown.scaling.folding.folds import cast_  # noqa: E402
from stopdown.scaling.rescale import rescale_  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
LONGEST_BITS = 26
LARGEST_SQUARED = 2.0**56
"""A sum of 65,536 squares of this is finite in fp32."""


@dataclass(frozen=True)
class Subject:
    """A class as Diffusers tests it.

    Attributes:
        name: of the class, and of the test that configures it where there are several.
        tester: an instance of that test.
    """

    name: str
    tester: Any

    def build(self, seed: int) -> tuple[torch.nn.Module, dict[str, Any]]:
        """The model with random weights, and the arguments of its call."""
        tester = self.tester
        if hasattr(tester, "get_init_dict"):
            config, given = tester.get_init_dict(), tester.get_dummy_inputs()
        else:
            config, given = tester.prepare_init_args_and_inputs_for_common()
        torch.manual_seed(seed)
        module = tester.model_class(**config).eval().requires_grad_(False)
        randomise(module)
        for parameter in module.parameters():
            if not bool(parameter.isfinite().all()):  # made by `torch.empty` (Lumina)
                parameter.normal_(0, 0.02)
        shift = {
            k: v + 0.1 * torch.randn(v.shape) if _is_latent(v) else v for k, v in given.items()
        }
        return module, shift


def _is_latent(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor) and value.is_floating_point() and value.unique().numel() > 9
    )


def list_subjects(checkout: Path) -> Iterator[Subject]:
    """Every class that the tests of models configure, by name."""
    sys.path.insert(0, str(checkout))
    _resize_without_torchvision()
    names: Counter[str] = Counter()
    for path in sorted((checkout / "tests" / "models").glob("*/test_*.py")):
        try:
            tests = importlib.import_module(
                ".".join(path.relative_to(checkout).with_suffix("").parts)
            )
        except Exception as error:
            print(f"{path.name}: {type(error).__name__}: {str(error)[:100]}", file=sys.stderr)
            continue
        for test in _list_testers(tests):
            name = test().model_class.__name__
            names[name] += 1
            yield Subject(name if names[name] == 1 else f"{name} #{names[name]}", test())


def _resize_without_torchvision() -> None:
    """Give Cosmos' transformers the one function that they take of torchvision."""
    cosmos = [
        importlib.import_module(f"diffusers.models.{x}")
        for x in ("transformers.transformer_cosmos", "controlnets.controlnet_cosmos")
    ]
    resize = SimpleNamespace(
        resize=lambda x, size, interpolation: torch.nn.functional.interpolate(
            x, size, mode="nearest"
        )
    )
    stand_in = SimpleNamespace(
        functional=resize, InterpolationMode=SimpleNamespace(NEAREST="nearest")
    )
    for module in cosmos:
        vars(module).setdefault("transforms", stand_in)


def _list_testers(tests: Any) -> list[type]:
    """The classes of a module that configure a model, one for each configuration."""
    found: dict[Any, type] = {}
    for value in vars(tests).values():
        if not isinstance(value, type) or value.__module__ != tests.__name__:
            continue
        config = getattr(value, "get_init_dict", None) or getattr(
            value, "prepare_init_args_and_inputs_for_common", None
        )
        if config is not None and getattr(value, "model_class", None) is not None:
            found.setdefault(config, value)
    return list(found.values())


def draw(subject: Subject, seed: int) -> dict[str, Any]:
    """One row: a class with random weights made to overflow, and what `rescale_` makes of it."""
    rng = random.Random(f"{subject.name} {seed}")
    row: dict[str, Any] = {"class": subject.name, "seed": seed}
    try:
        module, kwargs = subject.build(seed)
        reference = run(module, kwargs, torch.float32)
    except Exception as error:
        return row | {"outcome": "not built", "why": f"{type(error).__name__}: {error}"[:300]}
    ways = [w for w in WAYS if scale_weights(module, WAYS[w], 0)]
    row["way"] = way = rng.choice(ways) if ways else ""
    row["bits"] = enlarge(module, kwargs, WAYS.get(way, "$."), rng.randrange(4, LONGEST_BITS))
    reference = run(module, kwargs, torch.float32)
    if not is_finite(module, kwargs):
        return row | {"outcome": "not finite in fp32"}
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        row[name] = run_cast(module, kwargs, reference, dtype)
    started = time.perf_counter()
    try:
        rescaling = rescale_(module, (), kwargs)
    except StopdownError as error:
        row |= {"outcome": "refused", "why": str(error)[:400], "error": type(error).__name__}
        return row | {"seconds": time.perf_counter() - started}
    except Exception as error:
        row |= {"outcome": "raised", "why": f"{type(error).__name__}: {error}"[:400]}
        return row | {"where": traceback.format_exc()[-800:]}
    row["seconds"] = time.perf_counter() - started
    scaling = rescaling.scaling
    row |= {
        "exact": all(map(torch.equal, run(module, kwargs, torch.float32), reference)),
        "folds": len(scaling.exponents),
        "multiplies": len(scaling.multiplies),
        "fp32_modules": len(scaling.fp32_modules),
        "fp32_flops": scaling.fp32_flops,
        "wide_outputs": len(scaling.outputs),
        "stream": scaling.stream is not None,
        "note": scaling.note,
    }
    cast_(module, torch.float16, rescaling)
    try:
        error = row["rescaled"] = measure(run(module, kwargs, torch.float16), reference)
    except NotImplementedError as reason:  # the processor lacks an operation in fp16
        return row | {"outcome": "not run in fp16", "why": str(reason)[:300]}
    except Exception as reason:
        row |= {"outcome": "raised in fp16", "why": f"{type(reason).__name__}: {reason}"[:400]}
        return row | {"where": traceback.format_exc()[-800:]}
    if not row["exact"]:
        return row | {"outcome": "not exact"}
    if error is None:
        return row | {"outcome": "not finite"}
    is_worse = row["bf16"] is not None and error > max(row["bf16"], 2.0**-11)
    return row | {"outcome": "worse than bf16" if is_worse else "solved"}


def enlarge(module: torch.nn.Module, kwargs: dict[str, Any], pattern: str, most_bits: int) -> int:
    """Scale the weights of a way by as many bits as fp32 holds all values with; how many they are."""
    bits = most_bits if scale_weights(module, pattern, most_bits) else 0
    while bits > 0 and not is_finite(module, kwargs):
        scale_weights(module, pattern, -2)
        bits -= 2
    return bits


def is_finite(module: torch.nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether fp32 holds what modules return, and the squares of what norms are given."""
    held = True

    def look(part: torch.nn.Module, args: Any, output: Any) -> None:
        nonlocal held
        values = [x for x in iterate_tensors(output) if x.is_floating_point()]
        held = held and not any(bool((x.isnan() | (x == math.inf)).any()) for x in values)
        if "Norm" in type(part).__name__:
            given = [x for x in iterate_tensors(args) if x.is_floating_point() and x.dim() > 1]
            held = held and all(measure_amax(x) < LARGEST_SQUARED for x in given)

    hooks = [x.register_forward_hook(look) for x in module.modules()]
    run(module, kwargs, torch.float32)
    for hook in hooks:
        hook.remove()
    return held


def run(module: torch.nn.Module, kwargs: dict[str, Any], dtype: torch.dtype) -> list[torch.Tensor]:
    """The floating outputs of a call whose tensors are brought to a dtype.

    Times stay in fp32 unless the module has them in the dtype of its weights (Ideogram 4).
    """

    def call(least_dim: int) -> Any:
        torch.manual_seed(0)
        given = {
            k: v.clone_state() if isinstance(v, torch.Generator) else v for k, v in kwargs.items()
        }
        with torch.no_grad():
            return module(**cast_tree(given, dtype, least_dim))

    try:
        output = call(2)
    except RuntimeError:
        output = call(0)
    return [x for x in iterate_tensors(output) if x.is_floating_point()]


def run_cast(
    module: torch.nn.Module,
    kwargs: dict[str, Any],
    reference: list[torch.Tensor],
    dtype: torch.dtype,
) -> float | None:
    """The error of the module as it is, cast; None where it does not run or is not finite."""
    with cast_(module, dtype):
        try:
            return measure(run(module, kwargs, dtype), reference)
        except Exception:
            return None


def measure(outputs: list[torch.Tensor], reference: list[torch.Tensor]) -> float | None:
    """Relative 2-norm, of the worst output; None where one is not finite."""
    if not all(bool(x.isfinite().all()) for x in outputs):
        return None
    pairs = zip(outputs, reference, strict=True)
    errors = [0.0 if torch.equal(x.float(), y.float()) else relative_l2(x, y) for x, y in pairs]
    return max(errors) if math.isfinite(max(errors)) else None


def describe(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    counts = Counter(x["outcome"] for x in rows)
    solved = [x for x in rows if x["outcome"] == "solved"]
    ratios = [x["bf16"] / x["rescaled"] for x in solved if x.get("bf16") and x["rescaled"]]
    kinds = Counter(describe_means(x) for x in solved)
    lines = [
        f"# Rescaling: {len(rows)} draws of Diffusers' own configurations",
        "",
        "`python benchmarks/zoo.py CHECKOUT`: classes, configurations and arguments of Diffusers' tests,",
        "random weights by seed, one way to overflow with a random number of bits. Errors are relative",
        "2-norms against fp32.",
        "",
        "Outcomes: " + ", ".join(f"{count} {name}" for name, count in counts.most_common()) + ".",
        "Solved: " + ", ".join(f"{count} {name}" for name, count in kinds.most_common()) + ".",
        f"Median of bf16's error over that of rescaled fp16: {statistics.median(ratios or [0]):.1f}.",
        "",
        "| class | seed | overflow | bits | bf16 | fp16 | rescaled | bf16 : rescaled | how | outcome |",
        "|---|--:|---|--:|--:|--:|--:|--:|---|---|",
    ]
    for x in rows:
        cells = [_percent(x, name) for name in ("bf16", "fp16", "rescaled")]
        ratio = f"{x['bf16'] / x['rescaled']:.1f}" if x.get("bf16") and x.get("rescaled") else ""
        how = describe_means(x) if "rescaled" in x else ""
        why = f": {x['why'].splitlines()[0][:160]}" if "why" in x else ""
        row = [x["class"], str(x["seed"]), x.get("way", ""), str(x.get("bits", "")), *cells, ratio]
        lines.append(f"| {' | '.join([*row, how, x['outcome'] + why.replace('|', '/')])} |")
    return "\n".join(lines) + "\n"


def _percent(row: dict[str, Any], name: str) -> str:
    if name not in row:
        return ""
    return "inf" if row[name] is None else f"{100 * row[name]:.3g} %"


def describe_means(row: dict[str, Any]) -> str:
    """What a rescaling needs beside fp16."""
    if row.get("fp32_flops") or row.get("fp32_modules"):
        return f"{100 * row['fp32_flops']:.0f} % in fp32" if "way" in row else ""
    if row.get("stream"):
        return "fp32 between products"
    return "multiplies" if row.get("multiplies") else "fp16 alone"


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--classes", nargs="*", help="parts of names")
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="rows before this one are kept")
    parser.add_argument("--only", nargs="+", type=int, help="these rows again; others are kept")
    parser.add_argument("--print", action="store_true", help="store nothing")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    subjects = list(list_subjects(options.checkout))
    if options.classes:
        subjects = [x for x in subjects if any(y in x.name for y in options.classes)]
    order = random.Random(options.seed)
    drawn = list[Subject]()
    while subjects and len(drawn) < options.draws:
        drawn += order.sample(subjects, len(subjects))
    known, text = RESULTS / "zoo.json", (options.checkout / "setup.py").read_text()
    version = text.split('version="', 1)[1].partition('"')[0]
    rows = json.loads(known.read_text())["rows"] if options.first or options.only else []
    if any(row["class"] != subject.name for row, subject in zip(rows, drawn, strict=False)):
        parser.error(
            "other classes are drawn than in the stored rows: tests are missing or cannot be imported"
        )
    for number in options.only or range(options.first, options.draws):
        rows[number : number + 1] = [draw(drawn[number], options.seed + number)]
        print(json.dumps(rows[number]), flush=True)
        if not options.print:
            store(rows, options.seed, version)


def store(rows: list[dict[str, Any]], seed: int, checkout: str) -> None:
    """Write the rows as JSON and as a table, with the version that the tests say they are of."""
    import diffusers

    found = {
        "command": f"python benchmarks/zoo.py CHECKOUT --draws {len(rows)} --seed {seed}",
        "checkout": checkout,
        "machine": describe_machine(),
        "versions": {"torch": torch.__version__, "diffusers": diffusers.__version__},
        "rows": rows,
    }
    (RESULTS / "zoo.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "zoo.md").write_text(describe(rows))


if __name__ == "__main__":
    main()
