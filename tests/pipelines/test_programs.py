"""The guard on programs that are no pipelines: a module, a dict, sgm's engine, ComfyUI's patcher."""

from __future__ import annotations

import copy
import gc
import types
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from models.pipeline_calls import quiet
from models.programs import (
    KINDS,
    WIDTH,
    Block,
    UNet,
    decode,
    make_faulty,
    make_program,
    overflow_,
)
from models.snapshots import assert_untouched
from stopdown import apply_plan, make_plan
from stopdown.errors import InputError, NonFiniteError, PlanError, StopdownWarning
from stopdown.plans import certified
from stopdown.records import Plan, from_json, to_json
from stopdown.runtime.guard import guard

PLAIN_CALL = vars(nn.Module)["__call__"]


@pytest.fixture(autouse=True)
def nothing_stays() -> Any:
    """Calls of modules go the way that they went before, after each of these tests."""
    gc.collect()  # what other files' tests left in cycles
    yield
    gc.collect()
    assert vars(nn.Module)["__call__"] is PLAIN_CALL


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_silent(kind: str, dtype: torch.dtype) -> None:
    """A healthy run gives the same bits, with one read a call, and the calls are counted by name."""
    program = make_program(kind, dtype)
    plain = program.run()
    with assert_untouched(program.given), guard(program.given) as handle:
        assert torch.equal(program.run(), plain)
    counted = {call.component: call.calls for call in handle.record.calls}
    assert counted.pop(program.component) == 3
    others = {"dict": {"vae.decode": 1}, "engine": {"first_stage_model.decode": 1}}
    assert counted == others.get(kind, {})
    assert handle.repairs == ()
    assert handle.record.host_reads == sum(call.calls for call in handle.record.calls)


