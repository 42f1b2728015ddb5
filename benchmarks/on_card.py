"""Twelve minutes on a real card, the most important row first: `make gpu`.

Each row runs in a process of its own, within its own limit of seconds. Each fact is stored as soon as it is
known, so a machine that is taken away loses one fact. A row that has ended is not run again; what is
missing is printed at the end. No weights come from disk or a network: they are drawn on the card, with
the magnitudes that users reported (`full_size_runs.py`).

1. *tiny pipelines*: five kinds, overflowing, through `generate` in fp16: error beside bf16's, repairs; the
   same bits with and without the guard, and host reads that the guard adds for each call.
2. *CogVideoX-5B*: its transformer at its own width and size, 49 frames of 480 x 720: fp32, bf16, plain
   fp16, fp16 by its certificate: error, seconds, peak, also compiled; and the certificate's seconds.
3. *certificate on the host*: the same certificate, products of large weights computed by the processor.
4. *decoder*: its autoencoder in `generate`, whole and within 8 GiB: forecast, allocated and reserved peak.
5. *T5-XXL*: as the second row.
6. *sums*: switches of accumulation in half precision and kernels of attention: which give Inf where the
   sum fits.
7. *SVD-XT*, *CogView3-Plus-3B*, *Z-Image*: as the second row, smaller pictures.

    python benchmarks/on_card.py                      # what is missing, in order
    python benchmarks/on_card.py --rows sums --again
    python benchmarks/on_card.py --rehearse           # a simulated device, a hundredth of the size
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "src"), str(ROOT / "tests")]

CACHE = Path(tempfile.gettempdir()) / "stopdown-simulated"
"""Where the simulated device is kept, once compiled."""
PROMPT = "a red circle moving left on a grey background"
Facts = Iterator[tuple[str, Any]]


@dataclass(frozen=True)
class Place:
    """Where a row runs.

    Attributes:
        device: `cuda`, `mps`, `xpu`, `cpu` or `simulated`.
        is_small: whether models are cut to rehearse.
    """

    device: str
    is_small: bool

    def wait(self) -> None:
        """Wait for what the device has been given."""
        import torch

        if self.device != "cpu":
            torch.accelerator.synchronize()

    def start_peak(self) -> None:
        """Begin to count peaks anew."""
        import torch

        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def read_peak(self) -> dict[str, int]:
        """Return the peaks of PyTorch's allocator in bytes; empty where it keeps none."""
        import torch

        if self.device != "cuda":
            return {}
        return {
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
        }

    def time(self, run: Callable[[], Any], repeats: int = 3) -> float:
        """Return the median of a call's seconds."""
        times = []
        for _ in range(1 if self.is_small else repeats):
            self.wait()
            begun = time.perf_counter()
            run()
            self.wait()
            times.append(time.perf_counter() - begun)
        return statistics.median(times)


def run_tiny(place: Place) -> Facts:
    """Run five tiny pipelines through the command and under the guard."""
    import torch

    import stopdown
    from models.pipeline_calls import CALLS, name_denoiser

    for name in ("cogvideox", "sd", "flux", "wan", "svd")[: 2 if place.is_small else 5]:
        folder = Path(tempfile.mkdtemp()) / name
        stopdown.testing.save_pipeline(name, folder, overflow=name_denoiser(name))
        clips = {x: _generate_tiny(name, folder, x, place) for x in ("fp32", "bf16", "fp16")}
        want, repairs = clips["fp32"][0], clips["fp16"][1]
        errors = {x: float((clips[x][0] - want).abs().mean()) for x in ("bf16", "fp16")}
        yield f"{name}: generate", {"of_255": errors, "repairs": repairs}
        pipe = stopdown.load(folder, precision="fp16", device=place.device, guard=False)
        pipe.set_progress_bar_config(disable=True)

        def call(pipe: Any = pipe, name: str = name) -> Any:
            made = torch.Generator().manual_seed(0)
            found = pipe(**CALLS[name], num_inference_steps=2, generator=made, output_type="pt")
            return found.images if hasattr(found, "images") else found.frames

        plain, reads = _count_reads(call, place)
        with stopdown.guard(pipe, announce=lambda text: None) as guard:
            guarded, guarded_reads = _count_reads(call, place)
            calls = sum(x.calls for x in guard.record.calls) // 2  # it ran twice
        yield (
            f"{name}: guard",
            {"same_bits": bool(torch.equal(plain, guarded)), "repairs": len(guard.repairs),
             "host_reads": [reads, guarded_reads], "calls": calls},
        )  # fmt: skip


