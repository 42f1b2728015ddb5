"""Keep the outputs of a run's component calls on disk, so that a killed run can continue where it stopped.

The outermost layer at each component call writes the call's output to a file. When the same run is started
again, the pipeline starts from the beginning, and the output of each call in the journal is read instead of
computed, if its arguments have the same bytes. The scheduler's state needn't be stored, because its steps
run again. Random generators are set to their states after the call. A repaired call is run again, so that
its repair applies to later calls.

A file ends with the SHA-256 of its content and purpose: the run, the call's number and its arguments. From
the first call whose file is damaged, missing or has another purpose, calls are made again.

Not covered: components that change their arguments in place, or that use NumPy's or Python's random
generators inside a call. Components that cache earlier calls (step caches) are refused.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import torch

from stopdown.component_call_names import name_module_path
from stopdown.component_calls import components
from stopdown.devices.device_choice import choose_device
from stopdown.devices.environment import describe_machine
from stopdown.errors import InputError, OutputError
from stopdown.files.json_files import UnreadableError, read_small_file
from stopdown.files.outputs import LOCK, held_folder, written_beside
from stopdown.interception.patches import Patches
from stopdown.interception.randomness import find_random, find_weights_device
from stopdown.module_calls.call_interception import find_module
from stopdown.module_calls.step_caches import iterate_caches
from stopdown.number_formats import name_dtype
from stopdown.plans.weight_fingerprints import sample_weights
from stopdown.records import JournalUse
from stopdown.runtime.journal_values import PackingError, digest_call, pack, unpack
from stopdown.scaling import ComponentCall, Rank, intercept

LIMIT_BYTES = 4 * 2**30
"""Size at which a journal ends; 50 guided steps of CogVideoX-5B take an eighth of it."""

_HEAD = "run.journal"
_FILES = re.compile(rf"run\.journal|\d{{6}}\.pt|\.stopdown-.*\.part|{re.escape(LOCK)}")
_VERSION = "version 3"

_Answer = tuple[Any, dict[int, torch.Tensor], bool]
"""A call's output, the states after it of random generators by index, and whether it was repaired."""