@pytest.mark.parametrize("kind", KINDS)
def test_awake(kind: str) -> None:
    """An overflow is found in its layer, repaired by exponents, and the result is near that of fp32."""
    wide, program = make_faulty(kind, torch.float32), make_faulty(kind)
    with assert_untouched(program.given), guard(program.given, announce=quiet) as handle:
        found = program.run()
    (repair,) = handle.repairs
    assert repair.module_path == f"{program.component}:{program.path}blocks.1.wide"
    assert (repair.kind, repair.action, repair.replays) == ("range", "rescaled", 1)
    assert repair.step is None
    assert " in fp16 at call 1. " in repair.evidence
    torch.testing.assert_close(found.float(), wide.run(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", ["dict", "engine"])
def test_a_method_is_guarded(kind: str) -> None:
    """A fault in what a program decodes with is named by the method, and repaired."""
    program = make_program(kind, torch.float16)
    dict_given = kind == "dict"
    vae = program.given["vae.decode"][0] if dict_given else program.given.first_stage_model
    overflow_(vae.decoder)
    with assert_untouched(program.given), guard(program.given, announce=quiet) as handle:
        assert torch.isfinite(program.run()).all()
    (repair,) = handle.repairs
    name = "vae.decode" if dict_given else "first_stage_model.decode"
    assert (repair.component, repair.action) == (name, "rescaled")
    assert repair.module_path == f"{name}:decoder.wide"


@pytest.mark.parametrize("kind", KINDS)
def test_gone(kind: str) -> None:
    """After a repair, an error or Ctrl-C nothing is left; between calls a copy is a plain copy."""
    program = make_faulty(kind)
    with assert_untouched(program.given), guard(program.given, announce=quiet):
        program.run()
        copied = copy.deepcopy(program.unet)
        assert copied.forward == types.MethodType(type(copied).forward, copied)
    with (
        assert_untouched(program.given),
        pytest.raises(NonFiniteError, match="The fault begins at"),
        guard(program.given, on_fault="raise"),
    ):
        program.run()
    with (
        assert_untouched(program.given),
        pytest.raises(KeyboardInterrupt),
        guard(program.given),
    ):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("kind", "first"), [("module", 0), ("dict", 1), ("engine", 0), ("patcher", 1)]
)
def test_nested(kind: str, first: int) -> None:
    """Of two guards the inner one repairs and the outer one sees nothing; they go in either order."""
    program = make_faulty(kind)
    with assert_untouched(program.given):
        guards = [guard(program.given, announce=quiet) for _ in range(2)]
        found = program.run()
        assert torch.isfinite(found).all()
        assert sorted(len(one.repairs) for one in guards) == [0, 1]
        guards.pop(first).remove()
        program.run()
        guards.pop().remove()


@pytest.mark.parametrize("kind", KINDS)
def test_a_guard_goes_with_what_it_guards(kind: str) -> None:
    """Who drops a model gets its memory back, also where the guard was never taken off."""
    program = make_faulty(kind)
    guard(program.given, announce=quiet)
    program.run()
    weights = weakref.ref(program.unet.blocks[1])
    del program
    gc.collect()
    assert weights() is None
    assert vars(nn.Module)["__call__"] is PLAIN_CALL


def test_warn_and_raise() -> None:
    """Both name the layer; the bad value goes on with the one, and the program stops with the other."""
    program = make_faulty("patcher")
    name = (
        r"`model\.diffusion_model` returned .* The fault begins at "
        r"`model\.diffusion_model:blocks\.1\.wide`"
    )
    with guard(program.given, on_fault="warn"), pytest.warns(StopdownWarning, match=name):
        assert not torch.isfinite(program.run()).all()
    with guard(program.given, on_fault="raise"), pytest.raises(NonFiniteError, match=name):
        program.run()


def test_the_outermost_call_is_the_component() -> None:
    """Called by itself the network is a component; called inside of its wrapper it is a part of it."""
    program = make_program("engine")
    x, times = torch.randn(1, 4, 8), torch.ones(1)
    with guard(program.given) as handle, torch.no_grad():
        program.unet(x, times)
        program.run()
    calls = {call.component: call.calls for call in handle.record.calls}
    assert calls == {"model.diffusion_model": 1, "first_stage_model.decode": 1}
    (said,) = handle.record.unwatched
    assert said == (
        "model: it shares modules with model.diffusion_model, which is guarded; its own calls weren't "
        "watched."
    )


def test_training_is_left_alone() -> None:
    """In training nothing is counted or changed, and it is said once: gradients are as without a guard."""
    gradients, said = [], list[str]()
    for guarded in (False, True):
        program = make_program("engine")
        engine = program.given.train()
        optimizer = torch.optim.SGD(engine.parameters(), 0.1)
        picture = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
        if guarded:
            with guard(engine, announce=said.append) as handle:
                engine(picture).backward()
                engine(picture)
            assert handle.record.calls == ()
            assert handle.record.unwatched == tuple(said)
        else:
            engine(picture).backward()
        gradients.append([x.grad for x in engine.model.parameters()])
        del optimizer
    for plain, other in zip(*gradients, strict=True):
        assert torch.equal(plain, other)
    assert said == [
        "`DiffusionEngine` is in training: an optimizer has its parameters, or they have gradients. Its "
        "calls aren't watched; those under torch.no_grad() are."
    ]


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_inference_with_gradients_is_repaired(mode: str) -> None:
    """With PyTorch's defaults there is the same repair as without gradients, and none that was none."""
    program = make_faulty("module")
    program.given.train(mode == "train")
    x = torch.randn(1, 4, 8).half()
    with guard(program.given, announce=quiet) as handle, torch.no_grad():
        expected = program.unet(x, torch.ones(1))
    with guard(program.given, announce=quiet) as handle:
        output = program.unet(x, torch.ones(1))
        assert [repair.action for repair in handle.repairs] == ["rescaled"]
        assert torch.equal(output, expected)
        with pytest.raises(InputError, match="A gradient of a parameter of UNet was requested"):
            output.sum().backward()
    assert handle.record.unwatched == ()
    assert torch.isfinite(output).all()


def test_after_a_repair_inputs_have_gradients() -> None:
    """Exponents leave the function as it is, so its gradient by an input is that in fp32."""
    program = make_faulty("module")
    program.given.requires_grad_(False)
    found = []
    for network in (program.unet, copy.deepcopy(program.unet).float()):
        dtype = next(network.parameters()).dtype
        x = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
        with guard(network, announce=quiet):
            network(x.requires_grad_(), torch.ones(1)).float().sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(found[0].float(), found[1], rtol=0.01, atol=0.01)


def test_where_gradients_are_wanted_nothing_is_changed() -> None:
    """An optimizer has the parameters: a fault is said once, nothing is changed, no repair is listed."""
    program = make_faulty("module")
    optimizer = torch.optim.SGD(program.given.parameters(), 0.1)
    said: list[str] = []
    x = torch.randn(1, 4, 8).half()
    with guard(program.given, announce=said.append) as handle:
        outputs = [program.unet(x, torch.ones(1)) for _ in range(2)]
    assert not torch.isfinite(outputs[0]).all()
    outputs[0].sum().backward()
    assert handle.repairs == ()
    assert handle.record.unwatched == tuple(said)
    assert len(said) == 1
    assert "It is being trained" in said[0]
    del optimizer


class Dropping(nn.Module):
    """A dropout behind values that overflow in fp16."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.wide, self.norm, self.drop = nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(share)
        nn.init.constant_(self.wide.weight, 60000.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[N, 8]`, the same again."""
        made: torch.Tensor = self.drop(self.norm(self.wide(x)))
        return made


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_in_training_mode_code_that_asks_for_it_is_not_rescaled(share: float) -> None:
    """Exponents are those of eval mode; where training mode differs, the next remedy is tried."""
    net = Dropping(share).half()
    with guard(net, announce=quiet) as handle:
        assert torch.isfinite(net(torch.ones(2, 8).half())).all()
    (repair,) = handle.repairs
    assert (repair.action == "rescaled") == (share == 0)
    assert any("training mode" in tried for tried in repair.tried) == bool(share)


def test_a_module_that_is_called_inside_of_another_is_said() -> None:
    """Not a component: one message names what encloses it, and its calls stay unguarded."""
    unet, said = UNet().eval(), list[str]()
    with guard({"block": unet.blocks[0]}, announce=said.append) as handle, torch.no_grad():
        for _ in range(2):
            unet(torch.randn(1, 4, 8), torch.ones(1))
    assert said == [
        "`block` is called inside of a UNet, so its calls aren't guarded. Give the UNet to the guard."
    ]
    assert handle.record.calls == ()
    assert handle.record.unwatched == tuple(said)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (object(), "The argument (object) holds no module."),
        ({}, "An empty dict holds no module."),
        ({"unet": "weights.pt"}, "'weights.pt' is a name, not a model: load it first."),
        (
            {"vae.decode": (nn.Linear(1, 1), "decode")},
            "`vae.decode`: a Linear has no method decode.",
        ),
        ({"vae.decode": ("vae", "decode")}, "`vae.decode`: a str is no module."),
    ],
)
def test_what_holds_no_module_is_refused(given: Any, what: str) -> None:
    """One message: what was given, what is taken, and what to do."""
    with pytest.raises(InputError) as caught:
        guard(given)
    assert caught.value.what == what
    assert caught.value.expected.startswith(
        "Accepted are a Diffusers pipeline, a module, a dict such as"
    )


