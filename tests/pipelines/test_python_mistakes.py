"""What is easily given to the Python functions by mistake: one sentence that says what to give instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stopdown
from stopdown.comparison.matrix import number_prompts
from stopdown.testing import make_pipeline

CASES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "guard of a name": (lambda pipe: stopdown.guard("shapes"), "load it first"),
    "guard of a path": (lambda pipe: stopdown.guard(Path("shapes")), "load it first"),
    "guard of a number": (lambda pipe: stopdown.guard(3), "no module in what was given, a int"),
    "plan for a name": (lambda pipe: stopdown.apply_plan("shapes", "p.json"), "load it first"),
    "plan that is no file": (lambda pipe: stopdown.apply_plan(pipe, "p.json"), "p.json"),
    "rescaling of a pipeline": (lambda pipe: stopdown.rescale_(pipe), "apply_plan"),
    "rescaling of a name": (lambda pipe: stopdown.rescale_("shapes"), "which is no module"),
    "rescaling without a call": (lambda pipe: stopdown.rescale_(pipe.unet), "no call of it"),
    "cast of a pipeline": (lambda pipe: stopdown.cast_(pipe, torch.float16), "pipe.transformer"),
    "check in integers": (
        lambda pipe: stopdown.check(pipe, precision=torch.int8),
        "floating-point",
    ),
    "mend of a name": (lambda pipe: stopdown.mend("shapes"), "load it first"),
    "no plan to write": (lambda pipe: stopdown.write_plan(3, "p.json"), "a int and no plan"),
    "source that is no text": (lambda pipe: stopdown.load(3), "given as a int"),
    "revision of what has none": (
        lambda pipe: stopdown.load("shapes", revision="main"),
        'revision="main" was given, and shapes is a bundled model',
    ),
    "variant that is not there": (
        lambda pipe: stopdown.load("shapes", variant="fp16"),
        "has no weights of the variant fp16",
    ),
    "explanation of a number": (lambda pipe: stopdown.explain(3), "an exception"),
}


@pytest.fixture(scope="module")
def pipe() -> Any:
    return make_pipeline("sd")


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_one_clear_error(pipe: Any, name: str) -> None:
    """It is one of ours, so that no traceback of torch has to be read, and names the way."""
    call, said = CASES[name]
    with pytest.raises(stopdown.StopdownError, match=said):
        call(pipe)


def test_a_dtype_is_a_precision_for_check(pipe: Any) -> None:
    """As in `load`: a dtype says the same as its name."""
    asked = stopdown.check(pipe, precision=torch.float16, device="v100")
    assert asked == stopdown.check(pipe, precision="fp16", device="v100")


def test_one_prompt_is_one_prompt() -> None:
    """A text is not taken for a list of its letters."""
    assert number_prompts("a red circle") == ([(1, "a red circle")], [])


def test_handles_say_what_they_are(pipe: Any) -> None:
    """What is printed of a guard or a mending is a sentence, and no address in memory."""
    with stopdown.guard(pipe) as guarded:
        assert repr(guarded) == (
            "Guard(of a StableDiffusionPipeline, on_fault='repair', 0 faults so far)"
        )
    with stopdown.mend(pipe) as mending:
        assert repr(mending).startswith("Mending(0 done, ")
