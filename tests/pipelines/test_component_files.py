"""Files with one component, as most are published: found out by their names, planned, converted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from models import conversions
from models.measured_plans import measure_pipeline
from models.single_file_layout import name_encoder, name_pipeline, name_unet, name_vae
from stopdown.checkpoints.convert import convert
from stopdown.errors import OptionError, PlanError, SourceError
from stopdown.pipelines.loader import complete_source, load_pipeline, load_program
from stopdown.plans.certified import certify_plan
from stopdown.records import Plan
from stopdown.sources.source import Source
from stopdown.sources.source_checks import verify_source
from stopdown.sources.sources import resolve_source
from stopdown.testing import save_pipeline

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def pipe() -> Any:
    """A tiny Stable Diffusion that overflows in fp16, in bf16."""
    return conversions.build("sd")


@pytest.fixture(scope="module")
def folder(pipe: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its Diffusers folder."""
    path = tmp_path_factory.mktemp("component") / "sd"
    pipe.save_pretrained(path)
    return path


def strip(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): x for name, x in tensors.items()}


FILES: dict[str, tuple[Callable[[Any], dict[str, torch.Tensor]], tuple[str, ...]]] = {
    "unet": (lambda pipe: name_unet(pipe.unet.state_dict()), ("unet",)),
    "bare unet": (
        lambda pipe: strip(name_unet(pipe.unet.state_dict()), "model.diffusion_model."),
        ("unet",),
    ),
    "diffusers unet": (lambda pipe: pipe.unet.state_dict(), ("unet",)),
    "vae": (lambda pipe: strip(name_vae(pipe.vae.state_dict()), "first_stage_model."), ("vae",)),
    "text encoder": (
        lambda pipe: strip(
            name_encoder(pipe.text_encoder.state_dict()), "cond_stage_model.transformer."
        ),
        ("text_encoder",),
    ),
    "unet and vae": (
        lambda pipe: name_unet(pipe.unet.state_dict()) | name_vae(pipe.vae.state_dict()),
        ("unet", "vae"),
    ),
}


@pytest.fixture(scope="module")
def save(
    pipe: Any, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Source]:
    """A file of `FILES` as a source described by the folder."""
    root = tmp_path_factory.mktemp("files")

    def write(name: str) -> Source:
        path = root / f"{name.replace(' ', '-')}.safetensors"
        if not path.exists():
            save_file(dict(FILES[name][0](pipe)), path, metadata={"title": name})
        return resolve_source(path, config=folder)

    return write


@pytest.mark.parametrize("name", FILES)
def test_a_part_is_found_and_loaded(
    name: str, save: Callable[[str], Source], pipe: Any, folder: Path
) -> None:
    """By names and shapes, with and without prefixes; every weight is the one that was saved."""
    source = complete_source(save(name))
    assert tuple(part.name for part in source.parts) == FILES[name][1]
    program = load_program(source, torch_dtypes=torch.bfloat16)
    for part in source.parts:
        found = getattr(program, part.name).state_dict()
        for key, x in getattr(pipe, part.name).state_dict().items():
            assert torch.equal(found[key], x), key


def test_a_whole_file_has_no_parts(pipe: Any, folder: Path, tmp_path: Path) -> None:
    """A checkpoint with names of all three kinds loads as a pipeline, as before."""
    parts = (pipe.unet, pipe.vae, pipe.text_encoder)
    tensors = name_pipeline(*(part.state_dict() for part in parts))
    save_file(tensors, tmp_path / "whole.safetensors")
    source = complete_source(resolve_source(tmp_path / "whole.safetensors", config=folder))
    assert source.parts == ()
    assert load_pipeline(source, torch_dtypes=torch.float32).unet is not None


def test_a_run_of_a_part_is_refused(save: Callable[[str], Source]) -> None:
    """A part is no pipeline; what can be done with it is said."""
    source = complete_source(save("unet"))
    with pytest.raises(SourceError) as caught:
        load_pipeline(source, torch_dtypes=torch.float32)
    assert str(caught.value) == (
        f"The file {source.path} contains only the unet of a StableDiffusionPipeline. A run needs "
        "all of its components. Give the model's Diffusers folder or Hub id. The file by itself can be "
        f"planned and converted: stopdown convert {source.path} OUT.safetensors"
    )


def test_a_file_of_an_unknown_model_is_refused(folder: Path, tmp_path: Path) -> None:
    """Without a configuration Diffusers does not know it; with one, nothing of that model is in it."""
    path = tmp_path / "strange.safetensors"
    save_file({"strange.weight": torch.ones(2, 2)}, path)
    for config, message in (
        (
            None,
            f"Diffusers doesn't know what model {path} is; its first tensor is 'strange.weight'.",
        ),
        (
            folder,
            f"The file {path} holds no whole component of a StableDiffusionPipeline as {folder} ",
        ),
    ):
        with pytest.raises(SourceError) as caught:
            complete_source(resolve_source(path, config=config))
        assert str(caught.value).startswith(message)


