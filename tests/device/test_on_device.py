"""Pipelines on a device that is not the CPU: placement, memory, guard, journal.

The simulated device computes with the CPU's kernels, so pictures are those of the CPU bit for bit.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from device.simulated_device import KIND, Simulated
from models.injected_faults import inject
from models.pipeline_calls import CALLS, call_pipeline, quiet
from models.snapshots import assert_untouched
from stopdown import mapped_weights, testing
from stopdown.component_calls.components import find_components
from stopdown.devices.device_choice import choose_device
from stopdown.devices.device_memory import peak_memory
from stopdown.interception.patches import Patches
from stopdown.memory.forecast import Fit
from stopdown.memory.offloader import Offloader, predict_run
from stopdown.memory.strategies import PLACEMENTS, Placement, Strategy
from stopdown.memory.weight_stores import WeightStore
from stopdown.plans.calibrated import measure_plan
from stopdown.runtime.guard import guard

FAMILIES = [
    name if name in ("sd", "cogvideox") else pytest.param(name, marks=pytest.mark.slow)
    for name in CALLS
]


@functools.cache
def find_expected(name: str) -> np.ndarray[Any, Any]:
    """The pixels of a run on the CPU."""
    return call_pipeline(testing.make_pipeline(name), name)


def make_there(name: str, device: str = KIND, **options: Any) -> Any:
    return testing.make_pipeline(name, **options).to(device)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_guarded_run_is_that_of_the_cpu(name: str, simulated: Simulated) -> None:
    """Every component runs on the device; the guard leaves bits as they are and reads once a call."""
    pipe = make_there(name)
    plain = call_pipeline(pipe, name)
    np.testing.assert_array_equal(plain, find_expected(name))
    before = simulated.counts
    call_pipeline(pipe, name)
    between = simulated.counts
    with assert_untouched(pipe), guard(pipe, announce=quiet) as handle:
        start = simulated.counts
        np.testing.assert_array_equal(call_pipeline(pipe, name), plain)
        end = simulated.counts
    calls = sum(call.calls for call in handle.record.calls)
    own = (end.host_reads - start.host_reads) - (between.host_reads - before.host_reads)
    assert 0 < own <= calls
    assert handle.repairs == ()


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["nan", "range", "clamp"])
def test_faults_are_repaired_on_the_device(kind: Any, simulated: Simulated) -> None:
    """A fault that passes is computed again, one of range is scaled; nothing leaves the device."""
    pipe = make_there("cogvideox", dtype=torch.float16)
    with (
        assert_untouched(pipe),
        inject(pipe, "transformer", step=1, kind=kind, lasting=kind == "clamp"),
        guard(pipe, announce=quiet) as handle,
    ):
        pixels = call_pipeline(pipe, "cogvideox")
    assert np.isfinite(pixels).all()
    assert [repair.action for repair in handle.repairs] == [
        "replayed" if kind == "nan" else "rescaled"
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("where", [KIND, "cpu"])
def test_a_journal_goes_on_on_the_device(where: str, simulated: Simulated, tmp_path: Path) -> None:
    """What a journal answers is on the device; the rest is the same bits, also of drawn noise."""
    pipe = make_there("sd")

    def run(journal: Path | None = None) -> tuple[np.ndarray[Any, Any], Any]:
        torch.manual_seed(7)
        generator = torch.Generator(where).manual_seed(0)
        arguments = {**CALLS["sd"], "num_inference_steps": 3, "eta": 1.0}
        with guard(pipe, journal=journal, announce=quiet) as handle:
            output = pipe(**arguments, generator=generator, output_type="np")
        return np.asarray(output[0]), handle.record.journal

    plain, _ = run()
    pixels, use = run(tmp_path)
    np.testing.assert_array_equal(pixels, plain)
    kept = sorted(tmp_path.glob("*.pt"))
    for path in kept[3:]:
        path.unlink()
    pixels, use = run(tmp_path)
    np.testing.assert_array_equal(pixels, plain)
    assert (use.answered, use.notes) == (3, ())


def test_an_error_of_the_device_is_no_fault_of_a_call(simulated: Simulated) -> None:
    """An error that comes late is raised as it is, is not repaired, and leaves the pipeline whole."""
    pipe = make_there("sd")
    with assert_untouched(pipe):
        simulated.fail_after(400)
        with (
            pytest.raises(torch.AcceleratorError, match="an illegal memory access"),
            guard(pipe, announce=quiet) as handle,
        ):
            call_pipeline(pipe, "sd")
        simulated.fail_after(0)
    assert handle.repairs == ()


# ---------------------------------------------------------------------------------------------
# Memory


@pytest.fixture(scope="module")
def fit_sd() -> Fit:
    """What every strategy of the tiny Stable Diffusion takes on a device with fused attention."""
    pipe = testing.make_pipeline("sd")
    arguments = {**CALLS["sd"], "num_inference_steps": 2, "output_type": "np"}
    return predict_run(pipe, arguments, steps=2, fused=True, device=KIND)


def find(fit: Fit, placement: Placement) -> Any:
    return next(one for one in fit.predictions if one.strategy == Strategy(placement))


def list_devices_of(pipe: Any) -> set[str]:
    """Where weights and buffers are."""
    modules = find_components(pipe).values()
    return {str(x.device) for m in modules for x in (*m.parameters(), *m.buffers())}


def run_offloaded(fit: Fit, placement: Placement, device: str) -> None:
    """A run with weights placed: all of them are on the device, and the picture is that of the CPU."""
    pipe = testing.make_pipeline("sd")
    with (
        assert_untouched(pipe),
        Offloader(pipe, find(fit, placement), (), fit.strays, device=device),
    ):
        assert list_devices_of(pipe) == {device}
        np.testing.assert_array_equal(call_pipeline(pipe, "sd"), find_expected("sd"))
    assert list_devices_of(pipe) == {"cpu"}


@pytest.mark.thorough
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_placement_stays_within_its_prediction(
    placement: Placement, fit_sd: Fit, simulated: Simulated
) -> None:
    """Weights wait on the host, calls run on a device of the predicted size, and nothing stays there."""
    before, predicted = simulated.used(), find(fit_sd, placement).peak_bytes
    with peak_memory(choose_device(KIND)) as peak:
        run_offloaded(fit_sd, placement, simulated.name)
    assert peak.peak_bytes - before == pytest.approx(predicted, rel=0.1)
    assert simulated.used() == before


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_second_device_is_the_only_one_that_is_used(
    placement: Placement, fit_sd: Fit, simulated: Simulated
) -> None:
    """With `simulated:1` nothing is allocated on the first one, not for a moment."""
    simulated.limit(simulated.used())
    run_offloaded(fit_sd, placement, simulated.second)


FAULTS = {"weights": ("_move", "resident"), "buffers": ("move_buffers", "component")}
"""What was wrong once: weights that were to be resident stayed on the host, and buffers always."""


@pytest.mark.parametrize("planted", FAULTS)
def test_weights_that_stay_on_the_host_are_seen(
    planted: str, fit_sd: Fit, simulated: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the two faults, planted again, fails the tests above; with the CPU as device none does."""
    method, placement = FAULTS[planted]
    monkeypatch.setattr(WeightStore, method, lambda *_: None)
    run_offloaded(fit_sd, placement, "cpu")
    with pytest.raises(AssertionError, match="cpu"):
        run_offloaded(fit_sd, placement, simulated.name)
    monkeypatch.setattr(f"{__name__}.list_devices_of", lambda pipe: {simulated.name})
    with pytest.raises((AssertionError, RuntimeError), match=r"cpu|same device"):
        run_offloaded(fit_sd, placement, simulated.name)


