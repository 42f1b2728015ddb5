"""`certify_plan`: a plan from the weights alone, which holds when it is put on the real pipeline."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from typer.testing import CliRunner

from models.rescaling_models import make_example
from models.wide_models import make_call
from stopdown.app.commands import app
from stopdown.devices.device_choice import choose_device
from stopdown.errors import OptionError, SourceError
from stopdown.fold_names import name_parameters
from stopdown.module_calls.call_inputs import is_encoded
from stopdown.numerics import relative_l2
from stopdown.pipelines.loader import load_pipeline
from stopdown.plans import plan_choice
from stopdown.plans.applier import apply_plan
from stopdown.plans.certified import Scope, certify_plan, load_stored, suggest_stream
from stopdown.plans.plan_files import read_plan
from stopdown.plans.precision import leave_components
from stopdown.records import ComponentPlan, Plan, Scaling
from stopdown.scaling.graph import capture
from stopdown.scaling.trials.traced_calls import TracedCalls
from stopdown.sources.source import Source
from stopdown.sources.sources import resolve_source

SaveTiny = Callable[..., Path]


MOST_CAPTURES = 2
"""Of one kind of call while a component is planned: as it is, and with its stream in fp32. Only lowered."""


@pytest.mark.thorough
def test_a_kind_of_call_is_captured_at_most_twice(
    save_tiny: SaveTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is captured for a second plan of what was kept."""
    captured = Counter[tuple[str, str]]()
    trace = capture._ShadowCall.export

    def export(shadow: Any) -> Any:
        made = trace(shadow)
        captured[made.component, made.method] += 1
        return made

    monkeypatch.setattr(capture._ShadowCall, "export", export)
    folder = save_tiny("cogvideox")
    made = certify_plan(folder, residual="fp32", scope=Scope(keeps=True))
    assert {method for _, method in captured} == {"", "decode", "encode"}
    assert max(captured.values()) <= MOST_CAPTURES
    captured.clear()
    again = certify_plan(folder, residual="fp32", scope=Scope(keeps=True))
    assert again.components == made.components
    assert not captured


@pytest.mark.thorough
def test_an_interrupted_certificate_goes_on(
    certified: tuple[Path, Plan, list[tuple[str, str, int, int]]], monkeypatch: Any, tmp_path: Path
) -> None:
    """What was planned before Ctrl-C is not read again, for this model or another with the same part."""
    monkeypatch.setenv("STOPDOWN_CACHE", str(tmp_path))
    folder, plan, told = certified
    first, second, *_ = dict.fromkeys(what for _, what, _, _ in told)

    def stop(stage: str, what: str, done: int, total: int) -> None:
        if what == second:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        certify_plan(folder, progress=stop, scope=Scope(keeps=True))
    again = list[str]()
    made = certify_plan(
        folder, progress=lambda _, what, *said: again.append(what), scope=Scope(keeps=True)
    )
    assert first not in again
    assert second in again
    assert made.components == plan.components
    other = certify_plan(folder, precision=f"{second}=fp32", scope=Scope(keeps=True))
    assert entries_of(other)[second].precision == "fp32"
    assert entries_of(other)[first] == entries_of(plan)[first]


@pytest.mark.thorough
def test_a_transformer_is_certified_without_a_run(
    certified: tuple[Path, Plan, list[tuple[str, str, int, int]]],
) -> None:
    """Every fp16 value of the transformer and the text encoder rests on a bound, with no fp32 module."""
    entries = entries_of(certified[1])
    for name in ("transformer", "text_encoder"):
        assert entries[name].in_force.certified
        assert entries[name].in_force.bounded == entries[name].in_force.values > 0
        assert not entries[name].in_force.fp32_modules
        assert entries[name].calls == 0
        assert any(
            re.match(r"All \d+ activations are certified", reason)
            for reason in entries[name].reasons
        )
        said = "Computed from the weights alone; the model wasn't run."
        assert said in entries[name].reasons
    assert entries["transformer"].in_force.limits["forward.hidden_states"] == 64
    assert entries["transformer"].in_force.limits["forward.encoder_hidden_states"] == 128
    assert not entries["text_encoder"].in_force.limits  # token ids: every row of the table


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "limit"), [("Z-Image", 2.0**15), ("CogVideoX learned", 128.0)])
def test_hidden_states_of_an_encoder_may_be_large(name: str, limit: float) -> None:
    """An encoder that hands over hidden states may give whatever fp16 holds, if that costs nothing."""
    module, [(_, args, kwargs)] = make_example(name)
    call = make_call(*args, **kwargs)
    load = name_parameters(module).__getitem__
    for hands_over in (False, True):
        scaling = TracedCalls(module, [call]).certify("native", load, hands_over=hands_over)
        found = [x for key, x in scaling.limits.items() if is_encoded(key)]
        assert found == [limit if hands_over else 128.0]


