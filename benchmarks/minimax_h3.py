"""MiniMax H3's transformer in fp16, with the attention sinks that users of a V100 measured.

Users report that the text projection reaches 96 thousand, that a few rows of the residual stream grow
from 81 thousand to 4.3 million over the blocks while the others stay small, that normalised inputs reach
78.5, gated products 59 thousand, outputs of a feed-forward 2 million, and those of attention's output
projection 143 thousand. Weights here are random, and are scaled until a call of Diffusers' class has these
magnitudes: its text rows are the sinks.

Two cases. *width* has every width of the published configuration except the input of the modulation,
and fewer blocks. *depth* has all blocks and both refiner layers, with every width divided by 21. Errors
are relative 2-norms against fp32, of the video and of the audio. Products of fp16 are summed in fp32 and
rounded once, as devices do.

    python benchmarks/minimax_h3.py            # both cases; 6.3 GiB of memory, minutes
    python benchmarks/minimax_h3.py depth      # one of them; the other is kept
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import time
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stopdown.devices.environment import describe_machine
from stopdown.numerics import measure_amax, relative_l2
from stopdown.scaling.folding.folds import cast_
from stopdown.scaling.rescale import rescale_
from stopdown.scaling.trials.trial import WideProducts

STORED = Path(__file__).parent / "results" / "minimax_h3.json"
PUBLISHED = {
    "num_attention_heads": 56,
    "attention_head_dim": 128,
    "hidden_size": 5376,
    "num_layers": 50,
    "num_refiner_layers": 2,
    "ffn_dim": 14336,
    "text_dim": 5120,
    "time_embed_hidden_dim": 5376,
    "time_embed_dim": 2688,
}
"""What Diffusers' class has of itself, and the published checkpoint too."""
CASES: dict[str, dict[str, int]] = {
    "width": {"num_layers": 2, "num_refiner_layers": 0, "time_embed_dim": 256},
    "depth": {
        "num_attention_heads": 4,
        "attention_head_dim": 128,
        "hidden_size": 256,
        "ffn_dim": 683,
        "text_dim": 244,
        "time_embed_hidden_dim": 256,
        "time_embed_dim": 128,
    },
}
"""What differs from the published configuration."""

TEXT, PROJECTED, FIRST, LAST = 4, 9.6e4, 8.1e4, 4.3e6
"""Text rows, and the largest values: of their projection, of the sinks before and after all blocks."""
NORMALISED, GATED, FED_FORWARD, ATTENDED = 78.5, 5.9e4, 2e6, 1.43e5
"""The largest values of a feed-forward's input, gated product and output, and of attention's output."""
QUIET = 64.0
"""The largest value that attention, or a feed-forward, adds to a row that is no sink."""
SCALE, SINK = 4, 1
"""The part of a block's modulation that scales the feed-forward's input, and the modality of the sinks."""
FRAMES, HEIGHT, WIDTH, SOUND = 4, 4, 4, 8


@dataclass
class Variant:
    """One way to run the model: the format, and what `rescale_` is given."""

    dtype: torch.dtype
    options: dict[str, Any] | None = None


VARIANTS = {
    "bf16": Variant(torch.bfloat16),
    "fp16": Variant(torch.float16),
    "rescaled": Variant(torch.float16, {"ranges": "measured"}),
    "rescaled, fp32 residual": Variant(torch.float16, {"ranges": "bound", "residual": "fp32"}),
}


def make_call(config: dict[str, int]) -> dict[str, Any]:
    """The arguments of a call: text rows, then video, then sound, at two levels of noise."""
    draw = torch.Generator().manual_seed(1)
    video = FRAMES * HEIGHT * WIDTH
    tags = torch.tensor([1] * TEXT + [0] * video + [2] * SOUND)
    rows = torch.arange(len(tags))
    grid = torch.cartesian_prod(*(torch.arange(n) for n in (FRAMES, HEIGHT, WIDTH)))
    places = torch.stack([rows] * 3, 1)
    places[TEXT : TEXT + video] = grid + TEXT
    return {
        "hidden_states": torch.randn(1, video, 96, generator=draw),
        "audio_hidden_states": torch.randn(1, SOUND, 32, generator=draw),
        "encoder_hidden_states": torch.randn(1, TEXT, config["text_dim"], generator=draw),
        "timestep": torch.tensor([0.7, 0.0]),
        "timestep_indices": (tags == 1).long(),
        "token_tags": tags,
        "position_ids": places,
        "video_indices": rows[tags == 0],
        "audio_indices": rows[tags == 2],
        "text_indices": rows[tags == 1],
        "return_dict": False,
    }


