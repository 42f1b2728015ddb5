"""`check` and `mend` on programs that are no pipelines: a module, a dict, an engine, a patcher."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from models.programs import KINDS, FirstStage, UNet, make_faulty, make_half, make_program
from models.snapshots import assert_untouched
from stopdown import apply_plan, check, make_plan, mend
from stopdown.dtype_rules import check as check_module
from stopdown.errors import InputError, OptionError
from stopdown.records import Finding
from stopdown.testing import make_pipeline


def list_kinds(findings: list[Finding]) -> list[tuple[str, str]]:
    """Kind and place of each."""
    return [(finding.kind, finding.module_path) for finding in findings]


@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_program_has_no_finding(kind: str) -> None:
    """Its own code runs, its modules are not computed, and nothing of it is changed."""
    program, outputs = make_program(kind, torch.float16), list[Any]()
    program.unet.blocks[0].register_forward_hook(lambda *given: outputs.append(given[-1]))
    with assert_untouched(program.given):
        checked = check_module.inspect_pipeline(program.given, device="v100", run=program.run)
    assert checked.findings == []
    assert outputs
    assert all(isinstance(output, FakeTensor) for output in outputs)
    assert program.component in checked.seen.callees
    others = {"dict": {"vae.decode"}, "engine": {"first_stage_model.decode"}}
    assert set(checked.seen.callees) - {program.component} == others.get(kind, set())


@pytest.mark.parametrize("kind", KINDS)
def test_another_dtype_at_a_call_is_found_and_mended(kind: str) -> None:
    """The call that will be refused is named; mended it runs near fp32, and comes off."""
    program, expected = make_half(kind), make_program(kind).run()
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        program.run()
    (found,) = check(program.given, device="v100", run=program.run)
    assert (found.kind, found.severity) == ("boundary", "error")
    assert found.module_path == f"{program.component}:{program.path}blocks.0.up"
    assert f"argument x of {program.component} is fp32 (it comes from a randn)" in found.evidence
    assert "stopdown.mend" in found.remedy
    assert "pipe" not in found.remedy
    with assert_untouched(program.given):
        with mend(program.given, device="v100", run=program.run) as mended:
            assert mended.remaining == []
            output = program.run()
        torch.testing.assert_close(output, expected, rtol=0.01, atol=0.01)
        with pytest.raises(RuntimeError, match="must have the same dtype"):
            program.run()


@pytest.mark.parametrize("kind", KINDS)
def test_a_precision_is_judged_as_if_it_were_loaded_so(kind: str) -> None:
    """Nothing is cast for it; one component by name, and another name is refused with those there are."""
    program = make_program(kind)
    with assert_untouched(program.given):
        found = check(
            program.given, precision=f"{program.component}=fp16", device="v100", run=program.run
        )
        assert list_kinds(found) == [("boundary", f"{program.component}:{program.path}blocks.0.up")]
        assert check(program.given, precision="fp32", device="v100", run=program.run) == []
        with pytest.raises(OptionError, match=program.component):
            check(program.given, precision="transformer=fp16", run=program.run)


def test_both_methods_of_an_autoencoder_have_a_precision_of_their_own() -> None:
    """`vae.decode` alone in fp16: its argument is of another dtype, that of `encode` is not."""
    vae, picture = FirstStage().eval(), torch.randn(1, 4, 8)

    def run() -> None:
        vae.decode(vae.encode(picture))

    found = check({"vae": vae}, precision="vae.decode=fp16", device="v100", run=run)
    assert list_kinds(found) == [("boundary", "vae:decoder.up")]


def test_a_plan_is_judged_as_if_it_were_on(tmp_path: Path) -> None:
    """Under its plan a program in fp32 has no finding, and the plan is off again."""
    program = make_faulty("engine", torch.float32)
    plan = make_plan(program.given, run=program.run)
    path = tmp_path / "plan.json"
    from stopdown.plans.plan_files import write_plan

    write_plan(plan, path)
    with assert_untouched(program.given):
        assert check(program.given, precision=path, device="v100", run=program.run) == []
        with apply_plan(program.given, plan):
            assert check(program.given, device="v100", run=program.run) == []


def test_sums_are_looked_at_while_the_program_runs() -> None:
    """A product beyond fp16 is found in a component that is to run in fp16, from its own weights."""
    program = make_faulty("dict")
    with assert_untouched(program.given):
        found = check(program.given, device="v100", sums=True, run=program.run)
    assert ("product-overflows", "unet:blocks.1.wide") in list_kinds(found)
    assert [kind for kind, place in list_kinds(found) if place.startswith("vae")] == [
        "sums-in-fp16"
    ]


def take_transformer() -> tuple[Any, Callable[[], Any]]:
    """Diffusers' CogVideoX transformer by itself, and a call of it."""
    transformer = make_pipeline("cogvideox").transformer.eval()
    call = {
        "hidden_states": torch.randn(1, 2, 4, 4, 4),
        "encoder_hidden_states": torch.randn(1, 8, transformer.config.text_embed_dim),
        "timestep": torch.tensor([500]),
    }
    return transformer, lambda: transformer(**call)


