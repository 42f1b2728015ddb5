"""An accelerator that is not there, for tests: compiled once from `device/simulated.cpp`, then steered.

`load_device` registers the device type `simulated` with PyTorch, two devices of it, out of sight until
`Simulated.present` shows them: other tests of the process find the machine as it is. What the device is
like follows a real one: `Simulated.act_as` takes the mixtures of dtypes that are refused from
`knowledge/rules/backend_dtypes.toml`, and what its maker says from a profile.

**Shows** tensors on the wrong device, mixtures of dtypes, missing formats, memory that is not given back,
and errors that come late. **Does not show** speed, kernels' rounding, streams that overtake each other.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import shutil
import subprocess
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from filelock import FileLock

SOURCE = Path(__file__).parent / "simulated.cpp"
KIND = "simulated"
UNLIMITED = 2**40
ops: Any = torch.ops.simulated


class Counts(NamedTuple):
    """What happened on the devices: operations, values that the host waited for, bytes brought there."""

    operations: int
    host_reads: int
    bytes_in: int


def compile_device(cache: Path) -> Path:
    """The compiled device, from a folder that keeps it for this source and this version of PyTorch.

    Cost: the first time about 12 s, most of it PyTorch's headers.
    """
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler is here, which the simulated device is made with")
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    made = cache / f"simulated-{key}.so"
    root = Path(torch.__file__).parent
    with FileLock(cache / "simulated.lock"):
        if not made.exists():
            part = made.with_suffix(".part")
            command = [
                compiler,
                "-std=c++20",
                "-O0",
                "-fPIC",
                "-shared",
                str(SOURCE),
                "-o",
                str(part),
            ]
            command += [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
            command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
            command += [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
            subprocess.run(command, check=True)
            part.replace(made)
    return made


@functools.cache
def load_device(cache: Path) -> Simulated:
    """The device in this process, out of sight."""
    torch.ops.load_library(str(compile_device(cache)))
    torch.utils.rename_privateuse1_backend(KIND)
    torch._register_device_module(KIND, _make_module())  # type: ignore[no-untyped-call]
    return Simulated()


class Simulated:
    """Two devices of the type `simulated`, and what they are like."""

    name, second = f"{KIND}:0", f"{KIND}:1"

    @contextlib.contextmanager
    def present(self) -> Iterator[Simulated]:
        """The devices can be found; they are as they were made when the block ends.

        A probe finds both 16-bit formats twice as fast as fp32, wherever the tests run.
        """
        from stopdown.devices import device_choice, format_support

        timed = format_support._time_formats

        def time_formats(device: device_choice.Device) -> dict[str, format_support.Timing]:
            if device.type != KIND:
                return timed(device)
            seconds = {"fp32": 1.0, "bf16": 0.5, "fp16": 0.5}
            return {name: format_support.Timing(value, value) for name, value in seconds.items()}

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device_choice, "KINDS", (*device_choice.KINDS, KIND))
            patch.setattr(format_support, "_time_formats", time_formats)
            format_support._probe_once.cache_clear()
            gc.collect()  # what other tests left on the device
            ops.set_present(True)
            try:
                yield self
            finally:
                self.limit(UNLIMITED)
                self.act_as()
                self.fail_after(0)
                ops.set_present(False)
                format_support._probe_once.cache_clear()

    def act_as(
        self,
        backend: str = "",
        *,
        lacks: Iterable[torch.dtype] = (),
        computes_not: Iterable[torch.dtype] = (),
        fp16_sums: bool = False,
        fused: bool = True,
    ) -> None:
        """Refuse what a backend refuses.

        Args:
            backend: whose mixtures of dtypes are refused: `cuda` or `mps`, which says by a plain
                RuntimeError that its memory is full; "" for those of the CPU.
            lacks: formats that no tensor may have: fp64 on mps.
            computes_not: formats that no operation takes: bf16 where it is not emulated.
            fp16_sums: products in fp16 are summed in fp16, as with `allow_fp16_accumulation`.
            fused: attention has a kernel that keeps no scores.
        """
        named = list_same_dtype(backend) if backend else []
        ops.set_rules(named, fp16_sums, fused, backend == "mps")
        for dtype in lacks:
            ops.lack(dtype)
        for dtype in computes_not:
            ops.not_compute(dtype)

    def limit(self, size_bytes: int, index: int = 0) -> None:
        """How much memory a device has."""
        ops.set_limit(index, size_bytes)

    def fail_after(self, operations: int) -> None:
        """Make the device go wrong that many operations from now; 0 makes it whole again."""
        ops.fail_after(operations)

    @property
    def counts(self) -> Counts:
        """What happened since the process began."""
        return Counts(*ops.read_counts())

    def used(self, index: int = 0) -> int:
        """Bytes that are allocated."""
        return int(ops.read_memory(index)[0])


def list_same_dtype(backend: str) -> list[str]:
    """Operations that take operands of one dtype only on a backend, by the names that they are run by."""
    from stopdown.devices.backend_rules import read_backend_rules

    rows = ((op.targets, op.rows.get(backend)) for op in read_backend_rules())
    named = [
        t for targets, row in rows if row is not None and row.accepts == "same" for t in targets
    ]
    names = [target.removeprefix("aten.") for target in named]
    return [f"aten::{prefix}{name}" for name in names for prefix in ("", "native_")]


def _make_module() -> types.ModuleType:
    """`torch.simulated`, with what `torch.cuda` and `torch.xpu` have."""

    def index(device: Any = None) -> int:
        found = torch.device(device) if isinstance(device, str) else device
        given = found.index if isinstance(found, torch.device) else found
        return torch.accelerator.current_device_index() if given is None else int(given)

    def manual_seed_all(seed: int) -> None:
        for at in range(2):
            ops.seed(at, seed)

    made = types.ModuleType(f"torch.{KIND}")
    vars(made).update(
        is_available=lambda: bool(ops.is_present()),
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        device_count=lambda: 2 if ops.is_present() else 0,
        current_device=torch.accelerator.current_device_index,
        device=lambda device: torch.accelerator.device_index(index(device)),
        set_device=lambda device: torch.accelerator.set_device_index(index(device)),
        synchronize=lambda device=None: ops.wait(),
        empty_cache=lambda: None,
        memory_allocated=lambda device=None: ops.read_memory(index(device))[0],
        max_memory_allocated=lambda device=None: ops.read_memory(index(device))[1],
        reset_peak_memory_stats=lambda device=None: ops.reset_peak(index(device)),
        get_device_properties=lambda device=None: types.SimpleNamespace(
            name="Simulated accelerator", total_memory=ops.read_memory(index(device))[2]
        ),
        get_rng_state=lambda device=None: ops.read_rng(index(device)),
        set_rng_state=lambda state, device=None: ops.put_rng(index(device), state),
        manual_seed=lambda seed: ops.seed(index(), seed),
        manual_seed_all=manual_seed_all,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    )
    return made
