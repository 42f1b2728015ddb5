"""Suppression of progress bars and unhelpful log messages of Diffusers and Transformers.

The dropped messages are listed here one by one; all other warnings pass.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

from stopdown.errors import ignoring_warnings
from stopdown.interception.patches import Patches

_NOISE = re.compile(
    "|".join(
        (
            r"requires torchvision \(not installed\); falling back to",  # both give the same pixels
            # Said of every module that is cast, also of those that keep nothing in fp32; pipelines
            # that cast their autoencoder for one call do so.
            r"should be kept in float32: ",
            # refused while loading, by their names
            r"were not initialized from the model checkpoint",
            r"were not used when initializing",
            # the time steps of Wan 2.1 are one a prompt, and its plan is for those of Wan 2.2 as well
            r"Expected input tensor to have 2 dimensions, but got 1 dimensions",
            r"LOAD REPORT",
            # its components come loaded, and those of their kind lie in the pipeline's own package
            r"You have passed a non-standard module",
            r"`enable_parallelism` is an experimental feature",  # put on by us, and tested
        )
    )
)

_EMPTY = re.compile(r"should be kept in float32: \[\]")
"""Diffusers logs this for every module that is cast, even if the list is empty."""

_OLD_CALLS = r".*(all_gather_tensor|weight_norm)` is deprecated"
"""Warnings of PyTorch 2.13 about functions that Diffusers 0.42 and some layers use, on each rank."""

_TRUNCATION = re.compile(
    r"part of your input was truncated|sequence length is longer than the specified maximum"
)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Hide progress bars and unhelpful messages of Diffusers and Transformers while the block runs.

    Blocks may be nested.
    """
    with Patches() as patches, ignoring_warnings(FutureWarning, _OLD_CALLS):
        import diffusers.utils.logging as diffusers_logging
        import transformers.utils.logging as transformers_logging

        for module in (diffusers_logging, transformers_logging):
            if module.is_progress_bar_enabled():
                module.disable_progress_bar()
                patches.defer(module.enable_progress_bar)
        _drop(_NOISE, patches)
        # PyTorch logs tracebacks of errors on fake tensors, and raises those errors too
        logger = logging.getLogger("torch._subclasses.fake_tensor")
        patches.set_attribute(logger, "disabled", True)
        yield


@contextmanager
def quiet_truncation(*, wanted: bool = True) -> Iterator[None]:
    """Hide warnings about truncated prompts while the block runs.

    Args:
        wanted: True for Stopdown's own prompts; False to show the warnings, for prompts of a user.
    """
    with Patches() as patches:
        if wanted:
            _drop(_TRUNCATION, patches)
        yield


def drop_empty_remarks(patches: Patches) -> None:
    """Hide Diffusers' message that a cast module keeps nothing in fp32, until `patches` is undone."""
    import diffusers.utils.logging  # noqa: F401  # it makes the handler
    import transformers.utils.logging  # noqa: F401

    _drop(_EMPTY, patches)


def _drop(noise: re.Pattern[str], patches: Patches) -> None:
    """Drop matching messages from the logs of Diffusers and Transformers until `patches` is undone."""

    def is_heard(record: logging.LogRecord) -> bool:
        return not noise.search(record.getMessage())

    for name in ("diffusers", "transformers"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(is_heard)
            patches.defer(functools.partial(handler.removeFilter, is_heard))
