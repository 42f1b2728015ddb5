"""`Request`: what a user asks of a pipeline, and its translation to arguments of the pipeline's call.

Arguments are found by name in the signature of the pipeline's `__call__`, so that unknown pipelines work as
well. The few names that differ between families of pipelines are in tables.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from stopdown.argument_types import check_type
from stopdown.errors import OptionError, StopdownError, take_first_line
from stopdown.files.toml_files import read_rows
from stopdown.pipelines.accepted_arguments import read_signature, refuse_unknown
from stopdown.pipelines.allowed_sizes import choose_own_sides

if TYPE_CHECKING:
    import numpy as np

PROMPTS = (
    "a red circle moving left on a grey background",
    "Close-up of an old fisherman's weathered face at sunrise, every wrinkle sharp, gulls and waves "
    "behind him, warm golden light, 35mm film.",
    "A train crosses a snowy mountain bridge, steam and pine forest, heavy snowfall, aerial shot.",
)
"""Prompts for measurements if none is given: short and long, of still and moving scenes."""


_ALWAYS = ("mask_image", "control_image", "control_mask", "control_video")
"""Arguments that every pipeline which has them needs, although their default is None."""
_INPUT = re.compile(
    r"^(?!.*ip_adapter).*(image|mask|video|control|condition|frames|pose|face|audio|hint)(?!.*(embed|latent|scale|guidance"
    r"|strength|mode|crop|attention|num_|_start|_end|per_prompt))"
)
"""Pattern of the names of media inputs, such as pictures, masks and sound."""


def _check_count(name: str, value: int) -> None:
    if value < 1:
        raise OptionError(f"{name}={value} is less than 1.", remedy=f"Use {name}=1 or more.")


def _check_number(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise OptionError(f"{name}={value} isn't a number.", remedy=f"Use {name}=6.")


def _check_strength(name: str, value: float) -> None:
    if not 0 < value <= 1:
        raise OptionError(
            f"{name}={value} isn't above 0 and at most 1.",
            expected="It is the share of the denoising steps that are run.",
            remedy=f"Use {name}=0.8.",
        )


LARGEST_SEED = 2**63 - 1


def check_seed(name: str, value: int, largest: int = LARGEST_SEED) -> None:
    """Refuse an integer that is not a valid seed."""
    if not 0 <= value <= largest:
        power = (largest + 1).bit_length() - 1
        raise OptionError(
            f"{name}={value} isn't a seed.",
            expected=f"A seed is a whole number from 0 to 2**{power} - 1.",
            remedy=f"Use {name}=0.",
        )


def _say(
    kind: type, text: str, *names: str, check: Callable[[str, Any], None] | None = None
) -> dict[str, Any]:
    """Return the metadata of a field of `Request`.

    Commands, batches, journals, signatures and error messages iterate over the fields, so a new field is
    only added there.

    Args:
        kind: type of its value on the command line and in JSON; `Path` for a picture or video.
        text: help text of its option.
        names: argument names in pipelines, most common first.
        check: called with the field's name and a value; raises an error for an invalid value.
    """
    return {"kind": kind, "help": text, "names": names, "check": check}


@dataclass(frozen=True)
class Request:
    """Request to a pipeline; None leaves a value to the pipeline's own default.

    Attributes:
        prompt: what the output should show.
        negative: what the output should not show.
        image: picture to start from, `[H, W, 3]` uint8.
        video: video to start from, `[T, H, W, 3]` uint8.
        mask: `[H, W]` uint8 or bool, or `[H, W, 3]` uint8; white (true) areas are replaced.
        control_image: picture that a ControlNet follows, `[H, W, 3]` uint8.
        strength: how much of the starting picture is changed, above 0 and up to 1.
        frames: number of frames of the output.
        height: height of the output, in pixels.
        width: width of the output, in pixels.
        steps: number of denoising steps.
        guidance: guidance scale.
        seed: seed of the noise, which is drawn on the CPU so that it is the same on every device.
        arguments: further arguments of the pipeline's call, by the pipeline's names and passed unchanged;
            they override the other fields.

    Examples:
        >>> request = stopdown.Request("a red circle moving left", steps=20)
        >>> request.seed, request.height  # the pipeline's own height
        (0, None)
    """

    prompt: str | None = field(default=None, metadata=_say(str, "What to show.", "prompt"))
    negative: str | None = field(
        default=None,
        metadata=_say(str, "Negative prompt: what to avoid.", "negative_prompt"),
    )
    image: np.ndarray[Any, Any] | None = field(
        default=None, metadata=_say(Path, "Picture to start from.", "image", "images")
    )
    video: np.ndarray[Any, Any] | None = field(
        default=None, metadata=_say(Path, "Video to start from.", "video", "control_video")
    )
    frames: int | None = field(
        default=None,
        metadata=_say(int, "Number of frames.", "num_frames", "video_length", check=_check_count),
    )
    height: int | None = field(
        default=None, metadata=_say(int, "Height in pixels.", "height", check=_check_count)
    )
    width: int | None = field(
        default=None, metadata=_say(int, "Width in pixels.", "width", check=_check_count)
    )
    steps: int | None = field(
        default=None,
        metadata=_say(int, "Number of denoising steps.", "num_inference_steps", check=_check_count),
    )
    guidance: float | None = field(
        default=None,
        metadata=_say(
            float, "Guidance scale.", "guidance_scale", "max_guidance_scale", check=_check_number
        ),
    )
    seed: int = field(default=0, metadata=_say(int, "Seed for the noise.", check=check_seed))
    mask: np.ndarray[Any, Any] | None = field(
        default=None,
        metadata=_say(
            Path,
            "Mask for the picture: white areas are replaced.",
            "mask_image",
            "control_mask",
            "mask",
        ),
    )
    control_image: np.ndarray[Any, Any] | None = field(
        default=None,
        metadata=_say(
            Path, "Picture for a ControlNet to follow: edges, depth or a pose.", "control_image"
        ),
    )
    strength: float | None = field(
        default=None,
        metadata=_say(
            float,
            "How much to change the starting picture: above 0, up to 1.",
            "strength",
            check=_check_strength,
        ),
    )
    arguments: Mapping[str, Any] = field(default_factory=dict)


FIELDS = tuple(x for x in fields(Request) if x.metadata)
"""Fields of `Request` with metadata `kind`, `help`, `names` and `check`; all but `arguments`."""

MEDIA = tuple(x.name for x in FIELDS if x.metadata["kind"] is Path)
"""Names of a request's fields that are arrays of pixels."""