def build(config: dict[str, int], factors: dict[str, float]) -> torch.nn.Module:
    """The model in fp32, its weights drawn by a seed and then scaled."""
    from diffusers import MiniMaxH3Transformer3DModel

    torch.manual_seed(0)
    module = MiniMaxH3Transformer3DModel(**config).eval().requires_grad_(False)
    for name, factor in factors.items():
        scale(module, name, factor)
    return module


def scale(module: torch.nn.Module, name: str, factor: float) -> None:
    """Multiply a layer, or what its modulation gives as a gate to one modality: `layer:gate:modality`."""
    path, *gate = name.split(":")
    layer = module.get_submodule(path)
    for parameter in layer.parameters(recurse=False):
        part = parameter
        if gate:
            part = parameter.unflatten(0, (3, 6, -1))[int(gate[1]), int(gate[0])]
        part.mul_(factor)


def run(module: torch.nn.Module, call: dict[str, Any], dtype: torch.dtype) -> list[torch.Tensor]:
    """The video and the sound of a call whose states are in a format."""
    given = {k: v.to(dtype) if "hidden_states" in k else v for k, v in call.items()}
    with torch.no_grad():
        return [x.float() for x in module(**given)]


class Calibration:
    """Factors that give a call the reported magnitudes, found layer by layer in one run.

    Attributes:
        factors: of each layer, or gate of a layer, as `scale` takes them.
    """

    def __init__(self, config: dict[str, int], call: dict[str, Any]) -> None:
        self.factors: dict[str, float] = {}
        self._module = build(config, {})
        self._names = {part: name for name, part in self._module.named_modules()}
        self._text = call["text_indices"]
        blocks = list(self._module.transformer_blocks)
        growth = LAST / FIRST
        self._steps = [FIRST * growth ** (n / len(blocks)) for n in range(len(blocks) + 1)]
        self._module.context_embedder.register_forward_hook(partial(self._aim, PROJECTED))
        self._module.token_refiner.final_norm.register_forward_hook(partial(self._aim, FIRST))
        for number, block in enumerate(blocks):
            block.adaln_proj.linear.register_forward_hook(partial(self._modulate, number))
            block.attn.to_out[0].register_forward_hook(partial(self._aim, ATTENDED))
            block.ff.net[0].register_forward_hook(self._multiply)
            block.ff.net[2].register_forward_hook(partial(self._aim, FED_FORWARD))
            block.register_forward_hook(partial(self._grow, number))
        run(self._module, call, torch.float32)

    def _scale(self, name: str, factor: float) -> None:
        self.factors[name] = self.factors.get(name, 1.0) * factor
        scale(self._module, name, factor)

    def _aim(self, target: float, part: Any, _: Any, output: torch.Tensor) -> torch.Tensor:
        factor = target / measure_amax(output)
        self._scale(self._names[part], factor)
        return output * factor

    def _multiply(self, part: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        for _ in range(4):  # a product of two, one of them through SiLU: not quite the square
            self._scale(f"{self._names[part]}.proj", (GATED / measure_amax(output)) ** 0.5)
            output = part.forward(*args)
        return output

    def _modulate(self, block: int, part: Any, _: Any, output: torch.Tensor) -> torch.Tensor:
        """Scale the sinks' input, and the gates so that each adds what it is to add."""
        least, most = self._steps[block : block + 2]
        loud = NORMALISED / 4  # a normalised row's largest value is some 4
        targets = {(x, 2): QUIET / ATTENDED for x in range(3)}
        targets |= {(x, 5): QUIET / FED_FORWARD * loud**2 for x in range(3)}  # fed forward: squared
        targets |= {(SINK, SCALE): loud, (SINK, 5): (most - least) / FED_FORWARD}
        table = output.clone().unflatten(1, (3, 6, -1))
        for (modality, which), target in targets.items():
            entries = table[:, modality, which]
            factor = target / measure_amax(entries)
            self._scale(f"{self._names[part]}:{which}:{modality}", factor)
            entries.mul_(factor)
        return table.flatten(1)

    def _grow(self, block: int, part: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        """Scale what the sinks' gate adds until they have their size."""
        given, target = args[0][:, self._text], self._steps[block + 1]
        added = output[:, self._text] - given
        least, most = 0.0, 2 * target / measure_amax(added)
        for _ in range(40):
            factor = (least + most) / 2
            if measure_amax(given + added * factor) < target:
                least = factor
            else:
                most = factor
        self._scale(f"{self._names[part]}.adaln_proj.linear:5:{SINK}", factor)
        return output.index_copy(1, self._text, given + added * factor)


def measure_stream(
    module: torch.nn.Module, call: dict[str, Any]
) -> tuple[list[torch.Tensor], dict[str, list[float]]]:
    """A call in fp32, and the residual stream's largest and median values before and after each block."""
    found: dict[str, list[float]] = {"sinks": [], "others": [], "median": []}

    def look(states: torch.Tensor) -> None:
        sinks = torch.zeros(states.shape[1], dtype=torch.bool)
        sinks[call["text_indices"]] = True
        found["sinks"].append(measure_amax(states[:, sinks]))
        found["others"].append(measure_amax(states[:, ~sinks]))
        found["median"].append(float(states[:, ~sinks].abs().median()))

    blocks = list(module.transformer_blocks)
    hooks = [blocks[0].register_forward_pre_hook(lambda _, args: look(args[0]))]
    hooks += [x.register_forward_hook(lambda _, args, output: look(output)) for x in blocks]
    outputs = run(module, call, torch.float32)
    for hook in hooks:
        hook.remove()
    return outputs, found


def measure(name: str) -> dict[str, Any]:
    """One case: the magnitudes that were made, and each variant's error."""
    config = PUBLISHED | CASES[name]
    call, started = make_call(config), time.perf_counter()
    factors = Calibration(config, call).factors
    module = build(config, factors)
    reference, stream = measure_stream(module, call)
    row: dict[str, Any] = {
        "config": config,
        "parameters": sum(x.numel() for x in module.parameters()),
        "stream": stream,
        "variants": {},
    }
    for title, variant in VARIANTS.items():
        del module
        gc.collect()
        module = build(config, factors)
        row["variants"][title] = result = run_variant(module, call, reference, variant)
        print(name, title, json.dumps(result), flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return row | {"seconds": round(time.perf_counter() - started), "rss_bytes": peak}


def lower(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast as loading does: what the class keeps in fp32 stays, of the others no copy is held."""
    for name, parameter in module.named_parameters():
        if not any(kept in name for kept in module._keep_in_fp32_modules):
            parameter.data = parameter.data.to(dtype)


def run_variant(
    module: torch.nn.Module, call: dict[str, Any], reference: list[torch.Tensor], variant: Variant
) -> dict[str, Any]:
    """The errors of one way to run the model; None where a value is not finite."""
    result: dict[str, Any] = {}
    if variant.options is None:
        lower(module, variant.dtype)
    else:
        started = time.perf_counter()
        rescaling = rescale_(module, (), call, **variant.options)
        result["seconds"] = round(time.perf_counter() - started, 1)
        again = run(module, call, torch.float32)
        scaling = rescaling.scaling
        result |= {
            "exact": all(map(torch.equal, again, reference)),
            "folds": len(scaling.exponents),
            "fp32_modules": len(scaling.fp32_modules),
            "stream": rescaling.residual,
            "certified": rescaling.certified,
            "note": scaling.note,
        }
        cast_(module, variant.dtype, rescaling)
    with WideProducts():
        outputs = run(module, call, variant.dtype)
    for kind, output, right in zip(("video", "audio"), outputs, reference, strict=True):
        finite = bool(output.isfinite().all())
        result[kind] = relative_l2(output, right) if finite else None
    return result


def count_published() -> int:
    """The parameters of the transformer as it is published."""
    from diffusers import MiniMaxH3Transformer3DModel

    with torch.device("meta"):
        return sum(x.numel() for x in MiniMaxH3Transformer3DModel(**PUBLISHED).parameters())


def store(rows: dict[str, Any]) -> None:
    """Write the rows with what made them."""
    import diffusers

    found = {
        "command": "python benchmarks/minimax_h3.py",
        "machine": describe_machine(),
        "versions": {"torch": torch.__version__, "diffusers": diffusers.__version__},
        "published_parameters": count_published(),
        "rows": rows,
    }
    STORED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Measure the cases that are named, and store them beside the others."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=list(CASES))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = json.loads(STORED.read_text(encoding="utf-8"))["rows"] if STORED.exists() else {}
    for name in options.cases:
        rows[name] = measure(name)
        store(rows)


if __name__ == "__main__":
    main()
