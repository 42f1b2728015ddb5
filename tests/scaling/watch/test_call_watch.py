"""Calls with other arguments than those that exponents were found for: right, or refused."""

from __future__ import annotations

import copy
import gc
import inspect
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from models.rescaling_models import WAYS, make_example, scale_weights
from models.signature_cases import add_ip_adapter, call, make_case, measure_error
from models.snapshots import assert_untouched
from models.watched_encoders import (
    Encoder,
    Modulated,
    make_encoder,
    make_sized,
    plan_module,
    planned,
    repaired,
    run,
)
from stopdown.errors import NonFiniteError, ScalingError, StopdownWarning
from stopdown.interception.component_locks import ComponentLock
from stopdown.memory.weight_stores import WAITING
from stopdown.numerics import iterate_tensors, relative_l2
from stopdown.plans.applier import apply_plan
from stopdown.plans.calibrated import measure_plan
from stopdown.records import Plan
from stopdown.runtime import repairs
from stopdown.runtime.guard import Guard, GuardOptions, guard
from stopdown.runtime.plan_maker import make_plan
from stopdown.scaling.folding.folds import cast_
from stopdown.scaling.rescale import rescale_
from stopdown.scaling.watch.call_watch import CallWatch
from stopdown.scaling.watch.known_calls import KnownCalls
from stopdown.testing import make_pipeline


def make_t5() -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    module = make_pipeline("cogvideox", overflow="text_encoder").text_encoder
    ids = torch.randint(0, 70, (1, 16), generator=torch.Generator().manual_seed(0))
    first = {"input_ids": ids}
    return module, first, {**first, "output_hidden_states": True}


def make_unet(size: float) -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    module, [(_, _, first)] = make_example("SD UNet")
    scale_weights(module, WAYS["residual"], 9)
    made = torch.Generator().manual_seed(5)
    shapes = [(1, 16, 8, 8), (1, 16, 8, 8), (1, 16, 4, 4), (1, 32, 4, 4), (1, 32, 4, 4)]
    *down, middle = [(torch.rand(x, generator=made) * 2 - 1) * size for x in shapes]
    given = {
        "down_block_additional_residuals": tuple(down),
        "mid_block_additional_residual": middle,
    }
    return module, dict(first), {**first, **given}


ROWS = {
    "T5's hidden states": make_t5,
    "ControlNet residuals of 300": lambda: make_unet(300),
    "ControlNet residuals of 3e4": lambda: make_unet(3e4),
}


@pytest.mark.default_rows(1)
@pytest.mark.parametrize(
    ("row", "put"),
    [
        ("T5's hidden states", planned),
        ("T5's hidden states", repaired),
        ("ControlNet residuals of 3e4", planned),
        pytest.param("ControlNet residuals of 300", planned, marks=pytest.mark.slow),
        pytest.param("ControlNet residuals of 300", repaired, marks=pytest.mark.slow),
        pytest.param("ControlNet residuals of 3e4", repaired, marks=pytest.mark.slow),
    ],
)
def test_other_signatures_are_right(row: str, put: Any) -> None:
    """Optional inputs and outputs beside exponents: as near to fp32 as fp16 is, and nearer than bf16."""
    module, first, second = ROWS[row]()
    wanted = [run(module, x) for x in (first, second, first)]
    bf16 = measure_error(run(copy.deepcopy(module).bfloat16(), second, torch.bfloat16), wanted[1])
    with put(module, first):
        dtype = module.dtype
        found = [run(module, x, dtype) for x in (first, second, first)]
    errors = [measure_error(*pair) for pair in zip(found, wanted, strict=True)]
    assert max(errors) < bf16 / 2


def test_hidden_states_of_an_encoder() -> None:
    """Hidden states that leave a planned encoder are multiplied back: nothing is run without the plan."""
    module, first = make_encoder()
    second = {**first, "hidden": True}
    wanted = run(module, second)
    with planned(module, first):
        found = run(module, second)
        assert module.embed.weight.dtype == torch.float16
    assert measure_error(found, wanted) < 2e-3


