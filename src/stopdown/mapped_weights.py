"""Weights that lie in temporary files and are mapped: the system can take their memory back.

A mapped tensor reads and writes like any other. Its pages come from the file when they are touched, and
go back there when memory is needed for something else, so a model may be larger than memory. What is
cast from a mapped tensor is mapped as well.

**Does not catch** what copies a tensor by other means (`copy.deepcopy`, `.to`): the copy is in memory.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import torch

from stopdown.errors import OutputError, warn_user

SHARE = 0.25
"""Of the machine's memory: weights that take more are mapped."""


def choose_folder(needed_bytes: int, memory_bytes: int) -> Path | None:
    """Where weights of this size are mapped; None where they are small, or the disk has no room.

    Warns:
        StopdownWarning: they are large, and the disk has no room for them.
    """
    if needed_bytes <= SHARE * memory_bytes or os.name != "posix":
        return None
    folder = Path(tempfile.gettempdir())
    room, free = 1.5 * needed_bytes, shutil.disk_usage(folder).free
    if free > room:
        return folder
    warn_user(
        f"{folder} has {free / 1e9:.1f} GB free, and the weights need {room / 1e9:.1f} GB there. They "
        f"are loaded into memory instead, where they take {needed_bytes / 1e9:.1f} GB. Set TMPDIR to "
        "a folder on a larger disk."
    )
    return None


def is_mapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values lie in a file."""
    return find_folder(tensor) is not None


def find_folder(tensor: torch.Tensor) -> Path | None:
    """Folder of the file that a tensor's values lie in; None for memory."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "cpu":
        return None
    name = tensor.untyped_storage().filename
    return None if name is None else Path(name).parent


def cast_tensor(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in another dtype, mapped if it is; itself where it has that dtype."""
    folder = find_folder(tensor)
    if folder is None or tensor.dtype == dtype:
        return tensor.to(dtype)
    return map_copy(tensor, folder, dtype)


def map_copy(tensor: torch.Tensor, folder: Path, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A mapped copy of a tensor.

    The file is gone when nobody maps it any more, also after a kill; other systems than POSIX keep it as
    long as the folder.

    Raises:
        OutputError: the disk is full.
    """
    dtype = tensor.dtype if dtype is None else dtype
    size = tensor.numel() * dtype.itemsize
    handle, path = tempfile.mkstemp(suffix=".bin", dir=folder)
    os.close(handle)
    try:
        _reserve(Path(path), size)
        made = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    finally:
        if os.name == "posix":
            Path(path).unlink()
    return made.view(dtype).view(tensor.shape).copy_(tensor.detach())


def _reserve(path: Path, size_bytes: int) -> None:
    """Take the room on the disk now: values written into a mapping of a full one end the process."""
    try:
        with path.open("wb") as file:
            if size_bytes and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size_bytes)
    except OSError as error:
        raise OutputError(
            f"Weights kept on disk need {size_bytes} bytes in {path.parent}: {error.strerror}.",
            expected="On the CPU, weights that do not fit into `memory` are written to the folder "
            "for temporary files. So are weights that are large compared with the machine's "
            "memory.",
            remedy="Free some space there, set TMPDIR to another disk, or give a larger `memory`.",
            by_system=True,
        ) from error