@pytest.mark.thorough
def test_progress_counts_tensors(
    certified: tuple[Path, Plan, list[tuple[str, str, int, int]]],
) -> None:
    """Each component's tensors are counted up to their number."""
    last = {what: (done, total) for stage, what, done, total in certified[2] if stage == "certify"}
    assert set(last) == {"transformer", "text_encoder", "vae"}
    assert last["transformer"][0] == last["transformer"][1]


@pytest.mark.thorough
def test_tables_in_plain_attributes_have_their_values(tmp_path: Path) -> None:
    """Qwen-Image holds rotary frequencies outside of buffers; its transformer was left in fp32 for them."""
    module, [(_, args, kwargs)] = make_example("Qwen-Image")
    save_parts(tmp_path, module)
    call = make_call(*args, **kwargs)
    plan = certify_plan(tmp_path, scope=Scope(("transformer",), {"transformer": [call]}))
    [entry] = plan.components
    assert entry.precision == "fp16", entry.reasons
    assert entry.in_force.bounded > 0.9 * entry.in_force.values


def save_parts(folder: Path, transformer: torch.nn.Module) -> None:
    """A pipeline of Qwen-Image without a text encoder."""
    widths = {"dim_mult": [1, 2], "num_res_blocks": 1, "temperal_downsample": [False]}
    latents = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    vae = diffusers.AutoencoderKLQwenImage(base_dim=8, z_dim=4, **widths, **latents)
    diffusers.QwenImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=None,
        tokenizer=None,
        transformer=transformer,
    ).save_pretrained(folder)


@pytest.mark.thorough
def test_the_plan_fits_the_pipeline(
    certified: tuple[Path, Plan, list[tuple[str, str, int, int]]],
) -> None:
    """The plan belongs to the loaded weights, changes no bit in fp32, and comes off."""
    pipe = load_pipeline(resolve_source(str(certified[0])), torch_dtypes=torch.float32)
    ids = torch.randint(1, 16, (1, 8))
    with torch.no_grad():
        before = pipe.text_encoder(ids)[0]
        applied = apply_plan(pipe, certified[1], cast=False)
        after = pipe.text_encoder(ids)[0]
    applied.undo()
    assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("exponent", "residual", "count"), [(-14, "native", 0), (-15, "native", 1), (-15, "fp32", 0)]
)
def test_what_bounds_scale_far_down_is_said(exponent: int, residual: str, count: int) -> None:
    """Where a value of size 1 would be subnormal in fp16, the option that helps is named."""
    scaling = Scaling(layers={"proj": (0, exponent), "out": (exponent + 3, 2)})
    said = suggest_stream(scaling, residual)
    assert len(said) == count
    assert all("up to 2^15," in x and 'residual="fp32"' in x for x in said)


