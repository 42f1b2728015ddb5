"""Facts about the process and the machine: environment variables, caches, packages, CPU and memory.

No other module reads environment variables.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stopdown.errors import OptionError
from stopdown.files.json_files import parse_json

_NUMERIC_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_VISIBLE_DEVICES",
    "HSA_OVERRIDE_GFX_VERSION",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "PYTORCH_ENABLE_MPS_FALLBACK",
    "PYTORCH_MPS_HIGH_WATERMARK_RATIO",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)


def read_numeric_variables() -> dict[str, str]:
    """Return the environment variables of PyTorch and its libraries that affect numbers, speed or devices.

    Only variables that are set are included. They are recorded with runs.
    """
    return {name: os.environ[name] for name in _NUMERIC_VARIABLES if name in os.environ}


def copy_variables() -> dict[str, str]:
    """Return a copy of the environment of this process, for a child process."""
    return dict(os.environ)


def put_variables(variables: Mapping[str, str]) -> None:
    """Set environment variables of this process, such as those copied from its parent."""
    os.environ.update(variables)


def count_launched() -> int:
    """Count the processes that `torchrun` started, this one included; 1 without `torchrun`."""
    count = os.environ.get("WORLD_SIZE", "")
    return int(count) if count.isdecimal() and "RANK" in os.environ else 1


def count_processes() -> int:
    """Count the processes of PyTorch's process group; 1 without a group."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return int(distributed.get_world_size())


def cache_folder() -> Path:
    """Return the folder of Stopdown's cache, which need not exist yet.

    It is `STOPDOWN_CACHE` if that is set, else `stopdown` in the system's cache folder.

    Raises:
        OptionError: STOPDOWN_CACHE is a file.
    """
    given = os.environ.get("STOPDOWN_CACHE")
    if not given:
        return _system_cache() / "stopdown"
    folder = Path(given).expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise OptionError(
            f"The environment variable STOPDOWN_CACHE is {given}, which is a file.",
            expected="It names the folder in which Stopdown keeps its files.",
            remedy="Set it to a folder, or remove it: unset STOPDOWN_CACHE",
        )
    return folder


def _system_cache() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    variable = "LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME"
    given = os.environ.get(variable)
    return Path(given) if given else Path.home() / ".cache"


_PACKAGES = ("stopdown", "torch", "diffusers", "transformers", "accelerate")


def describe_machine() -> dict[str, Any]:
    """Return facts about this machine as JSON types, without importing the packages concerned.

    Returns:
        `versions` (by package; None if not installed), `python`, `platform`, `cpu` (model), `cores`
        (physical), `threads` (logical ones that this process may use), `torch_threads` (None before
        torch is imported), `memory_bytes`.
    """
    import psutil

    torch = sys.modules.get("torch")
    return {
        "versions": {name: read_version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": read_cpu_model(),
        "cores": psutil.cpu_count(logical=False),
        "threads": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        "torch_threads": torch.get_num_threads() if torch else None,
        "memory_bytes": read_memory_bytes(),
    }


def has_moving_cursor() -> bool:
    """Return whether lines in the terminal can be overwritten, which a notebook's cell does not support."""
    return "JPY_PARENT_PID" not in os.environ


def read_version(package: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def mark_code(package: str) -> str:
    """Return a mark of a package's code if its version doesn't tell it, a commit or a hash; "" if it does.

    A package that was installed from a repository or folder keeps its version while its code changes. For
    an editable one it's the time of the latest change.

    Cost: for an editable package, the times of its files are read, once.
    """
    try:
        found = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
    if not (text := found.read_text("direct_url.json")):
        return ""
    origin = parse_json(text.encode())
    if commit := origin.get("vcs_info", {}).get("commit_id"):
        return str(commit)[:12]
    if not origin.get("dir_info", {}).get("editable"):
        return hashlib.sha256((found.read_text("RECORD") or "").encode()).hexdigest()[:12]
    spec = importlib.util.find_spec(package)
    folder = Path(spec.origin if spec is not None and spec.origin else package).parent
    return str(max((x.stat().st_mtime_ns for x in folder.rglob("*.py")), default=0))


def require_package(package: str, extra: str, what: str, *, otherwise: str = "") -> None:
    """Raise `OptionError` if a package is not installed.

    Args:
        extra: the extra of Stopdown that installs it.
        what: the feature that needs it, such as `A LoRA`.
        otherwise: end of the remedy, such as ` or leave it out`.
    """
    if importlib.util.find_spec(package) is None:
        raise OptionError(
            f"{what} needs the package {package}, which isn't installed.",
            remedy="Install it, in the folder of Stopdown's repository: "
            f"pip install '.[{extra}]'{otherwise}",
        )


@functools.cache
def read_cpu_model() -> str:
    """Return the name of the CPU's model, as the system reports it."""
    if sys.platform == "darwin":
        return read_sysctl("machdep.cpu.brand_string") or platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", read_system_file("/proc/cpuinfo"), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def read_memory_bytes() -> int:
    """Return the memory of the machine in bytes, or the limit of this process's control groups if lower."""
    import psutil

    total = int(psutil.virtual_memory().total)
    return min([total, *(limit for _, limit in list_memory_limits())])


def list_memory_limits(root: Path = Path("/sys/fs/cgroup")) -> list[tuple[Path, int]]:
    """List the memory limits of this process in bytes, each with the folder of its control group.

    A container sees its group at the root. A cluster's job and a service are in a group below it, whose
    parents may have limits, too.
    """
    folders = [root, root / "memory"]  # of version 2 and 1
    for line in read_system_file("/proc/self/cgroup").splitlines():
        _, kinds, path = line.split(":", 2)
        if not kinds or "memory" in kinds.split(","):
            top, own = root / ("memory" if kinds else ""), Path(path.lstrip("/"))
            folders += [top / x for x in (own, *own.parents)]
    found = []
    for folder in dict.fromkeys(folders):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = read_system_file(str(folder / name)).strip()
            found += (
                [(folder, int(limit))] if limit.isdigit() else []
            )  # else "max", or another version
    return found


def read_system_file(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def read_sysctl(name: str) -> str:
    command = ["/usr/sbin/sysctl", "-n", name]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
