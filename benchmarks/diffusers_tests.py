"""Diffusers' own tests of five pipelines, on pipelines that a `quantization_config` loaded.

Diffusers' wheel has no tests: `STOPDOWN_DIFFUSERS` names a checkout. Its tests build a pipeline by
`get_pipeline`. Here that saves the pipeline and loads it again: in fp16 by the config, or in fp32 with the
config's plan put on by `apply_plan`. Each test runs in both ways. What pipelines return is hashed call by
call, so the results are the same if outcomes and hashes are. Tests that fail run as they are as well, and
are listed: the tiny tokenizers and the config that Diffusers' tests would download are made here.

    STOPDOWN_DIFFUSERS=... python benchmarks/diffusers_tests.py                 # all
    STOPDOWN_DIFFUSERS=... python benchmarks/diffusers_tests.py --only flux     # the others are kept
    python benchmarks/diffusers_tests.py --table                                # only write the table anew
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CHECKOUT = "STOPDOWN_DIFFUSERS"
FAMILIES = {
    "cogvideox": "cogvideo/test_cogvideox.py",
    "flux": "flux/test_pipeline_flux.py",
    "qwen-image": "qwenimage/test_qwenimage.py",
    "sd": "stable_diffusion/test_stable_diffusion.py",
    "wan": "wan/test_wan.py",
}
"""Families to their files under `tests/pipelines`."""

CHOSEN = "not Cache and not Broadcast"
"""Tests of what Diffusers caches between steps are left out: they are half of the time."""


_NOT_SAVED = (
    "A pipeline under `apply_plan` is not saved: its files would have exponents and not say so. One that "
    "was loaded by the config is, and loads again."
)
EXPLAINED = {
    "test_save_load_local": _NOT_SAVED,
    "test_save_load_optional_components": _NOT_SAVED,
    "test_loading_with_incorrect_variants_raises_error": _NOT_SAVED,
    "test_loading_with_variants": _NOT_SAVED,
    "test_serialization_with_variants": _NOT_SAVED,
    "test_torch_dtype_dict": f"{_NOT_SAVED} What a plan keeps in fp32 is so with every dtype.",
    "test_encode_prompt_works_in_isolation": "Without its text encoder the rest is in fp32 by the plan; "
    "embeddings are in fp16. `apply_plan` casts arguments if a plan has several formats, a config "
    "casts them always.",
    "test_inference": "The pipeline returns fp16, and the test holds that against numbers in fp32.",
    "test_to_dtype": "Casts of a model with a plan are refused, or end in the plan's own dtypes.",
    "test_fused_qkv_projections": "The fused layers are made anew, without the casts of the plan.",
}
"""Tests to why the two ways differ or both fail; another difference ends the benchmark with 1."""


class Recorder:
    """Pytest plugin that loads pipelines in one way, and notes what tests and calls gave."""

    def __init__(self, way: str, path: Path, folder: Path) -> None:
        self.way, self.path, self.folder = way, path, folder
        self.rows: dict[str, dict[str, Any]] = {}
        self.calls: list[str] = []
        self.loaded = 0

    def pytest_collection_finish(self, session: Any) -> None:
        """Put the other `get_pipeline` and the noting call in place, once the tests are imported."""
        common = sys.modules["tests.pipelines.testing_utils.common"]
        kind = common.BasePipelineOutputMixin
        if self.way != "as it is":
            kind.get_pipeline = self._replace(kind.get_pipeline)
        for pipeline in {x.cls.pipeline_class for x in session.items if _names_pipeline(x.cls)}:
            pipeline.__call__ = self._note(pipeline.__call__)

    def _replace(self, build: Any) -> Any:
        @functools.wraps(build)
        def get_pipeline(test: Any, **components: Any) -> Any:
            given, drawn = components, test.get_dummy_components()
            lacking = {name: x for name, x in drawn.items() if given and given.get(name) is None}
            self.loaded += 1
            return self._load(build(test, **given | lacking), lacking)

        return get_pipeline

    def _load(self, pipe: Any, lacking: Collection[str]) -> Any:
        """A whole pipeline, loaded again; of a part, the components that it `lacks` are None."""
        import torch

        import stopdown
        from stopdown.quantizers.script_loading import join_config_plans

        folder = Path(tempfile.mkdtemp(dir=self.folder)) / "model"
        pipe.save_pretrained(folder)
        config = stopdown.quantization(folder)
        absent = {name: None for name, x in pipe.components.items() if x is None or name in lacking}
        for name in {*absent} & {*config.quant_mapping}:
            del config.quant_mapping[name]
        if self.way == "config":
            options = {"dtype": torch.float16, "quantization_config": config}
            made = type(pipe).from_pretrained(folder, **options, **absent)
        else:
            made = type(pipe).from_pretrained(folder, dtype=torch.float32, **absent)
            if config.quant_mapping:
                stopdown.apply_plan(made, join_config_plans(config))
        made.set_progress_bar_config(disable=None)
        return made

    def _note(self, call: Any) -> Any:
        @functools.wraps(call)
        def noted(pipe: Any, *args: Any, **options: Any) -> Any:
            found = call(pipe, *args, **options)
            self.calls.append(_hash(found))
            return found

        return noted

    def pytest_runtest_setup(self, item: Any) -> None:
        """Begin a test."""
        self.calls, self.loaded = [], 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note how a test ended."""
        if report.when == "call" or report.outcome != "passed":
            said = ""
            if report.failed:
                crash = getattr(report.longrepr, "reprcrash", None)
                said = crash.message.splitlines()[0] if crash else str(report.longrepr)[-200:]
            self.rows[report.nodeid.partition("::")[2]] = {
                "outcome": report.outcome,
                "said": said[:200],
                "calls": self.calls,
                "loaded": self.loaded,
            }

    def pytest_sessionfinish(self) -> None:
        """Write what was noted."""
        self.path.write_text(json.dumps(self.rows), encoding="utf-8")


