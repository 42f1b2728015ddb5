"""Keep the outputs of a run's component calls on disk, so that a killed run can continue where it stopped.

The outermost layer at each component call writes the call's output to a file: atomically, with the SHA-256
of its bytes at the end of its name. When the same run is started again, the pipeline starts from the
beginning, and the output of each call in the journal is read instead of computed, if its arguments have the
same bytes. The scheduler's state needn't be stored, because its steps run again. Random generators are set
to their states after the call. A repaired call is run again, so that its repair applies to later calls.

Not covered: components that change their arguments in place, or that use NumPy's or Python's random
generators inside a call. Components that cache earlier calls (step caches) are refused.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import msgspec
import torch

from stopdown.component_call_names import name_module_path
from stopdown.component_calls.components import find_callees, find_components, read_precisions
from stopdown.devices.device_choice import choose_device
from stopdown.devices.environment import describe_machine
from stopdown.errors import InputError, OutputError
from stopdown.files.json_files import UnreadableError, read_json_table, read_small_file
from stopdown.files.outputs import LOCK, held_folder
from stopdown.interception.patches import Patches
from stopdown.interception.randomness import RandomSource, find_random
from stopdown.module_calls.call_interception import find_module
from stopdown.module_calls.callee import Callee
from stopdown.module_calls.step_caches import iterate_hooks
from stopdown.number_formats import name_dtype
from stopdown.plans.weight_fingerprints import sample_weights
from stopdown.records import JournalUse
from stopdown.runtime.journal_values import PackingError, digest_call, pack, unpack
from stopdown.scaling import ComponentCall, Rank, intercept

LIMIT_BYTES = 4 * 2**30
"""Size at which a journal ends; 50 guided steps of CogVideoX-5B take an eighth of it."""

_SCHEMA = 2
_HEAD = "journal.json"
_MOST_HEAD_BYTES = 2**20
_PARTS = ".*.part"
_ENTRY = re.compile(r"(\d{6})-[\w.]+\.([0-9a-f]{64})\.\w+")  # whatever suffix another version wrote


@dataclass(frozen=True)
class _Entry:
    """One stored call.

    Attributes:
        call: SHA-256 of its run, its component and its arguments.
        output: what it returned.
        random: states after it of the random generators that it drew from, by index.
        repaired: whether the guard repaired it.
    """

    call: str
    output: Any
    random: dict[int, torch.Tensor]
    repaired: bool


class Journal:
    """A folder with the outputs of one run's calls; also a context manager, which releases the folder.

    Args:
        folder: created if missing, and locked for this process.
        run: identifies the run beyond its pipeline: prompt, seed, checkpoint; JSON values.
        limit_bytes: size at which no more calls are written.
        announce: receives messages for the user.

    Attributes:
        own_s: seconds that the journal took, without the calls.

    Raises:
        InputError: the folder contains something else or another run, or is in use.
    """

    _depth = 0

    def __init__(
        self,
        folder: str | Path,
        run: dict[str, Any] | None = None,
        *,
        limit_bytes: int = LIMIT_BYTES,
        announce: Callable[[str], None] | None = None,
    ) -> None:
        self.folder, self.own_s = Path(folder).absolute(), 0.0
        self._run, self._limit = _to_plain(run or {}), limit_bytes
        self._announce = announce or (lambda text: None)
        self._use = JournalUse(str(self.folder), answered=0, written=0, bytes=0)
        self._number = 0
        self._stopped = False
        _refuse_foreign(self.folder)
        self._held = ExitStack()
        _hold(self.folder, self._held)
        try:
            for path in self.folder.glob(_PARTS):  # what a kill left half written
                path.unlink()
            self._head = self._read_head()
            self._refuse_differences(self._run)
        except BaseException:
            self._held.close()
            raise

    def put_on(self, pipe: Any, patches: Patches, count_repairs: Callable[[], int]) -> None:
        """Intercept a pipeline's component calls: read their outputs from the journal, or make the
        calls and write them.

        Args:
            patches: undoing them ends the interception.
            count_repairs: returns the number of repairs so far.

        Raises:
            InputError: the journal belongs to another run, or a component remembers earlier calls.
        """
        _refuse_memories(pipe)
        head = {**self._run, **_describe_pipeline(pipe)}
        self._refuse_differences(head)
        if self._head is None:
            self._begin(head)
        elif count := len(self._list_entries()):
            self._announce(f"The journal {self.folder} has {count} calls; the run continues there.")
        self._head, self._count_repairs = head, count_repairs
        for callee in find_callees(pipe):
            intercept(callee, self._enter, patches, Rank.JOURNAL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unlock the journal's folder for other processes. A second call does nothing."""
        self._held.close()

    def clear(self) -> None:
        """Remove the journal's files after the end of the run."""
        for path in [*self._list_entries(), self.folder / _HEAD]:
            path.unlink(missing_ok=True)

    @property
    def use(self) -> JournalUse:
        """Statistics on the journal's use in this run so far."""
        size = sum(path.stat().st_size for path in self._list_entries())
        return replace(self._use, bytes=size)

    def _begin(self, head: dict[str, Any]) -> None:
        """Start the journal: delete its calls, and write the head that identifies the run."""
        self._drop_from(0)
        sealed = {"journal": _SCHEMA, "sha256": _digest_head(head), "run": head}
        content = msgspec.json.format(msgspec.json.encode(sealed), indent=1)
        try:
            _write_whole(self.folder / _HEAD, content)
        except OSError as error:
            raise _explain_refusal(self.folder, error) from error

    def _enter(self, call: ComponentCall) -> Any:
        """Read or make a component call; one made inside another component's call isn't stored."""
        if self._depth:
            return call.proceed()
        self._depth += 1
        try:
            return self._answer(call)
        finally:
            self._depth -= 1

    def _answer(self, call: ComponentCall) -> Any:
        """Return a call's output from the journal, or else make the call and write its output there."""
        begun = time.perf_counter()
        number, self._number = self._number, self._number + 1
        if self._stopped and not self._find_entry(number):
            return call.proceed()
        whose = f"{_digest_head(self._head or {})} {call.callee.name}"
        digest, sources = digest_call(whose, call.args, call.kwargs), _find_sources(call)
        found = self._read(number, digest, len(sources))
        before = [source.read() for source in sources]
        self.own_s += time.perf_counter() - begun
        if found is not None:
            return self._give(found, call, sources)
        repairs = self._count_repairs()
        output = call.proceed()
        begun = time.perf_counter()
        if not self._stopped:
            now = enumerate([source.read() for source in sources])
            drawn = {i: state for i, state in now if not torch.equal(state, before[i])}
            entry = _Entry(digest, output, drawn, repaired=self._count_repairs() > repairs)
            self._write(number, call.callee.name, entry)
        self.own_s += time.perf_counter() - begun
        return output

    def _give(self, entry: _Entry, call: ComponentCall, sources: list[RandomSource]) -> Any:
        """Return a stored call's output, and set random generators to their states after it.

        A call that was repaired is run again, so that its repair applies to later calls.
        """
        counts = Counter(self._use.components)
        counts[call.callee.name] += 1
        answered = self._use.answered + 1
        self._use = replace(self._use, answered=answered, components=dict(counts))
        if entry.repaired:
            call.proceed()
        for index, state in entry.random.items():
            sources[index].put(state)
        return entry.output

    def _write(self, number: int, component: str, entry: _Entry) -> None:
        try:
            content = pack(vars(entry))
            if self.use.bytes + len(content) > self._limit:
                self._stop(f"it would grow beyond {self._limit / 2**30:.3g} GiB")
                return
            name = f"{number:06}-{component}.{_digest_bytes(content)}.pt"
            _write_whole(self.folder / name, content)
            self._use = replace(self._use, written=self._use.written + 1)
        except PackingError as error:
            self._stop(f"the output of `{component}` cannot be kept: {error}")
        except OSError as error:
            self._stop(f"the folder cannot be written: {error.strerror}")

    def _stop(self, why: str) -> None:
        """Stop writing; the calls written so far remain valid, and a killed run continues after them."""
        self._stopped = True
        self._note(f"The journal {self.folder} ends at call {self._number - 1}: {why}.")

    def _note(self, text: str) -> None:
        self._use = replace(self._use, notes=(*self._use.notes, text))
        self._announce(text)

    def _read(self, number: int, digest: str, sources: int) -> _Entry | None:
        """Read a call from the journal; return None if it has no such call, or an invalid one.

        Args:
            number: of the call, in the order of the run.
            digest: of the run, the component and the arguments.
            sources: number of random generators that the call may draw from.
        """
        path = self._find_entry(number)
        if path is None:
            if any(_read_number(other) > number for other in self._list_entries()):
                self._rebuild(number, "is missing")
            return None
        try:
            entry = _load_entry(path)
            if entry.call != digest:
                raise PackingError("it was made with other arguments")
            if not all(0 <= index < sources for index in entry.random):
                raise PackingError("it names random numbers that no call draws from")
            return entry
        except PackingError as error:
            self._rebuild(number, f"is of no use: {error}")
            return None

    def _rebuild(self, number: int, why: str) -> None:
        self._drop_from(number)
        self._note(
            f"Call {number} of the journal {self.folder} {why}. The calls from there on are "
            "made again."
        )

    def _drop_from(self, number: int) -> None:
        for path in self._list_entries():
            if _read_number(path) >= number:
                path.unlink(missing_ok=True)

    def _find_entry(self, number: int) -> Path | None:
        return next((x for x in self._list_entries() if _read_number(x) == number), None)

    def _list_entries(self) -> list[Path]:
        return sorted(path for path in self.folder.iterdir() if _ENTRY.fullmatch(path.name))

    def _read_head(self) -> dict[str, Any] | None:
        """Read the description of the run that the journal belongs to; return None if absent or damaged."""
        path = self.folder / _HEAD
        why = "is damaged"
        try:
            sealed = read_json_table(path, most_bytes=_MOST_HEAD_BYTES)
            head = sealed.get("run")
            if sealed.get("journal") != _SCHEMA:
                why = "was written by another version of Stopdown, or is damaged"
            elif isinstance(head, dict) and sealed.get("sha256") == _digest_head(head):
                return head
        except UnreadableError:
            if not path.exists() and not self._list_entries():
                return None
        self._note(f"The head of the journal {self.folder} {why}. The journal is started again.")
        return None

    def _refuse_differences(self, wanted: dict[str, Any]) -> None:
        head = self._head or {}
        differences = [
            f"{name} was {head.get(name)!r} and is {wanted.get(name)!r}"
            for name in wanted
            if self._head is not None and head.get(name) != wanted.get(name)
        ]
        if differences:
            raise InputError(
                f"The journal {self.folder} belongs to another run: {'; '.join(differences)}.",
                expected="Its calls answer those of the same run and of no other.",
                remedy="Name another folder for the journal, or remove this one.",
            )


