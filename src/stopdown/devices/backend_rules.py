"""Rules of the backends as data: which dtypes an operation takes together, and which it lacks.

`knowledge/rules/backend_dtypes.toml` has a row for each operation and backend (CPU, CUDA, MPS), with its
source; `attention.toml` which kernels of scaled dot product attention there are, by compute
capability; `versions.toml` which versions are known to be at fault. Tensors on `meta` do not
raise where a real device does (linear, layer_norm, group_norm), so a check compares the operands that a
captured graph shows with these rules.

**Catches** operands of different dtypes, and formats that an operation is not implemented in, by
backend, capability, versions of macOS and torch, and what a CPU's instruction sets leave to oneDNN.
**Does not catch** what depends on sizes, layouts or values. The CPU's rows are held against what torch
does (tests/devices/test_backend_rules.py); those of CUDA and MPS rest on their sources.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from stopdown.files.toml_files import read_rows, read_rules

ANY = "*"
"""In `BackendRow.also`: any format."""


class Gap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Formats that an operation is not implemented in.

    Attributes:
        message: what is raised, or a sentence; for people.
        before_capability: only below this CUDA compute capability.
        before_macos: only before this version of macOS.
        before_torch: only before this version of torch.
    """

    formats: tuple[str, ...]
    message: str
    source: str
    before_capability: tuple[int, int] | None = None
    before_macos: tuple[int, ...] | None = None
    before_torch: tuple[int, ...] | None = None


class BackendRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one backend makes of an operation's operands.

    Attributes:
        accepts: `same`: all operands have one dtype; `promoted`: any mixture, and the result has the
            widest.
        also: beside `same`: formats in the order of the operation's operands, `*` for any.
        gaps: formats that are not implemented.
        onednn: `also` holds only where PyTorch does not give the first operand's format to oneDNN.
    """

    accepts: Literal["same", "promoted"]
    source: str
    also: tuple[tuple[str, ...], ...] = ()
    gaps: tuple[Gap, ...] = ()
    onednn: bool = False

    def list_also(self, place: Place) -> list[tuple[str, ...]]:
        """Return the patterns of `also` that apply at a place; if its oneDNN is unknown, those of fp64
        only.
        """
        taken = ("fp32", "bf16", "fp16") if place.onednn is None else place.onednn
        return [pattern for pattern in self.also if not self.onednn or pattern[0] not in taken]


class BackendRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An operation, its floating operands, and what each backend makes of them.

    Attributes:
        targets: its names in a captured graph, without overload: `aten.layer_norm`.
        operands: the floating operands, by their argument names; for an operation that takes a list
            of tensors the one name of that list; none when nothing is compared.
        rows: by backend: `cpu`, `cuda`, `mps`. A backend without a row is one nothing is known of.
    """

    name: str
    targets: tuple[str, ...]
    operands: tuple[str, ...]
    rows: dict[str, BackendRow]


class AttentionKernel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A kernel of scaled dot product attention, as `torch.nn.attention.SDPBackend` names them.

    Attributes:
        from_capability: the first CUDA compute capability that has it in these formats.
        note: a sentence for people.
    """

    name: Literal["flash", "efficient", "cudnn", "math"]
    backend: str
    formats: tuple[str, ...]
    source: str
    from_capability: tuple[int, int] = (0, 0)
    note: str = ""


class VersionFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Versions of a package with a known fault.

    Attributes:
        package: `torch`, `diffusers`, `transformers`, `macos`.
        versions: as in a requirement: `>=2.4,<2.4.1`.
        remedy: what to type or do.
        backends: where it shows; empty for everywhere.
        formats: in which formats; empty for all.
        operations: in which operations, by name; empty for unknown.
        capabilities: on cards of which CUDA compute capability; empty for all.
    """

    package: str
    versions: str
    what: str
    remedy: str
    source: str
    backends: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()
    capabilities: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Ruling:
    """What the rules say of one call.

    Attributes:
        accepted: False when the backend refuses it; True also where nothing is known.
        reason: whole sentences; "" when it is accepted.
        source: where that is said; "" when nothing is known.
    """

    accepted: bool
    reason: str = ""
    source: str = ""


@dataclass(frozen=True)
class Place:
    """Where an operation would run.

    Attributes:
        backend: `cpu`, `cuda` or `mps`.
        capability: CUDA compute capability, None when unknown or elsewhere.
        macos: version of macOS, empty when unknown.
        torch: version of torch, empty when unknown.
        onednn: on a CPU, formats whose convolutions PyTorch gives to oneDNN, which depends on its
            instruction sets (`environment.find_onednn_formats`); None when unknown.
    """

    backend: str
    capability: tuple[int, int] | None = None
    macos: tuple[int, ...] = ()
    torch: tuple[int, ...] = ()
    onednn: tuple[str, ...] | None = None


def find_backend_rule(target: object) -> BackendRule | None:
    """Return the operation of a call in a captured graph; None if there are no rules for it.

    Args:
        target: an overload such as `torch.ops.aten.linear.default`, its name, `aten.linear` or `linear`.
    """
    text = str(target)
    parts = text.split(".")
    base = ".".join(parts[:2]) if parts[0] == "aten" else text
    return _index_operations().get(base)


