"""Which roundings matter in the bundled model's text encoder, for words that it knows and for others.

The encoder runs in fp32, and one kind of value is rounded to 11 significant bits, as fp16 has: weights,
what queries, keys, values, outputs and feed-forward layers give, norms, the stream, scores. The error
is that of the embeddings.

    python benchmarks/encoder_rounding.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from error_by_step import PROMPTS, TEXT_TOKENS
from torch.nn import functional

from stopdown import load
from stopdown.devices.environment import describe_machine
from stopdown.interception.patches import Patches
from stopdown.numerics import relative_l2

RESULTS = Path(__file__).parent / "results"
BITS = 11
_LAYERS = ("T5LayerSelfAttention", "T5LayerFF")
OUTPUTS: dict[str, Callable[[str, torch.nn.Module], bool]] = {
    "queries and keys": lambda path, _: path.endswith(("SelfAttention.q", "SelfAttention.k")),
    "values": lambda path, _: path.endswith("SelfAttention.v"),
    "what attention writes": lambda path, _: path.endswith("SelfAttention.o"),
    "feed-forward layers": lambda path, _: ".wi_" in path or path.endswith(".wo"),
    "norms": lambda path, _: path.endswith("layer_norm"),
    "stream": lambda _, module: type(module).__name__ in _LAYERS,
}
"""What is rounded to the modules that give it."""


def round_value(value: torch.Tensor) -> torch.Tensor:
    """To `BITS` significant bits, whatever the range."""
    mantissa, exponent = torch.frexp(value)
    return torch.ldexp(torch.round(mantissa * 2**BITS) / 2**BITS, exponent)


@contextmanager
def rounding(encoder: torch.nn.Module, what: str) -> Iterator[list[float]]:
    """One kind of value rounded; the largest scores of each attention come out."""
    scores: list[float] = []

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        scale = options.get("scale")
        found = (
            query
            @ key.transpose(-2, -1)
            * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        )
        scores.append(float(found.abs().max()))
        found = round_value(found) if what == "scores" else found
        mask = options.get("attn_mask")
        return (found if mask is None else found + mask).softmax(-1) @ value

    def follow(module: Any, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (round_value(output[0]), *output[1:])
        return round_value(output)

    with Patches() as patches:
        patches.set_attribute(functional, "scaled_dot_product_attention", attend)
        for path, module in encoder.named_modules():
            if what in OUTPUTS and OUTPUTS[what](path, module):
                patches.defer(module.register_forward_hook(follow).remove)
        for weight in encoder.parameters() if what == "weights" else ():
            patches.write_tensor(weight, round_value(weight.detach()))
        yield scores


def main() -> None:
    pipe = load("shapes", precision="fp32", device="cpu")
    prompts = dict.fromkeys(prompt for prompt, _, _ in PROMPTS)

    def embed(prompt: str) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = pipe.encode_prompt(prompt, "", max_sequence_length=TEXT_TOKENS)[0]
        return found.float()

    right = {prompt: embed(prompt) for prompt in prompts}
    rows, largest = dict[str, list[float]](), 0.0
    for what in ("nothing", "weights", *OUTPUTS, "scores"):
        with rounding(pipe.text_encoder, what) as scores:
            rows[what] = [relative_l2(embed(prompt), right[prompt]) for prompt in prompts]
        largest = max(largest, *scores)
    write_results(rows, list(prompts), largest)


def write_results(rows: dict[str, list[float]], prompts: list[str], largest: float) -> None:
    command = "python benchmarks/encoder_rounding.py"
    report = {"command": command, "machine": describe_machine(), "prompts": prompts,
              "largest_score": largest, "errors": rows}  # fmt: skip
    (RESULTS / "encoder_rounding.json").write_text(json.dumps(report, indent=1) + "\n")
    lines = [
        "# What rounding costs in the text encoder",
        "",
        f"`{command}`: relative error of the embeddings of `shapes` when one kind of value has {BITS}",
        f"significant bits. Its attention scores reach {largest:.0f}.",
        "",
        f"| rounded | {' | '.join(prompts)} |",
        f"|---|{'--:|' * len(prompts)}",
        *(
            f"| {what} | {' | '.join(f'{x:.5f}' for x in errors)} |"
            for what, errors in rows.items()
        ),
        "",
    ]
    (RESULTS / "encoder_rounding.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
