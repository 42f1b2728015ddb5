"""Folders of converted components: folded weights beside files that are copied."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from models.conversions import convert_made, plan_plainly
from stopdown.checkpoints import component_folders
from stopdown.checkpoints.component_folders import fold_to_fp16
from stopdown.checkpoints.convert import convert
from stopdown.checkpoints.file_exponents import FileExponents
from stopdown.errors import OptionError
from stopdown.plans.plan_files import seal_plan
from stopdown.records import Plan, Scaling
from stopdown.scaling.folding.folds import load_scaled
from stopdown.sources.sources import resolve_source


def test_folds_go_from_the_stored_format_to_fp16(
    save_tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a plan has folds alone nothing is in fp32 on the way: each weight is rounded once from bf16."""
    source, name = resolve_source(save_tiny("sd", "bf16")), "conv_in.weight"
    plan = plan_plainly("sd", save_tiny("sd", "bf16"))
    scaling = {"unet": Scaling(exponents={name: -20})}
    entries = [
        dataclasses.replace(x, scaling=scaling.get(x.component, Scaling())) for x in plan.components
    ]
    seen: dict[str, set[torch.dtype]] = {}

    def watch(module: torch.nn.Module, *given: Any) -> Any:
        seen[type(module).__name__] = {x.dtype for x in module.parameters()}
        return load_scaled(module, *given)

    monkeypatch.setattr(component_folders, "load_scaled", watch)
    convert(
        source, tmp_path / "out", seal_plan(dataclasses.replace(plan, components=tuple(entries)))
    )
    assert len(seen) == len(entries)
    assert set.union(*seen.values()) == {torch.bfloat16}
    file = "unet/diffusion_pytorch_model.safetensors"
    before, after = load_file(source.path / file), load_file(tmp_path / "out" / file)
    for key, value in before.items():
        wanted = torch.ldexp(value.double(), torch.tensor(-20 if key == name else 0)).half()
        assert torch.equal(after[key], wanted)


def test_what_is_left_is_copied(
    save_planned: Callable[[str], tuple[Path, Plan]], tmp_path: Path
) -> None:
    """`--leave` copies a component's files to the byte; loading it is told."""
    folder, plan = save_planned("sd")
    others = [e.component for e in plan.components if e.component != "text_encoder"]
    record = convert_made("sd", folder, tmp_path / "out", plan, leave=others)
    for name in others:
        file = f"{name}/diffusion_pytorch_model.safetensors"
        assert (tmp_path / "out" / file).read_bytes() == (folder / file).read_bytes()
    assert [e.precision for e in record.components if e.component in others] == ["as stored"] * 2
    assert '"unet": torch.bfloat16' in record.load
    assert '"default": torch.float16' in record.load


def test_a_weight_beyond_fp16_is_not_written() -> None:
    """By name; a NaN of the original is as bad."""
    module = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    )
    module.requires_grad_(False)
    module[0].weight[1, 2], module[2].bias[3] = 7e4, torch.nan
    with pytest.raises(
        OptionError, match=r"Weights are beyond 65504 in unet:0\.weight, unet:2\.bias\."
    ):
        fold_to_fp16("unet", module, FileExponents(Scaling()))
