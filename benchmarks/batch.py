"""What a batch costs beside the same calls in one loop, in turns, in one process; and Ray Data.

The *ratio* is the time per item of `stopdown batch` in one process, after its first item, over that of a
loop with a loaded pipeline, which makes the same frames under the guard and writes the same files.
*Start-up* is what comes before the first item is finished, its own time and the model's load among it.
`--ray` adds `map_batches` of Ray Data, start-up and all, over the time of the loop.

    python benchmarks/batch.py --items 8 --repeats 4 --ray
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stopdown.app.batch_command import BatchOptions, batch
from stopdown.app.display import Display
from stopdown.batch import dispatch
from stopdown.batch.jobs import Settings, prepare
from stopdown.batch.prompt_maker import PromptMaker
from stopdown.batch.prompts import Item
from stopdown.batch.worker import Worker
from stopdown.devices.environment import describe_machine
from stopdown.frames.media import write_media
from stopdown.runtime.guard import GuardOptions
from stopdown.runtime.runs import make_frames

RESULTS = Path(__file__).parent / "results"


def list_items(count: int, steps: int) -> list[Item]:
    return [Item(n + 1, "a red circle moving left", seed=n, steps=steps) for n in range(count)]


def make_loop(items: list[Item], folder: Path) -> Callable[[], float]:
    """A loop over a pipeline that is loaded once; what it gives back are seconds."""
    prepared = prepare(
        Settings("shapes", str(folder), precision="fp32"), items[0], items[0].make_request()
    )
    loaded = Worker(prepared.job, "cpu")._load(prepared.plan)

    def loop() -> float:
        begun = time.perf_counter()
        for item in items:
            name = str(folder / f"{item.seed}.mp4")
            made = make_frames(loaded, item.make_request(), output=name, settings=GuardOptions())
            write_media(name, made.output, 8.0)
        return time.perf_counter() - begun

    folder.mkdir()
    return loop


def time_batch(items: list[Item], root: Path, **words: Any) -> tuple[float, float]:
    """Seconds until the first item is finished, and per item from then on."""
    prompts, out = root / "prompts.jsonl", root / "batch"
    shutil.rmtree(out, ignore_errors=True)
    prompts.write_text(
        "".join(json.dumps({"prompt": x.prompt, "seed": x.seed}) + "\n" for x in items)
    )
    first: list[float] = []
    give_out = dispatch.Dispatch.run

    def run(self: Any, tasks: Any) -> Any:
        for result in give_out(self, tasks):
            first.append(time.perf_counter())
            yield result

    dispatch.Dispatch.run = run  # type: ignore[method-assign]
    begun = time.perf_counter()
    try:
        options = BatchOptions("shapes", str(prompts), str(out), precision="fp32", **words)
        record = batch(options, Display())
    finally:
        dispatch.Dispatch.run = give_out  # type: ignore[method-assign]
    assert (record.made, record.failed) == (len(items), 0)
    return first[0] - begun, (first[-1] - first[0]) / (len(first) - 1)


def time_ray_data(items: list[Item], root: Path) -> float:
    """Seconds of the same items by `map_batches` with one actor, model and all."""
    import ray

    out = root / "data"
    shutil.rmtree(out, ignore_errors=True)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        begun = time.perf_counter()
        rows = [{"prompt": x.prompt, "seed": x.seed} for x in items]
        made = ray.data.from_items(rows).map_batches(
            PromptMaker,
            fn_constructor_args=("shapes", str(out)),
            fn_constructor_kwargs={"precision": "fp32", "steps": items[0].steps},
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=1),
            num_cpus=1,
        )
        assert [row["status"] for row in made.take_all()] == ["made"] * len(items)
        return time.perf_counter() - begun
    finally:
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--ray", action="store_true")
    options = parser.parse_args()
    items = list_items(options.items, options.steps)
    sizes = f"--items {options.items} --steps {options.steps} --repeats {options.repeats}"
    report: dict[str, Any] = {
        "command": f"python benchmarks/batch.py {sizes}{' --ray' * options.ray}"
    }
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        loop = make_loop(items, root / "loop")
        loop()
        ratios, starts = [], []
        for _ in range(options.repeats):
            before_s = loop()
            start_s, batch_s = time_batch(items, root, steps=options.steps)
            after_s = loop()
            ratios.append(batch_s / ((before_s + after_s) / 2 / len(items)))
            starts.append(start_s)
            print(json.dumps({"ratio": ratios[-1], "start_s": start_s}), flush=True)
        report |= {
            "ratio_median": statistics.median(ratios),
            "ratio_range": [min(ratios), max(ratios)],
            "start_s_median": statistics.median(starts),
        }
        if options.ray:
            loop_s = loop()
            data_s = time_ray_data(items, root)
            report["ray_data"] = {"all_over_loop": data_s / loop_s, "all_s": data_s}
    report["machine"] = describe_machine()
    (RESULTS / "batch.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