def test_a_part_without_one_tensor_is_refused(
    save: Callable[[str], Source], folder: Path, tmp_path: Path
) -> None:
    """A UNet that lacks its last layer is not taken for one."""
    tensors = load_file(save("unet").path)
    path = tmp_path / "short.safetensors"
    save_file({k: x for k, x in tensors.items() if ".out.2." not in k}, path)
    with pytest.raises(SourceError, match="holds no whole component of a StableDiffusionPipeline"):
        complete_source(resolve_source(path, config=folder))


def test_a_half_written_file_is_refused(save: Callable[[str], Source], tmp_path: Path) -> None:
    """What was cut off is found in the header, before anything is loaded."""
    whole = save("unet").path.read_bytes()
    path = tmp_path / "half.safetensors"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SourceError, match=f"The weights {path} are damaged or cut off"):
        verify_source(resolve_source(path))


def make_call() -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(0)
    return {
        "sample": torch.randn(2, 4, 4, 4, generator=noise),
        "timestep": torch.tensor(500),
        "encoder_hidden_states": torch.randn(2, 8, 32, generator=noise),
    }


@pytest.fixture(scope="module")
def planned(save: Callable[[str], Source]) -> Plan:
    """The plan of the UNet's file, from the arguments of a call."""
    return measure_pipeline(save("unet"), prompts=[{**make_call(), "return_dict": True}])


