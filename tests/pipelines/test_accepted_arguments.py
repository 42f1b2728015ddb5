"""Arguments that Diffusers' calls would ignore in silence, or fail on after the model is loaded."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest

from stopdown.errors import OptionError
from stopdown.pipelines.accepted_arguments import read_keywords, refuse_unknown


def some_call(self: Any, prompt: str, **kwargs: Any) -> Any:
    if "crop" in kwargs:
        return kwargs["crop"], kwargs.get("seed", 0), kwargs.pop("callback", None)
    return prompt


def passes_on(self: Any, prompt: str, **kwargs: Any) -> Any:
    kwargs.pop("callback", None)
    return some_call(self, prompt, **kwargs)


def test_names_behind_keywords_are_read_from_the_code() -> None:
    assert read_keywords(some_call) == {"crop", "seed", "callback"}
    assert read_keywords(passes_on) is None
    assert read_keywords(eval("lambda self, **kwargs: kwargs.get('seed')")) is None
    assert read_keywords(lambda self, prompt: prompt) == frozenset()
    sd = diffusers.StableDiffusionPipeline
    assert read_keywords(sd.__call__) == {"callback", "callback_steps"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clip_skp": 1}, r"doesn't take the argument clip_skp\. .*Give clip_skip instead\."),
        ({"colour": "red"}, r"doesn't take the argument colour\. .*Leave colour out\."),
        ({"eta": "abc"}, r"expects a number for eta, not 'abc'\. .*such as eta=0\."),
        (
            {"clip_skip": "two"},
            r"expects a number for clip_skip, not 'two'\. .*such as clip_skip=1\.",
        ),
        ({"callback_on_step_end": "x"}, r"expects a function for callback_on_step_end, .*Python\."),
    ],
)
def test_an_argument_that_would_be_ignored_or_fail_late_is_refused(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        refuse_unknown(diffusers.StableDiffusionPipeline, arguments)


def test_what_the_code_reads_is_taken() -> None:
    given = {"clip_skip": 1, "eta": 0.5, "callback_steps": 1, "prompt": "a cat"}
    refuse_unknown(diffusers.StableDiffusionPipeline, given)


def test_a_call_that_passes_its_keywords_on_takes_any_name() -> None:
    class Combined:
        __call__ = passes_on

    refuse_unknown(Combined, {"prior_steps": 3})
