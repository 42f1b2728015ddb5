"""Tests of the guard: silent without a fault, repaired, and gone, on tiny pipelines of real classes."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from models.injected_faults import inject
from models.pipeline_calls import call_pipeline, make_pipeline, quiet
from models.snapshots import assert_untouched
from stopdown.errors import InputError, NonFiniteError, OptionError, StopdownWarning
from stopdown.interception.patches import Patches
from stopdown.number_formats import FORMATS
from stopdown.runtime.guard import LEFT_ON, guard
from stopdown.runtime.repair_order import Remedy, list_remedies


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.usefixtures("each_device")
def test_silent(precision: str) -> None:
    """A guarded run equals the plain one in every bit; one value is read for each call."""
    pipe = make_pipeline("cogvideox", dtype=FORMATS[precision].torch_dtype)
    plain = call_pipeline(pipe, "cogvideox")
    with assert_untouched(pipe), guard(pipe) as handle:
        np.testing.assert_array_equal(call_pipeline(pipe, "cogvideox"), plain)
    assert handle.repairs == ()
    assert handle.record.host_reads == sum(call.calls for call in handle.record.calls)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize(
    ("component", "module_path"),
    [
        ("text_encoder", "text_encoder:encoder.block.0.layer.1.DenseReluDense.wi_1"),
        ("transformer", "transformer:patch_embed."),
        ("vae", "vae.decode:decoder.conv_in.conv"),
    ],
)
@pytest.mark.usefixtures("each_device")
def test_an_overflow_is_repaired(component: str, module_path: str) -> None:
    """The module path is named, one call is run again, and the pixels are near those of fp32."""
    reference = call_pipeline(make_pipeline("cogvideox", overflow=component), "cogvideox")
    pipe = make_pipeline("cogvideox", overflow=component, dtype=torch.float16)
    with assert_untouched(pipe), guard(pipe, announce=quiet) as handle:
        pixels = call_pipeline(pipe, "cogvideox")
    assert np.sqrt(np.mean((pixels - reference) ** 2)) < 0.01
    (repair,) = handle.repairs
    assert repair.module_path.startswith(module_path)
    assert (repair.action, repair.kind, repair.replays) == ("rescaled", "range", 1)


def test_a_guard_that_nobody_holds_stays_on_and_is_known() -> None:
    """What is put on holds it: a guard over a part is refused, and a copy of the module has none."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 4)).eval().requires_grad_(False)
    with Patches() as patches:
        guard(net, announce=quiet)
        gc.collect()
        (kept,) = [x for x in LEFT_ON if x.pipe is net]
        patches.defer(kept.remove)
        with pytest.raises(InputError, match="is a part of the Sequential"):
            guard(net[0])
        assert torch.equal(copy.deepcopy(net)(torch.ones(1, 4)), net(torch.ones(1, 4)))
    guard(net[0]).remove()


@pytest.mark.parametrize("net", [torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Hardtanh())])
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"part.forward": (x, "forward")}])
def test_a_guarded_module_is_not_pickled(net: Any, wrap: Any) -> None:
    """The guard's hooks would go with it: there was a traceback about a thread's lock."""
    net.requires_grad_(False)
    with guard(wrap(net), announce=quiet):
        net(torch.ones(1, 4))
        with pytest.raises(InputError, match="can't be pickled while its calls are watched"):
            pickle.dumps(net)
    assert pickle.dumps(net)


@pytest.mark.thorough
@pytest.mark.usefixtures("each_device")
def test_a_fault_that_does_not_come_again_is_said_to() -> None:
    """A transient fault is told from a lasting one; the run goes on to the same pixels."""
    pipe = make_pipeline("cogvideox", dtype=torch.bfloat16)
    plain = call_pipeline(pipe, "cogvideox")
    with (
        assert_untouched(pipe),
        inject(pipe, "transformer", step=1),
        guard(pipe, announce=quiet) as handle,
    ):
        np.testing.assert_array_equal(call_pipeline(pipe, "cogvideox"), plain)
    (repair,) = handle.repairs
    assert (repair.action, repair.kind, repair.step) == ("replayed", "intermittent", 1)


@pytest.mark.usefixtures("each_device")
def test_raise_stops_with_the_module_path() -> None:
    """With `raise` nothing is repaired, and the message says where it began."""
    pipe = make_pipeline("cogvideox", overflow="transformer", dtype=torch.float16)
    with (
        assert_untouched(pipe),
        guard(pipe, on_fault="raise"),
        pytest.raises(NonFiniteError, match=r"The fault begins at `transformer:patch_embed\."),
    ):
        call_pipeline(pipe, "cogvideox")


@pytest.mark.usefixtures("each_device")
def test_warn_goes_on() -> None:
    """With `warn` the bad value passes on, and a warning says so."""
    pipe = make_pipeline("cogvideox", overflow="vae", dtype=torch.float16)
    with guard(pipe, on_fault="warn"), pytest.warns(StopdownWarning, match="It wasn't repaired"):
        assert np.isnan(call_pipeline(pipe, "cogvideox")).any()


@pytest.mark.usefixtures("each_device")
def test_gone_after_an_exception_and_nested() -> None:
    """Whatever ends the block and in whichever order, the pipeline is as it was."""
    pipe = make_pipeline("cogvideox")
    with assert_untouched(pipe):
        first, second = guard(pipe), guard(pipe)
        first.remove()
        second.remove()
        second.remove()
    with pytest.raises(KeyboardInterrupt), assert_untouched(pipe), guard(pipe):
        raise KeyboardInterrupt


def test_an_unknown_answer_is_refused() -> None:
    """A word that is none of the three is named with what is known."""
    with pytest.raises(OptionError) as caught:
        guard(make_pipeline("cogvideox"), on_fault="ignore")  # type: ignore[arg-type]
    assert str(caught.value) == (
        "on_fault='ignore' is unknown. Known values are repair, raise, warn. Use on_fault=\"repair\"."
    )


@pytest.mark.parametrize(
    ("situation", "actions"),
    [
        (("range", "fp16", ("a",), True), ["rescaled", "rescaled", "fp32-module", "bf16", "fp32"]),
        (("range", "fp16", (), False), ["rescaled", "rescaled", "fp32"]),
        (
            ("clamped", "fp16", ("a", "b", "c")),
            ["rescaled", "rescaled", "fp32-module", "fp32-module", "fp32"],
        ),
        (("written", "bf16", ("a",)), ["fp32-module", "fp32"]),
        (("intermittent", "fp32"), ["replayed"]),
        (("range", "fp32", ("a",)), []),
        (("weight", "fp16", ("a",)), []),
        (("input", "fp16", ("a",)), []),
    ],
)
def test_the_order_of_remedies(situation: tuple[Any, ...], actions: list[str]) -> None:
    """From what keeps most of speed and precision to what keeps least."""
    found: Any = [remedy.recorded for remedy in list_remedies(*situation)]
    assert found == actions
    assert all(isinstance(remedy, Remedy) and remedy.reason for remedy in list_remedies(*situation))