def test_a_journal_needs_a_pipeline(tmp_path: Path) -> None:
    """The calls of other programs have no order that could be known."""
    with pytest.raises(InputError, match="A journal was requested"):
        guard(make_program("module").given, journal=tmp_path / "journal")


def test_two_threads_have_outermost_calls_of_their_own() -> None:
    """What one thread calls does not enclose what another one calls."""
    from concurrent.futures import ThreadPoolExecutor

    programs = [make_program(kind) for kind in ("module", "patcher")]
    plain = [program.run() for program in programs]
    with (
        guard(programs[0].given) as first,
        guard(programs[1].given) as second,
        ThreadPoolExecutor(2) as pool,
    ):
        found = list(pool.map(lambda program: program.run(), programs))
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert [call.calls for one in (first, second) for call in one.record.calls] == [3, 3]


def test_compiled_code_is_guarded_as_a_whole() -> None:
    """A module that torch.compile wraps is one component, and gives the same bits."""
    program = make_program("module")
    compiled: Any = torch.compile(program.given, backend="eager")
    x, times = torch.randn(1, 4, 8), torch.ones(1)
    with torch.no_grad():
        plain = compiled(x, times)
        with guard({"unet": compiled}) as handle:
            assert torch.equal(compiled(x, times), plain)
    assert [(call.component, call.calls) for call in handle.record.calls] == [("unet", 1)]


def test_decoding_outside_of_the_named_method_is_not_found() -> None:
    """A dict with a method names that method alone."""
    program = make_program("dict")
    vae = program.given["vae.decode"][0]
    with guard(program.given) as handle:
        decode(vae, torch.randn(1, 4, 8))
        with torch.no_grad():
            vae.encode(torch.randn(1, 4, 8))
    assert [call.component for call in handle.record.calls] == ["vae.decode"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_is_made_and_applied(kind: str) -> None:
    """What a run calls is planned by name; applied in fp16 it is finite, near fp32, and comes off."""
    wide, program = make_faulty(kind, torch.float32), make_faulty(kind, torch.float32)
    expected = wide.run()
    with assert_untouched(program.given):
        plan = make_plan(program.given, run=program.run)
        named = {entry.component: entry.precision for entry in plan.components}
        assert named[program.component] == "fp16"
        assert len(named) == 1 + (kind in ("dict", "engine"))
        with apply_plan(program.given, from_json(to_json(plan), Plan)):
            matrices = {x.dtype for x in program.unet.blocks.parameters() if x.dim() > 1}
            assert matrices == {torch.float16}
            found = program.run()
        torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.02)
        with guard(program.given, plan) as handle:
            assert torch.equal(program.run(), found)
    assert handle.repairs == ()
    assert {call.precisions[0] for call in handle.record.calls} == {"fp16"}