@pytest.mark.thorough
def test_a_certificate_with_an_fp32_residual_stream(
    certified: tuple[Path, Plan, list[tuple[str, str, int, int]]], tmp_path: Path
) -> None:
    """The stream is fp32 and scaled by nothing; all else is bounded; in fp16 the call is near to fp32's."""
    folder, native = certified[:2]
    page = str(tmp_path / "plan.json")
    arguments = ["plan", str(folder), "-o", page, "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    plan, told = read_plan(page), list[str]()
    cpu, source = choose_device("cpu"), resolve_source(str(folder))
    run = plan_choice.find_or_certify(source, cpu, progress=lambda stage, *_: told.append(stage))
    assert run.components == plan.components
    assert "certify" not in told  # each component is kept since
    scaling = entries_of(plan)["transformer"].scaling
    assert scaling.certified
    assert scaling.stream is not None
    assert 0 < scaling.values < entries_of(native)["transformer"].in_force.values
    assert len(scaling.exponents) < len(entries_of(native)["transformer"].in_force.exponents)
    pipe = load_pipeline(resolve_source(str(folder)), torch_dtypes=torch.float32)
    call = {
        "hidden_states": torch.randn(1, 2, 4, 4, 4, generator=torch.Generator().manual_seed(0)),
        "encoder_hidden_states": torch.randn(1, 8, pipe.transformer.config.text_embed_dim),
        "timestep": torch.tensor([500]),
    }
    with torch.no_grad():
        before = pipe.transformer(**call).sample
        assert not copy.deepcopy(pipe.transformer).half()(**halve(call)).sample.isfinite().all()
        with apply_plan(pipe, plan, cast=False):
            assert torch.equal(before, pipe.transformer(**call).sample)
        with apply_plan(pipe, plan):
            after = pipe.transformer(**halve(call)).sample
    assert after.isfinite().all()
    assert relative_l2(after.float(), before) < 4e-3


def entries_of(plan: Plan) -> dict[str, ComponentPlan]:
    """A plan's entries by component."""
    return {entry.component: entry for entry in plan.components}


def halve(call: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A call with its floating tensors in fp16."""
    return {name: x.half() if x.is_floating_point() else x for name, x in call.items()}


def test_a_lost_tensor_is_named() -> None:
    """Weights without a tensor that the model needs are refused, naming it."""
    with pytest.raises(SourceError) as caught:
        load_stored({}, {}, dict, "proj_out.weight")
    assert caught.value.what == "The weights have no tensor proj_out.weight."


def test_only_fp16_is_certified(save_tiny: SaveTiny) -> None:
    """Another precision needs no certificate, and the message says so."""
    with pytest.raises(OptionError) as caught:
        certify_plan(save_tiny("cogvideox"), precision="bf16")
    assert caught.value.what == "A certificate for bf16 was requested."


@pytest.mark.thorough
def test_a_component_in_another_precision_has_no_certificate(save_tiny: SaveTiny) -> None:
    """It is planned in what was asked for, without exponents; a name that there is not is refused."""
    folder = save_tiny("cogvideox")
    found = certify_plan(folder, precision="text_encoder=fp32")
    entries = entries_of(found)
    assert entries["text_encoder"].precision == "fp32"
    assert entries["text_encoder"].reasons == ("fp32 was chosen for it.",)
    assert not entries["text_encoder"].in_force.values
    assert entries["transformer"].in_force.certified
    with pytest.raises(OptionError, match="no component 'text'"):
        certify_plan(folder, precision="text=fp32")


@pytest.mark.thorough
def test_fp16_by_component_is_rescaled(save_tiny: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """A component requested in fp16 gets its exponents; the others are as requested or as auto has them."""
    monkeypatch.setenv("STOPDOWN_CACHE", str(tmp_path))
    source, device = resolve_source(save_tiny("sd")), choose_device("cpu")
    certified: list[str] = []
    certify = plan_choice.certify_plan

    def count(source: Source, *, precision: str, **options: Any) -> Plan:
        certified.append(precision)
        return certify(source, precision=precision, **options)

    monkeypatch.setattr(plan_choice, "certify_plan", count)
    asked = "text_encoder=fp16,vae=fp16-plain,unet=fp32"
    for begun in (1, 2):
        chosen = plan_choice.choose_plan(source, asked, device)
        entries = {entry.component: entry for entry in chosen.components}
        precisions = {name: entry.precision for name, entry in entries.items()}
        assert precisions == {"text_encoder": "fp16", "vae": "fp16", "unet": "fp32"}
        assert entries["text_encoder"].in_force.certified
        assert entries["vae"].scaling is None
        assert entries["vae"].reasons == ("fp16-plain was chosen for it.",)
        assert len(certified) == begun  # a part of a plan is not kept
    whole = plan_choice.choose_plan(source, "fp16", device)
    again = plan_choice.choose_plan(source, asked, device)
    assert again.components == tuple(
        leave_components(whole.components, {"unet": "fp32", "vae": "fp16-plain"})
    )
    assert certified[2:] == ["fp16"]


@pytest.mark.thorough
def test_fp16_is_safe_and_fp16_plain_is_not(save_tiny: Any, run: Any, tmp_path: Path) -> None:
    """Without a fault, a repair or a plan that was typed: `fp16` runs what `fp16-plain` turns black."""
    source = save_tiny("cogvideox", overflow="transformer")
    sizes = (
        "--height",
        32,
        "--width",
        32,
        "--frames",
        9,
        "--steps",
        1,
        "--device",
        "cpu",
        "--json",
    )
    made = {}
    for precision in ("fp16", "fp16-plain"):
        asked = ("--precision", precision, "-o", tmp_path / f"{precision}.mp4")
        code, out, err = run("generate", source, "a", *sizes, *asked)
        assert code == 0, err
        made[precision] = json.loads(out)
    safe = made["fp16"]
    assert (safe["findings"], safe["repairs"]) == ([], [])
    assert made["fp16-plain"]["repairs"]
    reasons = {decision["component"]: decision["reasons"][0] for decision in safe["decisions"]}
    assert reasons["transformer"].startswith(
        "fp16 with an automatic plan, because you asked for fp16: proven not to overflow; "
    )