@pytest.mark.parametrize("backend", ["cuda", "mps"])
def test_a_device_that_is_full_gets_a_smaller_strategy(
    backend: str, fit_sd: Fit, simulated: Simulated
) -> None:
    """A call that runs out of real memory is run again with less; the picture is the same."""
    simulated.act_as(backend)
    taken, others = find(fit_sd, "resident"), [find(fit_sd, one) for one in PLACEMENTS]
    pipe, before = testing.make_pipeline("sd"), simulated.used()
    expected = find_expected("sd")
    with (
        Offloader(pipe, taken, others, fit_sd.strays, device=KIND) as offloader,
    ):
        resident = simulated.used() - before
        simulated.limit(before + resident + (taken.peak_bytes - resident) // 2)
        np.testing.assert_array_equal(call_pipeline(pipe, "sd"), expected)
    assert [(one.before, one.after) for one in offloader.steps_down] == [("resident", "component")]
    assert list_devices_of(pipe) == {"cpu"}
    np.testing.assert_array_equal(call_pipeline(pipe, "sd"), expected)


def test_a_large_weight_comes_in_pieces(
    simulated: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that lie in two pieces get their exponents in both, with the bits that the host makes.

    A device that has no bf16 at all, such as an M1, makes them as well.
    """
    simulated.act_as(lacks=[torch.bfloat16])
    monkeypatch.setattr(mapped_weights, "_PIECE_BYTES", 64)
    monkeypatch.setattr(mapped_weights, "_HOST_BYTES", 0)
    rows, columns = (slice(1, 6),), (slice(None), slice(2, 4))
    values = torch.randn(7, 8).bfloat16()
    for folds in (
        [(rows, -3), ((slice(6, 7),), 5)],
        [(columns, 2)],
        [((), -9)],
        [(rows, 1), (columns, 4)],
    ):
        stored = mapped_weights.StoredWeight(values, torch.float16, folds)
        assert torch.equal(stored.read(KIND).cpu(), stored.read())


class Net(torch.nn.Module):
    """A linear whose output overflows in fp16 if its exponents are those of smaller inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.up(x))  # type: ignore[no-any-return]


def test_a_plan_that_was_put_on_before_a_move_is_repaired_where_the_module_is(
    simulated: Simulated,
) -> None:
    """A repair takes the plan off first: the old weights came back on the host, and each repair failed."""
    module = Net().requires_grad_(False)
    module.up.weight.copy_(6e4 * torch.eye(8))
    small, large = torch.randn(2, 8), 300 * torch.randn(2, 8)
    before, expected = module.up.weight.clone(), module(large)
    with guard(module, measure_plan(module, lambda: module(small)), announce=quiet) as handle:
        module.to(KIND)
        found = module(large.to(KIND)).cpu()
        assert [repair.action for repair in handle.repairs] == ["rescaled"]
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)
    assert {x.device.type for x in module.parameters()} == {KIND}
    assert torch.equal(module.up.weight.cpu(), before)


def test_a_cast_comes_off_on_a_device_without_room(simulated: Simulated) -> None:
    """Where the old values don't fit, they stay where they were kept."""
    weight = torch.nn.Parameter(torch.randn(4096), requires_grad=False)
    before, patches = weight.data.clone(), Patches()
    mapped_weights.cast_tensor_(weight, torch.float16, patches)
    weight.data = weight.data.to(KIND)
    simulated.limit(simulated.used() + 1024)
    patches.undo()
    assert torch.equal(weight, before)


@pytest.mark.parametrize("exponent", [-26, -20, 3, 17])
def test_weights_in_fp16_are_scaled_on_a_device_as_on_the_host(
    exponent: int, simulated: Simulated
) -> None:
    """A factor of one element takes the weights' dtype there: 2**-26 was 0 in fp16, 2**17 Inf."""
    values = (torch.randn(64) * 2.0 ** -(exponent // 2)).half()
    there, patches = values.to(KIND), Patches()
    patches.scale_tensor(there, exponent)
    assert torch.equal(there.cpu(), (values.double() * 2.0**exponent).half())
    patches.undo()
    assert torch.equal(there.cpu(), values)
