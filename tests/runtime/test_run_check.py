"""Faults outside of the components: the scheduler's, the caller's, the pipeline's; and what leaves it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

from models.injected_faults import inject
from models.pipeline_calls import CALLS, call_pipeline, make_pipeline, quiet
from models.snapshots import assert_untouched
from stopdown import testing
from stopdown.errors import NonFiniteError, StopdownWarning
from stopdown.interception.patches import Patches
from stopdown.numerics import iterate_tensors
from stopdown.records import ComponentPlan
from stopdown.runtime.call_check import list_readable
from stopdown.runtime.guard import guard
from stopdown.runtime.run_check import count_bad

NAME = "cogvideox"


def call_for_latents(pipe: Any, **arguments: Any) -> torch.Tensor:
    """The latents of two steps."""
    given = {**CALLS[NAME], "num_inference_steps": 2, "output_type": "latent", **arguments}
    found: torch.Tensor = pipe(**given)[0]
    return found


@contextmanager
def spoilt_steps(scheduler: Any, first: int) -> Iterator[None]:
    """A scheduler's steps are NaN from one on."""
    step, calls = scheduler.step, 0

    def spoil(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        output = step(*args, **kwargs)
        calls += 1
        return (output[0] * torch.nan, *output[1:]) if calls > first else output

    scheduler.step = spoil
    try:
        yield
    finally:
        del scheduler.step


SCHEDULER = "The scheduler (CogVideoXDDIMScheduler) returned only NaN (128 values)"


@pytest.mark.parametrize("on_fault", ["repair", "raise"])
@pytest.mark.usefixtures("each_device")
def test_latents_of_a_last_step_that_fails_do_not_leave(on_fault: Any) -> None:
    """No component is called after it: what leaves the pipeline is looked at, and the step named."""
    pipe = make_pipeline(NAME)
    with (
        spoilt_steps(pipe.scheduler, 1),
        assert_untouched(pipe),
        guard(pipe, on_fault=on_fault, announce=quiet) as handle,
        pytest.raises(NonFiniteError) as caught,
    ):
        call_for_latents(pipe)
    assert str(caught.value) == (
        f"{SCHEDULER} at step 2 of 2, from finite inputs. The pipeline's result holds only NaN "
        "(128 values). Use another scheduler, or rebuild this one: pipe.scheduler = "
        "CogVideoXDDIMScheduler.from_config(pipe.scheduler.config)."
    )
    (repair,) = handle.repairs
    assert (repair.component, repair.module_path, repair.kind) == ("pipeline", "scheduler", "input")


@pytest.mark.usefixtures("each_device")
def test_switched_off_they_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the detector off the same latents reach the caller."""
    monkeypatch.setattr("stopdown.runtime.run_check.count_bad", lambda output: (0, 0, 0))
    pipe = make_pipeline(NAME)
    with spoilt_steps(pipe.scheduler, 1), guard(pipe):
        assert call_for_latents(pipe).isnan().all()


@pytest.mark.usefixtures("each_device")
def test_with_warn_they_leave_with_a_word() -> None:
    """Said, and in the record."""
    pipe = make_pipeline(NAME)
    with (
        spoilt_steps(pipe.scheduler, 1),
        guard(pipe, on_fault="warn") as handle,
        pytest.warns(StopdownWarning, match=r"^The scheduler .* It wasn't repaired"),
    ):
        assert call_for_latents(pipe).isnan().all()
    assert [(r.component, r.module_path) for r in handle.repairs] == [("pipeline", "scheduler")]


@pytest.mark.usefixtures("each_device")
def test_a_scheduler_that_was_replaced_is_followed() -> None:
    """Its steps are counted and looked at from the next run on, and it is left as it was."""
    pipe = testing.make_pipeline(NAME)
    before = pipe.scheduler
    after = type(before).from_config(before.config)
    with spoilt_steps(after, 1):
        spoilt = dict(vars(after))
        with guard(pipe, announce=quiet):
            call_for_latents(pipe)
            pipe.scheduler = after
            with pytest.raises(NonFiniteError, match=r"^The scheduler .* step 2 of 2"):
                call_for_latents(pipe)
        assert vars(after)["step"] is spoilt["step"]
    assert not {"step", "set_timesteps"} & {*vars(before), *vars(after)}


@pytest.mark.usefixtures("each_device")
def test_with_warn_the_origin_is_named_once() -> None:
    """What follows from a step that fails in the middle points back to it."""
    pipe, said = make_pipeline(NAME), list[str]()
    with (
        spoilt_steps(pipe.scheduler, 0),
        guard(pipe, on_fault="warn", announce=said.append, frames=False),
    ):
        call_pipeline(pipe, NAME)
    assert [text.partition(" was called")[0].partition(" at step")[0] for text in said] == [
        SCHEDULER,
        "It came from the scheduler, as reported. `vae.decode`",
    ]


@pytest.mark.usefixtures("each_device")
def test_decoded_the_scheduler_is_named_and_once() -> None:
    """Not the decoder, which was called with what the scheduler gave."""
    pipe = make_pipeline(NAME)
    with (
        spoilt_steps(pipe.scheduler, 1),
        guard(pipe, announce=quiet) as handle,
        pytest.raises(NonFiniteError) as caught,
    ):
        call_pipeline(pipe, NAME)
    assert caught.value.what == f"{SCHEDULER} at step 2 of 2, from finite inputs."
    assert caught.value.expected.startswith(
        "`vae.decode` was called with it as z: `vae.decode` returned"
    )
    assert str(caught.value).count("cheduler (") == 1
    assert [(r.component, r.module_path) for r in handle.repairs] == [("vae.decode", "scheduler")]


@pytest.mark.usefixtures("each_device")
def test_guidance_is_the_pipelines_own() -> None:
    """What it does to the denoiser's outputs before the scheduler gets them."""
    pipe = make_pipeline(NAME)
    with guard(pipe, announce=quiet), pytest.raises(NonFiniteError) as caught:
        call_for_latents(pipe, num_inference_steps=1, guidance_scale=float("inf"))
    assert caught.value.what.startswith("The pipeline's own arithmetic passed ")
    assert caught.value.what.endswith(" at step 1 of 1. Every component returned finite values.")


@pytest.mark.usefixtures("each_device")
def test_what_a_caller_gives_is_named() -> None:
    """Embeddings that were NaN before the run, by their argument."""
    pipe = make_pipeline(NAME)
    size = (1, 226, pipe.transformer.config.text_embed_dim)
    bad = torch.full(size, torch.nan, device=pipe.transformer.device)
    with guard(pipe, announce=quiet), pytest.raises(NonFiniteError) as caught:
        pipe(prompt_embeds=bad, negative_prompt_embeds=bad, num_frames=5, num_inference_steps=1)
    assert caught.value.what == (
        "The pipeline was called with only NaN (7,232 values) in `prompt_embeds`."
    )
    assert caught.value.remedy == "Give finite values for prompt_embeds."


def decode_what_is_finite(pipe: Any, patches: Patches) -> None:
    """A decoder that swallows NaN."""
    decode = pipe.vae.decode
    patches.set_attribute(
        pipe.vae, "decode", lambda z, *args, **kwargs: decode(z.nan_to_num(), *args, **kwargs)
    )


@pytest.mark.parametrize("on_fault", ["repair", "warn"])
@pytest.mark.usefixtures("each_device")
def test_a_component_that_swallows_nan_is_told_of(on_fault: Any) -> None:
    """Its argument is looked at too: said once, with the origin; the run goes on to the same bits."""
    pipe, said = make_pipeline(NAME), list[str]()
    with Patches() as patches:
        decode_what_is_finite(pipe, patches)
        with spoilt_steps(pipe.scheduler, 1):
            plain = call_pipeline(pipe, NAME)
        with (
            spoilt_steps(pipe.scheduler, 1),
            guard(pipe, on_fault=on_fault, announce=said.append, frames=False) as handle,
        ):
            np.testing.assert_array_equal(call_pipeline(pipe, NAME), plain)
    assert [text.split(" at step")[0] for text in said] == [SCHEDULER]
    assert "`vae.decode` was called with it as z, and returned finite values." in said[0]
    assert [(r.component, r.kind, r.action) for r in handle.repairs] == [
        ("vae.decode", "input", "none")
    ]


@pytest.mark.usefixtures("each_device")
def test_with_raise_it_ends_the_run() -> None:
    """A run that is to stop at a fault stops there as well."""
    pipe = make_pipeline(NAME)
    with Patches() as patches, spoilt_steps(pipe.scheduler, 1):
        decode_what_is_finite(pipe, patches)
        with (
            guard(pipe, on_fault="raise"),
            pytest.raises(NonFiniteError, match=r"was called with it as z, and returned finite"),
        ):
            call_pipeline(pipe, NAME)


class Slotted:
    """An output without a `__dict__`."""

    __slots__ = ("sample",)

    def __init__(self, sample: torch.Tensor) -> None:
        self.sample = sample

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.sample


class Opaque(Slotted):
    """An output that nobody can look into."""

    __slots__ = ()


def return_as(pipe: Any, kind: type, patches: Patches) -> None:
    """The transformer's output as an object of another kind."""
    forward = pipe.transformer.forward

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return kind(forward(*args, **kwargs)[0])

    patches.set_attribute(pipe.transformer, "forward", wrapped)


@pytest.mark.usefixtures("each_device")
def test_outputs_in_slots_are_looked_at() -> None:
    """Tensors of an object without a `__dict__` are found, and a fault in them."""
    assert len(list(iterate_tensors(Slotted(torch.ones(1))))) == 1
    pipe = make_pipeline(NAME)
    with inject(pipe, "transformer", step=1, lasting=True), Patches() as patches:
        return_as(pipe, Slotted, patches)
        with (
            guard(pipe, on_fault="raise"),
            pytest.raises(NonFiniteError, match=r"`transformer` returned .* at step 2 of 2"),
        ):
            call_pipeline(pipe, NAME)


@pytest.mark.usefixtures("each_device")
def test_an_output_that_cannot_be_looked_at_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody claims that such a component was finite."""

    def look_past(output: Any) -> list[torch.Tensor]:
        return [] if isinstance(output, Opaque) else list_readable(output)

    monkeypatch.setattr("stopdown.runtime.call_check.list_readable", look_past)
    pipe = make_pipeline(NAME)
    with inject(pipe, "transformer", step=1, lasting=True), Patches() as patches:
        return_as(pipe, Opaque, patches)
        with guard(pipe, announce=quiet), pytest.raises(NonFiniteError) as caught:
            call_pipeline(pipe, NAME)
    assert caught.value.what.endswith(
        "Every component that was watched returned finite values. "
        "No tensor could be looked at in what `transformer` gave."
    )


@pytest.mark.usefixtures("each_device")
def test_a_component_that_was_replaced_is_watched() -> None:
    """From the first call of the next run on, text encoders too; nothing stays on either."""
    pipe, other = testing.make_pipeline(NAME), testing.make_pipeline(NAME)
    call_pipeline(other, NAME)
    with (
        inject(other, "text_encoder", step=0, lasting=True),
        assert_untouched(other),
        guard(pipe, on_fault="raise") as handle,
    ):
        call_pipeline(pipe, NAME)
        pipe.text_encoder = other.text_encoder
        with pytest.raises(NonFiniteError, match=r"`text_encoder` returned "):
            call_pipeline(pipe, NAME)
    assert handle.record.unwatched == ()


@pytest.mark.usefixtures("each_device")
def test_of_a_component_that_was_replaced_a_plan_keeps_its_entry() -> None:
    """What was found for the old one is not written for the new one."""
    pipe, other = testing.make_pipeline(NAME), testing.make_pipeline(NAME)
    entry = ComponentPlan("vae", type(pipe.vae).__name__, "aa", "fp16")
    with guard(pipe) as handle:
        pipe.vae = other.vae
        assert handle._update(entry) is entry


def paint_grey(pipe: Any, patches: Patches) -> None:
    """A decoder that gives one grey."""
    decode = pipe.vae.decode

    def paint(*args: Any, **kwargs: Any) -> Any:
        output = decode(*args, **kwargs)
        output.sample = output.sample * 0
        return output

    patches.set_attribute(pipe.vae, "decode", paint)


@pytest.mark.parametrize("output_type", ["np", "pt", "pil"])
@pytest.mark.usefixtures("each_device")
def test_grey_frames_are_reported(output_type: str) -> None:
    """One finding, as the command line reports it, said once; the output is passed on."""
    pipe, said = make_pipeline(NAME), list[str]()
    with Patches() as patches:
        paint_grey(pipe, patches)
        with guard(pipe, announce=said.append) as handle:
            for _ in range(2):
                pipe(**CALLS[NAME], num_inference_steps=1, output_type=output_type)
    assert [(x.kind, x.module_path) for x in handle.record.findings] == [
        ("grey-frames", "result 1")
    ] * 2
    assert len(said) == 1
    assert said[0].startswith("result 1: All 8 frames: mean colour (128, 128, 128) of 255")
    assert handle.repairs == ()


@pytest.mark.usefixtures("each_device")
def test_where_someone_else_looks_at_frames_the_guard_does_not() -> None:
    """`generate` reports the frames of the file that it wrote."""
    pipe = make_pipeline(NAME)
    with Patches() as patches, guard(pipe, frames=False) as handle:
        paint_grey(pipe, patches)
        call_pipeline(pipe, NAME)
    assert handle.record.findings == ()


@pytest.mark.usefixtures("each_device")
def test_what_leaves_costs_one_read_at_most() -> None:
    """Latents are read once; arrays and pictures are on the host already."""
    pipe = make_pipeline(NAME)
    for output_type, reads in (("latent", 1), ("pt", 1), ("np", 0)):
        with guard(pipe, frames=False) as handle:
            pipe(**CALLS[NAME], num_inference_steps=1, output_type=output_type)
        calls = sum(call.calls for call in handle.record.calls)
        assert handle.record.host_reads == calls + reads


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.usefixtures("each_device")
def test_the_class_is_as_it_was(first: int) -> None:
    """Guards of two pipelines of one class come off in either order; others are called as ever."""
    pipes = [testing.make_pipeline(NAME) for _ in range(3)]
    kind = type(pipes[0])
    before = vars(kind)["__call__"]
    plain = call_pipeline(pipes[2], NAME)
    guards = [guard(pipe, on_fault="raise", announce=quiet) for pipe in pipes[:2]]
    with spoilt_steps(pipes[2].scheduler, 1):
        assert call_for_latents(pipes[2]).isnan().all()
    guards.pop(first).remove()
    with spoilt_steps(pipes[first].scheduler, 1):
        assert call_for_latents(pipes[first]).isnan().all()
    with spoilt_steps(pipes[1 - first].scheduler, 1), pytest.raises(NonFiniteError):
        call_for_latents(pipes[1 - first])
    guards.pop().remove()
    assert vars(kind)["__call__"] is before
    np.testing.assert_array_equal(call_pipeline(pipes[2], NAME), plain)


@pytest.mark.usefixtures("each_device")
def test_a_class_that_calls_its_parent_is_looked_at_once() -> None:
    """Its own `__call__` leads to that of the class above, which is not guarded a second time."""
    pipe: Any = testing.make_pipeline(NAME)

    class Own(type(pipe)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    pipe.__class__ = Own
    with spoilt_steps(pipe.scheduler, 1), guard(pipe, on_fault="warn", announce=quiet) as handle:
        call_for_latents(pipe)
    assert len(handle.repairs) == 1
    assert "stopdown_stack" not in vars(Own.__call__)
    assert isinstance(pipe, DiffusionPipeline)


@pytest.mark.parametrize(
    ("name", "value", "is_spoilt"),
    [
        ("attention_mask", torch.tensor([0.0, -torch.inf]), False),
        ("attention_mask", torch.tensor([0.0, torch.nan]), True),
        ("hidden_states", torch.tensor([0.0, -torch.inf]), True),
        ("hidden_states", torch.tensor([0.0, 65504.0]).half(), False),
        ("hidden_states", torch.ones(2, dtype=torch.complex64), False),
        ("hidden_states", torch.ones(0), False),
    ],
)
def test_arguments_that_are_not_finite(name: str, value: torch.Tensor, is_spoilt: bool) -> None:
    """NaN and Inf, but for the -Inf that masks are made of."""

    class Pipe:
        """A pipeline of one component."""

        def __init__(self) -> None:
            self.unet = torch.nn.Identity()
            self.unet.forward = lambda **given: torch.ones(1)  # type: ignore[method-assign]

        @property
        def components(self) -> dict[str, Any]:
            return {"unet": self.unet}

    pipe = Pipe()
    with guard(pipe, on_fault="warn", announce=quiet) as handle:
        pipe.unet(**{name: value})
    assert [repair.kind for repair in handle.repairs] == (["input"] if is_spoilt else [])
    assert all(f"`unet` was called with it as {name}" in r.evidence for r in handle.repairs)


def test_results_of_every_kind_are_counted() -> None:
    """Tensors and arrays in lists, mappings and objects."""
    bad = np.array([1.0, np.nan, np.inf])
    assert count_bad([Slotted(torch.tensor(bad)), {"a": bad}, [1, "b", None]]) == (2, 2, 6)
    assert count_bad([torch.ones(2), torch.ones(2, dtype=torch.int64), bad[:1]]) == (0, 0, 0)
