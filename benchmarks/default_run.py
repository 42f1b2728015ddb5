"""`stopdown generate MODEL PROMPT` without options, at full size, on a device smaller than the weights.

A folder with the real configurations of a checkpoint is written, every component at its full size, weights
in bf16 drawn as in `full_size_runs.py`. It is certified by itself first. Then the command's own function
runs twice: the first run makes its plan, the second takes the kept one. Each has a process of its own. The
accelerator is simulated, as in tests, has no bf16 and a limit of its memory; it computes on this machine's
processor. The size of the video is small, because the processor is slow; weights are not.

What is measured: anonymous memory of the process, and of the second one that plans, beside what is
allocated on the device (both read every 20 ms), bytes in the folder for temporary files, and the time of
each stage. What is free on the host is given as `--host`, since the device's memory lies in the same
machine. What the simulated device frees goes back to the system at once (`MALLOC_MMAP_THRESHOLD_`): the C
library would keep blocks of up to 32 MiB, and they would count as the host's.

    python benchmarks/default_run.py CogVideoX-5B
    python benchmarks/default_run.py SVD-XT --device 8
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests")]

GIB = 2**30
PROMPT = "a red circle moving left on a grey background"
REQUESTS: dict[str, dict[str, Any]] = {
    "CogVideoX-5B": {"frames": 9, "height": 64, "width": 64, "prompt": PROMPT},
    "CogView3-Plus-3B": {"height": 64, "width": 64, "prompt": PROMPT},
    "SVD-XT": {"frames": 2, "height": 128, "width": 128},
}
LARGE = ("transformer", "text_encoder", "unet")
STAGES = ("certificate", "first run", "second run")
"""Each in a process of its own. The first makes the plan alone, without a simulated device around it, which
slows it down; the first run makes it again."""


def write_model(name: str, folder: Path, *, device: str = "cpu", layers: int = 0) -> int:
    """Write a checkpoint with every component at its full size; return the bytes of its weights.

    Args:
        device: where weights are drawn.
        layers: of each transformer; 0 for all.
    """
    from full_size_runs import BASES, _write_part

    pipeline, parts = BASES[name]
    folder.mkdir(parents=True)
    index: dict[str, Any] = {"_class_name": pipeline, "_diffusers_version": "0.42.1"}
    written = 0
    for part, (library, kind, config) in parts.items():
        index[part] = [library, kind]
        cut = {"num_layers": layers} if layers and "num_layers" in config else {}
        written += _write_part(
            folder / part, library, kind, {**config, **cut}, is_large=part in LARGE, device=device
        )
    (folder / "model_index.json").write_text(json.dumps(index))
    return written


class Watch:
    """Peaks of a process's memory beside its device's, and of its temporary files, read every 20 ms."""

    def __init__(self, simulated: Any, folder: Path) -> None:
        self.host_bytes = self.device_bytes = self.file_bytes = 0
        self._simulated, self._folder, self._ended = simulated, folder, threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._ended.wait(0.02):
            used = self._simulated.used()
            anonymous = read_anonymous()
            self.device_bytes = max(self.device_bytes, used)
            self.host_bytes = max(self.host_bytes, anonymous - max(used, self._simulated.used()))
            files = (x.stat().st_size for x in self._folder.rglob("*") if x.is_file())
            self.file_bytes = max(self.file_bytes, sum(files, 0))


def read_anonymous() -> int:
    """Bytes of the memory of this process, and of those that it began, that belong to no file."""
    found = 0
    for number in ("self", *(x.pid for x in psutil.Process().children())):
        with contextlib.suppress(OSError, StopIteration):  # it may have ended
            lines = Path(f"/proc/{number}/status").read_text().splitlines()
            found += 1024 * int(next(x for x in lines if x.startswith("RssAnon")).split()[1])
    return found


def run(name: str, folder: Path, device_bytes: int, host_bytes: int) -> dict[str, Any]:
    """Generate without options; return what it took."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    from device.simulated_device import KIND, load_device
    from stopdown.app.generate_command import GenerateOptions, generate
    from stopdown.devices.device_profiles import find_device_target
    from stopdown.numerics import iterate_tensors
    from stopdown.plans import certified, plan_choice
    from stopdown.runtime import memory_limits
    from stopdown.scaling.trials.trial import PRODUCT_FUNCTIONS

    class WideProducts(torch.overrides.TorchFunctionMode):
        """Products of fp16 summed in fp32 and rounded once, as an accelerator does; else they take days."""

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if func not in PRODUCT_FUNCTIONS:
                return func(*args, **kwargs)
            tensors = list(iterate_tensors((args, kwargs)))
            if isinstance(args[0], FakeTensor) or any(
                x.dtype != torch.float16 or x.is_meta for x in tensors
            ):
                return func(*args, **kwargs)
            wide = torch.utils._pytree.tree_map_only(
                torch.Tensor, torch.Tensor.float, (args, kwargs)
            )
            return func(*wide[0], **wide[1]).half()

    certify_plan = plan_choice.certify_plan

    def certify_plainly(*args: Any, **kwargs: Any) -> Any:
        with torch.overrides._pop_mode_temporarily() as mode:  # planning multiplies nothing in fp16
            if not isinstance(mode, WideProducts):
                raise RuntimeError(f"{mode} is on top of what sums products in fp32.")
            return certify_plan(*args, **kwargs)

    plan_choice.certify_plan = certify_plainly
    temporary = Path(tempfile.gettempdir())
    begun = time.perf_counter()
    fields = dict(REQUESTS[name])
    if name == "SVD-XT":
        from PIL import Image

        fields["image"] = str(folder / "picture.png")
        Image.new("RGB", (128, 128), (200, 40, 40)).save(fields["image"])
    supports = find_device_target("v100")[1].supports
    for module in (plan_choice, certified):
        module.probe_formats = lambda device: supports  # what the maker of a V100 says
    free, find = host_bytes, memory_limits.find_host_bytes
    memory_limits.find_host_bytes = lambda: min(free, find())
    with load_device(folder / "device").present() as simulated, torch.no_grad(), WideProducts():
        simulated.act_as("cuda", computes_not=[torch.bfloat16])
        simulated.limit(device_bytes)
        with Watch(simulated, temporary) as watch:
            record = generate(
                GenerateOptions(
                    source=str(folder / "model"), device=KIND, steps=1, quiet=True, force=True,
                    output=str(folder / ("out.png" if name.startswith("CogView") else "out.mp4")),
                    **fields,
                )
            )  # fmt: skip
    return {
        "elapsed_s": round(time.perf_counter() - begun, 1),
        "cpu_s": round(time.process_time(), 1),
        "stages_s": {key: round(value, 1) for key, value in record.stages_s.items()},
        "strategy": record.strategy,
        "precisions": {x.component: x.precision for x in record.decisions},
        "reasons": {x.component: x.reason for x in record.decisions},
        "repairs": [f"{x.component}: {x.action}" for x in record.repairs],
        "device_peak_bytes": watch.device_bytes,
        "host_peak_bytes": watch.host_bytes,
        "temporary_bytes": watch.file_bytes,
    }


