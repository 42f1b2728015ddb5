"""Anonymous memory of a process: during a run within a limit on a CPU, and from repair to repair.

    python benchmarks/process_memory.py runs          # 5 GB of memory and of disk
    python benchmarks/process_memory.py runs --only shapes
    python benchmarks/process_memory.py repeated

`runs`: `generate` within a limit, in a process of its own that has imported everything. Every few
milliseconds it reads how much anonymous memory it has, how much of that the C library (glibc) has given
out, and how much the C library keeps of what was freed. At the highest of these readings:

    anonymous = given out (tensors, and whatever else) + kept (freed) + rest (Python's own, stacks, …)

`repeated`: what is kept after each of many repairs of the guard, and of many `rescale_`, of a tiny UNet:
anonymous memory as it is, after the C library returned what is free, and live Python objects.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from revision import describe_code

from stopdown.devices.environment import describe_machine

RESULTS = Path(__file__).parent / "results" / "process_memory.json"

RUNS = {
    "shapes": ("40MiB", "generate {source} circle --steps 2 --precision fp32"),
    "SVD-XT, cut": (
        "265MiB",
        "generate {source} --image {image} --frames 2 --height 64 --width 64 --steps 1 --precision fp32",
    ),
}
"""Model → its limit, and the command; models of `memory.py`."""

READINGS_S = 0.003
TIMES = 16
"""Repairs, and calls of `rescale_`."""


_FIELDS = (
    *(
        "arena",
        "ordblks",
        "smblks",
        "hblks",
        "hblkhd",
        "usmblks",
        "fsmblks",
        "uordblks",
        "fordblks",
    ),
    "keepcost",
)


class _Info(ctypes.Structure):
    """What glibc's `mallinfo2` returns."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def read_memory() -> dict[str, int]:
    """Bytes of anonymous memory, and of that what the C library has given out and what it keeps."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _Info
    info = library.mallinfo2()
    status = Path("/proc/self/status").read_text()
    anonymous = re.search(r"RssAnon:\s+(\d+)", status)
    assert anonymous is not None
    return {
        "anonymous": int(anonymous[1]) * 1024,
        "given_out": info.uordblks + info.hblkhd,
        "kept": info.fordblks,
    }


def trim() -> None:
    """Have the C library return what is free."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


# A run within a limit


def measure_run(words: list[str]) -> dict[str, int]:
    """Run a command in this process; readings at the highest anonymous memory, above those before."""
    import diffusers  # noqa: F401 (a part of what is there before)
    import transformers  # noqa: F401
    from diffusers import DiffusionPipeline  # noqa: F401

    from stopdown.app import cli

    trim()
    before = highest = read_memory()
    readings, is_over = 0, threading.Event()

    def watch() -> None:
        nonlocal highest, readings
        while not is_over.wait(READINGS_S):
            now, readings = read_memory(), readings + 1
            highest = max(highest, now, key=lambda x: x["anonymous"])

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    code = None
    try:
        cli.main(words)
    except SystemExit as exit_:
        code = exit_.code
    finally:
        is_over.set()
        watcher.join()
    assert not code, code
    found = {name: highest[name] - before[name] for name in before}
    found["rest"] = found["anonymous"] - found["given_out"] - found["kept"]
    return {"before": before["anonymous"], "readings": readings, **found}


def run(name: str, kept: Path | None) -> dict[str, Any]:
    """Forecast and measurement of one run, in a process of its own."""
    limit, words = RUNS[name]
    with tempfile.TemporaryDirectory() as place:
        source = "shapes" if name == "shapes" else str(save_model(name, kept or Path(place)))
        image = Path(place) / "image.png"
        save_image(image)
        given = [*words.format(source=source, image=image).split(), "--memory", limit]
        out = Path(place) / "out.mp4"
        command = [sys.executable, __file__, "one", "--", *given, "-o", str(out), "-q"]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        measured = json.loads(done.stdout.splitlines()[-1])
        strategy = json.loads(Path(f"{out}.json").read_text())["strategy"]
        predicted = predict(given, strategy)
    shown = words.format(source=f"'{name}'", image="IMAGE")
    return {
        "command": f"stopdown {shown} --memory {limit}",
        "limit_bytes": int(limit.removesuffix("MiB")) * 2**20,
        "strategy": strategy,
        "predicted_bytes": predicted,
        **{f"{key}_bytes" if key != "readings" else key: x for key, x in measured.items()},
    }


