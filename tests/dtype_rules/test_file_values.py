"""`stopdown check FILE`: what a weight file holds, without a model."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.weight_file_samples import SAFETENSORS, draw, write_gguf, write_sample
from stopdown.dtype_rules import file_values
from stopdown.dtype_rules.file_values import inspect_file
from stopdown.records import FileCheck
from stopdown.sources.headers import RESCALED_ENTRY
from stopdown.sources.weight_files import open_weight_file

Run = Callable[..., tuple[int, str, str]]

NOTES = {"fp16-unplanned", "weights-all-zero"}


def inspect(path: Path, device: str | None = None) -> FileCheck:
    return inspect_file(open_weight_file(path), path.name, device)


def find_faults(path: Path) -> dict[str, str]:
    """Kind to place of what is wrong with a file."""
    return {x.kind: x.module_path for x in inspect(path).findings if x.kind not in NOTES}


@pytest.mark.parametrize(
    ("sample", "contents", "stored"),
    [
        ("plain", "one component, 3 weights", {"": ["bf16"]}),
        ("scaled fp8", "1 component, 2 weights", {"model.diffusion_model": ["scaled fp8", "fp16"]}),
        ("comfy int8", "one component, 1 weights", {"": ["int8_tensorwise"]}),
        ("comfy metadata", "one component, 1 weights", {"": ["float8_e4m3fn"]}),
        ("bitsandbytes int8", "one component, 1 weights", {"": ["bitsandbytes int8 by rows"]}),
        (
            "lora",
            "an adapter (LoRA) of rank 4 for 2 layers",
            {"lora_unet": ["fp16"], "lora_te1": ["fp16"]},
        ),
    ],
)
def test_each_layout_is_known_by_its_names(
    tmp_path: Path, sample: str, contents: str, stored: dict[str, list[str]]
) -> None:
    """What a file is, how its weights are stored and how large they are, scales included."""
    path = write_sample(sample, tmp_path / "file.safetensors")
    found = inspect(path)
    assert found.contents.startswith(contents)
    assert {part.component: list(part.stored) for part in found.parts} == stored
    assert not find_faults(path)
    largest = max(part.amax or 0 for part in found.parts)
    assert 0.15 < largest <= 4.0, "codes alone reach 127 or 448"


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q5_0", "Q4_1"])
def test_gguf_is_unpacked(tmp_path: Path, kind: str) -> None:
    """The largest value is that of what was packed, up to the type's rounding."""
    weight = draw(8, 64)
    path = write_gguf(tmp_path / "file.gguf", kind, {"ff.weight": weight.numpy()})
    found = inspect(path)
    assert found.format == "GGUF flux"
    assert list(found.parts[0].stored) == [{"F16": "fp16", "BF16": "bf16"}.get(kind, kind)]
    assert found.parts[0].amax == pytest.approx(float(weight.abs().max()), rel=0.1)
    assert not find_faults(path)


def spoil(weight: torch.Tensor, value: float) -> torch.Tensor:
    weight = weight.clone()
    weight[3, 5] = value
    return weight


PLANTED: dict[str, tuple[str, dict[str, torch.Tensor | None]]] = {
    "weight-not-finite": ("plain", {"blocks_0_weight": spoil(draw(64, 64), float("nan"))}),
    "weight-out-of-range": ("plain", {"blocks_0_weight": spoil(draw(64, 64), 1e5)}),
    "vanishes-in-fp16": ("plain", {"blocks_0_weight": draw(64, 64) * 1e-8}),
    "weight-subnormal": ("plain", {"blocks_0_weight": draw(64, 64) * 1e-4}),
    "scale-missing": ("comfy int8", {"ff_weight_scale": None}),
    "scale-not-usable": ("scaled fp8", {"ff_scale_weight": torch.tensor(float("inf"))}),
    "scale-subnormal": ("scaled fp8", {"ff_scale_weight": torch.tensor(2.0**-15)}),
    "adapter-incomplete": ("lora", {"blocks_0_ff_lora_up_weight": None}),
    "ends-in-zeros": ("plain", {"norm_weight": torch.zeros(64).bfloat16(), "blocks_1_weight": torch.cat(
        [draw(8, 1024), torch.zeros(8, 1024)]).bfloat16()}),
}  # fmt: skip


@pytest.mark.parametrize("kind", PLANTED)
def test_each_fault_is_found_where_it_was_planted(tmp_path: Path, kind: str) -> None:
    """One fault in a file that is right without it; the file without it has none."""
    sample, changes = PLANTED[kind]
    path = write_sample(sample, tmp_path / "file.safetensors", **changes)
    assert not find_faults(write_sample(sample, tmp_path / "clean.safetensors"))
    faults = find_faults(path)
    assert kind in faults
    assert set(faults) <= {kind, "weight-not-finite"}, "a scale of Inf makes values of it"