def certify(folder: Path) -> dict[str, Any]:
    """Make the plan of the whole model from its weights, in this process and its second one."""
    from stopdown import make_plan

    begun = time.perf_counter()
    plan = make_plan(folder / "model")
    mine, others = (resource.getrusage(x) for x in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {
        "elapsed_s": round(time.perf_counter() - begun, 1),
        "cpu_s": [round(x.ru_utime + x.ru_stime, 1) for x in (mine, others)],
        "values": {x.component: [x.in_force.bounded, x.in_force.values] for x in plan.components},
    }


def main() -> None:
    """Write the model, certify it, run it twice, and store the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=sorted(REQUESTS))
    parser.add_argument("--device", type=float, default=15.0, help="GiB that the device has")
    parser.add_argument("--host", type=float, default=12.0, help="GiB that are free on the host")
    parser.add_argument("--folder", type=Path, help="where the model is written, and kept")
    parser.add_argument("--stages", nargs="*", default=STAGES, choices=STAGES)
    parser.add_argument("--inside", choices=STAGES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        sizes = int(options.device * GIB), int(options.host * GIB)
        is_run = options.inside != STAGES[0]
        made = run(options.model, options.folder, *sizes) if is_run else certify(options.folder)
        print("ROW " + json.dumps(made), flush=True)
        return
    from stopdown.devices.environment import describe_machine

    folder = options.folder or Path(tempfile.mkdtemp())
    begun = time.perf_counter()
    weights = write_model(options.model, folder / "model") if not (folder / "model").exists() else 0
    weights = weights or sum(x.stat().st_size for x in (folder / "model").rglob("*.safetensors"))
    print(f"written in {time.perf_counter() - begun:.0f} s", flush=True)
    for name in ("device", "cache", "temporary"):
        (folder / name).mkdir(exist_ok=True)
    rows = {}
    for stage in options.stages:
        if stage != STAGES[-1]:
            shutil.rmtree(folder / "cache" / "plans", ignore_errors=True)
        environment = {
            **os.environ, "TMPDIR": str(folder / "temporary"), "STOPDOWN_CACHE": str(folder / "cache"),
            **({} if stage == STAGES[0] else {"MALLOC_MMAP_THRESHOLD_": "65536"}),
        }  # fmt: skip
        command = [sys.executable, __file__, options.model, "--inside", stage, "--folder", str(folder),
                   "--device", str(options.device), "--host", str(options.host)]  # fmt: skip
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        found = [x for x in done.stdout.splitlines() if x.startswith("ROW ")]
        rows[stage] = json.loads(found[0][4:]) if found else {"error": done.stderr[-20000:]}
        print(stage, json.dumps(rows[stage])[:1500], flush=True)
    path = RESULTS / "default_run.json"
    stored = json.loads(path.read_text())["rows"] if path.exists() else {}
    key = f"{options.model}, {options.device:g} GiB"
    others = {"weights_bytes": weights, "host_limit_gib": options.host}
    stored[key] = {**stored.get(key, {}), **others, **rows}
    report = {"command": "python benchmarks/default_run.py MODEL --device GIB",
              "machine": describe_machine(), "rows": stored}  # fmt: skip
    path.write_text(json.dumps(report, indent=1) + "\n")
    if options.folder is None:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
