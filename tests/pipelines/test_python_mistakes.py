"""What is easily given to the Python functions by mistake: one sentence that says what to give instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stopdown
from stopdown.comparison.matrix import _name_precisions, number_prompts
from stopdown.plans.plan_files import seal_plan, take_plan
from stopdown.testing import make_pipeline

LINEAR, ONES = torch.nn.Linear(4, 4), torch.ones(2, 4)
PLAN = stopdown.records.Plan("m", "", "P", "fp16", {}, (), "cpu", 0.0)


def make_offloaded() -> Any:
    """A pipeline whose weights Accelerate keeps elsewhere between calls."""
    pipe = make_pipeline("sd")
    pipe.enable_sequential_cpu_offload(device="cpu")
    return pipe


CASES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "guard of a name": (lambda pipe: stopdown.guard("shapes"), "load it first"),
    "guard of a path": (lambda pipe: stopdown.guard(Path("shapes")), "load it first"),
    "guard of a number": (lambda pipe: stopdown.guard(3), r"The argument \(int\) holds no module"),
    "plan for a name": (lambda pipe: stopdown.apply_plan("shapes", "p.json"), "load it first"),
    "plan that is no file": (lambda pipe: stopdown.apply_plan(pipe, "p.json"), "p.json"),
    "plan of an offloaded pipeline": (
        lambda pipe: stopdown.make_plan(make_offloaded()),
        "has no values: it is stored elsewhere between calls",
    ),
    "rescaling of a pipeline": (lambda pipe: stopdown.rescale_(pipe), "apply_plan"),
    "rescaling of a name": (lambda pipe: stopdown.rescale_("shapes"), "which is no module"),
    "rescaling without a call": (
        lambda pipe: stopdown.rescale_(pipe.unet),
        "no example call of it",
    ),
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
    # plans: a Plan, or the path of its file
    "guard by no file": (lambda pipe: stopdown.guard(pipe, "p.json"), "The plan p.json can't"),
    "guard by a table": (
        lambda pipe: stopdown.guard(pipe, {"unet": "fp16"}),
        "A plan was given {'unet': 'fp16'}, a dict. It is a Plan, or the path of its file.",
    ),
    "guard by a number": (lambda pipe: stopdown.guard(pipe, 3), "was given 3, a int"),
    "no plan to apply": (lambda pipe: stopdown.apply_plan(pipe, None), "given None, a NoneType"),
    "pipeline for a plan": (lambda pipe: stopdown.apply_plan(pipe, pipe.unet), "A plan was given"),
    "no plan to convert by": (lambda pipe: stopdown.convert("shapes", "o", None), "given None"),
    "no path to read": (lambda pipe: stopdown.read_plan(None), "A plan was given None"),
    "no path to write": (
        lambda pipe: stopdown.write_plan(PLAN, None),
        'Use write_plan.plan, "plan',
    ),
    "no place to convert to": (
        lambda pipe: stopdown.convert("shapes", 3, "p.json"),
        r"convert.output. was given 3, a int. It is the path of a folder or",
    ),
    # calls
    "request as a table": (
        lambda pipe: stopdown.compare(pipe, "a", request={"steps": 1}),
        r"Use request=stopdown.Request\(steps=4",
    ),
    "request as a text": (
        lambda pipe: stopdown.compare(pipe, "a", request="a cat"),
        "'a cat', a str",
    ),
    "steps as a text": (
        lambda pipe: stopdown.compare(pipe, "a", request=stopdown.Request(steps="4")),  # type: ignore[arg-type]
        r"Request\(steps=...\) was given '4', a str. It is a whole number.",
    ),
    "height as a text": (
        lambda pipe: stopdown.compare(pipe, "a", request=stopdown.Request(height="9")),  # type: ignore[arg-type]
        r"Request\(height=...\) was given '9'",
    ),
    "guidance as a text": (
        lambda pipe: stopdown.compare(pipe, "a", request=stopdown.Request(guidance="high")),  # type: ignore[arg-type]
        "It is a number.",
    ),
    "picture as a path": (
        lambda pipe: stopdown.compare(pipe, "a", request=stopdown.Request(image="a.png")),  # type: ignore[arg-type]
        r"Request\(image=...\)\) was given 'a.png', a str. It is an array of uint8: a picture is",
    ),
    "picture of floats": (
        lambda pipe: stopdown.compare(
            pipe, "a", request=stopdown.Request(image=np.zeros((4, 4, 3), np.float32))
        ),
        r"was given an array of float32. It is .* Use numpy.asarray\(PIL",
    ),
    "run that is none": (
        lambda pipe: stopdown.make_plan(pipe.unet, run=3),
        "a function that takes",
    ),
    "run with arguments": (
        lambda pipe: stopdown.make_plan(pipe.unet, run=lambda x: x),
        "can't be called with no arguments: missing a required argument: 'x'",
    ),
    "progress that is none": (lambda pipe: stopdown.make_plan(pipe, progress="x"), "takes 4 arg"),
    "announce that is none": (lambda pipe: stopdown.guard(pipe, announce="x"), "takes 1 argument"),
    "observer that is none": (lambda pipe: stopdown.guard(pipe, observer=3), "takes 4 arguments"),
    "journal that is none": (lambda pipe: stopdown.guard(pipe, journal=3), 'Use journal="journal"'),
    "arguments as a list": (lambda pipe: stopdown.check(pipe, arguments=[1]), "by its own names"),
    "arguments as a text": (
        lambda pipe: stopdown.check(pipe, arguments="a"),
        "was given 'a', a str",
    ),
    "arguments of a mending": (lambda pipe: stopdown.mend(pipe, arguments=3), "mend.arguments="),
    "prompts of a comparison": (
        lambda pipe: stopdown.compare(pipe, 3),
        "compare.prompts. was given 3",
    ),
    "no prompts to compare": (lambda pipe: stopdown.compare(pipe, None), "given None, a NoneType"),
    "tables to compare": (
        lambda pipe: stopdown.compare(pipe, [{"prompt": "a"}]),
        "A prompt is a text",
    ),
    "thresholds of a comparison": (
        lambda pipe: stopdown.compare(pipe, "a", thresholds=3),
        "They are stopdown.comparison.records.Thresholds",
    ),
    "example of no pipeline": (lambda pipe: stopdown.fp16(pipe.unet), "no example of its call"),
    "example that is wrong": (
        lambda pipe: stopdown.fp16(torch.nn.Linear(4, 4), torch.ones(2, 5)),
        "The call that was given to fp16 fails as it is: RuntimeError: mat1 and mat2",
    ),
    "fp16 of a name": (lambda pipe: stopdown.fp16("shapes"), "load it first"),
    # devices and dtypes
    "device of a check": (lambda pipe: stopdown.check(pipe, device=0), 'Use device="cuda:0"'),
    "device of a comparison": (
        lambda pipe: stopdown.compare(pipe, "a", device=0),
        "compare.device=",
    ),
    "precisions as a number": (lambda pipe: stopdown.compare(pipe, "a", 3), "The precision 3 is"),
    "one dtype to compare": (
        lambda pipe: stopdown.compare(pipe, "a", torch.float16),
        'precisions="fp16" is no list of precisions to compare: it has 1',
    ),
    "cast to a number": (lambda pipe: stopdown.cast_(pipe.unet, 16), "which is no floating-point"),
    "cast to integers": (lambda pipe: stopdown.cast_(pipe.unet, torch.int8), "given torch.int8"),
    "cast to nothing": (lambda pipe: stopdown.cast_(pipe.unet, None), "cast_ was given None"),
    "cast to what is unknown": (
        lambda pipe: stopdown.cast_(pipe.unet, "fp12"),
        "'fp12' is unknown",
    ),
    "cast by a plan": (lambda pipe: stopdown.cast_(pipe.unet, "fp16", PLAN), "stopdown.apply_plan"),
    "cast by another rescaling": (
        lambda pipe: stopdown.cast_(pipe.unet, "fp16", stopdown.rescale_(LINEAR, ONES)),
        "given a UNet2DConditionModel and the rescaling of another module",
    ),
    # calls of a module
    "keywords as positions": (
        lambda pipe: stopdown.rescale_(LINEAR, {"input": ONES}),
        "Positional arguments are a tensor, or a tuple of all",
    ),
    "text for a call": (
        lambda pipe: stopdown.rescale_(LINEAR, "abc"),
        "rescale_.args. was given 'abc'",
    ),
    "array for a call": (lambda pipe: stopdown.rescale_(LINEAR, ONES.numpy()), "a ndarray"),
    "keywords as a list": (lambda pipe: stopdown.rescale_(LINEAR, (), [ONES]), "rescale_.kwargs."),
    "calls as a tensor": (
        lambda pipe: stopdown.rescale_(LINEAR, calls=ONES),
        "rescale_.calls=....",
    ),
    "calls without a form": (
        lambda pipe: stopdown.rescale_(LINEAR, calls=[(LINEAR, ONES)]),
        "Each call is what is called, a tuple of its arguments and a table",
    ),
    "call of another shape": (
        lambda pipe: stopdown.rescale_(LINEAR, torch.ones(2, 5)),
        "The call that was given to rescale_ fails as it is: RuntimeError: mat1 and mat2 shapes",
    ),
    "call in another dtype": (
        lambda pipe: stopdown.rescale_(LINEAR, ONES.half()),
        "fails as it is: RuntimeError: .* in the dtype of the weights",
    ),
    "call by another name": (
        lambda pipe: stopdown.rescale_(LINEAR, (), {"inputs": ONES}),
        "unexpected keyword argument 'inputs'",
    ),
    "scheduler by its name": (
        lambda pipe: stopdown.load("shapes", scheduler="ddim"),
        "Make it with its class, or leave scheduler out",
    ),
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


@pytest.mark.thorough
def test_a_dtype_is_a_precision_for_check(pipe: Any) -> None:
    """As in `load`: a dtype says the same as its name."""
    asked = stopdown.check(pipe, precision=torch.float16, device="v100")
    assert asked == stopdown.check(pipe, precision="fp16", device="v100")


def test_one_prompt_is_one_prompt() -> None:
    """A text is not taken for a list of its letters."""
    assert number_prompts("a red circle") == ([(1, "a red circle")], [])


def test_a_plan_is_taken_as_itself_or_by_its_path(tmp_path: Path) -> None:
    """Also among the precisions of a comparison, where dtypes say the same as their names."""
    plan = seal_plan(PLAN)
    path = stopdown.write_plan(plan, tmp_path / "plan.json")
    assert take_plan(plan) is plan
    assert take_plan(path) == take_plan(str(path)) == plan
    names = _name_precisions([torch.float32, "bf16", plan], tmp_path / "new")
    assert names[:2] == ("fp32", "bf16")
    assert stopdown.read_plan(names[2]) == plan


def test_a_tensor_is_a_call_and_a_name_is_a_dtype() -> None:
    """`rescale_(module, x)` and `cast_(module, "fp16")` say what their longer forms say."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    long = stopdown.rescale_(module, (ONES,)).exponents
    rescaling = stopdown.rescale_(module, ONES)
    assert rescaling.exponents == long
    stopdown.cast_(module, "half", rescaling)
    assert {x.dtype for x in module.parameters()} == {torch.float16}
    rescaling.undo()


def test_what_a_pipeline_does_not_take_is_no_argument_of_a_check() -> None:
    """A misspelt size ended the dry run before anything was looked at, and nothing was found."""
    with pytest.raises(stopdown.errors.OptionError, match="doesn't take the argument hight"):
        stopdown.check(make_pipeline("cogvideox"), arguments={"hight": 32})


def test_handles_say_what_they_are(pipe: Any) -> None:
    """What is printed of a guard or a mending is a sentence, and no address in memory."""
    with stopdown.guard(pipe) as guarded:
        assert repr(guarded) == (
            "Guard(of a StableDiffusionPipeline, on_fault='repair', 0 faults so far)"
        )
    with stopdown.mend(pipe) as mending:
        assert repr(mending).startswith("Mending(0 done, ")
