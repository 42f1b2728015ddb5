"""A pipeline's own code run once without weights, to see what it hands to its components.

Everything outside of the components is real: tokenizer, scheduler, noise, the loop over the steps.
Each component call goes to a function of the caller instead, which says what comes back; of that
only shapes and dtypes count, and the pipeline gets zeros. It ends where the decoder was called.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image

from stopdown.patches import Patches
from stopdown.pipelines.call_interception import Call, Rank, put_layer
from stopdown.pipelines.components import Callee, find_callees
from stopdown.pipelines.default_sizes import find_own_sides
from stopdown.pipelines.library_messages import quiet_libraries
from stopdown.pipelines.requests import list_needed

OnCall = Callable[[Callee, Call, tuple[Any, ...], dict[str, Any]], Any]
"""Called at a component call: the component call, what it would call, positional and keyword arguments."""

_PROMPT = "a red circle on a grey background"
_SIDE = 256


class _DecoderReached(Exception):
    """Everything that there is to see was seen."""


def dry_run(skeleton: Any, on_call: OnCall, arguments: Mapping[str, Any] | None = None) -> None:
    """Run a skeleton's `__call__`, every call of a component led to `on_call`.

    Args:
        skeleton: from `build_skeleton` or `copy_skeleton`.
        on_call: its result goes on into the pipeline; tensors in it become zeros of their shapes
            and dtypes.
        arguments: of the pipeline's call, beside or instead of those of `make_arguments`.

    Raises:
        Exception: whatever the pipeline's code raises.
    """
    callees = find_callees(skeleton)
    last = next((callee for callee in callees if callee.stage == "decode"), None)
    with Patches() as patches, quiet_libraries(), torch.no_grad(), warnings.catch_warnings():
        for callee in callees:
            _put_stop(callee, on_call, callee is last, patches)
        try:
            warnings.simplefilter("ignore")  # of a run without values they say nothing
            skeleton(**{**make_arguments(skeleton), **(arguments or {})})
        except _DecoderReached:
            return


def make_arguments(pipe: Any) -> dict[str, Any]:
    """Arguments for the smallest request that a pipeline takes; sizes are its own defaults."""
    taken = inspect.signature(type(pipe).__call__).parameters
    arguments: dict[str, Any] = {}
    if "prompt" in taken:
        arguments["prompt"] = _PROMPT
    height, width = find_own_sides(pipe) or (_SIDE, _SIDE)
    picture = Image.fromarray(np.zeros((height, width, 3), np.uint8))
    needed = list_needed(type(pipe))
    for name in ("image", "images"):
        if name in taken and taken[name].default in (None, inspect.Parameter.empty):
            arguments[name] = picture
    for name in ("mask_image", "control_mask", "control_image"):
        if name in needed:
            arguments[name] = picture
    for name in ("video", "control_video"):
        if name in needed and "image" not in arguments:
            arguments[name] = [picture] * 9
    if "generator" in taken:
        arguments["generator"] = torch.Generator("cpu").manual_seed(0)
    length = _read_config(pipe, "transformer").get("max_text_seq_length")
    if length and "max_sequence_length" in taken:
        arguments["max_sequence_length"] = length
    return arguments


def _read_config(pipe: Any, name: str) -> Any:
    return getattr(getattr(pipe, name, None), "config", None) or {}


def _put_stop(callee: Callee, on_call: OnCall, is_last: bool, patches: Patches) -> None:
    def stop(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = on_call(callee, call, args, kwargs)
        if is_last and callee.method == "decode":
            raise _DecoderReached
        return output

    put_layer(callee.owner, callee.method, stop, patches, Rank.RECORD)