FRAMES = {"cogvideox": {"frames": 9}, "wan": {"frames": 5}}


def _generate_tiny(name: str, folder: Path, precision: str, place: Place) -> tuple[Any, int]:
    import torch
    from PIL import Image

    from models.pipeline_calls import NOISE
    from stopdown.app.generate_command import GenerateOptions, generate
    from stopdown.frames.media import read_video

    fields: dict[str, Any] = {"height": 32, "width": 32}
    if name == "svd":
        fields |= {"image": str(folder / "picture.png"), "frames": 2}
        Image.fromarray(NOISE[0]).save(fields["image"])
    else:
        fields |= {"prompt": "a"} | FRAMES.get(name, {})
    output = folder.parent / f"{precision}/"
    record = generate(
        GenerateOptions(
            source=str(folder), device=place.device, steps=2, precision=precision, quiet=True,
            force=True, output=f"{output}/", **fields,
        )
    )  # fmt: skip
    return torch.as_tensor(read_video(output)).float(), len(record.repairs)


def _count_reads(call: Callable[[], Any], place: Place) -> tuple[Any, int | None]:
    """Return a call's result, and how often the host waited for the device; None where nobody counts."""
    import torch

    call()  # what is made once
    if place.device == "simulated":
        from device.simulated_device import load_device

        devices = load_device(CACHE)
        before = devices.counts.host_reads
        found = call()
        return found.cpu(), devices.counts.host_reads - before
    if place.device != "cuda":
        return call().cpu(), None
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return found.cpu(), sum("synchroniz" in str(x.message) for x in said)


def draw_model(name: str, place: Place) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Build a component in fp32 on the device with drawn weights, and draw the arguments of a call."""
    import diffusers
    import torch
    import transformers
    from full_size_runs import BASES, CASES, Draw

    case = CASES[name]
    library, kind, config = BASES[case.base][1][case.component]
    config = {**config, **case.changed, **(SMALL[kind] if place.is_small else {})}
    made = getattr(diffusers if library == "diffusers" else transformers, kind)
    with torch.device(place.device), torch.no_grad():
        if library == "transformers":
            module = made(
                made.config_class(**{k: v for k, v in config.items() if k != "model_type"})
            )
        else:
            module = made(**config)
        module.to(place.device)  # a legacy constructor leaves one parameter on the host
        draw = Draw(module, is_large=True, device=place.device)
        for path, parameter in module.named_parameters():
            parameter.copy_(draw(path, parameter.shape))
    module.eval().requires_grad_(False)
    return module, *_draw_call(name, module, place)


SMALL: dict[str, dict[str, Any]] = {
    "CogVideoXTransformer3DModel": {"num_layers": 2, "num_attention_heads": 2},
    "CogView3PlusTransformer2DModel": {"num_layers": 2, "num_attention_heads": 2},
    "T5EncoderModel": {"num_layers": 2, "num_heads": 2, "d_model": 64, "d_ff": 128},
    "UNetSpatioTemporalConditionModel": {
        "block_out_channels": [32, 32, 32, 32],
        "num_attention_heads": [1, 1, 1, 1],
        "layers_per_block": 1,
    },
    "ZImageTransformer2DModel": {
        "dim": 256,
        "n_heads": 2,
        "n_kv_heads": 2,
        "n_layers": 1,
        "n_refiner_layers": 1,
    },
}
"""What makes a configuration small enough to rehearse."""


def _draw_call(name: str, module: Any, place: Place) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Draw the arguments of one call at the model's own size; a rehearsal's is tiny."""
    import torch
    from diffusers import CogVideoXPipeline

    made = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made).to(place.device)

    time_ = torch.tensor([500], device=place.device)
    config = module.config
    if name.startswith("CogVideoX"):
        frames, height, width = (3, 8, 8) if place.is_small else (13, 60, 90)
        pipe = CogVideoXPipeline(None, None, None, module, None)
        rotary = pipe._prepare_rotary_positional_embeddings(
            height * 8, width * 8, frames, torch.device(place.device)
        )
        return (), {
            "hidden_states": draw(1, frames, config.in_channels, height, width),
            "encoder_hidden_states": draw(1, 226, config.text_embed_dim),
            "timestep": time_, "image_rotary_emb": rotary, "return_dict": False,
        }  # fmt: skip
    if name.startswith("T5"):
        ids = torch.randint(2, config.vocab_size, (1, 226), generator=made).to(place.device)
        return (ids,), {"return_dict": False}
    if name == "SVD-XT":
        side, frames = (16, 2) if place.is_small else (72, 14)
        return (
            draw(1, frames, config.in_channels, side, side), time_,
            draw(1, 1, config.cross_attention_dim),
            torch.tensor([[6.0, 127.0, 0.02]], device=place.device),
        ), {"return_dict": False}  # fmt: skip
    side = 16 if place.is_small else 128
    if name.startswith("CogView3"):
        size = torch.tensor([[8.0 * side, 8.0 * side]], device=place.device)
        return (), {
            "hidden_states": draw(1, config.in_channels, side, side),
            "encoder_hidden_states": draw(1, 224, config.text_embed_dim),
            "timestep": time_, "original_size": size, "target_size": size,
            "crop_coords": torch.zeros_like(size), "return_dict": False,
        }  # fmt: skip
    latents, text = draw(config.in_channels, 1, side, side), draw(64, config.cap_feat_dim)
    return ([latents], torch.tensor([0.5], device=place.device), [text]), {"return_dict": False}


