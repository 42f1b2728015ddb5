"""Certify components of a model on the Hub while the others are still downloaded.

Not covered: single files, LoRAs, and models whose headers cannot be read from the Hub.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from stopdown.devices.environment import Device
from stopdown.pipelines.class_selection import select_class
from stopdown.pipelines.requests import Request
from stopdown.plans.certified import list_planned
from stopdown.plans.certifier import WORTH_BYTES, Certifier
from stopdown.plans.plan_choice import find_need
from stopdown.plans.precision import find_plan_path
from stopdown.records import Plan
from stopdown.sources.hub import PLAN_BESIDE, Progress
from stopdown.sources.library_messages import quiet_libraries
from stopdown.sources.sources import Source, count_download


@contextlib.contextmanager
def certified_on_arrival(
    source: Source,
    precision: str | Plan,
    device: Device,
    *,
    request: Request | None = None,
    progress: Progress | None = None,
) -> Iterator[None]:
    """A block that downloads the weights of a source; it ends when they are downloaded and certified.

    Args:
        source: without its weights, from `resolve_source(..., with_weights=False)`.
        precision: what the run asks for, as of `choose_plan`; with a plan nothing is certified.
    """
    components = list[str]()
    if isinstance(precision, str):
        with quiet_libraries():
            source, components = _list_worth(source, precision, device, request)
    with Certifier(source, components, "fp32") as certifier:
        yield
        certifier.wait(progress)


def _list_worth(
    source: Source, precision: str, device: Device, request: Request | None
) -> tuple[Source, list[str]]:
    """Return what is to be planned; no component where there is too little to download or to plan."""
    if source.kind != "hub" or source.loras or find_plan_path(precision) is not None:
        return source, []
    if count_download(source) < WORTH_BYTES:
        return source, []
    need = find_need(source, precision, device)
    if not need.why or (source.path / PLAN_BESIDE).is_file():
        return source, []
    left = [name for name in list_planned(source) if name not in need.others]
    return select_class(source, request), left