@pytest.mark.parametrize("put", [apply_plan, guard])
def test_outputs_beyond_fp16_of_an_unmeasured_call(put: Any) -> None:
    """A hidden state that fp16 cannot hold is handed over in fp32, with the plan on and under a guard."""
    module, first, second = make_t5()
    wanted = list(run(module, second).hidden_states)
    assert wanted[1].abs().max() > torch.finfo(torch.float16).max
    plan = measure_plan({"part": module}, run=lambda: run(module, first), residual="fp32")
    assert plan.components[0].in_force.stream is not None
    with put({"part": module}, plan):
        for _ in range(2):
            found = list(run(module, second).hidden_states)
            assert [x.dtype for x in found] == [torch.float16, torch.float32, torch.float16]
            assert measure_error(found, wanted) < 2e-3


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the watch the same hidden states are wrong by far: the test above sees what it is for."""
    monkeypatch.setattr(CallWatch, "_enter", lambda self, call: call.proceed())
    module, first = make_encoder()
    second = {**first, "hidden": True}
    wanted = run(module, second)
    with planned(module, first):
        assert measure_error(run(module, second), wanted) > 0.5


def test_no_exponents_hold() -> None:
    """A call that no exponents hold for is refused with a remedy, and leaves all as it was."""
    module, first = make_encoder()
    second = {**first, "gate": torch.zeros(1)}
    wanted = run(module, first)
    with planned(module, first):
        before = run(module, first)
        weight = module.down[2].weight.clone()
        for _ in range(2):
            with pytest.raises(ScalingError, match=r"part was called with gate\[1d\]") as raised:
                run(module, second)
        assert "Put the plan on with a guard, which repairs such calls" in str(raised.value)
        assert torch.equal(module.down[2].weight, weight)
        assert torch.equal(run(module, first), before)
    assert torch.equal(run(module, first), wanted)


def test_a_guard_extends_the_exponents() -> None:
    """Under a guard the same call is right in fp16: exponents are found for both kinds, and reported."""
    module, first = make_encoder()
    second = {**first, "gate": torch.zeros(1)}
    wanted, said = [run(module, x) for x in (first, second)], list[str]()
    with guard({"part": module}, plan_module(module, first), announce=said.append) as handle:
        found = [run(module, x) for x in (first, second, first, second)]
        assert [(x.kind, x.action) for x in handle.repairs] == [("signature", "rescaled")]
        assert module.embed.weight.dtype == torch.float16
    assert len(said) == 1
    assert (
        "part` was called with gate[1d] (forward), for which its exponents didn't hold" in said[0]
    )
    assert max(measure_error(x, wanted[i % 2]) for i, x in enumerate(found)) < 2e-3


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_guard_casts_what_no_exponents_are_found_for(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the code is another one, the guard casts the component; that stays, and is reported once."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    monkeypatch.setattr(repairs, "computes_bf16", lambda device: precision == "bf16")
    module, first = make_encoder()
    hook = lambda part, args, output: output * 2  # noqa: E731
    plain = copy.deepcopy(module)
    plain.norm.register_forward_hook(hook)
    wanted = run(plain, first)
    allowed = measure_error(run(copy.deepcopy(plain).to(dtype), first, dtype), wanted)
    said: list[str] = []
    with guard({"part": module}, plan_module(module, first), announce=said.append) as handle:
        run(module, first)
        module.norm.register_forward_hook(hook)
        found = [run(module, first) for _ in range(2)]
        assert [(x.kind, x.action) for x in handle.repairs] == [("signature", precision)]
        assert module.embed.weight.dtype == dtype
    assert len(said) == 1
    assert "No exponents were found that hold for these calls and those before" in said[0]
    assert max(measure_error(x, wanted) for x in found) <= max(allowed, 1e-6)
    assert torch.equal(run(module, first), wanted)


@pytest.mark.parametrize("other", [{"gate": torch.zeros(1)}, {"hidden": True}])
def test_a_new_call_with_nan_casts_nothing_for_good(other: dict[str, Any]) -> None:
    """It ends as any call with NaN does under the guard; the component stays in fp16, and right."""
    module, first = make_encoder()
    bad = {**first, "x": first["x"].clone(), **other}
    bad["x"][0, 0, 0] = torch.nan
    wanted = [run(module, x) for x in (first, {**first, **other})]
    with guard({"part": module}, plan_module(module, first), announce=lambda text: None):
        with pytest.raises(NonFiniteError, match="`part` was called with it as x"):
            run(module, bad)
        assert module.embed.weight.dtype == torch.float16
        found = [run(module, x) for x in (first, {**first, **other})]
        assert module.embed.weight.dtype == torch.float16
    errors = [measure_error(*pair) for pair in zip(found, wanted, strict=True)]
    assert max(errors) < 2e-3


def test_nan_of_a_new_call_is_handed_on_by_a_plan() -> None:
    """Exponents that hold for such calls hold for NaN: other rows are right, and nothing is refused."""
    module, first = make_encoder()
    bad = {**first, "x": first["x"].clone(), "hidden": True}
    bad["x"][0, 0, 0] = torch.nan
    wanted = run(module, bad)
    with planned(module, first):
        found = run(module, bad)
    for one, right in zip(found, wanted, strict=True):
        assert torch.equal(one.isnan(), right.isnan())
        assert measure_error(one.nan_to_num(), right.nan_to_num()) < 2e-3


def test_a_guard_that_raises_repairs_no_call() -> None:
    """With on_fault="raise" a call that the exponents do not hold for is refused, and the plan stays."""
    module, first = make_encoder()
    with guard({"part": module}, plan_module(module, first), on_fault="raise") as handle:
        module.norm.register_forward_hook(lambda part, args, output: output * 2)
        with pytest.raises(ScalingError, match="its exponents were found for other calls"):
            run(module, first)
        assert handle.repairs == ()
        assert module.embed.weight.dtype == torch.float16


def hand_back(module: nn.Module, plan: Plan) -> Guard:
    """A guard as `stopdown run` puts on."""
    options = GuardOptions(announce=lambda text: None, plan=plan, hands_back=True)
    return Guard({"part": module}, options).put_on()


def test_a_script_gets_what_no_repair_helps_as_the_model_gave_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under `run` nothing is refused: the plan comes off for such a call, which is reported once."""
    module, first = make_encoder()
    module.half()
    plain = copy.deepcopy(module)
    plan = measure_plan({"part": module}, run=lambda: run(module, first))

    def find_repair(*_: Any) -> Any:
        raise RuntimeError("no memory")

    hook = lambda part, args, output: output * 2  # noqa: E731
    with hand_back(module, plan) as handle:
        monkeypatch.setattr(repairs.Component, "find_repair", find_repair)
        run(module, first, torch.float16)
        hooks = [x.norm.register_forward_hook(hook) for x in (module, plain)]
        for _ in range(2):
            found = run(module, first, torch.float16)
            assert torch.equal(found.isnan(), run(plain, first, torch.float16).isnan())
        refused = [x for x in handle.repairs if x.kind == "signature"]
        assert [x.action for x in refused] == ["none"]
        assert "the script receives the output unchanged" in refused[0].reason
        assert handle.updated_plan() is None
        hooks[0].remove()