def _flatten(found: Any) -> Any:
    """Return all tensors of a result as one row in fp32 on the host."""
    import torch

    from stopdown.numerics import iterate_tensors

    return torch.cat([x.detach().float().cpu().flatten() for x in iterate_tensors(found)])


def run_model(name: str, place: Place) -> Facts:
    """Compare one call of a component in each format; its certificate is timed on the way."""
    import torch
    from torch.utils import _pytree as pytree

    import stopdown

    begun = time.perf_counter()
    module, args, kwargs = draw_model(name, place)
    count = sum(x.numel() for x in module.parameters())
    yield "weights", {"parameters": count, "seconds": time.perf_counter() - begun}

    def cast(dtype: torch.dtype) -> tuple[Any, Any]:
        def change(x: Any) -> Any:
            return x.to(dtype) if x.is_floating_point() and x.dtype == torch.float32 else x

        given: tuple[Any, Any] = pytree.tree_map_only(torch.Tensor, change, (args, kwargs))
        return given

    want = _flatten(module(*args, **kwargs))

    def measure(model: Any, dtype: torch.dtype) -> dict[str, Any]:
        own, named = cast(dtype)
        place.start_peak()
        found = _flatten(model(*own, **named))
        row: dict[str, Any] = {
            "non_finite": int((~found.isfinite()).sum()),
            "values": found.numel(),
        }
        if not row["non_finite"]:
            row["error"] = float((found - want).norm() / want.norm())
        row |= place.read_peak()
        row["seconds"] = place.time(lambda: model(*own, **named))
        return row

    with torch.no_grad():
        yield "fp32", measure(module, torch.float32)
        for label, dtype in (("bf16", torch.bfloat16), ("plain fp16", torch.float16)):
            half = copy.deepcopy(module).to(dtype)
            yield label, measure(half, dtype)
            del half
        begun = time.perf_counter()
        place.start_peak()
        found = stopdown.rescale_(module, args, kwargs, residual="fp32", ranges="bound", cast=True)
        scaling = found.scaling
        yield (
            "certificate",
            {"seconds": time.perf_counter() - begun, "certified": found.certified,
             "multiplies": len(scaling.multiplies), "bounded": scaling.bounded,
             "values": scaling.values, "headroom_bits": found.headroom_bits, **place.read_peak()},
        )  # fmt: skip
        yield "fp16 by its certificate", measure(module, torch.float16)
        if name == "CogVideoX-5B":
            backend = "aot_eager" if place.is_small else "inductor"
            begun = time.perf_counter()
            compiled = torch.compile(module, backend=backend)
            own, named = cast(torch.float16)
            compiled(*own, **named)
            yield "compiling", {"seconds": time.perf_counter() - begun}
            yield "fp16 by its certificate, compiled", measure(compiled, torch.float16)


