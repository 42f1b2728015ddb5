"""Plans as files, the choice of a plan, and what is recorded of a run; without a pipeline's run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from models.bare_plans import ENTRY, GOOD, MISSING, PLAN
from stopdown.checkpoints import file_exponents
from stopdown.devices import environment
from stopdown.devices.format_support import Support
from stopdown.errors import OptionError, PlanError
from stopdown.module_calls.call import ComponentCall
from stopdown.module_calls.callee import Callee
from stopdown.plans import applier, calibrated, exponents, planned_loader
from stopdown.plans import plan_files as files
from stopdown.plans.precision import (
    ComponentFacts,
    check_components,
    explain_plan,
    leave_components,
    parse_fp16,
)
from stopdown.records import ComponentPlan, MemoryPlan, ResidualStream, Scaling
from stopdown.scaling.folding.folds import list_misfits
from stopdown.sources.source import Source


def test_memory_is_of_one_run(tmp_path: Path) -> None:
    """What a run stays within is in no file and under no seal; files from before it are read."""
    placed = dataclasses.replace(PLAN, memory=MemoryPlan("8GiB", strategy="block"))
    assert files.seal_plan(placed) == PLAN
    path = files.write_plan(placed, tmp_path / "plan.json")
    assert files.read_plan(path) == PLAN
    content = json.loads(path.read_text())
    del content["memory"]
    path.write_text(json.dumps(content))
    assert files.read_plan(path) == PLAN


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    """What is read is what was written, exponents, tuples and all."""
    path = tmp_path / "plan.json"
    for fp32_flops in (0.5, 0):
        scaling = dataclasses.replace(ENTRY.scaling, fp32_flops=fp32_flops, headroom_bits=3)
        entry = dataclasses.replace(ENTRY, scaling=scaling)
        plan = files.seal_plan(dataclasses.replace(PLAN, components=(entry,)))
        files.write_plan(plan, path)
        assert files.read_plan(path) == plan


@pytest.mark.parametrize("change", ["exponent", "nested field", "seal"])
def test_an_edited_plan_is_refused(tmp_path: Path, change: str) -> None:
    """One exponent changed, a field slipped in or another seal: the seal does not fit."""
    path = tmp_path / "plan.json"
    files.write_plan(PLAN, path)
    content = json.loads(path.read_text())
    if change == "exponent":
        content["components"][0]["scaling"]["exponents"]["weight"] = -5
    elif change == "nested field":
        content["components"][0]["scaling"]["fp32_modules"] = ["norm"]
    else:
        content["seal"] = "0" * 64
    path.write_text(json.dumps(content))
    with pytest.raises(PlanError, match=r"was edited: its content doesn't fit its seal"):
        files.read_plan(path)


def test_a_plan_for_another_checkpoint_or_version_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both fingerprints and both versions stand in one message."""
    source = Source("other/model", Path("nowhere"), "folder")
    monkeypatch.setattr(applier, "fingerprint", lambda source: "e" * 64)
    old = dataclasses.replace(PLAN, versions={**PLAN.versions, "transformers": "4.0"})
    with pytest.raises(PlanError) as caught:
        applier.check_source(old, source)
    text = str(caught.value)
    assert (
        "made for owner/name with the fingerprint ffffffffffff, and that of other/model is ee"
        in text
    )
    assert "it was made with transformers 4.0, and 5." in text
    assert text.endswith("Make its plan: stopdown plan other/model -o plan.json")


def test_only_fp16_needs_a_plan() -> None:
    """A plan for bf16 is refused with what to type instead, before anything is loaded."""
    with pytest.raises(OptionError, match="Only fp16 needs one"):
        parse_fp16("bf16", "A plan")
    with pytest.raises(OptionError, match="Only fp16 needs one"):
        parse_fp16("vae.encode=fp32", "A plan")


def test_a_component_of_a_plan_can_be_left_in_another_precision() -> None:
    """What is named has no exponents any more, and says who asked for it; the rest is as it was."""
    assert parse_fp16("fp16", "A plan") == {}
    assert parse_fp16("text_encoder=fp32,vae=fp16", "A plan") == {"text_encoder": "fp32"}
    scaling = Scaling(exponents={"a": 1})
    planned = [ComponentPlan(x, "T", "w", "fp16", scaling) for x in ("text_encoder", "vae")]
    left, kept = leave_components(planned, {"text_encoder": "fp32"})
    assert (left.precision, left.scaling, left.weights) == ("fp32", None, "w")
    assert left.reasons == ("fp32 was chosen for it.",)
    assert kept == planned[1]
    with pytest.raises(OptionError, match="no component 'text'"):
        check_components({"text": "fp32"}, ["text_encoder", "vae"])