@pytest.fixture(scope="module")
def converted(
    save: Callable[[str], Source], planned: Plan, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The UNet's file, converted."""
    output = tmp_path_factory.mktemp("out") / "out.safetensors"
    convert(save("unet"), output, planned)
    return output


def run_plain(path: Path, folder: Path, dtype: torch.dtype) -> torch.Tensor:
    """The UNet of a file in plain Diffusers."""
    from diffusers import UNet2DConditionModel

    unet = UNet2DConditionModel.from_single_file(
        str(path), config=str(folder), subfolder="unet", dtype=dtype
    )
    call = {k: x.to(dtype) if x.is_floating_point() else x for k, x in make_call().items()}
    with torch.no_grad():
        found: torch.Tensor = unet(**call).sample.double()
    return found


def test_a_part_is_right_in_plain_diffusers(
    save: Callable[[str], Source], converted: Path, folder: Path
) -> None:
    """NaN before; afterwards six times nearer than bf16, and in fp32 bit for bit the original."""
    before = save("unet").path
    exact = run_plain(before, folder, torch.float32)

    def measure(path: Path, dtype: torch.dtype) -> float:
        return float((run_plain(path, folder, dtype) - exact).norm() / exact.norm())

    assert not run_plain(before, folder, torch.float16).isfinite().all()
    assert torch.equal(run_plain(converted, folder, torch.float32), exact)
    assert measure(converted, torch.float16) <= measure(before, torch.bfloat16) / 6


def test_a_part_keeps_its_names_and_says_what_was_done(
    save: Callable[[str], Source], converted: Path, planned: Plan
) -> None:
    """Names and shapes are those of the source; the metadata has the plan and what was rescaled."""
    with safe_open(save("unet").path, "pt") as old, safe_open(converted, "pt") as new:
        assert {k: old.get_slice(k).get_shape() for k in old.keys()} == {  # noqa: SIM118
            k: new.get_slice(k).get_shape()
            for k in new.keys()  # noqa: SIM118
        }
        said = new.metadata()
    assert said["title"] == "unet"
    assert planned.seal in said["stopdown"]
    assert said["stopdown.rescaled"].startswith("unet: weights are multiplied by powers of two")


def test_nothing_is_rescaled_twice(converted: Path, planned: Plan, folder: Path) -> None:
    """A file that convert wrote is refused, before its plan is looked at."""
    with pytest.raises(OptionError) as caught:
        convert(
            resolve_source(converted, config=folder), converted.parent / "b.safetensors", planned
        )
    assert str(caught.value).startswith(
        f"{converted} is already rescaled. Unet: weights are multiplied by powers of two"
    )


def test_a_plan_for_another_file_is_refused(
    save: Callable[[str], Source], planned: Plan, tmp_path: Path
) -> None:
    """The fingerprint tells them apart; the source stays as it was and nothing is left."""
    source = save("bare unet")
    before = source.path.read_bytes()
    with pytest.raises(PlanError, match=r"it was made for .* with the fingerprint"):
        convert(source, tmp_path / "out.safetensors", planned)
    assert source.path.read_bytes() == before
    assert list(tmp_path.iterdir()) == []


def test_a_certificate_of_a_part_needs_no_call(save: Callable[[str], Source]) -> None:
    """The pipeline's own code is run dry around it, and only what the file holds is planned."""
    plan = certify_plan(save("text encoder"))
    (entry,) = plan.components
    assert (entry.component, entry.precision, entry.calls) == ("text_encoder", "fp16", 0)
    assert entry.in_force.certified


def test_a_part_without_calls_is_explained(save: Callable[[str], Source]) -> None:
    """A prompt makes no call of a part; an autoencoder's calls need a name."""
    with pytest.raises(OptionError, match="is called as unet, and the prompt 'a ball' was given"):
        measure_pipeline(save("unet"), prompts=["a ball"])
    with pytest.raises(
        OptionError, match=r"as vae\.encode and vae\.decode, and a call without a name"
    ):
        measure_pipeline(save("vae"), prompts=[{"z": torch.ones(1)}])
    with pytest.raises(OptionError, match=r"^unet didn't run as recorded: "):
        measure_pipeline(save("unet"), prompts=[{"x": torch.ones(1)}])


def test_a_part_becomes_a_folder_of_its_component(
    save: Callable[[str], Source], planned: Plan, tmp_path: Path
) -> None:
    """The configuration stands beside the weights; there is no index of a pipeline."""
    from diffusers import UNet2DConditionModel

    record = convert(save("unet"), tmp_path / "out", planned)
    assert not (tmp_path / "out" / "model_index.json").exists()
    assert record.load == (
        f'UNet2DConditionModel.from_pretrained("{tmp_path / "out"}", subfolder="unet", '
        "dtype=torch.float16)"
    )
    UNet2DConditionModel.from_pretrained(tmp_path / "out", subfolder="unet")


def test_a_component_folder_describes_a_part(save: Callable[[str], Source], folder: Path) -> None:
    """The config of the component alone is enough with a recorded call, and not for a certificate."""
    source = dataclasses.replace(save("unet"), config=folder / "unet")
    assert complete_source(source).components == {"unet": ("diffusers", "UNet2DConditionModel")}
    plan = measure_pipeline(source, prompts=[make_call()])
    assert plan.components[0].precision == "fp16"
    with pytest.raises(SourceError, match="is that of a component, and doesn't say how a pipeline"):
        certify_plan(source)


@pytest.fixture(scope="module")
def transformer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a CogVideoX transformer that overflows, in Diffusers' names, beside its pipeline."""
    root = tmp_path_factory.mktemp("cogvideox")
    folder = save_pipeline("cogvideox", root / "pipeline", overflow="transformer")
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    return weights.rename(root / "transformer.safetensors")


def test_a_class_without_a_converter_is_loaded_by_its_config(
    transformer: Path, tmp_path: Path
) -> None:
    """CogVideoX has no `from_single_file`: certified, converted, and loaded by what the record says."""
    import diffusers

    config = transformer.parent / "pipeline"
    source = resolve_source(transformer, config=config)
    record = convert(source, output := tmp_path / "out.safetensors", certify_plan(source))
    assert record.load == (
        "model = CogVideoXTransformer3DModel.from_config(CogVideoXTransformer3DModel.load_config("
        f'"{config / "transformer"}")).half(); model.load_state_dict(load_file("{output}"))'
    )
    names: dict[str, Any] = {"load_file": load_file}
    names["CogVideoXTransformer3DModel"] = kind = diffusers.CogVideoXTransformer3DModel
    exec(record.load, names)  # our own text
    bare = kind.from_config(names["model"].config)
    bare.load_state_dict(load_file(transformer))
    call = {
        "hidden_states": torch.randn(1, 2, 4, 4, 4),
        "encoder_hidden_states": torch.randn(1, 226, 32),
        "timestep": torch.tensor([500]),
    }
    with torch.no_grad():
        wanted = bare.float()(**call).sample
        half = {k: x.half() if x.is_floating_point() else x for k, x in call.items()}
        assert not bare.half()(**half).sample.isfinite().all()
        found = names["model"](**half).sample.float()
    assert (found - wanted).norm() < 0.005 * wanted.norm()


def test_a_part_is_checked_by_its_config(transformer: Path, run: Any) -> None:
    """`check FILE --config FOLDER` reads the format of the file, and says how `auto` runs it."""
    config = transformer.parent / "pipeline"
    code, said, _ = run("check", transformer, "--config", config, "--device", "v100")
    assert code == 0
    assert "transformer is stored in bf16, which is slow on this device" in " ".join(said.split())
