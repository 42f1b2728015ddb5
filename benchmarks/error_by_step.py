"""Error of the latents after each step: what a format loses, and how the sampler changes it.

The bundled pipeline makes each prompt with the same noise in fp32 and in others, with and without
guidance; after each step the latents are compared with fp32's. Beside bf16 and fp16 by a plan run
controls and ablations: fp32 that goes on from latents disturbed after the first step, by noise as large as
a format's error there; fp16 without rounded latents, with an fp32 residual stream, with an fp32 encoder
or denoiser alone, and with the first or last steps in fp32.

    python benchmarks/error_by_step.py
    python benchmarks/error_by_step.py --prompts 2 --guidance 4
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stopdown import apply_plan, load, make_plan
from stopdown.devices.environment import describe_machine
from stopdown.numerics import relative_l2

RESULTS = Path(__file__).parent / "results"
STEPS = 8
TEXT_TOKENS = 16
GUIDANCES = (1.0, 4.0, 6.0)
PROMPTS: tuple[tuple[str, int, str], ...] = (
    ("a green square moving left on a beige background", 1001, "language"),
    ("a white cross moving right on a grey background", 1009, "language"),
    ("a red circle standing still", 0, "outside"),
    ("two blue squares on a black background", 1, "outside"),
    ("a train crosses a snowy mountain bridge", 2, "outside"),
    ("a large purple star turning around", 3, "outside"),
)
"""Prompt, seed, and whether it is in the model's language."""


@dataclass(frozen=True)
class Variant:
    """What computes where.

    Attributes:
        encoder, denoiser: format of each, or the name of a plan.
        latents: format that latents have between steps, and the noise of the sampler.
        wide_first, wide_last: so many steps are in fp32.
        disturbed: fp32 goes on from latents that are off by noise as large as this variant's error
            after the first step.
        continued: fp32 goes on from this variant's own latents after the first step.
    """

    encoder: str = "fp32"
    denoiser: str = "fp32"
    latents: torch.dtype = torch.float32
    wide_first: int = 0
    wide_last: int = 0
    disturbed: str = ""
    continued: str = ""


HALF = torch.float16
VARIANTS = {
    "bf16": Variant("bf16", "bf16", torch.bfloat16),
    "fp16": Variant("fp16", "fp16", HALF),
    "fp16, fp32 latents": Variant("fp16", "fp16"),
    "fp16, fp32 residual": Variant("fp16", "fp16 residual", HALF),
    "fp16, fp32 residual and latents": Variant("fp16", "fp16 residual"),
    "encoder alone in fp16": Variant("fp16", "fp32"),
    "denoiser alone in fp16": Variant("fp32", "fp16"),
    "latents alone in fp16": Variant(latents=HALF),
    "fp16, first 2 steps in fp32": Variant("fp16", "fp16", wide_first=2),
    "fp16, last 2 steps in fp32": Variant("fp16", "fp16", wide_last=2),
    "fp32, disturbed as bf16": Variant(disturbed="bf16"),
    "fp32, disturbed as fp16": Variant(disturbed="fp16"),
    "fp32, from fp16's first step": Variant(continued="fp16"),
    "fp32, from bf16's first step": Variant(continued="bf16"),
}
DRAWN = {
    "bf16": "#cc3311",
    "fp16": "#0077bb",
    "fp16, fp32 residual": "#33bbee",
    "denoiser alone in fp16": "#009988",
    "fp16, last 2 steps in fp32": "#ee7733",
    "fp32, from bf16's first step": "#ee99aa",
    "fp32, from fp16's first step": "#99bbdd",
    "fp32, disturbed as fp16": "#bbbbbb",
}
"""Variants that the picture shows, and their colours."""


class Switch(torch.nn.Module):
    """Stands for the denoiser: calls the one that its step asks for, in its format, between casts."""

    def __init__(self, modules: dict[str, torch.nn.Module]) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleDict(modules)
        self.config: Any = modules["fp32"].config
        self.cache_context: Any = modules["fp32"].cache_context
        self.device = torch.device("cpu")
        self.choose: Callable[[int], str] = lambda step: "fp32"
        self.step = 0

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parts["fp32"].parameters()).dtype

    def forward(self, **kwargs: Any) -> Any:
        module = self.parts[self.choose(self.step)]
        self.step += 1
        dtype = module.get_parameter("proj_out.weight").dtype
        for name in ("hidden_states", "encoder_hidden_states"):
            kwargs[name] = kwargs[name].to(dtype)
        return tuple(x.float() for x in module(**kwargs))