def _load_entry(path: Path) -> _Entry:
    """Load a stored call from its file, and check the file's bytes against the SHA-256 in its name.

    Raises:
        PackingError: the file is damaged.
    """
    matched = _ENTRY.fullmatch(path.name)
    try:
        content = read_small_file(path, most_bytes=LIMIT_BYTES)
        if matched is None or _digest_bytes(content) != matched[2]:
            raise PackingError("its bytes are not those that were written")
        return msgspec.convert(unpack(content), _Entry)
    except UnreadableError as error:
        raise PackingError(str(error)) from error
    except msgspec.ValidationError as error:
        raise PackingError(f"it is no entry of a journal ({error})") from error


def _digest_head(head: dict[str, Any]) -> str:
    return _digest_bytes(msgspec.json.encode(head))


def _digest_bytes(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _read_number(path: Path) -> int:
    return int(path.name[:6])


def _write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically, so that it survives even a power failure whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _refuse_foreign(folder: Path) -> None:
    """Refuse a folder that contains anything but a journal's files, so that nobody's files are
    overwritten.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        is_own = path.name in (_HEAD, LOCK) or path.match(_PARTS) or _ENTRY.fullmatch(path.name)
        if not is_own or not path.is_file():
            raise InputError(
                f"The folder {folder} is not a journal: it contains {path.name}.",
                expected="A journal needs its own folder.",
                remedy="Name a folder that is empty or new.",
            )


def _hold(folder: Path, stack: ExitStack) -> None:
    """Create a folder and lock it for this process until the stack is closed."""
    busy = InputError(
        f"The journal {folder} is in use by another run.",
        remedy="Wait until it ends, or name another folder for the journal.",
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(held_folder(folder, busy))
    except OSError as error:
        raise _explain_refusal(folder, error) from error


def _explain_refusal(folder: Path, error: OSError) -> OutputError:
    return OutputError(
        f"The journal {folder} cannot be written: {error.strerror}.",
        remedy="Name another folder for the journal.",
    )


def _describe_pipeline(pipe: Any) -> dict[str, Any]:
    """Describe all that determines the bits of a run, to recognise the same run: classes, weights,
    settings, machine.
    """
    machine = describe_machine()
    device = _find_device(next(iter(find_callees(pipe))))
    scheduler = getattr(pipe, "scheduler", None)
    found = {
        "pipeline": type(pipe).__name__,
        "scheduler": type(scheduler).__name__,
        "scheduler's settings": _read_settings(scheduler),
        "device": str(choose_device(str(device))),
        "threads": machine["torch_threads"],
        "versions": machine["versions"],
    }
    for name, module in find_components(pipe).items():
        found[f"{name}'s class"] = type(module).__name__
        found[f"{name}'s precision"] = [name_dtype(dtype) for dtype in read_precisions(module)]
        found[f"{name}'s weights"] = sample_weights(module)
        tiling = ("use_tiling", "use_slicing", "use_framewise", "tile_")
        found[f"{name}'s tiling"] = {k: x for k, x in vars(module).items() if k.startswith(tiling)}
    return _to_plain(found)


def _read_settings(scheduler: Any) -> str:
    """Return a scheduler's config as text, to be compared; private entries, whose order varies, are
    left out.
    """
    config = dict(getattr(scheduler, "config", {}))
    return repr(sorted((name, x) for name, x in config.items() if not name.startswith("_")))


def _refuse_memories(pipe: Any) -> None:
    """Refuse components with step caches, which would miss the calls that are read instead of made."""
    for name, module in find_components(pipe).items():
        for path, hook in iterate_hooks(module):
            if getattr(hook, "_is_stateful", False):
                place = name_module_path(name, path)
                raise InputError(
                    f"`{place}` has a {type(hook).__name__}, which remembers earlier calls.",
                    expected="Each call that a journal answers is a function of its arguments.",
                    remedy="Run without a journal, or take the cache off: disable_cache().",
                )


def _find_sources(call: ComponentCall) -> list[RandomSource]:
    """List the random generators that a call may draw from."""
    return find_random(_find_device(call.callee), (*call.args, *call.kwargs.values()))


def _find_device(callee: Callee) -> torch.device:
    weight = next(find_module(callee).parameters(), None)
    return torch.device("cpu") if weight is None else weight.device


def _to_plain(value: Any) -> Any:
    """Convert a value to plain data, as it would be after writing and reading JSON."""
    return msgspec.json.decode(msgspec.json.encode(value, enc_hook=str))
