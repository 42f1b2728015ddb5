"""What a dry run notes for the rules: calls, their dtypes, operations, and what could not be seen."""

from __future__ import annotations

from typing import Any

import torch

from models.programs import make_half, make_program, sample
from stopdown import check
from stopdown.devices.device_profiles import find_profile
from stopdown.dtype_rules.check import make_place
from stopdown.dtype_rules.inspection import examine_program
from stopdown.records import Finding


def list_kinds(findings: list[Finding]) -> list[tuple[str, str]]:
    """Kind and place of each."""
    return [(finding.kind, finding.module_path) for finding in findings]


def test_each_call_is_noted_with_its_dtype_and_timesteps() -> None:
    """Both components, in the dtype of most of their weights, and where each operation was met first."""
    program = make_program("dict")
    program.unet.half()
    vae, _ = program.given["vae.decode"]
    vae.bfloat16()
    seen = examine_program(program.given, make_place(find_profile("v100")), program.run)
    unet, decode = seen.callees["unet"], seen.callees["vae.decode"]
    assert (unet.kind, unet.main, unet.component_name) == ("UNet", torch.float16, "unet")
    assert (decode.kind, decode.main, decode.component_name) == (
        *("FirstStage", torch.bfloat16),
        "vae",
    )
    assert [float(time) for time in unet.times] == [900.0, 500.0, 100.0]
    assert (unet.is_rescaled, unet.force_upcast) == (False, False)
    assert seen.operations["linear", "fp16"] == "unet:time_embed.0"
    assert seen.unseen == []


def test_a_dtype_that_is_wanted_is_put_on_for_the_run_alone() -> None:
    """A component is judged as if it were loaded so, and has its own dtype afterwards."""
    program = make_program("module")
    seen = examine_program(
        program.given,
        make_place(find_profile("v100")),
        program.run,
        {"UNet": torch.float16},
    )
    assert seen.callees["UNet"].main == torch.float16
    assert {x.kind for x in seen.observations} == {"boundary"}
    assert seen.observations[0].module_path == "UNet:blocks.0.up"
    assert {x.dtype for x in program.unet.parameters()} == {torch.float32}


def test_a_module_called_by_itself_and_inside_of_another_has_two_names() -> None:
    """Both calls are judged, each by the path that it is called by."""
    program = make_half("engine")

    def run() -> None:
        program.unet(torch.randn(1, 4, 8).half(), torch.ones(1))
        program.run()

    found = check(program.given, device="v100", run=run)
    assert list_kinds(found) == [("boundary", "model:diffusion_model.blocks.0.up")]


def test_compiled_code_is_judged_as_the_code_that_was_compiled() -> None:
    """A module that torch.compile wraps is looked at inside."""
    program = make_half("module")
    compiled: Any = torch.compile(program.given, backend="eager")
    found = check({"unet": compiled}, device="v100", run=lambda: sample(compiled, torch.float32))
    assert list_kinds(found) == [("boundary", "unet:blocks.0.up")]


def test_what_stops_a_program_without_values_is_said() -> None:
    """The calls before it are judged; what its own code raised is a note, with no word of pipelines."""
    program = make_program("module")

    def run() -> None:
        program.run()
        raise ZeroDivisionError("of zeros")

    (found,) = check(program.given, device="v100", run=run)
    assert (found.kind, found.severity) == ("unchecked", "note")
    assert found.evidence == "Its code stopped without values: ZeroDivisionError: of zeros"
    assert (
        found.remedy
        == "Run it once with its weights, while Stopdown watches every call: stopdown.guard."
    )