class Bench:
    """The bundled pipeline with every denoiser and encoder that the variants need."""

    def __init__(self) -> None:
        plans = {
            "fp16": make_plan("shapes", residual="native"),
            "fp16 residual": make_plan("shapes"),
        }
        pipes = {name: load("shapes", precision=name, device="cpu") for name in ("fp32", "bf16")}
        for name, plan in plans.items():
            pipes[name] = load("shapes", precision="fp32", device="cpu")
            apply_plan(pipes[name], plan)
        self.pipe = pipes["fp32"]
        self.pipe.set_progress_bar_config(disable=True)
        self.encoders = {name: pipe.text_encoder for name, pipe in pipes.items()}
        self.switch = Switch({name: pipe.transformer for name, pipe in pipes.items()})
        self.pipe.transformer = self.switch

    def run(
        self,
        prompt: str,
        seed: int,
        guidance: float,
        variant: Variant,
        change: Callable[[torch.Tensor], torch.Tensor] = lambda latents: latents,
    ) -> list[torch.Tensor]:
        """Latents after each step; `change` is done to those of the first."""
        seen: list[torch.Tensor] = []

        def follow(pipe: Any, step: int, time: Any, values: dict[str, Any]) -> dict[str, Any]:
            latents = change(values["latents"]) if step == 0 else values["latents"]
            seen.append(latents.detach().float().clone())
            return {"latents": latents}

        def choose(step: int) -> str:
            is_wide = step < variant.wide_first or step >= STEPS - variant.wide_last
            return "fp32" if is_wide else variant.denoiser

        self.switch.choose, self.switch.step = choose, 0
        self.pipe.text_encoder = self.encoders[variant.encoder]
        with torch.no_grad():
            texts = self.pipe.encode_prompt(prompt, "", max_sequence_length=TEXT_TOKENS)
            self.pipe(
                prompt_embeds=texts[0].to(variant.latents),
                negative_prompt_embeds=texts[1].to(variant.latents),
                num_inference_steps=STEPS,
                guidance_scale=guidance,
                generator=torch.Generator().manual_seed(seed),
                output_type="latent",
                callback_on_step_end=follow,
            )
        return seen


def measure(bench: Bench, prompt: str, seed: int, guidance: float) -> dict[str, list[float]]:
    """Relative errors of the latents after each step, by variant."""
    right = bench.run(prompt, seed, guidance, Variant())
    found: dict[str, list[torch.Tensor]] = {}
    for name, variant in VARIANTS.items():
        change = _choose_change(variant, found, right[0])
        found[name] = bench.run(prompt, seed, guidance, variant, change)
    return {
        name: [relative_l2(x, y) for x, y in zip(latents, right, strict=True)]
        for name, latents in found.items()
    }


def _choose_change(
    variant: Variant, found: dict[str, list[torch.Tensor]], right: torch.Tensor
) -> Callable[[torch.Tensor], torch.Tensor]:
    if variant.continued:
        return lambda latents: found[variant.continued][0].to(latents.dtype)
    if not variant.disturbed:
        return lambda latents: latents
    noise = torch.randn(right.shape, generator=torch.Generator().manual_seed(7))
    size = (found[variant.disturbed][0] - right).norm() / noise.norm()
    return lambda latents: latents + noise * size


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--guidance", type=float, nargs="*", default=GUIDANCES)
    parser.add_argument("--draw", action="store_true", help="table and picture of the stored rows")
    options = parser.parse_args()
    if options.draw:
        rows = json.loads((RESULTS / "error_by_step.json").read_text())["rows"]
        write_table(rows)
        draw(rows)
        return
    bench, rows = Bench(), list[dict[str, Any]]()
    for prompt, seed, kind in PROMPTS[: options.prompts]:
        for guidance in options.guidance:
            errors = measure(bench, prompt, seed, guidance)
            rows.append({"prompt": prompt, "seed": seed, "kind": kind, "guidance": guidance,
                         "errors": errors})  # fmt: skip
            last = {name: float(f"{x[-1]:.3g}") for name, x in errors.items()}
            print(prompt, guidance, json.dumps(last), flush=True)
    write_results(rows)


