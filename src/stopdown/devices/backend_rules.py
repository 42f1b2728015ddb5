"""Rules on the dtypes that each backend's operations accept, as data.

`knowledge/rules/backend_dtypes.toml` has a row for each operation and backend (CPU, CUDA, MPS), with its
source. `attention.toml` lists the kernels of scaled dot product attention by compute capability, and
`versions.toml` the versions with known faults. Tensors on `meta` do not raise where a real device does
(linear, layer_norm, group_norm), so a check compares the operands in a captured graph with these rules.

**Catches** operands of different dtypes, and formats in which an operation is not implemented, by backend,
compute capability, and versions of macOS and torch; on a CPU also by whether its instruction sets let
PyTorch use oneDNN.
**Does not catch** faults that depend on sizes, layouts or values. The rows of the CPU are tested against
torch (tests/devices/test_backend_rules.py); those of CUDA and MPS rely on their sources.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from stopdown.files.toml_files import read_rows, read_rules

ANY = "*"
"""Wildcard for any format in `BackendRow.also`."""


class Gap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Formats in which an operation is not implemented.

    Attributes:
        message: the error that is raised, or a sentence.
        before_capability: applies only below this CUDA compute capability; None for all.
        before_macos: applies only before this version of macOS; None for all.
        before_torch: applies only before this version of torch; None for all.
    """

    formats: tuple[str, ...]
    message: str
    source: str
    before_capability: tuple[int, int] | None = None
    before_macos: tuple[int, ...] | None = None
    before_torch: tuple[int, ...] | None = None


class BackendRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Operand dtypes that one backend accepts for an operation.

    Attributes:
        accepts: `same`: all operands must have one dtype; `promoted`: any mixture, and the result has the
            widest dtype.
        also: combinations accepted besides `same`: formats in the order of the operands, `*` for any.
        gaps: formats that are not implemented.
        onednn: whether `also` only applies if PyTorch does not use oneDNN for the first operand's format.
    """

    accepts: Literal["same", "promoted"]
    source: str
    also: tuple[tuple[str, ...], ...] = ()
    gaps: tuple[Gap, ...] = ()
    onednn: bool = False

    def list_also(self, place: Place) -> list[tuple[str, ...]]:
        """Return the mixtures of operands' formats that are accepted besides one format, on one device.

        If its oneDNN formats are unknown, combinations that depend on oneDNN only apply to fp64.
        """
        taken = ("fp32", "bf16", "fp16") if place.onednn is None else place.onednn
        return [pattern for pattern in self.also if not self.onednn or pattern[0] not in taken]


class BackendRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rules for one operation on each backend.

    Attributes:
        targets: names of the operation in a captured graph, without overload: `aten.layer_norm`.
        operands: argument names of the floating operands; for an operation on a list of tensors, the name
            of that argument; empty if dtypes are not compared.
        rows: accepted dtypes by backend: `cpu`, `cuda`, `mps`. Nothing is known of a backend without a row.
    """

    name: str
    targets: tuple[str, ...]
    operands: tuple[str, ...]
    rows: dict[str, BackendRow]


class AttentionKernel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A kernel of scaled dot product attention, named as in `torch.nn.attention.SDPBackend`.

    Attributes:
        from_capability: the lowest CUDA compute capability that has it in these formats.
        note: remark for users, as a sentence.
    """

    name: Literal["flash", "efficient", "cudnn", "math"]
    backend: str
    formats: tuple[str, ...]
    source: str
    from_capability: tuple[int, int] = (0, 0)
    note: str = ""


class VersionFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Known fault of some versions of a package.

    Attributes:
        package: `torch`, `diffusers`, `transformers`, `macos`.
        versions: affected versions, as in a requirement: `>=2.4,<2.4.1`.
        remedy: what to type or do.
        backends: affected backends; empty for all.
        formats: affected formats; empty for all.
        operations: names of affected operations; empty if unknown.
        capabilities: CUDA compute capabilities of affected cards; empty for all.
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
    """Verdict of the rules on one operation.

    Attributes:
        accepted: False if the backend refuses it; also True if nothing is known.
        reason: why it is refused, in whole sentences; "" if it is accepted.
        source: source of the rule; "" if it is accepted.
    """

    accepted: bool
    reason: str = ""
    source: str = ""


@dataclass(frozen=True)
class Place:
    """Device and versions with which an operation would run.

    Attributes:
        backend: `cpu`, `cuda` or `mps`.
        capability: CUDA compute capability; None if unknown or not CUDA.
        macos: version of macOS; empty if unknown.
        torch: version of torch; empty if unknown.
        onednn: on a CPU, formats for whose convolutions PyTorch uses oneDNN, which depends on the
            instruction sets (`find_onednn_formats`); None if unknown.
    """

    backend: str
    capability: tuple[int, int] | None = None
    macos: tuple[int, ...] = ()
    torch: tuple[int, ...] = ()
    onednn: tuple[str, ...] | None = None


def find_backend_rule(target: object) -> BackendRule | None:
    """Return the rules for an operation of a captured graph; None if there are none.

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
        operands: formats by argument name, several for a list of tensors. Arguments whose dtypes the
            operation does not compare are ignored.
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
                f"{operation.name} isn't implemented in {format_name} on {place.backend}"
                f"{_describe_limits(gap)}: {gap.message}",
                gap.source,
            )
    return Ruling(True)


def list_attention(backend: str, capability: tuple[int, int] | None) -> dict[str, tuple[str, ...]]:
    """Return the formats that each attention kernel of a backend supports, by the kernel's name.

    Args:
        backend: `cpu`, `cuda` or `mps`.
        capability: CUDA compute capability; None elsewhere.
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
    """Return whether a gap applies at a place; a limit on a version that is unknown there isn't met."""
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
    """Parse the rules in the tables of `backend_dtypes.toml`.

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
