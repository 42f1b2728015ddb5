"""Weights in files instead of memory: in the checkpoint's own files, or memory-mapped temporary files.

A `StoredWeight` is a weight of the checkpoint together with exponents and a dtype. Powers of two are exact
in every format of checkpoints, so that a weight is rounded only once, from the file to fp16. This is done
tensor by tensor when the weight is needed. Its pages belong to the checkpoint's file, and the system can
evict them.

Weights that would take more than a share of memory are mapped from a temporary file, if the disk has space.
A mapped tensor is read and written like any other. If it is cast, the result is mapped as well.

**Does not catch** tensors that are copied by other means (`copy.deepcopy`, `.to`); the copy is in memory.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from stopdown.errors import OutputError, warn_user
from stopdown.fold_names import Folds, name_parameters
from stopdown.interception.patches import Patches
from stopdown.number_formats import name_dtype
from stopdown.numerics import is_away, is_readable

SHARE = 0.25
"""Share of the machine's memory above which weights are mapped."""

Load = Callable[[str], torch.Tensor]
"""Returns a parameter or buffer by its name, in its stored dtype."""

_STORED = "stopdown_stored"
"""Name of the attribute with the `StoredWeight` of a parameter that is offloaded to its file."""


@dataclass(frozen=True)
class StoredWeight:
    """A weight in its file, with the exponents and the dtype in which it is read.

    Attributes:
        values: stored values, mapped from the file; of any shape and floating dtype.
        dtype: dtype to which the scaled values are cast.
        folds: places in the tensor (slices of rows and columns; `()` for all of it) and their exponents;
            values there are multiplied by `2**exponent`.

    Examples:
        >>> values = torch.tensor([1.0, 131072.0], dtype=torch.bfloat16)
        >>> StoredWeight(values, torch.float16, folds=(((slice(None),), -3),)).read()
        tensor([1.2500e-01, 1.6384e+04], dtype=torch.float16)
    """

    values: torch.Tensor
    dtype: torch.dtype
    folds: Folds = ()

    def read(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return the scaled and cast weight on a device, or the stored values if nothing changes."""
        if not self.folds and self.values.dtype == self.dtype:
            return self.values.to(device)
        made = torch.empty(self.values.shape, dtype=self.dtype, device=device)
        self.write(made)
        return made

    def take(self, places: torch.Tensor) -> torch.Tensor:
        """Return some of the scaled and cast values.

        Args:
            places: indices into the flattened tensor, `[n]`.
        """
        values = self.values.reshape(-1)[places].double()
        if self.values.dim():
            at = torch.unravel_index(places, self.values.shape)
            for place, exponent in self.folds:
                is_inside = torch.ones_like(places, dtype=torch.bool)
                for axis, part in zip(at, place, strict=False):
                    if part.start is not None:
                        is_inside &= (axis >= part.start) & (axis < part.stop)
                values[is_inside] *= 2.0**exponent
        else:
            values *= 2.0 ** sum(exponent for _, exponent in self.folds)
        return values.to(self.dtype)

    def write(self, target: torch.Tensor) -> None:
        """Write the scaled and cast weight into a tensor of its shape and dtype, on any device.

        Each value is rounded once, since its product with a power of two is exact before the cast.

        Cost: on another device, up to `_PIECE_BYTES` of memory besides the target, or as much on the host.
        """
        rows = len(self.values) if self.values.dim() else 1
        if self.values.device == target.device or not self.values.dim():
            _convert(self.values.to(target.device), self.folds, target)
        elif self.values.dtype == target.dtype and not self.folds:
            target.copy_(self.values)
        elif self.values.nbytes <= _HOST_BYTES:
            target.copy_(self.read())
        else:
            step = max(1, rows * _PIECE_BYTES // self.values.nbytes)
            for start in range(0, rows, step):
                piece = _bring(self.values[start : start + step], target.device)
                _convert(piece, _shift(self.folds, start, step), target[start : start + step])


_PIECE_BYTES = 2**25
"""Stored bytes of a large weight that are converted at a time on a device."""

_HOST_BYTES = 2**20
"""Size in stored bytes up to which a weight is converted on the host and then transferred."""


def _bring(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return stored values on a device; bf16 is transferred as integers and expanded to fp32 there.

    This works on devices without bf16, such as an M1.
    """
    if values.dtype != torch.bfloat16 or device.type == "cpu":
        return values.to(device)
    bits = values.view(torch.int16).to(device).to(torch.int32)
    return bits.bitwise_left_shift_(16).view(torch.float32)


def _convert(values: torch.Tensor, folds: Folds, target: torch.Tensor) -> None:
    if folds and values.dtype == torch.float16 != target.dtype:
        values = values.float()  # fp16 may not hold the product
    places = [place for place, _ in folds]
    with torch.no_grad():
        if places and (places == [()] or not target.dim()):
            torch.mul(values, 2.0 ** sum(exponent for _, exponent in folds), out=target)
        elif () not in places and len({len(place) for place in places}) < 2:
            target.copy_(values)
            for place, exponent in folds:
                torch.mul(values[place], 2.0**exponent, out=target[place])
        else:  # places that overlap: their exponents add up
            wide = values.to(torch.float32, copy=True)
            for place, exponent in folds:
                wide[place] *= 2.0**exponent
            target.copy_(wide)


def _shift(folds: Folds, start: int, count: int) -> Folds:
    """Return the exponents of `count` rows of a tensor from `start` on, with places counted from there."""
    return [
        ((slice(max(0, rows.start - start), max(0, min(count, rows.stop - start))),), exponent)
        if len(place) == 1 and (rows := place[0]).start is not None
        else (place, exponent)
        for place, exponent in folds
    ]


def put_(
    tensor: torch.Tensor, stored: StoredWeight, device: str | torch.device | None = None
) -> None:
    """Load a stored weight into a parameter or buffer, on its own device or another one."""
    tensor.data = stored.read(tensor.device if device is None else device)
    mark_as_waiting(tensor, waits=False)


def wait_(tensor: torch.Tensor, stored: StoredWeight) -> None:
    """Offload a parameter to its file: keep shape and dtype, and free its memory. A buffer is loaded."""
    if not isinstance(tensor, torch.nn.Parameter):
        put_(tensor, stored)
    elif find_stored(tensor) is None:  # a tied one has several names
        tensor.data = torch.empty(stored.values.shape, dtype=stored.dtype)
        tensor.untyped_storage().resize_(0)
        vars(tensor)[_STORED] = stored
        mark_as_waiting(tensor)


class WaitingParameter(torch.nn.Parameter):
    """Parameter that can be offloaded, and is printed without values then.

    PyTorch's own `repr` would read past the end of its empty storage.
    """

    def __repr__(self) -> str:  # type: ignore[override]
        if self.untyped_storage().nbytes() or not self.numel():
            return super().__repr__()
        return f"Parameter of {name_dtype(self.dtype)} {[*self.shape]}, whose values are stored elsewhere"


def mark_as_waiting(tensor: torch.Tensor, *, waits: bool = True) -> None:
    """Make a plain parameter a `WaitingParameter`, or with `waits=False` the reverse, in place."""
    before, after = torch.nn.Parameter, WaitingParameter
    if type(tensor) is (before if waits else after):
        tensor.__class__ = after if waits else before


def find_stored(tensor: torch.Tensor) -> StoredWeight | None:
    """Return the stored weight of an offloaded parameter; None if the tensor's values are in memory."""
    stored: StoredWeight | None = vars(tensor).get(_STORED)
    return stored if stored is not None and not tensor.untyped_storage().nbytes() else None


def choose_folder(needed_bytes: int, memory_bytes: int) -> Path | None:
    """Choose the folder for mapped weights; None if they are small, or the disk has too little space.

    Warns:
        StopdownWarning: they are large, and the disk has too little space.
    """
    if needed_bytes <= SHARE * memory_bytes or os.name != "posix":
        return None
    folder = find_disk_folder()
    room, free = 1.5 * needed_bytes, shutil.disk_usage(folder).free
    if free > room:
        return folder
    warn_user(
        f"{folder} has {free / 1e9:.1f} GB free, and the weights need {room / 1e9:.1f} GB there. They "
        f"are loaded into memory instead, where they take {needed_bytes / 1e9:.1f} GB. Set TMPDIR to "
        "a folder on a larger disk."
    )
    return None


_MOUNTS = Path("/proc/mounts")
"""Linux's list of mounted filesystems: device, place, type and options of each."""


def find_disk_folder() -> Path:
    """Return the folder for temporary files; `/var/tmp` where `/tmp` is in memory, as many distributions
    have it. A folder that TMPDIR names is taken as it is.
    """
    folder, other = Path(tempfile.gettempdir()), Path("/var/tmp")
    is_better = folder == Path("/tmp") and _is_in_memory(folder) and not _is_in_memory(other)
    return other if is_better and os.access(other, os.W_OK | os.X_OK) else folder


def _is_in_memory(folder: Path) -> bool:
    """Return whether a folder's files are in memory; False where the system doesn't tell."""
    try:
        lines = [line.split() for line in _MOUNTS.read_text(errors="replace").splitlines()]
    except OSError:
        return False
    held = [(len(place), kind) for _, place, kind, *_ in lines if folder.is_relative_to(place)]
    return bool(held) and max(reversed(held), key=lambda one: one[0])[1] in ("tmpfs", "ramfs")


def is_mapped(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's values are mapped from a file."""
    return find_mapped_folder(tensor) is not None


_PLAIN = (torch.Tensor, torch.nn.Parameter, WaitingParameter)


def find_mapped_folder(tensor: torch.Tensor) -> Path | None:
    """Return the folder of the file from which a tensor is mapped; None if it is in memory."""
    if type(tensor) not in _PLAIN or tensor.device.type != "cpu":
        return None
    name = tensor.untyped_storage().filename
    return None if name is None else Path(name).parent


def cast_tensor(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast a tensor; the result is mapped if the tensor is. It is the tensor itself if nothing changes."""
    folder = find_mapped_folder(tensor)
    if folder is None or tensor.dtype == dtype:
        return tensor.to(dtype)
    return map_copy(tensor, folder, dtype)


_COMPARED = 65536
"""About as many values of a tensor are compared to find out whether it was written."""


def cast_tensor_(tensor: torch.Tensor, dtype: torch.dtype, patches: Patches) -> None:
    """Cast a tensor in place. Undoing restores every bit, or casts back what was written meanwhile.

    A fused LoRA and other weights loaded in between are kept so. A difference below the precision of
    `dtype` isn't taken for a write: it's what a LoRA leaves that was fused and taken out again. A tensor
    that was moved since stays on its device, if that has room for the old values.

    Cost: undoing compares some of the values, with a host read.
    """
    before = tensor.data

    def undo() -> None:
        try:
            tensor.data = _choose_values(tensor.data, before, dtype)
        except (RuntimeError, TypeError):  # the device is full, or can't compare or hold the dtype
            tensor.data = before

    patches.defer(undo)  # first: a Ctrl-C in between leaves nothing cast
    tensor.data = cast_tensor(before, dtype)


def cast_additions_(module: torch.nn.Module, dtype: torch.dtype, patches: Patches) -> None:
    """Cast weights that are added to a module in `dtype` until `patches` is undone, such as a LoRA or
    fused layers, back with the others then.

    Call it before the module is cast to `dtype`.
    """
    known = {id(x): x for x in name_parameters(module).values()}
    sizes: dict[torch.dtype, int] = {}
    for tensor in filter(torch.is_floating_point, known.values()):
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    before = max(sizes, key=sizes.__getitem__, default=dtype)

    def undo() -> None:
        for tensor in name_parameters(module).values():
            if id(tensor) not in known and tensor.dtype == dtype:
                tensor.data = cast_tensor(tensor.data, before)

    patches.defer(undo)


def _choose_values(now: torch.Tensor, before: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values that a tensor had before its cast to a dtype, or its present ones, cast back, if
    they were written since; both on its present device.
    """
    if now.shape != before.shape:  # tokens were added to a table of embeddings
        return now.to(before.dtype)
    here = before if is_away(now) else before.to(now.device)
    is_comparable = now.dtype == dtype != before.dtype
    if (
        not is_comparable
        or find_mapped_folder(before)
        or not (is_readable(now) and is_readable(here))
    ):
        return here
    some = slice(None, None, max(1, now.numel() // _COMPARED))
    cast = here.reshape(-1)[some].to(dtype).float()
    change = torch.linalg.vector_norm(now.reshape(-1)[some].float() - cast)
    is_written = change > torch.finfo(dtype).eps * torch.linalg.vector_norm(cast)
    return now.to(before.dtype) if is_written else here


def widen_(module: torch.nn.Module) -> None:
    """Cast every floating parameter and buffer to fp32 in place."""
    for tensor in name_parameters(module).values():
        if tensor.is_floating_point():
            tensor.data = cast_tensor(tensor.data, torch.float32)


def map_copy(tensor: torch.Tensor, folder: Path, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a copy of a tensor that is mapped from a temporary file.

    The file is deleted at once, so that its space is freed when it is no longer mapped, even after a kill.
    Windows cannot delete a mapped file. There, a later call in any process deletes it once it is free.

    Args:
        dtype: dtype of the copy; None for that of the tensor.
    """
    dtype = tensor.dtype if dtype is None else dtype
    size = tensor.numel() * dtype.itemsize
    remove_left(folder)
    handle, path = tempfile.mkstemp(prefix=_PREFIX, suffix=".bin", dir=folder)
    try:
        _reserve(Path(path), size)
        made = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    finally:
        os.close(handle)  # until it is mapped nobody else can remove it there
        _remove(path)
    return made.view(dtype).view(tensor.shape).copy_(tensor.detach())


_PREFIX = "stopdown-weights-"
_KEEPS_MAPPED = os.name != "posix"
"""Whether the system refuses to remove a file while it is mapped."""

_left: set[str] = set()
"""Files of this process that could not be removed."""


def _remove(path: str) -> None:
    """Remove a file, or add it to `_left` if it cannot be removed yet."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        _left.discard(path)
    except OSError:
        _left.add(path)
    else:
        _left.discard(path)


def remove_left(folder: Path | None = None) -> None:
    """Remove temporary files that could not be removed before; those that are still mapped are kept.

    Args:
        folder: on Windows, a folder from which files of other processes are removed as well.
    """
    found = {str(x) for x in folder.glob(f"{_PREFIX}*.bin")} if folder and _KEEPS_MAPPED else set()
    for path in _left | found:
        _remove(path)


atexit.register(remove_left)


_ZEROS = 2**24
"""Bytes of zeros that are written at a time on systems that cannot reserve disk space."""


def _reserve(path: Path, size_bytes: int) -> None:
    """Reserve disk space for a file; otherwise writes to its mapping on a full disk would kill the process.

    Raises:
        OutputError: the disk has too little space.
    """
    try:
        with path.open("wb") as file:
            if hasattr(os, "posix_fallocate"):
                if size_bytes:
                    os.posix_fallocate(file.fileno(), 0, size_bytes)
                return
            for begin in range(0, size_bytes, _ZEROS):  # macOS and Windows
                file.write(bytes(min(_ZEROS, size_bytes - begin)))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OutputError(
            f"Weights kept on disk need {size_bytes} bytes in {path.parent}: {error.strerror}.",
            expected="On the CPU, weights that don't fit into `memory` are written to the folder "
            "for temporary files. So are weights that are large compared with the machine's "
            "memory.",
            remedy="Free some space there, set TMPDIR to another disk, or give a larger `memory`.",
            by_system=True,
        ) from error


def bring_home(load: Load) -> Load:
    """Return a loader that moves each weight to the host, where bounds are computed."""
    return lambda name: load(name).cpu()