@pytest.mark.parametrize(
    ("stored", "bf16", "fp16", "wanted"),
    [
        ("bf16", MISSING, GOOD, True),
        ("bf16", GOOD, GOOD, False),
        ("bf16", MISSING, MISSING, False),
        ("fp16", MISSING, GOOD, False),
        ("fp32", MISSING, GOOD, False),
    ],
)
def test_auto_wants_a_plan_only_where_bf16_is_missing_and_fp16_is_not(
    stored: str, bf16: Support, fp16: Support, wanted: bool
) -> None:
    """A table of plain cases: storage of the weights against what the device is good at."""
    facts = [ComponentFacts("transformer", ("transformer",), {stored: 10})]
    reason = explain_plan(facts, {"bf16": bf16, "fp16": fp16, "fp32": GOOD})
    assert bool(reason) is wanted
    if wanted:
        assert reason.startswith("transformer is stored in bf16, which is slow on this device")


def test_a_cached_plan_that_was_edited_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged file in the cache is no error, and is replaced."""
    monkeypatch.setenv("STOPDOWN_CACHE", str(tmp_path))
    path = files.write_cached_plan(PLAN)
    path.write_text("{")
    assert files.read_cached_plan(PLAN.fingerprint) is None
    assert files.write_cached_plan(PLAN) == path
    assert files.read_cached_plan(PLAN.fingerprint) == PLAN
    assert path.is_relative_to(environment.cache_folder())


def test_a_cached_plan_with_a_field_that_is_gone_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its seal fits the file but not what would be written of it, which compare refused as edited."""
    monkeypatch.setenv("STOPDOWN_CACHE", str(tmp_path))
    path = files.write_cached_plan(PLAN)
    content = {**json.loads(path.read_text()), "seal": ""}
    content["components"][0]["gone"] = None
    content["seal"] = files._compute_seal(json.dumps(content))
    path.write_text(json.dumps(content))
    assert files.read_plan(path).fingerprint == PLAN.fingerprint
    assert files.read_cached_plan(PLAN.fingerprint) is None


def test_a_decision_says_what_the_plan_did() -> None:
    """The proof and the headroom in one sentence; each direction has its own."""
    facts = [ComponentFacts("transformer", ("transformer",), {"bf16": 10})]
    (decision,) = planned_loader.describe_calls(
        dataclasses.replace(PLAN, chosen="plan.json"), facts
    )
    assert decision.reason == ("fp16 with plan.json: measured in 4 calls; 3.2 bits of headroom.")
    assert decision.stored == "bf16"


def test_a_component_in_fp32_says_why() -> None:
    """The reasons of the plan are those of the run."""
    entry = dataclasses.replace(ENTRY, precision="fp32", reasons=("It can't be captured.",))
    assert planned_loader.describe_entry(entry, "p.json") == "fp32 by p.json. It can't be captured."


@pytest.mark.parametrize(
    ("share", "rest"), [(0.0, "."), (0.012, ", except for 1.2 % of that work.")]
)
def test_reasons_name_modules_whose_sums_are_fp32(share: float, rest: str, tmp_path: Path) -> None:
    """A stream that ends where a module does is no residual stream; the file keeps where it ends."""
    stream = ResidualStream(
        ("embed.proj",), ("embed.proj",), returns=False, cast_output_down=("embed",)
    )
    scaling = Scaling(multiplies={"embed": -4}, fp32_flops=share, stream=stream)
    entry = calibrated.describe_scaling(
        ComponentPlan("transformer", "X", "", "fp32"), scaling, "fp16", 3
    )
    assert entry.reasons[-1] == (
        "Inside embed sums are fp32, because nothing there can be scaled; matrix products run in "
        f"fp16{rest}"
    )
    assert "fp32 sums in embed" in planned_loader.describe_entry(entry, "plan.json")
    assert file_exponents.describe_rest(entry) == "1 multiply and fp32 sums inside embed"
    plan = dataclasses.replace(PLAN, components=(entry,))
    files.write_plan(files.seal_plan(plan), tmp_path / "plan.json")
    assert files.read_plan(tmp_path / "plan.json").components[0].in_force.stream == stream