class Journal(ExitStack):
    """A folder with the outputs of one run's calls; also a context manager, which unlocks the folder.

    Args:
        folder: created if missing, and locked for this process.
        run: identifies the run beyond its pipeline: prompt, seed, checkpoint; JSON values.
        limit_bytes: size at which no more calls are written.
        announce: receives messages for the user.

    Attributes:
        own_s: seconds that the journal took, without the calls.

    Raises:
        InputError: the folder contains something else or another run, or is in use.
        OutputError: the folder can't be made or locked.
    """

    def __init__(
        self,
        folder: str | Path,
        run: dict[str, Any] | None = None,
        *,
        limit_bytes: int = LIMIT_BYTES,
        announce: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__()
        self.folder, self.own_s = Path(folder).absolute(), 0.0
        self._run, self._limit = msgspec.to_builtins(run or {}, enc_hook=str), limit_bytes
        self._announce = announce or (lambda text: None)
        self._answered: Counter[str] = Counter()
        self._written, self._notes = 0, list[str]()
        self._is_inside = self._has_ended = False
        with ExitStack() as held:
            _hold(self.folder, held)
            self._head = self._read_head()
            self._refuse_differences(self._run)
            self.push(held.pop_all())

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
        head = {**self._run, **describe_program(pipe)}
        self._refuse_differences(head)
        if self._head is None:
            self.clear()
            with written_beside(self.folder / _HEAD, option="for the journal") as part:
                part.write_bytes(pack(head, _VERSION))
        elif count := len(self._list_calls()):
            self._announce(f"The journal {self.folder} has {count} calls; the run continues there.")
        self._head, self._count_repairs = head, count_repairs
        for callee in components.find_callees(pipe):
            intercept(callee, self._enter, patches, Rank.JOURNAL)

    def clear(self) -> None:
        """Remove the journal's files after the end of the run."""
        for path in (*self._list_calls(), self.folder / _HEAD):
            path.unlink(missing_ok=True)

    @property
    def use(self) -> JournalUse:
        """Statistics on the journal's use in this run so far."""
        return JournalUse(
            str(self.folder),
            answered=self._answered.total(),
            written=self._written,
            bytes=sum(path.stat().st_size for path in self._list_calls()),
            notes=tuple(self._notes),
            components=dict(self._answered),
        )

    def _enter(self, call: ComponentCall) -> Any:
        """Read or make a component call; one made inside another component's call isn't stored."""
        if self._is_inside or self._has_ended:
            return call.proceed()
        self._is_inside = True
        try:
            return self._answer(call)
        finally:
            self._is_inside = False

    def _answer(self, call: ComponentCall) -> Any:
        """Return a call's output from the journal, or else make the call and write its output there."""
        begun, component = time.perf_counter(), call.callee.name
        path = self.folder / f"{self._answered.total() + self._written:06}.pt"
        purpose = digest_call(f"{self._head} {path.stem} {component}", call.args, call.kwargs)
        device = find_weights_device(find_module(call.callee))
        sources = find_random(device, (*call.args, *call.kwargs.values()))
        found = self._read(path, purpose, len(sources))
        before, repairs = [source.read() for source in sources], self._count_repairs()
        self.own_s += time.perf_counter() - begun
        made = call.proceed() if found is None or found[2] else None
        begun = time.perf_counter()
        if found is not None:
            made, states, _ = found
            for index, state in states.items():
                sources[index].put(state)
            self._answered[component] += 1
        else:
            now = enumerate(source.read() for source in sources)
            states = {i: state for i, state in now if not torch.equal(state, before[i])}
            answer = made, states, self._count_repairs() > repairs
            self._write(path, purpose, answer, component)
        self.own_s += time.perf_counter() - begun
        return made

    def _read(self, path: Path, purpose: str, sources: int) -> _Answer | None:
        """Read a call from the journal; return None if there is no such call, or an invalid one.

        Args:
            purpose: digest of the run, the call's number and its arguments.
            sources: number of random generators that the call may draw from.
        """
        left = [other for other in self._list_calls() if other >= path]
        if not left:
            return None
        try:
            content = read_small_file(path, most_bytes=LIMIT_BYTES)
            answer: _Answer = unpack(content, _Answer, purpose)
            if all(0 <= index < sources for index in answer[1]):
                return answer
            why = "it names random numbers that no call draws from"
        except (UnreadableError, PackingError) as error:
            why = str(error)
        for other in left:
            other.unlink()
        self._note(
            f"Call {int(path.stem)} of the journal {self.folder} is of no use: {why}. The calls from "
            "there on are made again."
        )
        return None

    def _write(self, path: Path, purpose: str, answer: _Answer, component: str) -> None:
        """Write a call; the first one that can't be written ends the journal, which remains valid."""
        try:
            content = pack(answer, purpose)
            if self.use.bytes + len(content) <= self._limit:
                with written_beside(path, option="for the journal") as part:
                    part.write_bytes(content)
                self._written += 1
                return
            why = f"it would grow beyond {self._limit / 2**30:.3g} GiB"
        except PackingError as error:
            why = f"the output of `{component}` can't be kept: {error}"
        except OutputError as error:
            why = f"it can't be written. {error.what}".rstrip(".")
        self._has_ended = True
        self._note(f"The journal {self.folder} ends at call {int(path.stem)}: {why}.")

    def _note(self, text: str) -> None:
        self._notes.append(text)
        self._announce(text)

    def _list_calls(self) -> list[Path]:
        return sorted(self.folder.glob("*.pt"))

    def _read_head(self) -> dict[str, Any] | None:
        """Read the description of the run that the journal belongs to; return None if absent or damaged."""
        path = self.folder / _HEAD
        try:
            return unpack(read_small_file(path, most_bytes=2**20), dict[str, Any], _VERSION)
        except (UnreadableError, PackingError):
            if path.exists() or self._list_calls():
                self._note(
                    f"The head of the journal {self.folder} was written by another version of Stopdown, or "
                    "is damaged. The journal is started again."
                )
            return None

    def _refuse_differences(self, wanted: dict[str, Any]) -> None:
        head = self._head or wanted
        differences = [
            f"{name} was {head.get(name)!r} and is {value!r}"
            for name, value in wanted.items()
            if head.get(name) != value
        ]
        if differences:
            raise InputError(
                f"The journal {self.folder} belongs to another run: {'; '.join(differences)}.",
                expected="Its calls answer those of the same run and of no other.",
                remedy="Name another folder for the journal, or remove this one.",
            )


def _hold(folder: Path, stack: ExitStack) -> None:
    """Create a folder and lock it for this process until the stack is closed.

    A folder that contains anything but a journal's files is refused, so that nobody's files are replaced.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not _FILES.fullmatch(path.name) or not path.is_file() or path.is_symlink():
            raise InputError(
                f"The folder {folder} isn't a journal: it contains {path.name}.",
                expected="A journal needs its own folder.",
                remedy="Name a folder that is empty or new.",
            )
    busy = InputError(
        f"The journal {folder} is in use by another run.",
        remedy="Wait until it ends, or name another folder for the journal.",
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(held_folder(folder, busy))
    except OSError as error:
        raise OutputError(
            f"The journal {folder} can't be written: {error.strerror}.",
            remedy="Name another folder for the journal.",
        ) from error


def describe_program(pipe: Any) -> dict[str, Any]:
    """Describe what determines the bits of a program's run, to recognise it: classes, weights, settings,
    machine.
    """
    scheduler = getattr(pipe, "scheduler", None)
    settings = dict(getattr(scheduler, "config", {}))
    found = {
        "pipeline": type(pipe).__name__,
        "scheduler": type(scheduler).__name__,
        "scheduler's settings": {k: x for k, x in settings.items() if not k.startswith("_")},
        "device": str(choose_device(components.find_device(pipe))),
        "threads": torch.get_num_threads(),
        "versions": describe_machine()["versions"],
    }
    for name, module in components.find_components(pipe).items():
        found[f"{name}'s class"] = type(module).__name__
        found[f"{name}'s precision"] = [*map(name_dtype, components.read_precisions(module))]
        found[f"{name}'s weights"] = sample_weights(module)
        tiling = ("use_tiling", "use_slicing", "use_framewise", "tile_")
        found[f"{name}'s tiling"] = {k: x for k, x in vars(module).items() if k.startswith(tiling)}
    return dict(msgspec.to_builtins(found, enc_hook=str))


def _refuse_memories(pipe: Any) -> None:
    """Refuse components with step caches, which would miss the calls that are read instead of made."""
    for name, module in components.find_components(pipe).items():
        for path, hook in iterate_caches(module):
            place = name_module_path(name, path)
            raise InputError(
                f"`{place}` has a {type(hook).__name__}, which remembers earlier calls.",
                expected="Each call that a journal answers is a function of its arguments.",
                remedy="Run without a journal, or take the cache off: disable_cache().",
            )
