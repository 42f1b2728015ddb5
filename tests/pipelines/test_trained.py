"""Trained weights: what fp16 makes of them as they are, and rescaled. `make trained` downloads them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from models import trained_models
from models.trained_models import (
    finish_terrain,
    list_packages,
    load_gemma,
    load_terrain,
    make_terrain_call,
    open_package,
    run_onnx,
)
from stopdown import cast_, rescale_
from stopdown.numerics import relative_l2


def test_another_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package whose hash is not the one that was pinned is not read."""
    stem = next(x for x in list_packages() if x.startswith("adaptive_terrain"))
    (tmp_path / f"{stem}-py3-none-any.whl").write_bytes(b"something else")
    monkeypatch.setattr(trained_models, "FOLDER", tmp_path)
    with pytest.raises(
        ValueError, match=r"has the sha256 \w{64}, and dd803be2c98d\w+ was expected"
    ):
        open_package.__wrapped__("adaptive_terrain_diffusion")


@pytest.mark.trained
def test_the_network_draws_what_its_package_draws() -> None:
    """The architecture that is built here gives the terrains of the package's own runtime."""
    module, data = load_terrain()
    given = make_terrain_call(7, (10, 90))
    found = finish_terrain(given, module(**given))
    assert float((found - run_onnx(data, given)).abs().max()) < 1e-4
    assert float(found.std()) > 0.1


def check_rescaled(
    module: torch.nn.Module, call: dict[str, Any], others: list[dict[str, Any]], ranges: str
) -> list[torch.Tensor]:
    """Rescale for one call and compare others: the same in fp32, nearer than bf16 in fp16."""

    def run(part: torch.nn.Module, given: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
        cast = {k: x.to(dtype) if k == "sample" else x for k, x in given.items()}
        with torch.no_grad():
            found = part(**cast)
        return (found if isinstance(found, torch.Tensor) else found.logits).float()

    wanted = [run(module, x, torch.float32) for x in others]
    plain = run(copy.deepcopy(module).to(torch.float16), others[0], torch.float16)
    assert not bool(plain.isfinite().all())
    brain = run(copy.deepcopy(module).to(torch.bfloat16), others[0], torch.bfloat16)
    rescaling = rescale_(module, (), call, ranges=ranges)
    assert all(
        torch.equal(run(module, x, torch.float32), y) for x, y in zip(others, wanted, strict=True)
    )
    cast_(module, torch.float16, rescaling)
    found = [run(module, x, torch.float16) for x in others]
    errors = [relative_l2(x, y) for x, y in zip(found, wanted, strict=True)]
    assert errors[0] < relative_l2(brain, wanted[0]) / 4
    assert max(errors) < 0.01
    return [x.argmax(-1) == y.argmax(-1) for x, y in zip(found, wanted, strict=True)]


@pytest.mark.trained
@pytest.mark.parametrize("ranges", ["measured", "bound"])
def test_gemma_chooses_the_same_words(ranges: str) -> None:
    """Gemma 3 is NaN in plain fp16; rescaled, it is nearer than bf16, and its likeliest words stay."""
    module, calls = load_gemma()
    same = check_rescaled(module, calls[0], calls[1:], ranges)
    assert all(bool(x.all()) for x in same)


@pytest.mark.trained
def test_a_trained_unet() -> None:
    """A consistency UNet whose values reach 4e10 is NaN in plain fp16; rescaled, it is nearer than bf16."""
    module, _ = load_terrain()
    check_rescaled(module, make_terrain_call(1, (50,)), [make_terrain_call(2, (80,))], "measured")