def test_samples_of_weights_are_the_same_in_every_format_that_holds_them() -> None:
    """bf16 values give one digest in bf16, fp32 and fp16; one changed value gives another."""
    module = nn.Linear(5, 3).bfloat16()
    digest = calibrated.sample_weights(module)
    assert calibrated.sample_weights(module.float()) == digest
    assert calibrated.sample_weights(module.half()) == digest
    module.weight.data[0, 0] += 1
    assert calibrated.sample_weights(module) != digest


def _call(*args: Any, **kwargs: Any) -> ComponentCall:
    return ComponentCall(Callee("vae.decode", nn.Linear(1, 1), "decode", "decode"), args, kwargs)


def test_calls_of_one_kind_share_a_capture() -> None:
    """Other values are the same kind; another shape, flag or keyword is another."""
    first = _call(torch.zeros(2, 3), return_dict=False)
    assert first.key == _call(torch.ones(2, 3), return_dict=False).key
    for other in (
        _call(torch.zeros(2, 4), return_dict=False),
        _call(torch.zeros(2, 3), return_dict=True),
        _call(torch.zeros(2, 3)),
    ):
        assert first.key != other.key
    assert len(exponents.group_calls([first, first, _call(torch.zeros(1))])) == 2


class Normed(nn.Module):
    """A linear, a norm and a table of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 6), nn.LayerNorm(4)
        self.linear.weight.data.fill_(1.0)
        self.register_buffer("ids", torch.arange(4))
        self.register_buffer("table", torch.ones(1, 3, 6))


MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "too large": (
        {"exponents": {"linear.weight": 17}},
        "its linear.weight is up to 1, and times 2**17 fp16 doesn't hold it",
    ),
    "vanishing": (
        {"exponents": {"linear.weight[0:2]": -30}},
        "its linear.weight[0:2] is up to 1, and times 2**-30 fp16 doesn't hold it",
    ),
    "beyond fp32": (
        {"exponents": {"linear.weight": 130}, "fp32_modules": ("linear",)},
        "its linear.weight is up to 1, and times 2**130 fp32 doesn't hold it",
    ),
    "beyond everything": (
        {"exponents": {"linear.weight": 10**18}},
        f"its linear.weight is up to 1, and times 2**{10**18} fp16 doesn't hold it",
    ),
    "rows and columns": (
        {"exponents": {"linear.weight[0:2]": 9, "linear.weight[:,1:3]": 9}},
        "its linear.weight is up to 1, and with its exponents up to 2.62e+05, which fp16 doesn't hold",
    ),
    "no parameter": ({"exponents": {"other.weight": 1}}, "it has no floating other.weight"),
    "no rows": ({"exponents": {"linear.weight[4:9]": 1}}, "it has no floating linear.weight[4:9]"),
    "whole numbers": ({"exponents": {"ids": 1}}, "it has no floating ids"),
    "no module": ({"multiplies": {"other": 1}}, "it has no module other"),
    "no fp32 module": ({"fp32_modules": ("other",)}, "it has no module other"),
    "no eps": ({"eps": {"norm.forward": 1}}, "it has no number norm.forward"),
    "no norm": ({"eps": {"other.eps": 1}}, "it has no number other.eps"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_exponents_are_compared_with_the_weights(name: str) -> None:
    """A plan for these very weights whose exponents do not fit them: refused, and nothing changed."""
    values, said = MISFITS[name]
    module = Normed()
    pipe = SimpleNamespace(components={"transformer": module}, transformer=module)
    weights = calibrated.sample_weights(module)
    entry = ComponentPlan("transformer", "Normed", weights, "fp16", Scaling(**values))
    before = {key: value.clone() for key, value in module.state_dict().items()}
    with pytest.raises(PlanError) as caught:
        applier.apply_plan(pipe, dataclasses.replace(PLAN, components=(entry,)))
    assert f"transformer doesn't fit its exponents: {said}" in caught.value.what
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())


def test_exponents_that_fit_are_let_through() -> None:
    """Rows, a bias that becomes very small, and an fp32 layer with what fp16 would not hold."""
    fitting = (
        {"exponents": {"linear.weight[0:6]": 15, "linear.bias": -40}, "eps": {"norm.eps": -3}},
        {"exponents": {"linear.weight": 100}, "fp32_modules": ("linear",)},
        {"exponents": {"linear.weight[0:6]": 17, "linear.weight[:,0:4]": -17}},
        {"exponents": {"table[0:6]": -2, "table[6:9]": -2}},
    )
    for values in fitting:
        assert list(list_misfits(Normed(), Scaling(**values))) == []  # type: ignore[arg-type]


def test_what_a_plan_scaled_is_not_saved_in_silence() -> None:
    """Pickling it is refused, taking its weights to save them is warned of once, a copy is still made."""
    import copy
    import io

    from models.programs import make_faulty
    from stopdown import apply_plan, make_plan
    from stopdown.errors import InputError, StopdownWarning

    module, call = make_faulty("module").unet.float(), (torch.randn(1, 4, 8), torch.ones(1))
    with torch.no_grad():
        handle = apply_plan(module, make_plan(module, run=lambda: module(*call)))
    with pytest.raises(InputError, match="can't be pickled while its calls are watched"):
        torch.save(module, io.BytesIO())
    with pytest.warns(
        StopdownWarning, match="is under a plan or a repair, and its weights are scaled"
    ) as said:
        module.state_dict()
    assert len(said) == 1
    module.state_dict()
    copy.deepcopy(module)
    handle.undo()
    torch.save(module.state_dict(), io.BytesIO())
    torch.save(module, io.BytesIO())


class Branch(nn.Module):
    """Two residual branches beyond fp16, and what an attribute or a closure does with their sum."""

    def __init__(self, change: Any, table: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.change, self.table = change, [torch.full((16,), table)]
        self.first.weight.data.mul_(3e4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stream = self.change(self.first(x) + self.first(-x.flip(0)))
        return self.last(nn.functional.layer_norm(stream, (16,))) * self.table[0].to(x.dtype)


def use(change: Any) -> Any:
    """Return code whose instructions are the same whatever it calls."""
    return lambda h: change(h)


@pytest.mark.parametrize(
    "other",
    [lambda: Branch(use(lambda h: h.clamp(-1e4, 1e4))), lambda: Branch(use(lambda h: h), 2.0**16)],
    ids=["closure", "table"],
)
@torch.no_grad()
def test_a_kept_plan_is_that_of_the_same_graph(
    other: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A plan that is kept for one module serves its twin, and none that computes something else."""
    from stopdown import apply_plan, make_plan
    from stopdown.plans import certified

    monkeypatch.setenv("STOPDOWN_CACHE", str(tmp_path))
    made = list[str]()
    plan_one = certified._plan_component
    monkeypatch.setattr(
        certified, "_plan_component", lambda *args: made.append("one") or plan_one(*args)
    )
    x = torch.randn(4, 16)
    first, twin, third = Branch(use(lambda h: h)), Branch(use(lambda h: h)), other().eval()
    for module in (first, twin, third):
        want = module(x)
        with apply_plan(module, make_plan(module, run=lambda: module(x)), cast=False):  # noqa: B023
            assert torch.equal(module(x), want)
    assert len(made) == 2