def write_results(rows: list[dict[str, Any]]) -> None:
    report = {"command": "python benchmarks/error_by_step.py", "machine": describe_machine(),
              "steps": STEPS, "rows": rows}  # fmt: skip
    (RESULTS / "error_by_step.json").write_text(json.dumps(report, indent=1) + "\n")
    write_table(rows)
    draw(rows)


def list_groups(rows: list[dict[str, Any]]) -> dict[tuple[str, float], list[dict[str, Any]]]:
    """Rows by kind of prompt and guidance."""
    keys = dict.fromkeys((row["kind"], row["guidance"]) for row in rows)
    return {key: [x for x in rows if (x["kind"], x["guidance"]) == key] for key in sorted(keys)}


def write_table(rows: list[dict[str, Any]]) -> None:
    groups = list_groups(rows)
    lines = [
        "# Error of the latents, step by step",
        "",
        "`python benchmarks/error_by_step.py`: relative error of `shapes`' latents against fp32 after the",
        f"last of {STEPS} steps, median of the prompts. *language*: prompts as it was trained on;",
        "*outside*: others.",
        "",
        "| what | " + " | ".join(f"{kind}, guidance {scale:g}" for kind, scale in groups) + " |",
        f"|---|{'--:|' * len(groups)}",
    ]
    for name in VARIANTS:
        medians = [statistics.median(x["errors"][name][-1] for x in g) for g in groups.values()]
        lines.append(f"| {name} | " + " | ".join(f"{x:.5f}" for x in medians) + " |")
    lines += ["", "![Error by step](error_by_step.png)", ""]
    (RESULTS / "error_by_step.md").write_text("\n".join(lines))


def draw(rows: list[dict[str, Any]]) -> None:
    """One panel for each kind of prompt and guidance: medians by step, on a logarithmic axis."""
    from PIL import Image, ImageDraw, ImageFont

    groups, wide, high, top = list_groups(rows), 460, 360, 150
    columns = len({scale for _, scale in groups})
    size = (wide * columns, high * math.ceil(len(groups) / columns) + top)
    picture = Image.new("RGB", size, "white")
    pen, font = ImageDraw.Draw(picture), ImageFont.load_default(size=15)
    for number, (name, colour) in enumerate(DRAWN.items()):
        x, y = 20 + 460 * (number % 3), 14 + 30 * (number // 3)
        pen.line([(x, y + 9), (x + 30, y + 9)], fill=colour, width=4)
        pen.text((x + 38, y), name, fill="black", font=font)
    text = "relative error of the latents against fp32, median of the prompts, by step"
    pen.text((20, 110), text, fill="black", font=font)
    for number, (key, group) in enumerate(groups.items()):
        corner = (wide * (number % columns), top + high * (number // columns))
        draw_panel(pen, font, corner, (wide, high), key, group)
    picture.save(RESULTS / "error_by_step.png", optimize=True)


def draw_panel(
    pen: Any,
    font: Any,
    corner: tuple[int, int],
    size: tuple[int, int],
    key: tuple[str, float],
    group: list[dict[str, Any]],
) -> None:
    """Errors from 1e-6 to 1, and the steps."""
    left, upper, wide, high = corner[0] + 60, corner[1] + 30, size[0] - 80, size[1] - 70

    def place(step: int, error: float) -> tuple[float, float]:
        share = min(max((math.log10(max(error, 1e-9)) + 6) / 6, 0.0), 1.0)
        return left + wide * step / (STEPS - 1), upper + high * (1 - share)

    title = f"{key[0]}, guidance {key[1]:g}" if key[1] > 1 else f"{key[0]}, no guidance"
    pen.text((left, upper - 24), title, fill="black", font=font)
    for decade in range(-6, 1):
        y = place(0, 10.0**decade)[1]
        pen.line([(left, y), (left + wide, y)], fill="#dddddd")
        pen.text((left - 46, y - 9), f"1e{decade}", fill="black", font=font)
    for step in range(STEPS):
        x = place(step, 1)[0]
        pen.text((x, upper + high + 6), str(step + 1), fill="black", font=font, anchor="ma")
    for name, colour in DRAWN.items():
        medians = [
            statistics.median(x["errors"][name][step] for x in group) for step in range(STEPS)
        ]
        pen.line([place(*pair) for pair in enumerate(medians)], fill=colour, width=3)


if __name__ == "__main__":
    main()