@pytest.mark.parametrize(
    ("name", "component"),
    [("text_encoders.clip_l.a.weight", "text_encoder"), ("model.diffusion_model.a", "COMPONENT")],
)
def test_the_remedy_asks_for_what_it_says(tmp_path: Path, name: str, component: str) -> None:
    """Both its sentence and its option name a format that holds the value, and no tensor of the file."""
    path = tmp_path / "file.safetensors"
    save_file({name: torch.full((4, 4), 1e6)}, path)
    (found,) = (x for x in inspect(path).findings if x.kind == "weight-out-of-range")
    assert found.remedy.startswith(
        f"Run the component in bf16 or fp32: --precision {component}=bf16."
    )


@pytest.mark.parametrize(
    ("check", "kinds"),
    [
        ("_check_values", ("weight-not-finite", "weight-out-of-range", "vanishes-in-fp16")),
        ("_check_scales", ("scale-missing", "scale-subnormal")),
        ("_check_tail", ("ends-in-zeros",)),
        ("_check_pairs", ("adapter-incomplete",)),
    ],
)
def test_a_check_that_is_off_finds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: str, kinds: tuple[str, ...]
) -> None:
    """The findings come from these checks and from nothing else."""
    monkeypatch.setattr(file_values, check, lambda *_: iter(()))
    for kind in kinds:
        sample, changes = PLANTED[kind]
        assert kind not in find_faults(write_sample(sample, tmp_path / "x.safetensors", **changes))


def test_a_matrix_of_zeros_is_told_and_is_no_fault(tmp_path: Path, run: Run) -> None:
    """Last layers of blocks begin so; the exit code stays 0."""
    path = write_sample(
        "plain", tmp_path / "x.safetensors", blocks_0_weight=torch.zeros(64, 64).bfloat16()
    )
    code, out, _ = run("check", path)
    assert code == 0
    assert "NOTE blocks.0.weight  [weights-all-zero]" in out


def test_a_bias_of_zeros_at_the_end_is_no_cut_off_file(tmp_path: Path) -> None:
    """Only a matrix that ends in zeros says that values are missing."""
    path = write_sample("plain", tmp_path / "x.safetensors", norm_weight=torch.zeros(9000))
    assert not find_faults(path)


def test_the_page_has_components_and_the_exit_code_of_faults(tmp_path: Path, run: Run) -> None:
    """One page: what it is, one line a component, the findings worst first."""
    path = write_sample("scaled fp8", tmp_path / "x.safetensors")
    code, out, _ = run("check", path)
    assert code == 0
    assert out.startswith(f"No problems and 1 note in {path}.\n")
    assert "\nsafetensors, 1 component, 2 weights in 4 KiB" in out
    assert (
        "- model.diffusion_model: 2 weights; scaled fp8 4 KiB, fp16 128 B; the largest value" in out
    )
    assert "NOTE x.safetensors  [fp16-unplanned]" in out
    assert "NVIDIA Tesla V100" in out
    sample, changes = PLANTED["weight-not-finite"]
    code, out, _ = run("check", write_sample(sample, path, **changes))
    assert code == 1
    assert "1 of 4096 values are NaN or Inf, as stored in fp32." in out


def test_a_device_is_judged_alone(tmp_path: Path, run: Run) -> None:
    """A card without bf16 makes programs fall back to fp16; one without fp8 refuses the file."""
    path = write_sample("scaled fp8", tmp_path / "x.safetensors")
    code, out, _ = run("check", path, "--device", "v100", "--json")
    assert code == 1
    assert [x["kind"] for x in json.loads(out)["findings"]] == ["range-unplanned"]
    code, out, _ = run("check", path, "--device", "a100")
    assert (code, out.startswith("No problems ")) == (0, True)
    code, out, _ = run("check", path, "--device", "mps-m1")
    assert (code, "codes-unsupported" in out) == (1, True)


def test_a_file_that_is_rescaled_already_says_so(tmp_path: Path, run: Run) -> None:
    """What its metadata says is on the page, and fp16 is no risk for it."""
    path = write_sample("plain", tmp_path / "x.safetensors")
    save_file(
        load_file(path), path, {RESCALED_ENTRY: "unet: weights are multiplied by powers of two"}
    )
    code, out, _ = run("check", path, "--device", "v100")
    assert code == 0
    assert "Rescaled already: unet: weights are multiplied by powers of two." in out