@torch.no_grad()
def test_a_component_left_as_loaded_takes_what_a_planned_one_gives() -> None:
    """A module in fp32 that no exponents fit is given fp16 by its neighbour, and runs."""
    from models.small_ways import WIDTH, make_net
    from stopdown import apply_plan, make_plan

    wide, x = make_net("output beyond widened"), torch.randn(4, WIDTH)
    plan = make_plan(wide, run=lambda: wide(x))
    assert plan.components[0].precision == "as loaded"
    want = wide(x)
    with apply_plan(wide, plan):
        found = wide(x.half())
    assert (found - want).norm() < 1e-3 * want.norm()


@torch.no_grad()
def test_a_plan_is_refused_where_other_code_runs() -> None:
    """What somebody put in a layer's place since the plan was made is named, and nothing is changed."""
    from stopdown import apply_plan, make_plan

    module, x = Branch(use(lambda h: h)), torch.randn(4, 16)
    plan = make_plan(module, run=lambda: module(x))
    own = module.first.forward
    module.first.forward = lambda h: own(h) + h  # type: ignore[method-assign]
    want = module(x)
    with pytest.raises(
        PlanError, match=r"runs other code than it was made for, with first\.forward"
    ):
        apply_plan(module, plan)
    assert torch.equal(module(x), want)
    changed = make_plan(module, run=lambda: module(x))
    with apply_plan(module, changed, cast=False):
        assert torch.equal(module(x), want)