def _names_pipeline(kind: Any) -> bool:
    return isinstance(getattr(kind, "pipeline_class", None), type)


def _hash(output: Any) -> str:
    """A digest of all tensors and arrays that a pipeline returned."""
    import numpy as np
    import torch

    digest = hashlib.sha256()
    waiting = list(output.values()) if isinstance(output, dict) else [output]
    while waiting:
        value = waiting.pop(0)
        if isinstance(value, (list, tuple)):
            waiting[:0] = value
        elif isinstance(value, torch.Tensor):
            digest.update(value.detach().float().cpu().numpy().tobytes())
        elif value is not None:
            digest.update(np.asarray(value).tobytes())
    return digest.hexdigest()[:16]


def answer_hub() -> None:
    """Have tokenizers and the config of the Hub's tiny models made here."""
    import transformers

    from stopdown.pipelines.tiny_pipelines import make_clip_tokenizer, make_t5_tokenizer

    def take(kind: str, make: Any) -> None:
        def from_pretrained(name: str, *args: Any, **options: Any) -> Any:
            return (
                make() if name.startswith("hf-internal-testing/") else read(name, *args, **options)
            )

        read = getattr(transformers, kind).from_pretrained
        getattr(transformers, kind).from_pretrained = from_pretrained

    def make_t5_config() -> Any:
        return transformers.T5Config(
            vocab_size=1103, d_model=32, d_kv=8, d_ff=37, num_layers=5, num_heads=4
        )

    take("AutoConfig", make_t5_config)
    take("AutoTokenizer", make_t5_tokenizer)
    take("CLIPTokenizer", make_clip_tokenizer)
    take("Qwen2Tokenizer", make_qwen_tokenizer)


def make_qwen_tokenizer() -> Any:
    """A `Qwen2Tokenizer` that knows single bytes."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    vocab = {piece: index for index, piece in enumerate(sorted(ByteLevel.alphabet()))}
    return Qwen2Tokenizer(vocab=vocab, merges=[])


def run_way(path: str, way: str, chosen: str, only: Collection[str] = ()) -> dict[str, Any]:
    """Run a file of tests, or some tests of it, in one way, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "rows.json"
        nodes = [f"{path}::{test}" for test in only] or [path]
        command = [sys.executable, __file__, "--choose", chosen, "--run", way, str(result), folder]
        command += nodes
        subprocess.run(command, cwd=os.environ[CHECKOUT], check=False)
        return dict(json.loads(result.read_text(encoding="utf-8")))


def run_tests(way: str, result: Path, folder: Path, chosen: str, nodes: Collection[str]) -> int:
    """Run pytest in this process, with the plugin."""
    import warnings

    import diffusers.pipelines  # noqa: F401  # a checkout puts its own source at the head of the path
    import pytest

    warnings.simplefilter("ignore")
    answer_hub()
    options = [
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "--tb=no",
        "-W",
        "ignore",
        "-k",
        chosen,
    ]
    plugin = Recorder(way, result, folder)
    return int(pytest.main([*options, *(f"tests/pipelines/{x}" for x in nodes)], plugins=[plugin]))