def judge_operands(
    operation: BackendRule, place: Place, operands: Mapping[str, Sequence[str]]
) -> Ruling:
    """Return whether a backend accepts operands of these formats together.

    Args:
        operands: formats by argument name, several for a list of tensors. Names that the operation
            does not compare are passed over.
    """
    row = operation.rows.get(place.backend)
    given = [(name, fmt) for name in operation.operands for fmt in operands.get(name, ())]
    if row is None or row.accepts == "promoted" or len({fmt for _, fmt in given}) < 2:
        return Ruling(True)
    positions = {name: at for at, name in enumerate(operation.operands)}
    also = row.list_also(place)
    for pattern in also:
        if all(pattern[positions[name]] in (ANY, fmt) for name, fmt in given):
            return Ruling(True)
    listed = ", ".join(f"{name} {fmt}" for name, fmt in given)
    return Ruling(
        False,
        f"{operation.name} on {place.backend} takes operands of one dtype"
        f"{_describe_also(operation, also)}, and got {listed}.",
        row.source,
    )


def judge_format(operation: BackendRule, place: Place, format_name: str) -> Ruling:
    """Return whether a backend implements an operation in a format."""
    row = operation.rows.get(place.backend)
    for gap in row.gaps if row else ():
        if format_name in gap.formats and _applies(gap, place):
            return Ruling(
                False,
                f"{operation.name} is not implemented in {format_name} on {place.backend}"
                f"{_describe_limits(gap)}: {gap.message}",
                gap.source,
            )
    return Ruling(True)


def list_attention(backend: str, capability: tuple[int, int] | None) -> dict[str, tuple[str, ...]]:
    """Return the formats that each attention kernel of a backend takes, by the kernel's name.

    Args:
        backend: `cpu`, `cuda` or `mps`.
    """
    found: dict[str, tuple[str, ...]] = {}
    for kernel in read_rows("attention", "kernel", AttentionKernel):
        if kernel.backend == backend and kernel.from_capability <= (capability or (0, 0)):
            formats = (*found.get(kernel.name, ()), *kernel.formats)
            found[kernel.name] = tuple(dict.fromkeys(formats))
    return found


def list_version_faults(
    versions: Mapping[str, str | None],
    backend: str | None = None,
    capability: tuple[int, int] | None = None,
) -> list[VersionFault]:
    """Return the known faults of installed versions.

    Args:
        versions: version by package; None when it is not installed.
        backend: limit the result to faults of this backend; None for all.
        capability: limit the result to faults of cards with this compute capability; None for all.
    """
    return [
        fault
        for fault in read_rows("versions", "fault", VersionFault)
        if _is_installed(fault, versions.get(fault.package))
        and (backend is None or not fault.backends or backend in fault.backends)
        and (capability is None or not fault.capabilities or capability in fault.capabilities)
    ]


def _is_installed(fault: VersionFault, version: str | None) -> bool:
    from packaging.specifiers import SpecifierSet

    return bool(version) and SpecifierSet(fault.versions).contains(version or "", prereleases=True)


def _describe_also(operation: BackendRule, also: Iterable[tuple[str, ...]]) -> str:
    kinds = [
        ", ".join(f"{n} {f}" for n, f in zip(operation.operands, p, strict=True)) for p in also
    ]
    return f" (or {'; or '.join(kinds)})" if kinds else ""


def _applies(gap: Gap, place: Place) -> bool:
    """Return whether a gap applies at a place; it does not where the place lacks a fact for its limits."""
    limits = (
        (gap.before_capability, place.capability),
        (gap.before_macos, place.macos),
        (gap.before_torch, place.torch),
    )
    return all(limit is None or (bool(at) and tuple(at or ()) < limit) for limit, at in limits)


def _describe_limits(gap: Gap) -> str:
    said = (
        (" before compute capability ", gap.before_capability),
        (" before macOS ", gap.before_macos),
        (" before torch ", gap.before_torch),
    )
    return "".join(word + ".".join(map(str, limit)) for word, limit in said if limit)


@functools.cache
def read_backend_rules() -> tuple[BackendRule, ...]:
    return tuple(parse_operations(read_rules("backend_dtypes")))


def parse_operations(data: Mapping[str, Any]) -> list[BackendRule]:
    """Parse the operations in the tables of `backend_dtypes.toml`.

    A row under `all` applies to each backend without a row of its own.
    """
    found = []
    for entry in data["operation"]:
        rows = dict(entry["rows"])
        shared = rows.pop("all", None)
        if shared is not None:
            rows = {backend: rows.get(backend, shared) for backend in ("cpu", "cuda", "mps")}
        found.append(msgspec.convert({**entry, "rows": rows}, BackendRule))
    return found


@functools.cache
def _index_operations() -> dict[str, BackendRule]:
    targets = {target: op for op in read_backend_rules() for target in op.targets}
    short = {target.removeprefix("aten."): op for target, op in targets.items()}
    return short | {op.name: op for op in read_backend_rules()} | targets