def test_a_script_calls_a_part_alone_under_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part computes with its own weights, as without a plan; the whole is right before and after."""
    module, first = make_encoder()
    wanted = run(module, first)
    plain, given = copy.deepcopy(module).half(), torch.randn(2, 5, 32).half()
    module.half()
    plan = measure_plan({"part": module}, run=lambda: run(module, first))
    monkeypatch.setattr(KnownCalls, "find_ends", lambda *_, **__: None)  # none hold for the part
    with hand_back(module, plan) as handle:
        assert measure_error(run(module, first, torch.float16), wanted) < 2e-3
        assert torch.equal(module.up[2](given), plain.up[2](given))
        assert [(x.kind, x.action) for x in handle.repairs] == [("signature", "none")]
        assert measure_error(run(module, first, torch.float16), wanted) < 2e-3


def test_a_new_thread_knows_what_a_call_was_recorded_in() -> None:
    """Formats that a model's own code computes in stay first; only a repair comes before them."""
    module, first = make_encoder()
    with guard({"part": module}, plan_module(module, first), announce=lambda text: None) as handle:
        run(module, first)
        call = handle.session.calls["part"]
        call.record_own_precision("bf16")
        before = call.summary.precisions
        with ThreadPoolExecutor(1) as pool:
            pool.submit(run, module, first).result()
        assert call.summary.precisions == before


class Loud(Encoder):
    """Returns its stream, beyond fp16's range, where it is asked for that."""

    def forward(self, x: torch.Tensor, loud: bool = False) -> Any:  # type: ignore[override]
        """`[B, N, 32]`, the same again."""
        if not loud:
            return super().forward(x)
        x = self.embed(x)
        for up, down, norm in zip(self.up, self.down, self.norms, strict=True):
            x = x + down(up(norm(x)))
        return x


class Denoiser(nn.Module):
    """A norm, as at most denoisers' entrances, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(32), nn.Linear(32, 32)

    @property
    def dtype(self) -> torch.dtype:
        return self.out.weight.dtype

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """`[B, N, 32]`, the same again."""
        return self.out(self.norm(states))


class Program:
    """Brings what its encoder returns to its denoiser's dtype, as many pipelines do."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.text_encoder, self.transformer = Loud().eval(), Denoiser().eval()
        for module in (self.text_encoder, self.transformer):
            module.requires_grad_(False)
        self.text_encoder.up[2].weight.mul_(2.0**10)
        self.text_encoder.down[2].weight.mul_(2.0**9)

    def draw(self, x: torch.Tensor, **more: Any) -> torch.Tensor:
        states = self.text_encoder(x, **more)
        found: torch.Tensor = self.transformer(states.to(self.transformer.dtype))
        return found