def run_host(place: Place) -> Facts:
    """Certify CogVideoX-5B's transformer with the processor's products alone."""
    import stopdown
    from stopdown.plans import near_weights

    near_weights.KINDS = ()
    module, args, kwargs = draw_model("CogVideoX-5B", place)
    begun, cpu = time.perf_counter(), time.process_time()
    stopdown.rescale_(module, args, kwargs, residual="fp32", ranges="bound")
    yield (
        "certificate",
        {"seconds": time.perf_counter() - begun, "cpu_s": time.process_time() - cpu},
    )


def run_decoder(place: Place) -> Facts:
    """Generate with a full autoencoder behind a tiny denoiser: forecast beside the allocator's peaks."""
    from full_size_runs import _TINY_T5, _TINY_TRANSFORMER, _TINY_VAE, BASES, _write_part

    from stopdown.app.generate_command import GenerateOptions, generate

    folder = Path(tempfile.mkdtemp()) / "model"
    pipeline, parts = BASES["CogVideoX-5B"]
    folder.mkdir()
    index: dict[str, Any] = {"_class_name": pipeline, "_diffusers_version": "0.42.1"}
    tiny: dict[str, dict[str, Any]] = {"transformer": _TINY_TRANSFORMER, "text_encoder": _TINY_T5}
    if place.is_small:
        tiny["vae"] = _TINY_VAE
    for part, (library, kind, config) in parts.items():
        index[part] = [library, kind]
        given = {**config, **tiny.get(part, {})}
        _write_part(folder / part, library, kind, given, is_large=False)
    (folder / "model_index.json").write_text(json.dumps(index))
    size = {"frames": 9, "height": 64, "width": 64} if place.is_small else {}
    for label, memory in (("whole", "none"), ("within 8 GiB", "8GiB"), ("within 5 GiB", "5GiB")):
        place.start_peak()
        record = generate(
            GenerateOptions(
                source=str(folder), prompt=PROMPT, device=place.device, steps=1, quiet=True,
                precision="fp16", memory=memory, force=True, output=str(folder.parent / "out.mp4"),
                **size,
            )
        )  # fmt: skip
        yield (
            label,
            {"strategy": record.strategy, "stages_s": record.stages_s,
             "predicted_bytes": record.memory.peak_bytes if record.memory else None,
             "steps_down": len(record.steps_down), "repairs": len(record.repairs),
             **place.read_peak()},
        )  # fmt: skip