def save_model(name: str, folder: Path) -> Path:
    """The folder of a model with random weights; made if it is not there."""
    path = folder / "model"
    if not (path / "model_index.json").exists():
        from memory import make_pipeline

        make_pipeline(name, folder / "configs").save_pretrained(path)
    return path


def save_image(path: Path) -> None:
    import numpy as np

    from stopdown.frames.media import write_media

    write_media(path, np.random.default_rng(0).integers(0, 255, (1, 64, 64, 3), np.uint8))


def predict(words: list[str], strategy: str) -> int:
    """The peak that `fit` predicts for a strategy of the same run."""
    _, source, *rest = words
    options = rest if rest[0].startswith("--") else rest[1:]  # `fit` takes no prompt
    command = [sys.executable, "-m", "stopdown", "fit", source, *options, "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return next(find_peaks(json.loads(done.stdout), strategy))


def find_peaks(record: Any, strategy: str) -> Iterator[int]:
    """Peaks of a strategy in what `fit` says."""
    if isinstance(record, dict):
        if record.get("strategy") == strategy and "peak_bytes" in record:
            yield int(record["peak_bytes"])
        record = list(record.values())
    for item in record if isinstance(record, list) else ():
        yield from find_peaks(item, strategy)


# From repair to repair


def repeat() -> dict[str, Any]:
    """What is kept after each repair, and after each `rescale_`."""
    import torch

    import stopdown
    from stopdown import testing
    from stopdown.runtime.guard import guard

    unet = testing.make_pipeline("sd", overflow="unet").unet.requires_grad_(False)
    call = {
        "sample": torch.randn(1, 4, 8, 8),
        "timestep": torch.tensor(5),
        "encoder_hidden_states": torch.randn(1, 7, unet.config.cross_attention_dim),
    }

    def repair() -> None:
        part = copy.deepcopy(unet).half()
        with torch.no_grad(), guard({"unet": part}, announce=lambda text: None) as handle:
            part(**{k: x.half() if x.is_floating_point() else x for k, x in call.items()})
            assert [x.action for x in handle.repairs] == ["rescaled"]

    def rescale() -> None:
        stopdown.rescale_(copy.deepcopy(unet), (), call).undo()

    return {name: list(count(one)) for name, one in (("repair", repair), ("rescale_", rescale))}


def count(once: Callable[[], None]) -> Iterator[dict[str, int]]:
    """Do it many times: what is there after each."""
    for _ in range(TIMES):
        once()
        gc.collect()
        as_it_is = read_memory()["anonymous"]
        trim()
        found = {
            "anonymous_bytes": as_it_is,
            "trimmed_bytes": read_memory()["anonymous"],
            "objects": len(gc.get_objects()),
        }
        print(found, flush=True)
        yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["runs", "repeated", "one"])
    parser.add_argument("words", nargs="*", help="of `one`: those of the command")
    parser.add_argument("--only", nargs="*", choices=RUNS, help="models of `runs`")
    parser.add_argument("--keep", type=Path, help="folder that the model is saved in, or was")
    given = parser.parse_args()
    if given.part == "one":
        print(json.dumps(measure_run(given.words)))
        return
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    stored |= {"machine": describe_machine(), "code": describe_code()}
    begun = time.process_time()
    if given.part == "runs":
        for name in given.only or RUNS:
            stored.setdefault("runs", {})[name] = run(name, given.keep)
            print(name, stored["runs"][name], flush=True)
    else:
        stored["repeated"] = repeat()
    print(f"{time.process_time() - begun:.0f} s of processor time")
    stored["command"] = " && ".join(
        f"python benchmarks/process_memory.py {part}"
        for part in ("runs", "repeated")
        if part in stored
    )
    RESULTS.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