@pytest.mark.parametrize("casts", [False, True])
def test_what_a_repaired_encoder_returns_stays_as_it_is_up_to_the_next_component(
    casts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new signature's states beyond fp16's range are those of fp32, rescaled or cast, at once."""
    monkeypatch.setattr(repairs, "computes_bf16", lambda device: False)
    program, x = Program(), torch.randn(2, 5, 32)
    monkeypatch.setattr(
        KnownCalls, "find_ends", lambda *_, **__: None
    )  # the plan's hold for no other
    states = program.text_encoder(x, loud=True)
    assert states.abs().max() > torch.finfo(torch.float16).max
    wanted = program.draw(x, loud=True)
    plan = measure_plan(program, run=lambda: program.draw(x))
    if casts:  # no exponents are found
        find = repairs.Component._find_scaling
        monkeypatch.setattr(repairs.Component, "_find_scaling", lambda *_: find(None, None))
    with guard(program, plan, announce=lambda text: None) as handle:
        program.draw(x)
        for _ in range(2):
            assert measure_error(program.draw(x.half(), loud=True), wanted) < 2e-3
        assert [(x.kind, x.action) for x in handle.repairs] == [
            ("signature", "fp32" if casts else "rescaled")
        ]
    assert program.transformer.dtype == torch.float32


def test_a_guard_that_can_put_nothing_on_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each remedy is tried once; then the call is refused, and other calls run as before."""
    monkeypatch.setattr(repairs, "computes_bf16", lambda device: True)
    module, first = make_encoder()
    tried: list[str] = []

    def find_repair(self: Any, remedy: Any, call: Any) -> Any:
        tried.append(remedy.recorded)
        raise RuntimeError("no memory")

    monkeypatch.setattr(repairs.Component, "find_repair", find_repair)
    with guard({"part": module}, plan_module(module, first), announce=lambda text: None):
        wanted = run(module, first)
        hook = module.norm.register_forward_hook(lambda part, args, output: output * 2)
        for _ in range(2):
            with pytest.raises(ScalingError, match="its exponents were found for other calls"):
                run(module, first)
        hook.remove()
        assert torch.equal(run(module, first), wanted)
    assert tried == ["bf16", "fp32"]


def test_a_call_that_the_module_refuses() -> None:
    """Such a call is refused by name, and the next one is planned as before."""
    module, first = make_encoder()
    with planned(module, first):
        wanted = run(module, first)
        with pytest.raises(ScalingError, match="part was called with other=1"):
            run(module, {**first, "other": 1})
        assert torch.equal(run(module, first), wanted)


@pytest.mark.thorough
@pytest.mark.parametrize("put", [apply_plan, guard])
def test_hidden_states_of_a_vision_tower_with_a_stream_in_fp32(put: Any) -> None:
    """CLIP's last hidden state is returned twice, beside others: all leave as they are in fp32."""
    case = make_case("CLIP vision")
    assert case is not None
    module, second = case.module, {**case.first, "output_hidden_states": True}
    wanted = call(module, second)
    plan = measure_plan({"part": module}, run=lambda: call(module, case.first), residual="fp32")
    assert plan.components[0].in_force.stream is not None
    with put({"part": module}, plan) as handle:
        found = call(module, second, torch.float16)
        assert torch.float16 in {x.dtype for x in module.parameters()}
        assert not getattr(handle, "repairs", ())
    pairs = list(zip(iterate_tensors(found), iterate_tensors(wanted), strict=True))
    assert len(pairs) == 5
    assert max(relative_l2(x.float(), y) for x, y in pairs) < 2e-3


@pytest.mark.thorough
def test_a_mask_under_a_certified_stream() -> None:
    """Sana's linear attention has no bound: casts of the stream behind it get exponents all the same.

    Without a mask PyTorch's attention on a processor made 0 of the NaN, which nobody saw.
    """
    case = make_case("Sana")
    assert case is not None
    module, mask = case.module, torch.ones(1, 7).bool()
    second = {**case.first, "encoder_attention_mask": mask}
    wanted = call(module, second)
    plan = make_plan({"part": module}, lambda: call(module, case.first))
    assert plan.components[0].in_force.stream is not None
    with apply_plan({"part": module}, plan):
        found = call(module, second, torch.float16)
    assert measure_error(found, wanted) < 2e-3


@pytest.mark.thorough
def test_a_controlnet_under_a_plan_and_a_guard() -> None:
    """Flux gets a ControlNet's residuals under a plan and a guard: it stays in fp16, unrepaired."""
    case = make_case("Flux")
    assert case is not None
    draw = case.options["controlnet_block_samples"]
    drawn = draw(case.first, torch.Generator().manual_seed(0))
    calls = [case.first, {**case.first, "controlnet_block_samples": drawn}]
    module, wanted = case.module, [call(case.module, x) for x in calls]
    bf16 = measure_error(
        call(copy.deepcopy(module).bfloat16(), calls[1], torch.bfloat16), wanted[1]
    )
    plan = measure_plan({"part": module}, run=lambda: call(module, case.first))
    assert plan.components[0].in_force.exponents
    with guard({"part": module}, plan) as handle:
        found = [call(module, x, torch.float16) for x in calls]
        assert handle.repairs == ()
        assert module.dtype == torch.float16
    errors = [measure_error(*pair) for pair in zip(found, wanted, strict=True)]
    assert max(errors) < bf16 / 2


def test_other_signatures_in_threads() -> None:
    """Calls of three signatures from four threads at once, one of them refused: all others right."""
    module, first = make_encoder()
    calls = [first, {**first, "hidden": True}, {**first, "gate": torch.zeros(1)}]
    wanted = [run(module, x) for x in calls]
    start = threading.Barrier(4)

    def make(number: int) -> float | None:
        try:
            return measure_error(run(module, calls[number]), wanted[number])
        except ScalingError:
            return None

    def work(seed: int) -> list[tuple[int, float | None]]:
        start.wait()
        order = [(seed + i) % 3 for i in range(9)]
        return [(i, make(i)) for i in order]

    with planned(module, first), ThreadPoolExecutor(4) as pool:
        found = [pair for made in pool.map(work, range(4)) for pair in made]
    assert {number for number, error in found if error is None} == {2}
    assert all(number < 2 for number, error in found if error is not None)
    assert max(error for _, error in found if error is not None) < 2e-3


@pytest.mark.thorough
def test_other_signatures_in_threads_under_a_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same under a guard with a plan, which repairs it meanwhile: right, and said once each."""
    monkeypatch.setattr(repairs, "computes_bf16", lambda device: False)
    module, first = make_encoder()
    late = {**first, "late": torch.full((32,), 300.0)}
    calls = [first, {**first, "hidden": True}, late, {**first, "gate": torch.zeros(1)}]
    wanted = [run(module, x) for x in calls]
    plan, said = plan_module(module, first), list[str]()

    def work(seed: int) -> float:
        order = [(seed + i) % 4 for i in range(8)]
        return max(measure_error(run(module, calls[i]), wanted[i]) for i in order)

    program = {"part": module}
    with guard(program, plan, announce=said.append) as handle, ThreadPoolExecutor(6) as pool:
        assert max(pool.map(work, range(6))) < 2e-3
        assert [x.kind for x in handle.repairs].count("signature") >= 1
    assert len(said) == len(set(said))


def call_while_exponents_are_found_anew(patience_s: float = 0.5) -> float:
    """Error of a call, while another thread's call needs new exponents.

    The first call waits in its middle for the exponents to be replaced, but no longer than that.
    """
    module, first = make_encoder()
    module.up[2].weight.mul_(2.0**4)
    large = {**first, "inner": torch.full((2, 5, 64), 6e4)}
    wanted, plan = run(module, first), plan_module(module, first)
    begins, is_inside, is_replaced = threading.Event(), threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        if (
            begins.is_set() and not is_inside.is_set()
        ):  # the other thread's call comes by here as well
            is_inside.set()
            is_replaced.wait(patience_s)

    def disturb() -> None:
        is_inside.wait()
        run(module, large)
        is_replaced.set()

    module.up[0].register_forward_hook(wait)
    with guard({"part": module}, plan, announce=lambda text: None) as handle:
        run(module, first)
        begins.set()
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(disturb)
            found = run(module, first)
            is_replaced.set()
            other.result()
        assert [x.action for x in handle.repairs] == ["rescaled"]
    return measure_error(found, wanted)


def test_exponents_stay_until_a_call_is_over() -> None:
    """Another thread's call does not take the exponents away in the middle of a call."""
    assert call_while_exponents_are_found_anew() < 2e-3


def test_exponents_that_do_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the lock around whole calls the same call is wrong by far."""
    monkeypatch.setattr(ComponentLock, "calling", lambda self, *_: nullcontext())
    assert call_while_exponents_are_found_anew(patience_s=120) > 0.5


def test_a_planned_module_is_compiled_under_the_guard() -> None:
    """Calls of code that is compiled after the plan was put on are asked for their signature as well."""
    module, first = make_encoder()
    calls = [first, {**first, "hidden": True}]
    wanted = [run(module, x) for x in calls]
    with guard({"part": module}, plan_module(module, first)):
        before = run(module, first)
        module.compile(backend="eager")
        found = [run(module, x) for x in calls]
    assert torch.equal(found[0], before)
    assert max(measure_error(*pair) for pair in zip(found, wanted, strict=True)) < 2e-3


def compile_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


def compile_around(module: nn.Module) -> nn.Module:
    made: Any = torch.compile(module, backend="eager")
    return made


@pytest.mark.parametrize("compiled", [compile_in_place, compile_around])
def test_a_planned_module_is_compiled_without_a_guard(compiled: Any) -> None:
    """What was compiled after a plan was put on runs calls of other signatures and sizes rightly."""
    module, first = make_encoder()
    calls = [first, {**first, "hidden": True}, {"x": torch.randn(2, 7, 32)}, first]
    wanted = [run(module, x) for x in calls]
    with apply_plan({"part": module}, plan_module(module, first)):
        before = run(module, first, torch.float16)
        code = compiled(module)
        found = [run(code, x, torch.float16) for x in calls]
        assert torch.equal(found[-1], before)
    assert max(measure_error(*pair) for pair in zip(found, wanted, strict=True)) < 2e-3


@pytest.mark.parametrize("compiled", [compile_in_place, compile_around])
def test_a_rescaled_module_is_compiled(compiled: Any) -> None:
    """Calls of compiled code that the exponents do not hold for are refused, others keep every bit."""
    module, first = make_encoder()
    wanted, late = run(module, first), {**first, "late": torch.full((2, 5, 32), 3e4)}
    right = run(module, late)
    rescaling = rescale_(module, (), first)
    code = compiled(module)
    assert torch.equal(run(code, first), wanted)
    assert measure_error(run(code, late), right) < 2e-3
    with pytest.raises(ScalingError, match=r"Encoder was called with gate\[1d\] \(forward\)"):
        run(code, {**first, "gate": torch.tensor(0.5)})
    rescaling.undo()
    assert torch.equal(run(code, first), wanted)


def test_a_plan_of_replaced_code_belongs_to_it() -> None:
    """A function that was set on a part before the plan was made is no difference from the plan."""
    module, first = make_encoder()
    before = module.up[2].forward
    module.up[2].forward = lambda x: 2 * before(x)  # type: ignore[method-assign]
    calls = [first, {**first, "hidden": True}, {"x": torch.randn(2, 7, 32)}]
    wanted = [run(module, x) for x in calls]
    with apply_plan(
        {"part": module}, measure_plan({"part": module}, run=lambda: run(module, first))
    ):
        found = [run(module, x, torch.float16) for x in calls]
    assert max(measure_error(*pair) for pair in zip(found, wanted, strict=True)) < 2e-3


def test_weights_that_wait_elsewhere_are_refused() -> None:
    """Where weights come from a store, such a call is refused with what to do, as elsewhere."""
    module, first = make_encoder()
    with planned(module, first):
        vars(module)[WAITING] = True
        with pytest.raises(ScalingError, match=r"part was called with gate\[1d\]") as raised:
            run(module, {**first, "gate": torch.zeros(1)})
        del vars(module)[WAITING]
    assert "Put the plan on with a guard, which repairs such calls" in str(raised.value)


# Calls in other ways


@pytest.mark.parametrize("put", [planned, repaired])
def test_forward_itself_is_a_call_of_the_module(put: Any) -> None:
    """`module.forward(...)` passes by hooks, some of which take exponents off: it is `module(...)`."""
    module, first = make_encoder()
    second = {**first, "hidden": True}
    wanted = run(module, second)
    with put(module, first), torch.no_grad():
        found = module.forward(first["x"].half(), hidden=True)
        assert all(map(torch.equal, found, run(module, second, torch.float16)))
    assert measure_error(found, wanted) < 2e-3


@pytest.mark.parametrize("put", [planned, repaired])
def test_a_cache_of_keys_and_values(put: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that is given is filled once, by a guard's cast; without a guard it is left as it was."""
    from transformers import DynamicCache

    monkeypatch.setattr(repairs, "computes_bf16", lambda device: False)
    case = make_case("Llama")
    assert case is not None
    ids = case.first["input_ids"]

    def generate(module: nn.Module, cache: DynamicCache) -> list[torch.Tensor]:
        with torch.no_grad():
            calls = (ids, ids[:, :3], ids[:, :1])
            return [
                module(input_ids=x, past_key_values=cache, use_cache=True).last_hidden_state
                for x in calls
            ]

    wanted = generate(case.module, DynamicCache())
    bf16 = measure_error(generate(copy.deepcopy(case.module).bfloat16(), DynamicCache()), wanted)
    cache = DynamicCache()
    with put(case.module, case.first) as handle:
        if put is planned:
            with pytest.raises(ScalingError, match="past_key_values:DynamicCache"):
                generate(case.module, cache)
            assert cache.get_seq_length() == 0
            return
        found = generate(case.module, cache)
        assert [x.kind for x in handle.repairs] == ["range", "signature"]
    assert measure_error(found, wanted) < bf16 / 2


def make_pictured_unet() -> tuple[nn.Module, dict[str, Any]]:
    """A UNet with an IP-Adapter whose values overflow, and a call with a picture."""
    module, [(_, _, first)] = make_example("SD UNet")
    given = add_ip_adapter(module, first)
    scale_weights(module, WAYS["attention values"], 14)
    scale_weights(module, "to_v_ip", 14)
    return module, {**first, **given}


def weigh_pictures(module: Any, scale: float) -> None:
    """As `set_ip_adapter_scale` does."""
    for processor in module.attn_processors.values():
        if hasattr(processor, "scale"):
            processor.scale[0] = scale


@pytest.mark.thorough
def test_an_ip_adapter_that_is_turned_on() -> None:
    """Its scale was 0 in the planned call, which leaves its layers out: another scale is another call."""
    module, first = make_pictured_unet()
    weigh_pictures(module, 1.0)
    wanted = run(module, first)
    bf16 = measure_error(run(copy.deepcopy(module).bfloat16(), first, torch.bfloat16), wanted)
    weigh_pictures(module, 0.0)
    plan = plan_module(module, first)
    with guard({"part": module}, plan, announce=lambda text: None) as handle:
        run(module, first)
        weigh_pictures(module, 1.0)
        found = run(module, first)
        assert [x.kind for x in handle.repairs] == ["signature"]
    assert measure_error(found, wanted) <= bf16


# Two pipelines of the same components


@pytest.mark.thorough
def test_a_control_pipeline_of_guarded_components() -> None:
    """A guarded pipeline, then a ControlNet pipeline of its components: the pixels are those of fp32."""
    from diffusers import ControlNetModel, StableDiffusionControlNetPipeline

    pipe = make_pipeline("sd", overflow="unet")
    torch.manual_seed(3)
    plain = make_pipeline("sd").unet
    net = ControlNetModel.from_unet(plain, conditioning_channels=3).eval()
    for block in (*net.controlnet_down_blocks, net.controlnet_mid_block):
        nn.init.normal_(block.weight, std=0.5)
    parts = {**pipe.components, "controlnet": net}
    control = StableDiffusionControlNetPipeline(**parts, requires_safety_checker=False)
    for one in (pipe, control):
        one.set_progress_bar_config(disable=True)
    picture = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    sizes = {"num_inference_steps": 2, "height": 32, "width": 32, "output_type": "pt"}

    def draw(steers: bool) -> torch.Tensor:
        chosen = control if steers else pipe
        extra = {"image": picture, "controlnet_conditioning_scale": 50.0} if steers else {}
        made = torch.Generator().manual_seed(0)
        return chosen("a cat", generator=made, **sizes, **extra).images.float()

    def measure(steers: bool) -> float:
        return float((draw(steers) - wanted[steers]).abs().mean())

    with torch.no_grad():
        wanted = {steers: draw(steers) for steers in (False, True)}
        for part in (pipe.unet, pipe.vae, pipe.text_encoder, net):
            part.half()
        said: list[str] = []
        with guard(pipe, announce=said.append):
            errors = [measure(steers) for steers in (False, True, False)]
    assert not any("unet was called with" in x for x in said)  # its exponents hold for both
    assert max(errors) < 0.005


# Weights rewritten under a plan


def test_rewritten_weights_are_refused() -> None:
    """A write under a plan stops the next call, with what to do; taken off, the plan says it again."""
    module, first = make_encoder()
    applied = apply_plan({"part": module}, plan_module(module, first))
    run(module, first)
    module.down[2].weight += 0.01
    with pytest.raises(ScalingError, match="of part were rewritten since") as raised:
        run(module, first)
    assert "load the pipeline again, write the weights" in str(raised.value)
    with pytest.warns(StopdownWarning, match=r"down\.2\.weight of part had exponents as they were"):
        applied.undo()


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("kind", ["whole", "part", "copy"])
def test_other_weights_are_not_loaded_under_exponents(kind: str, assign: bool) -> None:
    """They lost powers of two that they never had when the plan came off, without a word."""
    module, first = make_encoder()
    with (
        assert_untouched({"part": module}),
        apply_plan({"part": module}, plan_module(module, first)),
    ):
        before = run(module, first)
        target = copy.deepcopy(module) if kind == "copy" else module
        target = target.down if kind == "part" else target
        other = {name: x.detach() + 0.01 for name, x in target.state_dict(keep_vars=True).items()}
        with pytest.raises(
            ScalingError, match=r"of part were to be loaded, which have exponents: "
        ) as raised:
            target.load_state_dict(other, assign=assign)
        assert "load the weights, and make a plan of the result" in str(raised.value)
        assert torch.equal(run(module, first), before)


def copy_parameters(module: nn.Module) -> None:
    """As accelerate does when it brings weights back: other parameters of the same values."""
    for part in module.modules():
        for name, tensor in list(part._parameters.items()):
            if tensor is not None:
                part._parameters[name] = nn.Parameter(tensor.clone(), requires_grad=False)


MOVES = {
    "to": lambda module: module.to("cpu"),
    "copied": copy_parameters,
    "swapped": lambda module: [setattr(x, "data", x.data.clone()) for x in module.parameters()],
    "same values": lambda module: module.load_state_dict(dict(module.named_parameters())),
    "trained": lambda module: module.train(),
}


@pytest.mark.parametrize("move", MOVES)
def test_healthy_moves_are_not_refused(move: str) -> None:
    """Weights that are moved, swapped for equal ones or loaded with their own values stay in use."""
    module, first = make_encoder()
    with apply_plan({"part": module}, plan_module(module, first)):
        before = run(module, first)
        MOVES[move](module)
        assert torch.equal(run(module, first), before)


def test_rescale_watches_other_signatures() -> None:
    """`rescale_` alone answers calls that its exponents hold for, refuses others, and leaves no trace."""
    module, first = make_encoder()
    hidden, gated = {**first, "hidden": True}, {**first, "gate": torch.zeros(1)}
    wanted, both = run(module, first), run(module, hidden)
    with assert_untouched({"part": module}):
        rescaling = rescale_(module, (), first)
        assert torch.equal(run(module, first), wanted)
        assert measure_error(run(module, hidden), both) == 0.0
        with pytest.raises(ScalingError, match=r"Encoder was called with gate\[1d\]") as raised:
            run(module, gated)
        assert "Give rescale_ such calls as well" in str(raised.value)
        cast_(module, torch.float16, rescaling)
        assert measure_error(run(module, hidden, torch.float16), both) < 2e-3
        rescaling.undo()


def test_a_stream_in_fp32_under_other_numbers() -> None:
    """A call that differs in a number alone keeps exponents whose stream has multiplies before its parts.

    Without the casts of the stream such a linear's result is in parts that nothing multiplies, so every
    picture of another size ran in fp32.
    """
    torch.manual_seed(2)
    module = Modulated().eval().requires_grad_(False)
    module.modulations[1].weight.mul_(2.0**18)
    given = {"x": torch.randn(1, 12, 16), "time": torch.randn(1, 8)}
    first, other = {**given, "grid": (3, 4)}, {**given, "grid": (2, 6)}
    wanted = run(module, other)
    bf16 = measure_error(run(copy.deepcopy(module).bfloat16(), other, torch.bfloat16), wanted)
    rescaling = rescale_(module, (), first, residual="fp32")
    assert rescaling.residual == "fp32"
    assert "modulations.1" in rescaling.scaling.multiplies
    cast_(module, torch.float16, rescaling)
    assert measure_error(run(module, other, torch.float16), wanted) < bf16 / 2


@pytest.mark.parametrize("put", [apply_plan, rescale_])
def test_a_deep_copy_refuses_other_signatures(put: Any) -> None:
    """Nothing takes exponents off a copy, so calls that they do not hold for are refused there."""
    module, first = make_encoder()
    wanted = run(module, first)
    if put is apply_plan:
        handle: Any = apply_plan({"part": module}, plan_module(module, first))
    else:
        handle = rescale_(module, (), first)
        cast_(module, torch.float16, handle)
    copied = copy.deepcopy(copy.deepcopy(module))
    handle.undo()
    assert measure_error(run(copied, first, torch.float16), wanted) < 2e-3
    with pytest.raises(ScalingError, match=r"A copy of .* was called with hidden=True"):
        run(copied, {**first, "hidden": True}, torch.float16)
    assert measure_error(run(module, first), wanted) == 0.0


class Decoder(Encoder):
    """An encoder with a method of its own, as an autoencoder has."""

    def decode(self, z: torch.Tensor, hidden: bool = False) -> Any:
        """As `forward`, without `__call__`, which hooks see."""
        return self.forward(z, hidden)


def test_a_deep_copy_refuses_other_calls_of_its_methods() -> None:
    """`decode` of a copy is asked as its `forward` is, although no pre-hook sees it."""
    torch.manual_seed(1)
    module = Decoder().eval().requires_grad_(False)
    module.up[2].weight.mul_(2.0**10)
    module.down[2].weight.mul_(2.0**9)
    z = torch.randn(2, 5, 32)
    wanted = module.decode(z)
    handle = apply_plan({"part": module}, plan_module(module, {"x": z}))
    copied = copy.deepcopy(copy.deepcopy(module))
    handle.undo()
    assert "z" in inspect.signature(copied.decode).parameters
    assert measure_error(copied.decode(z.half()), wanted) < 2e-3
    with pytest.raises(ScalingError, match=r"A copy of .* was called as decode\(hidden=True"):
        copied.decode(z.half(), hidden=True)
    assert measure_error(module.decode(z), wanted) == 0.0


def test_a_module_with_exponents_is_freed() -> None:
    """Nothing keeps it, with its weights, after the last reference: not the lock that its calls take."""
    module, calls = make_sized()
    assert rescale_(module, (), calls[0]).scaling.exponents
    run(module, calls[0])
    found = weakref.ref(module)
    del module
    gc.collect()
    assert found() is None


def test_a_call_is_recorded_into_a_cuda_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile CUDA refuses to tell the state of its generator, and no call can be made again."""
    module, first, _ = make_t5()
    rescaling = rescale_(module, (), first)
    wanted = module(**first)[0]

    def refuse() -> torch.Tensor:
        raise RuntimeError("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch, "get_rng_state", refuse)
    assert torch.equal(module(**first)[0], wanted)
    rescaling.undo()