@pytest.mark.parametrize("kind", ["module", "patcher", "dict"])
def test_a_plan_is_certified_without_a_measured_run(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends where a component is first called, and its weights alone give the plan.

    With several components the first one computes for the call of the next. The plan is kept
    for these weights, and another program of the same weights takes it.
    """
    monkeypatch.setenv("STOPDOWN_CACHE", str(tmp_path))
    wide, program = make_faulty(kind, torch.float32), make_faulty(kind, torch.float32)
    expected, computed = wide.run(), set[type]()  # a capture gives it fake tensors
    hook = program.unet.out.register_forward_hook(lambda _, __, out: computed.add(type(out)))
    with assert_untouched(program.given):
        plan = make_plan(program.given, run=program.run)
    hook.remove()
    assert (torch.Tensor in computed) is (kind == "dict")
    named = {entry.component: entry for entry in plan.components}
    assert named[program.component].scaling.bounded
    with apply_plan(program.given, plan):
        matrices = {x.dtype for x in program.unet.blocks.parameters() if x.dim() > 1}
        assert matrices == {torch.float16}
        torch.testing.assert_close(program.run().float(), expected, rtol=0.02, atol=0.02)
    assert len(list((tmp_path / "plans").glob("*.json"))) == 1
    monkeypatch.setattr(certified, "_plan_component", None)
    assert make_plan(wide.given, run=wide.run) == plan


def test_each_module_that_a_run_calls_is_planned() -> None:
    """Of modules without a name for their calls, such as an encoder and a denoiser, only the first was."""
    parts = {"encoder": Block(), "unet": UNet(), "unused": Block()}

    def run() -> torch.Tensor:
        given = parts["encoder"](torch.randn(1, 4, WIDTH))
        out: torch.Tensor = parts["unet"](given, torch.ones(1))
        return out

    plan = make_plan(parts, run=run)
    assert [entry.component for entry in plan.components] == ["encoder", "unet"]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_damaged_are_not_planned(value: float) -> None:
    """They were left out of the bounds, which were called proven, or ended in an error of LAPACK."""
    program = make_program("module")
    with torch.no_grad():
        program.unet.blocks[1].wide.weight[2, 3] = value
    said = r"^blocks\.1\.wide\.weight of UNet holds NaN or Inf \(1 of 1024"
    with pytest.raises(InputError, match=said):
        make_plan(program.given, run=program.run)


def test_a_kept_plan_is_not_taken_for_other_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same weights are certified anew where the code gives another graph, and only there."""
    monkeypatch.setenv("STOPDOWN_CACHE", str(tmp_path))
    program, forward = make_program("module"), UNet.forward

    def count_plans() -> int:
        make_plan(program.given, run=program.run)
        return len(list((tmp_path / "plans").glob("*.json")))

    assert [count_plans(), count_plans()] == [1, 1]
    program.unet.blocks[1].unread = 2.0
    assert count_plans() == 1
    double = lambda self, *args, **named: 2 * forward(self, *args, **named)  # noqa: E731
    monkeypatch.setattr(UNet, "forward", double)
    assert count_plans() == 2


def test_a_plan_needs_a_run() -> None:
    """One message for a program that nobody can run, and for a run that calls nothing."""
    program = make_program("module")
    with pytest.raises(InputError, match=r"Nothing says how the program is called\."):
        make_plan(program.given)
    with pytest.raises(InputError, match=r"The run called no module of the UNet\."):
        make_plan(program.given, run=lambda: None)


def test_a_plan_of_another_program_is_refused() -> None:
    """Other weights, or a component that is not there, are named; nothing is changed."""
    program, other = make_program("module"), make_program("patcher")
    plan = make_plan(program.given, run=program.run)
    with torch.no_grad():
        program.unet.out.weight.add_(1)
    with pytest.raises(PlanError, match="UNet has weights other than those"):
        apply_plan(program.given, plan)
    with pytest.raises(PlanError, match="it has a UNet, and the pipeline has none"):
        guard(other.given, plan)


def test_an_input_beyond_its_limit_is_found() -> None:
    """Limits of a plan's certificate hold for calls that are found as they happen, too."""
    program, said = make_program("patcher"), list[str]()
    with guard(program.given, announce=said.append) as handle:
        handle.limit_inputs(program.component, {"forward.x": 1e-6, "encode.x": 1e-6})
        program.run()
    (sentence,) = handle.record.uncertified
    assert sentence.startswith("3 calls of `model.diffusion_model` not certified: `x` reached ")
    assert len(said) == 1
