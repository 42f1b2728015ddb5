"""Blocks, tiles and frames that are alike: run once, and all is predicted as if each were run."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch

from stopdown.component_calls.components import find_components, is_autoencoder, list_block_paths
from stopdown.fake_tensors.fake_modules import build_fake
from stopdown.memory.alike_calls import sign_block, sign_state
from stopdown.memory.allocation_tracker import StorageTracker
from stopdown.memory.run_memory import MemoryListener, RunMemory, listen_to_run
from stopdown.pipelines.drawn_inputs import complete_request
from stopdown.pipelines.dry_run import dry_run_program
from stopdown.pipelines.requests import Request, build_arguments
from stopdown.pipelines.skeletons import copy_skeleton
from stopdown.testing import PIPELINE_NAMES, make_pipeline


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["cogvideox", "wan"])
def test_a_tile_like_another_is_not_run_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is predicted as if each were run, with what Wan's decoder writes into its cache.

    Of a seam one row is blended.
    """
    pipe = make_pipeline(name)
    seams, blend = list[int](), type(pipe.vae).blend_v
    sides = ("min_height", "min_width", "stride_height", "stride_width")
    pipe.vae.enable_tiling(**{f"tile_sample_{x}": 16 for x in sides if name == "wan"})
    ran, kind = list[bool](), type(pipe.vae.decoder)
    forward = kind.forward

    def count(self: Any, *args: Any, **kwargs: Any) -> Any:
        ran.append(True)
        return forward(self, *args, **kwargs)

    def note(self: Any, before: Any, after: Any, width: int) -> Any:
        seams.append(width)
        return blend(self, before, after, width)

    def listen() -> tuple[RunMemory, int]:
        ran.clear()
        seams.clear()
        sizes = {"height": 32, "width": 32, "num_frames": 5}
        return listen_to_run(
            copy_skeleton(pipe), {"prompt": "a", "num_inference_steps": 1, **sizes}
        ), len(ran)

    monkeypatch.setattr(kind, "forward", count)
    monkeypatch.setattr(type(pipe.vae), "blend_v", note)
    found, few = listen()
    narrow = max(seams)
    monkeypatch.setattr(MemoryListener, "_put_tiles", lambda *_: None)
    expected, many = listen()
    assert narrow == min(1, max(seams))
    assert found == expected
    assert many > 4
    assert few < many / 2


class Coder:
    """A program with nothing but an autoencoder of a class's own size, without weights."""

    def __init__(self, name: str) -> None:
        self.vae: Any = build_fake(getattr(diffusers, name), torch.bfloat16)

    @property
    def components(self) -> dict[str, Any]:
        return {"vae": self.vae}

    def listen(self, shape: tuple[int, ...]) -> RunMemory:
        """What decoding latents of a shape takes."""
        listener, latents = MemoryListener(on_cpu=False), torch.zeros(shape, dtype=torch.bfloat16)
        dry_run_program(self, lambda: self.vae.decode(latents), [listener])
        return listener.conclude(self)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "channels"),
    [
        ("AutoencoderKLMagvit", 16),
        ("AutoencoderKLWan", 16),
        ("AutoencoderKLHunyuanVideo", 16),
        ("AutoencoderKLLTXVideo", 128),
        ("AutoencoderKLMochi", 12),
        ("AutoencoderKLCosmos", 16),
        ("AutoencoderVidTok", 4),
    ],
)
def test_frames_that_are_alike_are_decoded_once(
    name: str, channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is predicted as if each frame and tile were run, wherever the decoder keeps the one before."""
    coder = Coder(name)
    for tiles, side in ((False, 16), (True, 40)):
        coder.vae.use_tiling = tiles
        with monkeypatch.context() as patches:
            found = coder.listen((1, channels, 7, side, side))
            patches.setattr(MemoryListener, "_put_tiles", lambda *_: None)
            assert found == coder.listen((1, channels, 7, side, side))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        # the blocks of CogVideoX are the same wherever its pipeline starts from
        pytest.param(x, marks=pytest.mark.slow if x.startswith("cogvideox-") else ())
        for x in PIPELINE_NAMES
    ],
)
def test_blocks_that_are_alike_are_run_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is predicted as if each block were run; where two are alike, one of them is not."""
    pipe, ran = make_pipeline(name), list[str]()
    signs = [
        sign_block(module.get_submodule(path))
        for module in find_components(pipe).values()
        for path in list_block_paths(module, (torch.nn.ModuleList,))
        if not is_autoencoder(module)
    ]
    begin = StorageTracker.__torch_dispatch__

    def count(self: Any, func: Any, *given: Any, **named: Any) -> Any:
        ran.append(str(func))
        return begin(self, func, *given, **named)

    def listen() -> tuple[RunMemory, int]:
        ran.clear()
        request = complete_request(pipe, Request(steps=2))
        return listen_to_run(copy_skeleton(pipe), build_arguments(pipe, request)), len(ran)

    monkeypatch.setattr(StorageTracker, "__torch_dispatch__", count)
    found, few = listen()
    monkeypatch.setattr(MemoryListener, "_put_blocks", lambda *_: None)
    expected, many = listen()
    assert found == expected
    assert few < many or len(set(signs)) == len(signs)


def test_blocks_with_other_hooks_or_settings_are_told_apart() -> None:
    """A hook, an attribute, a size or a dtype of one block, but not its number, makes it another."""
    layers = [torch.nn.TransformerEncoderLayer(8, 2, 16) for _ in range(6)]
    for number, layer in enumerate(layers):
        layer.layer_idx = number  # type: ignore[assignment]
    assert len({*map(sign_block, layers)}) == len({*map(sign_state, layers)}) == 1
    layers[1].norm_first = True
    layers[2].linear1.register_forward_hook(lambda *_: None)
    layers[3].half()
    layers[4].linear2 = torch.nn.Linear(16, 8, bias=False)
    assert len({*map(sign_block, layers)}) == 5


def test_what_a_block_keeps_is_told_by_shape() -> None:
    """Numbers and nested values count as they are, tensors by shape, strides and dtype alone."""
    layers = [torch.nn.Linear(4, 4) for _ in range(6)]
    for layer in layers:
        layer.frames, layer.count = [torch.zeros(2, 3)], {"seen": (1, None)}  # type: ignore[assignment]
    layers[1].frames = [torch.ones(2, 3)]  # type: ignore[assignment]
    assert len({*map(sign_state, layers)}) == 1
    layers[2].frames = [torch.zeros(2, 4)]  # type: ignore[assignment]
    layers[3].frames = [torch.zeros(3, 2).T]  # type: ignore[assignment]
    layers[4].count = {"seen": (2, None)}  # type: ignore[assignment]
    layers[5].frames = None  # type: ignore[assignment]
    assert len({*map(sign_state, layers)}) == 5
