"""Comparison of a card's architecture with those for which a build of PyTorch has kernels.

A build lists the architectures that it was compiled for (`torch.cuda.get_arch_list`). NVIDIA's cards run
code for the same major compute capability and an equal or lower minor one, and intermediate code
(`compute_90`) for any lower one. AMD's run code for their own architecture, or for its generic name.

**Catches** cards for which nothing in the list can run: the first kernel would fail with "no kernel image
is available".
**Does not catch** libraries beside PyTorch (flash attention, bitsandbytes), which have their own lists.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import msgspec

from stopdown.errors import OptionError
from stopdown.files.toml_files import read_rows

Number = tuple[int, int]

_INTEGRATED: tuple[Number, ...] = ((5, 3), (6, 2), (7, 2), (8, 7), (10, 1), (11, 0))
"""Compute capabilities of Tegra and Jetson, which do not run code for cards, and vice versa."""


_ON_CPU = 'Or run on the CPU: device="cpu".'


@dataclass(frozen=True)
class Build:
    """A build of PyTorch.

    Attributes:
        version: `2.13.0+cu130`.
        toolkit: `CUDA 13.0`, `ROCm 7.1`.
        architectures: those it was compiled for: `sm_75`, `compute_90`, `gfx1030`; empty if unknown.
    """

    version: str
    toolkit: str
    architectures: tuple[str, ...]


class _Card(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Row of the table `card` in `knowledge/rules/builds.toml`: which build to install for which cards."""

    backend: Literal["cuda", "rocm"]
    build: str
    remedy: str
    source: str
    first: tuple[int, ...] = msgspec.field(default=(), name="from")
    below: tuple[int, ...] = ()
    name: str = ""

    def fits(self, number: Number, name: str) -> bool:
        return (
            number >= self.first
            and (not self.below or number < self.below)
            and re.search(self.name, name) is not None
        )


class _System(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Row of the table `system` in `knowledge/rules/builds.toml`: versions of torch, and the oldest macOS
    on which they have MPS.
    """

    torch: str
    least: Number
    source: str


def find_missing_kernels(
    build: Build, device: str, number: Number, architecture: str = ""
) -> OptionError | None:
    """Return an error if a build of PyTorch has no kernels for a card.

    None if it has kernels, or if the build does not list its architectures.

    Args:
        device: name of the card, for the message.
        number: compute capability of an NVIDIA card.
        architecture: architecture of an AMD card, such as `gfx1031`; "" for an NVIDIA card.
    """
    listed = build.architectures
    has = _runs_on_amd(listed, architecture) if architecture else _runs_on_nvidia(listed, number)
    if has or not listed:
        return None
    backend, written = "rocm" if architecture else "cuda", ".".join(map(str, number))
    row = next(
        x
        for x in read_rows("builds", "card", _Card)
        if x.backend == backend and x.fits(number, architecture)
    )
    return OptionError(
        f"This PyTorch ({build.version}, {build.toolkit}) has no kernels for {device}, which is "
        f"{architecture or f'compute capability {written}'}. It was built for {', '.join(listed)}.",
        expected=row.build.format(number=written, name=architecture),
        remedy=f"{row.remedy}." if "cpu" in row.remedy else f"{row.remedy}. {_ON_CPU}",
    )


def _runs_on_nvidia(listed: Collection[str], number: Number) -> bool:
    for entry in listed:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", entry)
        if found is None:
            continue
        code, is_exact = (int(found[2]), int(found[3])), found[4] == "a"
        if code == number or (found[1] == "compute" and not is_exact and code <= number):
            return True
        is_alike = code[0] == number[0] and code[1] <= number[1] and not is_exact
        if found[1] == "sm" and is_alike and number not in _INTEGRATED and code not in _INTEGRATED:
            return True
    return False


def _runs_on_amd(listed: Collection[str], architecture: str) -> bool:
    generic = (
        x.removesuffix("-generic").replace("-", "") for x in listed if x.endswith("-generic")
    )
    return architecture in {x.partition(":")[0] for x in listed} or architecture.startswith(
        tuple(generic)
    )


def find_missing_system(version: str, macos: tuple[int, ...]) -> OptionError | None:
    """Return an error if a version of torch has no MPS on a version of macOS; None if it has.

    Args:
        version: version of torch.
        macos: version of macOS, such as (13, 7, 4).
    """
    from packaging.specifiers import SpecifierSet

    rows = read_rows("builds", "system", _System)
    row = next(x for x in rows if SpecifierSet(x.torch).contains(version, prereleases=True))
    if macos >= row.least:
        return None
    here, least = ".".join(map(str, macos)), ".".join(map(str, row.least))
    return OptionError(
        f"This PyTorch ({version}) doesn't use the Apple GPU under macOS {here}.",
        expected=f"It needs macOS {least} or newer.",
        remedy="Update macOS, or choose an older PyTorch at https://pytorch.org/get-started/locally/. "
        f"{_ON_CPU}",
    )