def measure(name: str, chosen: str) -> dict[str, Any]:
    """Run the tests of one family, and those that fail once more as they are."""
    path = FAMILIES[name]
    config, planned = (run_way(path, way, chosen) for way in ("config", "apply_plan"))
    loaded = [x for x in config if config[x]["loaded"]]
    same = [
        x for x in loaded if all(config[x][key] == planned[x][key] for key in ("outcome", "calls"))
    ]
    failing = [x for x in loaded if "failed" in (config[x]["outcome"], planned[x]["outcome"])]
    bare = run_way(path, "as it is", chosen, failing) if failing else {}
    found = (("config", config), ("apply_plan", planned), ("as it is", bare))
    listed = {*failing, *loaded} - ({*same} - {*failing})
    return {
        "name": name,
        "chosen": chosen,
        "tests": len(config),
        "loaded": len(loaded),
        "passed": Counter(config[x]["outcome"] for x in loaded)["passed"],
        "passed by apply_plan": Counter(planned[x]["outcome"] for x in loaded)["passed"],
        "calls": sum(len(config[x]["calls"]) for x in loaded),
        "same": len(same),
        "listed": {
            test: {
                "same": test in same,
                **{way: rows[test]["said"] or "passed" for way, rows in found if test in rows},
            }
            for test in sorted(listed)
        },
    }


def write_table(record: dict[str, Any], path: Path) -> None:
    """The rows as Markdown."""
    rows = record["rows"]
    heads = (
        "family", "tests left out", "tests that loaded a pipeline", "passed by the config", "by apply_plan",
        "calls of pipelines", "same outcome and same bits",
    )  # fmt: skip
    lines = [
        f"# Diffusers' own tests of {len(rows)} pipelines, loaded by `quantization_config`",
        "",
        f"Tests of {record['checkout']}. A test counts if it builds its pipeline by `get_pipeline`, in "
        "whose place the config loads it. Same: the outcome by the "
        "config is that by `apply_plan`, and so is every bit that a pipeline returned.",
        "",
        f"| {' | '.join(heads)} |",
        "| --- | --- |" + " --: |" * 5,
    ]
    for stored in rows:
        row = stored | {
            "left": stored.get("chosen", CHOSEN).replace("not ", "").replace(" and", ",")
        }
        cells = (
            row[x]
            for x in ("name", "left", "loaded", "passed", "passed by apply_plan", "calls", "same")
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    listed = [(row["name"], *found) for row in rows for found in row["listed"].items()]
    for is_same, title in ((False, "Not the same"), (True, "The same, and failed")):
        lines += ["", f"## {title}", ""]
        chosen = [(name, test, said) for name, test, said in listed if said["same"] == is_same]
        for name, test, said in chosen:
            parts = "; ".join(f"{way}: {said[way]}" for way in said if way != "same")
            why = EXPLAINED.get(_name_test(test), "" if is_same else "Not explained.")
            lines.append(" ".join(filter(None, (f"- {name}, `{test}`.", why, parts))))
        if not chosen:
            lines.append("None.")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    """Run the tests, and write the record and the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=(), help="some families; the others are kept")
    parser.add_argument("--choose", default=CHOSEN, help="which tests, as pytest's -k takes it")
    parser.add_argument("--table", action="store_true", help="only write the table anew")
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        way, result, folder, *nodes = options.run
        return run_tests(way, Path(result), Path(folder), options.choose, nodes)
    path = RESULTS / "diffusers_tests.json"
    record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"rows": []}
    if not options.table:
        from stopdown.devices.environment import describe_machine

        commit = ["git", "-C", os.environ[CHECKOUT], "log", "-1", "--format=Diffusers at %h of %cs"]
        record["checkout"] = subprocess.run(commit, stdout=-1, text=True, check=True).stdout.strip()
        with tempfile.TemporaryDirectory() as cache:
            os.environ["STOPDOWN_CACHE"] = cache
            for name in options.only or FAMILIES:
                row = measure(name, options.choose)
                others = [x for x in record["rows"] if x["name"] != name]
                record["rows"] = sorted([*others, row], key=lambda row: row["name"])
                record |= {
                    "command": f"{CHECKOUT}=... python benchmarks/diffusers_tests.py",
                    "machine": describe_machine(),
                }
                path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    write_table(record, RESULTS / "diffusers_tests.md")
    listed = [(x, said) for row in record["rows"] for x, said in row["listed"].items()]
    return int(any(not said["same"] and _name_test(x) not in EXPLAINED for x, said in listed))


def _name_test(node: str) -> str:
    return node.rpartition("::")[2]


if __name__ == "__main__":
    sys.exit(main())