def run_sums(place: Place) -> Facts:
    """Show which kernels give Inf for a sum that fits, while its partial sums do not."""
    import torch
    from torch.nn import attention
    from torch.nn.functional import scaled_dot_product_attention

    half, size = torch.float16, 64 if place.is_small else 4096
    row = torch.full((size,), 30000.0 / 128)
    row[size // 2 :].neg_()  # partial sums reach size / 2 * 30000, the whole is 0
    a, b = (torch.full((256, size), 128.0) * 1, row.expand(256, size).contiguous())
    a, b = a.to(place.device, half), b.to(place.device, half)
    switches = (
        "allow_fp16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    )
    for name in switches:
        for is_on in (False, True):
            with contextlib.ExitStack() as stack:
                if place.device == "cuda" and hasattr(torch.backends.cuda.matmul, name):
                    before = getattr(torch.backends.cuda.matmul, name)
                    setattr(torch.backends.cuda.matmul, name, is_on)
                    stack.callback(setattr, torch.backends.cuda.matmul, name, before)
                found = a @ b.T
            yield f"product, {name}={is_on}", {"non_finite": int((~found.isfinite()).sum().cpu())}
    q = torch.full((1, 8, 256, 64), 60.0, device=place.device, dtype=half)
    k = q.clone()
    k[..., 32:].neg_()
    for scale in (1.0, 8.0):
        for kernel in attention.SDPBackend.__members__.values():
            if kernel in (attention.SDPBackend.ERROR, attention.SDPBackend.OVERRIDEABLE):
                continue
            try:
                with attention.sdpa_kernel(kernel):
                    found = scaled_dot_product_attention(q * scale, k, k)
                row_ = {"non_finite": int((~found.isfinite()).sum().cpu())}
            except RuntimeError as error:
                row_ = {"refused": str(error).splitlines()[0][:200]}
            yield f"attention, {kernel.name}, queries of {60 * scale:g}", row_


@dataclass(frozen=True)
class Row:
    """A row of the table: what it runs, and the seconds that it may take."""

    run: Callable[[Place], Facts]
    limit_s: int


def _model(name: str, limit_s: int) -> Row:
    return Row(lambda place: run_model(name, place), limit_s)


ROWS = {
    "tiny pipelines": Row(run_tiny, 90),
    "CogVideoX-5B": _model("CogVideoX-5B", 240),
    "certificate on the host": Row(run_host, 150),
    "decoder": Row(run_decoder, 90),
    "T5-XXL": _model("T5-XXL", 90),
    "sums": Row(run_sums, 40),
    "SVD-XT": _model("SVD-XT", 120),
    "CogView3-Plus-3B": _model("CogView3-Plus-3B", 90),
    "Z-Image": _model("Z-Image", 120),
}

SLOWER = 10
"""How much more time a row has on a simulated device: a processor, which others use too."""


def _end_with_the_table() -> None:
    """End this process and its children when standard input closes: whoever started the row is gone.

    A row that went on by itself would hold the card's memory while the next run tries it again.
    """

    def wait() -> None:
        while os.read(0, 1024):  # `sys.stdin` has a lock, which this thread would hold at exit
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def run_inside(name: str, place: Place) -> None:
    """Run a row in this process; print each fact as a line."""
    _end_with_the_table()
    with contextlib.ExitStack() as stack:
        if place.device == "simulated":
            from device.simulated_device import load_device

            CACHE.mkdir(exist_ok=True)
            stack.enter_context(load_device(CACHE).present())
        try:
            for fact, value in ROWS[name].run(place):
                print("FACT " + json.dumps([fact, value]), flush=True)
        except Exception:  # the next row may work
            print("FACT " + json.dumps(["failure", traceback.format_exc()[-3000:]]), flush=True)
        else:
            print("FACT " + json.dumps(["ended", True]), flush=True)


def run_row(name: str, command: list[str], limit_s: int, store: Callable[[str, Any], None]) -> None:
    """Run a row in a process of its own within its limit, and store each of its facts at once."""
    begun = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--inside", name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None

    def stop(*_: object) -> None:
        os.killpg(process.pid, signal.SIGKILL)

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(limit_s)
    try:
        for line in process.stdout:
            if line.startswith("FACT "):
                store(*json.loads(line.removeprefix("FACT ")))
            else:
                print(line, end="", flush=True)
        process.wait()
    finally:
        signal.alarm(0)
        with contextlib.suppress(ProcessLookupError):
            stop()
    if process.returncode:
        store(
            "failure", f"ended with {process.returncode} after {time.perf_counter() - begun:.0f} s"
        )
    store("seconds", round(time.perf_counter() - begun, 1))


def main() -> None:
    """Run the rows that are missing, in order, within the minutes that there are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--again", action="store_true", help="also rows that have ended")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--rehearse", action="store_true", help="a simulated device, cut models")
    parser.add_argument("--output", type=Path, default=RESULTS / "on_card.json")
    parser.add_argument("--inside", choices=list(ROWS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    place = Place("simulated" if options.rehearse else options.device, options.rehearse)
    if options.inside:
        run_inside(options.inside, place)
        return
    from stopdown.devices.environment import describe_machine

    report = json.loads(options.output.read_text()) if options.output.exists() else {}
    report |= {"command": "python benchmarks/on_card.py", "machine": describe_machine()}
    rows: dict[str, Any] = report.setdefault("rows", {})
    end = time.monotonic() + 60 * options.minutes
    command = [sys.executable, __file__, "--device", place.device]
    command += ["--rehearse"] if place.is_small else []
    for name in options.rows:
        if rows.get(name, {}).get("ended") and not options.again:
            continue
        if time.monotonic() > end:
            break
        kept = {} if options.again else rows.get(name, {})  # until this run knows better
        rows[name] = {k: v for k, v in kept.items() if k != "failure"} | {"card": _name_card(place)}

        def store(fact: str, value: Any, name: str = name) -> None:
            rows[name][fact] = value
            part = options.output.with_suffix(".part")
            part.write_text(json.dumps(report, indent=1) + "\n")
            part.replace(options.output)
            print(name, "|", fact, "|", json.dumps(value)[:300], flush=True)

        run_row(name, command, ROWS[name].limit_s * (SLOWER if place.is_small else 1), store)
    missing = [x for x in ROWS if not rows.get(x, {}).get("ended")]
    print("missing:", ", ".join(missing) or "nothing", flush=True)


def _name_card(place: Place) -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else place.device


if __name__ == "__main__":
    main()