def take_encoder() -> tuple[Any, Callable[[], Any]]:
    """Transformers' T5 encoder by itself."""
    encoder = make_pipeline("cogvideox").text_encoder.eval()
    return encoder, lambda: encoder(torch.tensor([[3, 4, 1]]))


@pytest.mark.thorough
def test_classes_of_diffusers_and_transformers_without_a_pipeline() -> None:
    """Parameters of another dtype, and fp32 that a cast took, are found and mended as in a pipeline."""
    transformer, run = take_transformer()
    assert check(transformer, device="v100", run=run) == []
    transformer.transformer_blocks[0].norm1.linear.half()
    name = "CogVideoXTransformer3DModel"
    with assert_untouched(transformer):
        (found,) = check(transformer, device="v100", run=run)
        assert found.module_path == f"{name}:transformer_blocks.0.norm1.linear"
        assert found.kind == "mixed-parameters"
        assert found.remedy == f"Cast the component: {name}.to(torch.float32). Or: stopdown.mend."
        with mend(transformer, device="v100", run=run) as mended, torch.no_grad():
            assert mended.done == (f"{name}: 2 parameters cast to fp32, as the rest.",)
            assert torch.isfinite(run().sample).all()
    encoder, encode = take_encoder()
    encoder.half()
    assert "fp32-module-lost" in {x.kind for x in check(encoder, device="v100", run=encode)}
    with mend(encoder, device="v100", run=encode) as mended, torch.no_grad():
        assert "that the model's authors keep in fp32 are fp32 again" in mended.done[0]
        assert torch.isfinite(encode().last_hidden_state).all()


def test_autocast_that_a_program_enters_by_itself_is_read() -> None:
    """A cast to fp32 that autocast takes back is found at the call, and mended there."""

    class Wide(UNet):
        def forward(self, x: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
            out: torch.Tensor = self.out(x.float())
            return out

    unet = Wide().eval()
    x = torch.randn(1, 4, 8, dtype=torch.bfloat16)

    def run() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            out: torch.Tensor = unet(x)
            return out

    (found,) = check({"unet": unet}, device="cpu", run=run)
    assert (found.kind, found.module_path) == ("autocast-overrides", "unet:out")
    assert run().dtype == torch.bfloat16
    with mend({"unet": unet}, device="cpu", run=run) as mended:
        assert mended.done == ("unet: autocast is off inside of its calls.",)
        assert run().dtype == torch.float32


def test_bad_input_is_refused() -> None:
    """One message each: nobody knows how it runs, nothing is called, and options of pipelines."""
    program = make_program("engine")
    with pytest.raises(InputError, match="A DiffusionEngine isn't a pipeline, so") as no:
        check(program.given)
    assert no.value.remedy == "Give a function that runs it: check(program, run=lambda: ...)."
    with pytest.raises(InputError, match=r"The run called no module of the DiffusionEngine\."):
        mend(program.given, run=lambda: None)
    with pytest.raises(InputError, match="It ended with ZeroDivisionError: division by zero"):
        check(program.given, run=lambda: 1 / 0)
    with pytest.raises(InputError, match="Arguments of a call were given for a DiffusionEngine"):
        check(program.given, arguments={"x": 1})
    with pytest.raises(InputError, match="runs it was given for pipeline CogVideoXPipeline"):
        check(make_pipeline("cogvideox"), run=lambda: None)
    with pytest.raises(InputError, match=r"The argument \(object\) holds no module"):
        check(object(), run=lambda: None)
    with pytest.raises(InputError, match="runs it was given for the source shapes"):
        check("shapes", run=lambda: None)


@pytest.mark.usefixtures("simulated")
def test_a_program_on_a_device_is_judged_there() -> None:
    """Copies without weights are where the modules are, and what comes out is there, too."""
    unet = UNet().eval().half().to("privateuseone")
    noise = torch.randn(2, 4, 8).half().to("privateuseone")
    outputs: list[torch.Tensor] = []

    def run() -> None:
        outputs.append(unet(noise, torch.ones(2, device="privateuseone")))

    assert check({"unet": unet}, device="v100", run=run) == []
    assert outputs[0].device == noise.device