@pytest.mark.parametrize("suffix", [".safetensors", ".gguf"])
def test_a_half_written_file_is_one_message(tmp_path: Path, run: Run, suffix: str) -> None:
    """Exit 2, and the file stays as it is."""
    path = tmp_path / f"x{suffix}"
    if suffix == ".gguf":
        write_gguf(path, "Q8_0", {"ff.weight": draw(64, 64).numpy()})
    else:
        write_sample("plain", path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    code, _, err = run("check", path)
    assert code == 2
    assert f"The weights {path} are damaged or cut off: it" in err
    assert path.read_bytes() == content[: len(content) // 2]


def test_a_header_that_was_changed_is_a_damaged_file(tmp_path: Path) -> None:
    """Whatever byte of a GGUF header is wrong: it is read, or refused as damaged, and nothing else."""
    from stopdown.sources.headers import DamagedFileError

    path = write_gguf(tmp_path / "x.gguf", "Q8_0", {"ff.weight": draw(4, 32).numpy()})
    content = path.read_bytes()
    refused = 0
    with path.open("r+b", buffering=0) as file:
        for place in range(0, 140):
            os.pwrite(file.fileno(), b"\xff", place)
            try:
                inspect(path)
            except DamagedFileError:
                refused += 1
            os.pwrite(file.fileno(), content[place : place + 1], place)
    assert refused > 20


def test_without_its_package_gguf_is_one_message(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names what to install."""
    path = write_gguf(tmp_path / "x.gguf", "Q8_0", {"ff.weight": draw(4, 32).numpy()})
    monkeypatch.setitem(sys.modules, "gguf", None)
    code, _, err = run("check", path)
    assert code == 2
    assert "pip install '.[gguf]'" in err


def test_options_of_models_are_refused_for_gguf(tmp_path: Path, run: Run) -> None:
    """A GGUF file has no configurations that a precision could be judged by."""
    path = write_gguf(tmp_path / "x.gguf", "Q8_0", {"ff.weight": draw(4, 32).numpy()})
    code, _, err = run("check", path, "--precision", "fp16")
    assert code == 2
    assert f"--precision can't be used with the GGUF file {path}." in err


def test_torchao_files_are_known(tmp_path: Path) -> None:
    """As torchao flattens its tensors: by the table of types in the metadata."""
    quantization = pytest.importorskip("torchao.quantization")
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    layer = torch.nn.Sequential(torch.nn.Linear(64, 64).bfloat16())
    quantization.quantize_(layer, quantization.Int8WeightOnlyConfig(version=2))
    tensors, metadata = flatten_tensor_state_dict(
        {name: x if type(x) is torch.Tensor else x.data for name, x in layer.state_dict().items()}
    )
    save_file(tensors, tmp_path / "x.safetensors", metadata)
    found = inspect(tmp_path / "x.safetensors")
    assert "torchao Int8Tensor" in found.parts[0].stored
    assert not find_faults(tmp_path / "x.safetensors")
    assert found.parts[0].amax == pytest.approx(0.125, rel=0.05)


def test_bitsandbytes_files_are_known(tmp_path: Path) -> None:
    """As bitsandbytes writes a layer in nf4: codes, their scales and a table beside them."""
    bnb = pytest.importorskip("bitsandbytes")

    layer = bnb.nn.Linear4bit(64, 64, quant_type="nf4").to("cpu")
    layer.weight = bnb.nn.Params4bit(draw(64, 64), requires_grad=False, quant_type="nf4").to("cpu")
    save_file({f"ff.{k}": v for k, v in layer.state_dict().items()}, tmp_path / "x.safetensors")
    found = inspect(tmp_path / "x.safetensors")
    assert "bitsandbytes 4 bits" in found.parts[0].stored
    assert not find_faults(tmp_path / "x.safetensors")


def test_every_sample_is_used() -> None:
    """The layouts above are all that there are."""
    assert len(SAFETENSORS) == 6


def test_a_complex_table_is_no_quantised_weight(tmp_path: Path) -> None:
    """A file in fp32 with rotary frequencies was said to be of a model that was trained in bf16."""
    path = tmp_path / "file.safetensors"
    save_file({"freqs": torch.ones(4, 4, dtype=torch.complex64), "w": torch.ones(4, 4)}, path)
    assert inspect(path).findings == inspect(path, "t4").findings == ()


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e8m0fnu]
)
def test_no_fp8_is_stored_on_a_mac(tmp_path: Path, dtype: torch.dtype) -> None:
    """Whatever its kind."""
    save_file({"w": torch.ones(4, 4).to(dtype)}, tmp_path / "file.safetensors")
    kinds = {x.kind for x in inspect(tmp_path / "file.safetensors", "mps-m3").findings}
    assert "codes-unsupported" in kinds
