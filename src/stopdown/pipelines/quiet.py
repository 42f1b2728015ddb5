"""Diffusers and Transformers without their progress bars and without remarks that help nobody.

What is dropped is listed here, sentence by sentence; every other warning of theirs passes.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

from stopdown.patches import Patches

_NOISE = re.compile(
    "|".join(
        (
            r"requires torchvision \(not installed\); falling back to",  # both give the same pixels
            # Said of every module that is cast, also of those that keep nothing in fp32; pipelines
            # that cast their autoencoder for one call do so.
            r"should be kept in float32: ",
            r"were not initialized from the model checkpoint",  # refused while loading
        )
    )
)


class _NoiseFilter(logging.Filter):
    """Lets everything pass but the sentences of `_NOISE`."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not _NOISE.search(record.getMessage())


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Without bars and noise of Diffusers and Transformers, which are put back as they were.

    Blocks may be nested.
    """
    with Patches() as patches:
        _hide_bars(patches)
        for name in ("diffusers", "transformers"):
            for handler in logging.getLogger(name).handlers:
                noise = _NoiseFilter()
                handler.addFilter(noise)
                patches.defer(functools.partial(handler.removeFilter, noise))
        yield


def _hide_bars(patches: Patches) -> None:
    import diffusers.utils.logging as diffusers_logging
    import transformers.utils.logging as transformers_logging

    for module in (diffusers_logging, transformers_logging):
        if module.is_progress_bar_enabled():
            module.disable_progress_bar()
            patches.defer(module.enable_progress_bar)