_NAMES = {x.name: x.metadata["names"] for x in FIELDS if x.metadata["names"]}

_IN_WORDS: dict[type, tuple[type, str]] = {
    str: (str, "text"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
}


def check_values(values: Mapping[str, Any]) -> None:
    """Refuse values of a request's fields that are out of range.

    Args:
        values: values by field name.
    """
    for entry in FIELDS:
        value, check = values.get(entry.name), entry.metadata["check"]
        if value is not None and check is not None:
            check(entry.name, value)


def check_request(function: str, given: Request | None) -> Request | None:
    """Validate the `request` argument of a public function, including its fields; return it.

    Args:
        function: name of the function, for the error message.
    """
    check_type(
        f"{function}(request=...)",
        given,
        (Request, type(None)),
        "It is a stopdown.Request.",
        "Use request=stopdown.Request(steps=4, height=512, width=512).",
    )
    if given is None:
        return None
    table = (Mapping, "a mapping")
    kinds = {x.name: _IN_WORDS.get(x.metadata["kind"]) for x in FIELDS} | {"arguments": table}
    for name, (kind, words) in ((x, y) for x, y in kinds.items() if y is not None):
        check_type(
            f"Request({name}=...)",
            getattr(given, name),
            (kind, type(None)),
            f"It is {words}.",
            f"Give {words}, or leave `{name}` out.",
        )
    for name in MEDIA:
        place = f"{function}(request=Request({name}=...))"
        _check_pixels(place, getattr(given, name), is_mask=name == "mask")
    check_values(vars(given))
    return given


def _check_pixels(place: str, value: Any, *, is_mask: bool) -> None:
    """Refuse a picture, mask or video that isn't an array of uint8, such as a path or a PIL image.

    A mask without colours may be an array of bool.
    """
    import numpy as np

    expected = "It is an array of uint8: a picture is [H, W, 3], and a video [T, H, W, 3]."
    remedy = 'Use numpy.asarray(PIL.Image.open("picture.png").convert("RGB")).'
    check_type(place, value, (np.ndarray, type(None)), expected, remedy)
    if value is None or (is_mask and value.dtype == np.bool_ and value.ndim == 2):
        return
    if value.dtype != np.uint8:
        raise OptionError(
            f"{place} was given an array of {value.dtype}.", expected=expected, remedy=remedy
        )


def name_pipeline_arguments(pipeline_class: type, request: Request) -> dict[str, Any]:
    """Map a request's fields to the argument names of a pipeline class; loads nothing.

    Raises:
        OptionError: the class does not accept a field or an argument, or needs one that is missing.
    """
    arguments: dict[str, Any] = {}
    refused: list[str] = []
    for name in _NAMES:
        value = getattr(request, name)
        target = find_pipeline_argument(name, pipeline_class)
        if value is None or (target is None and _is_in_media(name, request)):
            continue
        if target is None:
            refused.append(name)
            continue
        if target in arguments:
            names = [
                f"`{x}`" for x in _NAMES if find_pipeline_argument(x, pipeline_class) == target
            ]
            raise OptionError(
                f"{' and '.join(names)} were both given, and {pipeline_class.__name__} has one argument "
                f"for them: {target}.",
                remedy=f"Leave {names[0]} out.",
            )
        arguments[target] = value
    if refused:
        missing = _list_missing(pipeline_class, {**arguments, **request.arguments})
        raise _describe_refused(pipeline_class, refused, missing)
    refuse_unknown(pipeline_class, request.arguments)
    given = {**arguments, **request.arguments}
    _check_needed(pipeline_class, given)
    _check_steps(pipeline_class, given)
    return arguments


_WITHOUT_PROMPT = re.compile("LEditsPP|Marigold|UnCLIPImageVariation|VisualCloze")
"""Classes with a tokenizer that take text under other names, or none."""


_WITH_MEDIA = re.compile("Image(To|2)|Img2|Video(To|2)|Inpaint|Fill|ControlNet|Edit")
"""Names of classes that need a picture or video as well."""


def refuse_missing_prompt(class_name: str, components: Iterable[str], request: Request) -> None:
    """Refuse a request without a prompt for a pipeline that needs one, by class name and components alone.

    Pipelines with a tokenizer need a prompt, except for a few classes. If a picture or video is missing as
    well, nothing is raised here, since `name_pipeline_arguments` names all missing inputs.
    """
    if {"prompt", "prompt_embeds"} & set(request.arguments) or request.prompt is not None:
        return
    has_tokenizer = any(name.startswith("tokenizer") for name in components)
    takes_more = _WITH_MEDIA.search(class_name) and request.image is None and request.video is None
    if has_tokenizer and not takes_more and not _WITHOUT_PROMPT.search(class_name):
        raise _describe_missing(class_name, "`prompt`", _GIVE_PROMPT)


def list_needed_arguments(pipeline_class: type) -> list[str]:
    """List the arguments that a pipeline's call needs, in the order of its signature."""
    taken = read_signature(pipeline_class)
    needed = {name for name, x in taken.items() if x.default is inspect.Parameter.empty}
    needed |= {name for name in ("prompt", *_ALWAYS) if name in taken}
    if "video" in taken and "image" not in taken and not _is_optional("video", pipeline_class):
        needed.add("video")
    if "image" in taken and not _is_optional("image", pipeline_class):
        needed.add("image")
    starts_from = "strength" in taken or "mask_image" in taken
    if starts_from and not {"video", "conditions"} & set(taken):
        needed.add("image")
    if find_pipeline_argument("control_image", pipeline_class) == "image":
        needed.add("image")
    return [name for name in taken if name in needed]


@functools.cache
def _is_optional(name: str, pipeline_class: type) -> bool:
    """Return whether a pipeline runs without an input, according to its docstring and its code.

    An input documented as optional is so if the pipeline also takes a prompt (Wan VACE, AnyFlow). As
    docstrings are often wrong about pictures, code that tests for a picture counts as running without one.

    Args:
        name: `image` or `video`.
    """
    said = inspect.getdoc(pipeline_class.__call__) or ""
    described = re.search(rf"^ *{name} \(.*", said, re.M)
    if "*optional*" in (described[0] if described else ""):
        return "prompt" in read_signature(pipeline_class)
    if name == "video":
        return False
    try:
        code = inspect.getsource(pipeline_class)
    except (OSError, TypeError):  # a class without a file
        return True
    if re.search(rf"if {name} is None:\s+raise ", code):
        return False
    return described is None or f"{name} is not None" in code


def list_needed_fields(pipeline_class: type) -> list[str]:
    """List the fields of a request that a pipeline's call needs."""
    needed = list_needed_arguments(pipeline_class)
    named = {find_pipeline_argument(name, pipeline_class): name for name in _NAMES}
    return [named[target] for target in needed if target in named]


_OF_PRECISION = re.compile(
    r"\b(half|double|dtype|[bf]p?16|fp32|b?float\d*|nan|inf|finite)\b", re.IGNORECASE
)
"""Words of errors that a precision may cause."""

_NOT_OF_PRECISION = (AttributeError, KeyError, NameError, TypeError, ValueError)
_SIZES = re.compile(
    r"normalized_shape|shapes cannot be multiplied|size of tensor|to have \d+ channels"
)


def was_raised_by_model(error: Exception) -> bool:
    """Return whether a module's code raised an error, and not the pipeline's own."""
    frames = (x for x, _ in traceback.walk_tb(error.__traceback__))
    return any(hasattr(x.f_locals.get("self"), "named_modules") for x in frames)


def _is_of_precision(error: Exception) -> bool:
    """Return whether an error may go away in another precision; wrong names and sizes never do."""
    if _OF_PRECISION.search(str(error)):
        return True
    return not isinstance(error, _NOT_OF_PRECISION) and not _SIZES.search(str(error))


def explain_stop(
    pipeline_class: type,
    arguments: Mapping[str, Any],
    error: Exception,
    *,
    precisions: Iterable[str] = (),
) -> StopdownError:
    """Return the error for a run that failed for a reason other than its arguments or device memory.

    Args:
        precisions: of the pipeline's components.
    """
    absent = [x for x in read_signature(pipeline_class) if _INPUT.match(x)]
    absent = [] if was_raised_by_model(error) else [x for x in absent if arguments.get(x) is None]
    own = [x for x in traceback.extract_tb(error.__traceback__) if "site-packages" in x.filename]
    own = [x for x in own if not re.search(r"site-packages.(torch|accelerate).", x.filename)]
    place = ""
    if own:
        file = re.split(r"site-packages.", own[-1].filename)[-1]
        place = f"It was raised in {file}, line {own[-1].lineno}."
    said = [place, *getattr(error, "__notes__", ())]
    if absent:
        said.append(f"It wasn't given {_list_fields(pipeline_class, absent)}.")
    if {*precisions} == {"fp32"}:
        remedy = "It ran in fp32, so the cause is in the model or the request."
    elif _is_of_precision(error):
        remedy = (
            'Run it again with precision="fp32": if that stops as well, the cause is in the model or '
            "the request."
        )
    else:
        remedy = (
            "The cause is in the model or the request: another precision leads to the same error."
        )
    return StopdownError(
        f"{pipeline_class.__name__} stopped: {type(error).__name__}: {take_first_line(error)[:300]}",
        expected=" ".join(filter(None, said)),
        remedy=remedy,
    )


def say_what_to_change(pipeline_class: type, text: str) -> str:
    """Return the remedy for a pipeline's error about its arguments.

    Args:
        text: the pipeline's message.
    """
    if "unsupported ScalarType BFloat16" in text:
        return 'It hands bf16 to NumPy, which has no such format. Use precision="fp16" or precision="fp32".'
    if "multiple controlnets" in text:
        name = next(x for x in ("control_image", "image") if x in read_signature(pipeline_class))
        return (
            f'Use request=stopdown.Request(arguments={{"{name}": ...}}) with a list of pictures, one for '
            "each ControlNet."
        )
    if "height and width must be > 0" in text:
        return "Give an `image` of 64 pixels a side or more: its sides are rounded down to whole blocks."
    words = re.findall(r"\w+", text)
    named = [x for x in read_signature(pipeline_class) if x in words]
    fields = [x for x in (_find_field(pipeline_class, name) for name in named) if x]
    fields += [
        x
        for x in _NAMES
        if x in words and x not in fields and find_pipeline_argument(x, pipeline_class)
    ]
    if fields:
        return f"Change {' and '.join(f'`{x}`' for x in fields)}."
    if named:
        return _say_how(pipeline_class, named)
    for name in re.findall(r"`(\w+)`", text):
        method = getattr(pipeline_class, name, None)
        if inspect.isfunction(method):
            needed = [
                f"{x.name}=..."
                for x in [*inspect.signature(method).parameters.values()][1:]
                if x.default is inspect.Parameter.empty and x.kind == x.POSITIONAL_OR_KEYWORD
            ]
            return (
                f"Call its method {name} first, in Python: pipe = stopdown.load(SOURCE); "
                f"pipe.{name}({', '.join(needed)}); then pipe(...)."
            )
    return (
        "Its own code says so of what it was given. To give an argument that has no option, "
        'use request=stopdown.Request(arguments={"NAME": ...}).'
    )


def find_pipeline_argument(name: str, pipeline_class: type) -> str | None:
    """Return the name of a pipeline's argument for a field of a request; None if it has none."""
    taken = read_signature(pipeline_class)
    found = next((candidate for candidate in _NAMES[name] if candidate in taken), None)
    is_control = re.search("ControlNet|Adapter", pipeline_class.__name__) is not None
    if name == "control_image" and found is None and is_control and "image" in taken:
        return "image"  # what its ControlNet follows is all that it takes
    return found


_NEEDS_NEGATIVE = ("EasyAnimate",)
"""Beginnings of class names that fail without a negative prompt; they get an empty one."""


def build_arguments(pipe: Any, request: Request) -> dict[str, Any]:
    """Build the keyword arguments of a pipeline's call from a request.

    Sizes that the request leaves out are added if the pipeline's defaults don't suit its configs.
    """
    taken = inspect.signature(type(pipe).__call__).parameters
    arguments = name_pipeline_arguments(type(pipe), request)
    arguments = {**list_own_arguments(pipe), **list_own_sides(pipe, request), **arguments}
    arguments |= _prepare_media(arguments, request, find_picture_mode(pipe))
    if "generator" in taken:
        import torch

        arguments["generator"] = torch.Generator("cpu").manual_seed(request.seed)
    if "output_type" in taken:
        arguments["output_type"] = "np"
    given = {name: _match_tensor(taken.get(name), x) for name, x in request.arguments.items()}
    return {**arguments, **given}


def _match_tensor(parameter: inspect.Parameter | None, value: Any) -> Any:
    """Return a PIL image as a tensor [1, 3, H, W] in [0, 1] where a call takes only tensors, as a hint."""
    import numpy as np
    import torch
    from PIL import Image

    annotation = parameter.annotation if parameter is not None else None
    if annotation not in (torch.Tensor, "torch.Tensor") or not isinstance(value, Image.Image):
        return value
    pixels = np.asarray(value.convert("RGB"), np.float32) / 255
    return torch.from_numpy(pixels).permute(2, 0, 1)[None]


def list_own_sides(pipe: Any, request: Request) -> dict[str, int]:
    """Return the height and width to add to a request without them; empty if the default suits.

    See `choose_own_sides`. A size that the model's config recommends is not among them.
    """
    if {"height", "width"} <= list_own_arguments(pipe).keys():
        return {}
    asked = (request.height, request.width, *map(request.arguments.get, ("height", "width")))
    return {} if any(side is not None for side in asked) else choose_own_sides(pipe)


def list_own_arguments(pipe: Any) -> dict[str, bool | float | str]:
    """Return the arguments that a pipeline's call needs if it leaves them out, by its transformer's config.

    - Latte's `video_length`, the only length of a video that its transformer has positions for. The
      pipeline's default is 16, whatever the config says.
    - CogVideoX's `max_sequence_length`, the only text length that its transformer accepts.
    - An empty `negative_prompt` for the classes of `_NEEDS_NEGATIVE`.
    - The numbers and switches of `_recommended_call`, by the pipeline's names. `solids` has one. Names with
      an underscore in front are ignored by Diffusers.
    """
    config = getattr(getattr(pipe, "transformer", None), "config", None) or {}
    told = config.get("_recommended_call")
    own = {**told} if isinstance(told, Mapping) else {}
    own["video_length"] = config.get("video_length") or None
    if length := config.get("max_text_seq_length"):
        own["max_sequence_length"] = length
    taken = inspect.signature(type(pipe).__call__).parameters
    found: dict[str, bool | float | str] = {
        name: x for name, x in own.items() if name in taken and isinstance(x, (int, float))
    }
    if type(pipe).__name__.startswith(_NEEDS_NEGATIVE):
        found["negative_prompt"] = ""
    return found


def _is_in_media(name: str, request: Request) -> bool:
    """Return whether a request's input implies a size that the pipeline has no argument for.

    It is the number of frames of a video, or the height or width to which a picture is resized.
    """
    if name == "frames":
        return request.video is not None
    return name in ("height", "width") and request.image is not None


def _list_missing(pipeline_class: type, arguments: Mapping[str, Any]) -> list[str]:
    """List the arguments that a pipeline's call needs and that were not given."""
    has_prompt = any(arguments.get(name) is not None for name in ("prompt", "prompt_embeds"))
    missing = [
        name for name in list_needed_arguments(pipeline_class) if arguments.get(name) is None
    ]
    return [name for name in missing if name != "prompt" or not has_prompt]


def _check_needed(pipeline_class: type, arguments: Mapping[str, Any]) -> None:
    missing = _list_missing(pipeline_class, arguments)
    if missing:
        fields = _list_fields(pipeline_class, missing)
        remedy = _describe_stage(pipeline_class) or _say_how(pipeline_class, missing)
        raise _describe_missing(pipeline_class.__name__, fields, remedy)


def _describe_refused(pipeline_class: type, names: list[str], missing: list[str]) -> OptionError:
    """Return the error for a request with fields that a pipeline does not accept, and missing ones.

    Args:
        names: fields that the pipeline does not accept.
        missing: arguments that it needs.
    """
    taken = [f"`{other}`" for other in _NAMES if find_pipeline_argument(other, pipeline_class)]
    refused = " and ".join(f"`{name}`" for name in names)
    also, how = "", ""
    if missing:
        fields = _list_fields(pipeline_class, missing)
        also = f" and needs {fields}, which {_was(fields)}n't given"
        how = _describe_stage(pipeline_class) or _say_how(pipeline_class, missing)
    return OptionError(
        f"{pipeline_class.__name__} doesn't take {refused}{also}.",
        expected=f"It takes {', '.join(taken)}.",
        remedy=f"{how} Leave {refused} out.".lstrip()
        if missing
        else f"Leave {refused} out, or use a model that takes {'it' if len(names) == 1 else 'them'}.",
    )


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Pipeline classes that are the second stage of a model; see `knowledge/rules/stages.toml`.

    Attributes:
        first: class of the first stage.
        repository: Hub id of the first stage's model.
        combined: class that runs both stages; "" if there is none.
        makes: what the second stage takes from the first one's result, if no class runs both; a picture
            without it.
        folder: name of the folder in which the remedy saves the combined model.
    """

    classes: tuple[str, ...]
    first: str
    repository: str
    source: str
    combined: str = ""
    makes: tuple[str, ...] = ()
    folder: str = ""


def _describe_stage(pipeline_class: type) -> str:
    """Return the remedy for a pipeline that needs the result of a first stage; "" for other pipelines."""
    for stage in read_rows("stages", "stage", Stage):
        name = pipeline_class.__name__
        if name in stage.classes and stage.makes:
            given = ", ".join(f"{x}=made.{x}" for x in stage.makes)
            return (
                f"{name} is the second stage: {stage.first} makes that from a prompt, and no class does "
                f'both. In Python: prior = diffusers.{stage.first}.from_pretrained("{stage.repository}"); '
                f'made = prior("a cat"); pipe = stopdown.load(SOURCE); then pipe({given}, ...).'
            )
        if name in stage.classes and not stage.combined:
            return f"{name} is the second stage: give `image`, the picture that {stage.repository} makes."
        if name in stage.classes:
            return (
                f"{name} is the second stage: {stage.first} makes that from a prompt. Save both as one "
                f"model, in Python: diffusers.{stage.combined}.from_pretrained("
                f'"{stage.repository}").save_pretrained("{stage.folder}"). Then give {stage.folder}.'
            )
    return ""


def _describe_missing(class_name: str, fields: str, remedy: str) -> OptionError:
    if fields == "`prompt`":
        return OptionError("No `prompt` was given.", remedy=remedy)
    return OptionError(
        f"{class_name} needs {fields}, which {_was(fields)}n't given.", remedy=remedy
    )


def _was(fields: str) -> str:
    return "were" if " and " in fields else "was"


_GIVE_PROMPT = 'Add what to show, in quotes, such as "a lake at sunset".'


def _check_steps(pipeline_class: type, arguments: Mapping[str, Any]) -> None:
    """Refuse a strength that leaves no denoising step, for which pipelines raise various errors."""
    taken = read_signature(pipeline_class)
    if (
        not {"image", "video"} & set(list_needed_arguments(pipeline_class))
        or "denoising_start" in arguments
    ):
        return
    names = ("num_inference_steps", "strength")
    steps, strength = (
        arguments.get(name, taken[name].default if name in taken else None) for name in names
    )
    if not isinstance(steps, int) or not isinstance(strength, (int, float)) or not strength > 0:
        return
    if int(steps * strength) < 1:
        raise OptionError(
            f"{steps} step{'s' * (steps != 1)} at a strength of {strength} are less than one step.",
            expected=f"{pipeline_class.__name__} makes that share of its steps.",
            remedy=f"Use steps={math.ceil(1 / strength)} or more, or strength=1.",
        )


def _find_field(pipeline_class: type, argument: str) -> str:
    """Return the field of a request for an argument of a pipeline's call; "" if there is none."""
    names = [name for name in _NAMES if find_pipeline_argument(name, pipeline_class) == argument]
    return names[-1] if names else ""  # a picture that is a control is called so


def _list_fields(pipeline_class: type, arguments: list[str]) -> str:
    """Join the fields of a request for these arguments, each as "`mask` (its argument mask_image)"."""
    said = []
    for argument in arguments:
        name = _find_field(pipeline_class, argument)
        own = f"`{name}`" + f" (its argument {argument})" * (name != argument)
        said.append(own if name else argument)
    return " and ".join(said)


def _say_how(pipeline_class: type, arguments: list[str]) -> str:
    """Explain how to give arguments of a pipeline's call: as fields of a request, or in `arguments`."""
    if arguments == ["prompt"]:
        return _GIVE_PROMPT
    if made := [name for name in arguments if re.search("embed|latent", name)]:
        return (
            f"Another pipeline makes {' and '.join(made)}. Call both in Python: the first one, then this "
            "one as pipe = stopdown.load(SOURCE)."
        )
    names = [_find_field(pipeline_class, argument) for argument in arguments]
    given = " and ".join(f"`{name}`" for name in names if name)
    others = ", ".join(f'"{x}": ...' for x, name in zip(arguments, names, strict=True) if not name)
    said = [f"Give {given}."] if given else []
    if others:
        said.append(f"Use request=stopdown.Request(arguments={{{others}}}).")
    return " ".join(said)


def find_picture_mode(pipe: Any) -> str:
    """Return the mode of the PIL images that a pipeline encodes: `RGBA` if its autoencoder reads an alpha
    channel, as that of Qwen-Image-Layered, else `RGB`.
    """
    config = getattr(getattr(pipe, "vae", None), "config", {})
    return "RGBA" if config.get("input_channels") == 4 else "RGB"


def _prepare_media(arguments: dict[str, Any], request: Request, mode: str) -> dict[str, Any]:
    """Convert pictures, masks and videos in the arguments to PIL images; resize pictures as requested."""
    from PIL import Image

    prepared: dict[str, Any] = {}
    for name in ("image", "images", "control_image", *_NAMES["mask"]):
        if name in arguments:
            picture = Image.fromarray(arguments[name])
            picture = picture.convert("L" if name in _NAMES["mask"] else mode)
            size = (request.width or picture.width, request.height or picture.height)
            picture = picture if size == picture.size else picture.resize(size)
            prepared[name] = [picture] if name == "images" else picture
    for name in _NAMES["video"]:
        if name in arguments:
            prepared[name] = [Image.fromarray(frame) for frame in arguments[name]]
    if "mask" in prepared and "video" in prepared:
        prepared["mask"] = [prepared["mask"]] * len(prepared["video"])
    return prepared


def describe_unused_negative(pipeline_class: type, arguments: Mapping[str, Any]) -> str:
    """Return a sentence about a negative prompt that a call ignores without a word, as Flux's; else ""."""
    taken, name = read_signature(pipeline_class), "true_cfg_scale"
    if name not in taken or not arguments.get("negative_prompt"):
        return ""
    scale = arguments.get(name, taken[name].default)
    if not isinstance(scale, (int, float)) or scale > 1:
        return ""
    return (
        f"The negative prompt has no effect: {pipeline_class.__name__} reads it only with a {name} "
        f"above 1, and that is {scale:g}. To use it, set the argument {name}=4. Each step then takes "
        "twice as long."
    )


def find_frames(pipe: Any, arguments: dict[str, Any]) -> int:
    """Return the number of frames that a call will make, by its arguments and the pipeline's defaults."""
    for name in _NAMES["video"]:
        if name in arguments:
            return len(arguments[name])
    parameters = inspect.signature(type(pipe).__call__).parameters
    for name in _NAMES["frames"]:
        if name in parameters:
            default = list_own_arguments(pipe).get(name) or parameters[name].default
            asked = arguments.get(name) or default
            return int(asked or find_own_frames(pipe) or 2)
    return 1


def find_own_frames(pipe: Any) -> int | None:
    """Return the number of frames in the config of a pipeline's denoiser; None if it has none."""
    unet = getattr(getattr(pipe, "unet", None), "config", None)
    transformer = getattr(getattr(pipe, "transformer", None), "config", None)
    frames = getattr(transformer, "sample_frames", None)
    if frames and type(pipe).__name__ == "AllegroPipeline":  # its config counts latent frames
        frames *= pipe.vae_scale_factor_temporal
    return getattr(unet, "num_frames", None) or getattr(transformer, "video_length", None) or frames


def find_steps(pipe: Any, arguments: dict[str, Any]) -> int:
    """Return the number of denoising steps that a call will make, by its arguments and the defaults."""
    parameters = inspect.signature(type(pipe).__call__).parameters
    for name in _NAMES["steps"]:
        if name in parameters:
            own = list_own_arguments(pipe).get(name)
            return int(arguments.get(name) or own or parameters[name].default or 1)
    return 1
