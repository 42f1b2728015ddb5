"""Every reader of files from elsewhere, on files that are damaged at random: an answer or an error of ours.

A few hundred files for each reader in the default run, ten thousand each with `-m slow`. Files begin as
ones that Stopdown wrote; bytes and tokens of them are changed, and leaves of their JSON are replaced
by values of other types and sizes (with a seal that fits, where there is one). Memory is limited by the
system while a file is read, and processor time for each file.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import hmac
import json
import resource
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vae import DecoderOutput
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from models.comparisons import RUN, make_comparison, write_profile
from stopdown import testing
from stopdown.app.compare_command import read_prompts
from stopdown.app.report_command import report
from stopdown.devices.device_profiles import find_profile
from stopdown.diagnosis.explained import explain_file
from stopdown.errors import StopdownError
from stopdown.files.json_files import UnreadableError
from stopdown.frames.media import iterate_frames, read_image, write_media
from stopdown.plans.plan_files import read_plan, seal_plan
from stopdown.records import (
    ComponentPlan,
    Plan,
    ResidualStream,
    RunRecord,
    Scaling,
    read_record,
    to_json,
)
from stopdown.runtime import journal
from stopdown.runtime.journal_values import PackingError, pack, unpack
from stopdown.sources.headers import (
    DamagedFileError,
    find_missing_shards,
    read_header,
    read_shard_index,
)
from stopdown.sources.source_checks import verify_source
from stopdown.sources.sources import resolve_source

OURS = (StopdownError, UnreadableError, DamagedFileError, PackingError)
"""What a reader may raise; the last three become sentences where they are caught."""

FEW, MANY = 60, 10_000
GROWTH_BYTES = 2**30
MOST_SECONDS = 20.0  # of the processor, for one file of at most some kilobytes

Bytes = Callable[[bytes], bytes]


@dataclass(frozen=True)
class Reader:
    """A reader, and how its files are made.

    Attributes:
        make: a whole file, in a folder.
        read: reads the file at a path, in that folder.
        split: the JSON in a file, and how a file is made of other JSON; None where there is none.
    """

    make: Callable[[Path], Path]
    read: Callable[[Path], object]
    split: Callable[[bytes], tuple[Any, Callable[[Any], bytes]]] | None = None


def split_json(content: bytes) -> tuple[Any, Callable[[Any], bytes]]:
    return json.loads(content), encode


def encode(tree: Any) -> bytes:
    """JSON as Python writes it, NaN and halves of surrogate pairs included."""
    return json.dumps(tree).encode()


def split_sealed(name: str) -> Callable[[bytes], Any]:
    """As `split_json`, with a checksum under this name that fits what is written."""

    def seal(tree: Any) -> bytes:
        with contextlib.suppress(Exception):  # what cannot be sealed is read without
            content = msgspec.json.encode({**tree, name: ""})
            tree = {**tree, name: hashlib.sha256(content).hexdigest()}
        return encode(tree)

    return lambda content: (json.loads(content), seal)


def split_head(content: bytes) -> tuple[Any, Callable[[Any], bytes]]:
    """What a journal says of its run, and the file that says something else."""
    version = journal._VERSION
    return unpack(content, purpose=version), lambda tree: pack(tree, version)


def split_header(content: bytes) -> tuple[Any, Callable[[Any], bytes]]:
    """The header of a safetensors file, and the file with another one."""
    length = int.from_bytes(content[:8], "little")

    def join(tree: Any) -> bytes:
        header = encode(tree)
        return len(header).to_bytes(8, "little") + header + content[8 + length :]

    return json.loads(content[8 : 8 + length]), join


# ---------------------------------------------------------------------------------------------
# The table

PLAN = Plan(
    source="owner/name",
    fingerprint="f" * 64,
    pipeline="CogVideoXPipeline",
    precision="fp16",
    versions={"diffusers": "0"},
    components=(
        ComponentPlan(
            component="transformer",
            class_name="Linear",
            weights="aa",
            precision="fp16",
            scaling=Scaling(
                exponents={"weight": -6, "bias[0:2]": 3},
                multiplies={"norm": 2},
                fp32_modules=("proj",),
                limits={"forward.x": 4.0},
                stream=ResidualStream(("a",), ("b",)),
            ),
            reasons=("A reason.",),
        ),
    ),
    device="cpu",
    elapsed_s=1.5,
)


def write(name: str, make: Callable[[], str | bytes]) -> Callable[[Path], Path]:
    def put(folder: Path) -> Path:
        content = make()
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return folder / name

    return put


@functools.cache
def tiny() -> Path:
    return testing.save_pipeline("cogvideox", Path(tempfile.mkdtemp()) / "tiny")


def copy_model(name: str) -> Callable[[Path], Path]:
    """A tiny pipeline, of which this file is changed."""

    def put(folder: Path) -> Path:
        return Path(shutil.copytree(tiny(), folder / "model")) / name

    return put


def read_model(path: Path) -> None:
    """All that is read of a model before it is loaded."""
    root = next(above for above in path.parents if above.name == "model")
    verify_source(resolve_source(str(root)))


def make_shards(folder: Path) -> Path:
    save_file(
        {"a": torch.zeros(2), "b": torch.zeros(3)}, folder / "model-00001-of-00001.safetensors"
    )
    weights = dict.fromkeys("ab", "model-00001-of-00001.safetensors")
    return write(
        "model.safetensors.index.json", lambda: encode({"metadata": {}, "weight_map": weights})
    )(folder)


def make_header(folder: Path) -> Path:
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.float16)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder / "model.safetensors"


def make_head(folder: Path) -> Path:
    head = {"prompt": "a ball", "seed": 3, "versions": {"torch": "2"}, "precision": ["fp16"]}
    content = pack(head, journal._VERSION)
    return write("journal/run.journal", lambda: content)(mkdir(folder, "journal"))


def seal(content: bytes, purpose: str) -> bytes:
    """The content of a journal's file with another checksum, which fits."""
    return content[:-32] + hmac.digest(purpose.encode(), content[:-32], "sha256")


def mkdir(folder: Path, name: str) -> Path:
    (folder / name).mkdir(exist_ok=True)
    return folder


def read_head(path: Path) -> None:
    path.write_bytes(seal(path.read_bytes(), journal._VERSION))
    with journal.Journal(path.parent, {"prompt": "a ball"}):
        pass


def make_call(folder: Path) -> Path:
    """The file of a call that returned a tuple of a tensor and a table."""
    output = (
        torch.arange(6.0).reshape(2, 3).T,
        {"x": [1, None, "y"]},
        DecoderOutput(sample=torch.ones(2)),
    )
    answer = output, {0: torch.zeros(4, dtype=torch.uint8)}, False
    return write("call.pt", lambda: pack(answer))(folder)


def read_call(path: Path) -> None:
    """As a journal does, under a checksum that fits the bytes."""
    unpack(seal(path.read_bytes(), ""), journal._Answer)


@functools.cache
def comparison() -> str:
    return to_json(make_comparison(2))


def read_report(path: Path) -> None:
    try:
        report(path, path.parent / "page.html")
    finally:
        (path.parent / "page.html").unlink(missing_ok=True)


def read_profile(path: Path) -> None:
    profile = find_profile(str(path))
    profile.as_device(), profile.supports


@functools.cache
def clip() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 255, (3, 32, 32, 3), np.uint8)


def make_media(name: str) -> Callable[[Path], Path]:
    def put(folder: Path) -> Path:
        write_media(folder / name, clip()[:1] if name.endswith(".png") else clip())
        return folder / name

    return put


def make_picture(name: str) -> Callable[[Path], Path]:
    def put(folder: Path) -> Path:
        from PIL import Image

        Image.fromarray(clip()[0]).save(folder / name)
        return folder / name

    return put


def drain(path: Path) -> None:
    for _ in iterate_frames(path, 50):
        pass


LOG = '  File "/x/diffusers/models/t.py", line 3, in forward\nexpected scalar type Float but found Half\n'

READERS = {
    "header": Reader(make_header, read_header, split_header),
    "shard index": Reader(
        make_shards, lambda path: find_missing_shards(path, read_shard_index(path)), split_json
    ),
    "model index": Reader(copy_model("model_index.json"), read_model, split_json),
    "config": Reader(copy_model("transformer/config.json"), read_model, split_json),
    "scheduler": Reader(copy_model("scheduler/scheduler_config.json"), read_model, split_json),
    "plan": Reader(
        write("plan.json", lambda: to_json(seal_plan(PLAN))), read_plan, split_sealed("seal")
    ),
    "record": Reader(
        write("run.json", lambda: to_json(RUN)),
        lambda path: read_record(path, RunRecord),
        split_json,
    ),
    "report of a run": Reader(write("run.json", lambda: to_json(RUN)), read_report, split_json),
    "report of a comparison": Reader(write("page.html.json", comparison), read_report, split_json),
    "journal": Reader(make_head, read_head, split_head),
    "call of a journal": Reader(make_call, read_call),
    "profile": Reader(write("mine.toml", write_profile), read_profile),
    "prompts": Reader(write("prompts.txt", lambda: "a ball\n\na caf\u00e9\n" * 20), read_prompts),
    "log": Reader(write("run.log", lambda: LOG * 20), explain_file),
    "png": Reader(make_picture("a.png"), read_image),
    "jpeg": Reader(make_picture("a.jpg"), read_image),
    "webp": Reader(make_picture("a.webp"), read_image),
    "tiff": Reader(make_picture("a.tif"), read_image),
    "gif": Reader(make_media("a.gif"), drain),
    "mp4": Reader(make_media("a.mp4"), drain),
}

# ---------------------------------------------------------------------------------------------
# How files are damaged

TOKENS = [
    *(
        b"[",
        b"{",
        b'"',
        b"]",
        b"}",
        b",",
        b":",
        b"\\",
        b"null",
        b"true",
        b"NaN",
        b"-Infinity",
        b"1e999",
    ),
    *(
        b"-1",
        b"0",
        b"1e308",
        b"9" * 19,
        b"9" * 30,
        b"9" * 5000,
        b"[" * 200,
        b'{"a":' * 200,
        b"\\ud800",
    ),
    *(b"\x00", b"\xff", b"\xef\xbb\xbf", b"../", b"/dev/zero", b"\n", b"\r", b"=", b"[[", b"''' "),
    *(b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x00\x00\x00\x00", b"\x1b[2J", b"%s", b"{0}"),
]

WRONG = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, -1, 10**9, 2**31, 2**63, 10**18, 10**400]),
    st.floats(),
    st.sampled_from(
        ["", "/", "..", ".", "x" * 300, "\x00", "\ud800", "fp16", "../../etc/passwd", "a b"]
    ),
    st.text(max_size=5),
    st.just([]),
    st.just({}),
    st.lists(st.integers() | st.text(max_size=3) | st.none(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers() | st.none(), max_size=2),
    st.sampled_from([10, 63, 65, 300]).map(lambda depth: nest(depth)),
)


def nest(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def list_places(tree: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in JSON."""
    yield above
    if isinstance(tree, (dict, list)):
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            yield from list_places(tree[key], (*above, key))


@st.composite
def damage_tree(draw: st.DrawFn, tree: Any) -> Any:
    """JSON of the right shape with one to three values replaced, removed or renamed."""
    places = list(list_places(tree))
    tree = json.loads(json.dumps(tree))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(places))
        how = draw(st.sampled_from(["replace", "replace", "remove", "rename", "repeat"]))
        value = copy.deepcopy(draw(WRONG))
        if not place:
            tree = value if how == "replace" else tree
            continue
        with contextlib.suppress(KeyError, IndexError, TypeError, AttributeError):
            change(
                functools.reduce(lambda inner, key: inner[key], place[:-1], tree),
                place[-1],
                how,
                value,
            )
    return tree


def change(table: Any, key: Any, how: str, value: Any) -> None:
    if how == "replace":
        table[key] = value
    elif how == "remove":
        del table[key]
    elif how == "rename":
        table[str(value)[:20]] = table.pop(key)
    else:
        table.extend(table[:] * 3)


@st.composite
def damage_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """A file with one to four places flipped, cut, doubled or overwritten with tokens."""
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(changed)))
        end = min(len(changed), start + draw(st.integers(0, 40)))
        how = draw(st.sampled_from(["flip", "cut", "double", "token", "end"]))
        if how == "flip" and start < len(changed):
            changed[start] ^= 1 << draw(st.integers(0, 7))
        elif how == "cut":
            del changed[start:end]
        elif how == "double":
            changed[start:start] = changed[start:end] * draw(st.integers(1, 3))
        elif how == "token":
            changed[start:end] = draw(st.sampled_from(TOKENS))
        elif how == "end":
            del changed[start:]
    return bytes(changed)


def draw_file(reader: Reader, content: bytes) -> st.SearchStrategy[bytes]:
    found: st.SearchStrategy[bytes] = damage_bytes(content)
    if reader.split is not None:
        tree, join = reader.split(content)
        found = st.one_of(damage_tree(tree).map(join), found)
    return found


# ---------------------------------------------------------------------------------------------
# Limits


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """No more address space than is used now and `GROWTH_BYTES`."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(
        resource.RLIMIT_AS, (pages * resource.getpagesize() + GROWTH_BYTES, before[1])
    )
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class TooSlowError(Exception):
    """A file took more time of the processor than any may."""


@contextlib.contextmanager
def limited_time() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TooSlowError

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def fuzz(reader: Reader, folder: Path, count: int) -> int:
    """Read so many damaged files; how many were read without an error."""
    path = reader.make(folder)
    whole = path.read_bytes()
    reader.read(path)  # as it was written it is read
    read = 0

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=count == FEW,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(draw_file(reader, whole))
    def check(content: bytes) -> None:
        nonlocal read
        path.write_bytes(content)
        with contextlib.suppress(*OURS), limited_time():
            reader.read(path)
            read += 1

    with limited_memory():
        check()
    return read


@pytest.mark.default_rows(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_gives_an_answer_or_an_error_of_ours(name: str, tmp_path: Path) -> None:
    """No other exception, whatever was changed in a file; some are read all the same."""
    fuzz(READERS[name], tmp_path, FEW)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # minutes each; a busy machine takes longer
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", READERS)
def test_ten_thousand_damaged_files_give_no_other_error(name: str, tmp_path: Path) -> None:
    """As above, ten thousand files for each reader, others in every run."""
    fuzz(READERS[name], tmp_path, MANY)


@pytest.mark.parametrize("place", ["library", "class", "component"])
def test_a_name_longer_than_a_file_may_have(place: str, tmp_path: Path) -> None:
    """In an index of a model it is refused by name; no system is asked for such a file."""
    path = READERS["model index"].make(tmp_path)
    index, long = json.loads(path.read_bytes()), "x" * 300
    found = {"library": [long, "Model"], "class": ["diffusers", long]}
    index[long if place == "component" else "transformer"] = found.get(
        place, ["diffusers", "VQModel"]
    )
    path.write_bytes(encode(index))
    with pytest.raises(StopdownError, match=long):
        read_model(path)


def test_a_shard_of_a_longer_name_than_a_file_may_have(tmp_path: Path) -> None:
    """It is no shard's name, and no system is asked for such a file."""
    path = READERS["shard index"].make(tmp_path)
    index = json.loads(path.read_bytes())
    index["weight_map"] = {"a": f"model-00001-of-00001.{'9' * 300}.safetensors"}
    path.write_bytes(encode(index))
    with pytest.raises(DamagedFileError, match="which is no shard's name"):
        READERS["shard index"].read(path)


@pytest.mark.thorough
def test_an_error_that_is_not_ours_is_found(tmp_path: Path) -> None:
    """A reader that lets a KeyError through, and one that takes all memory, do not pass."""

    def trip(path: Path) -> object:
        return json.loads(path.read_bytes()).get("device")

    def hoard(path: Path) -> object:
        return bytes(2 * GROWTH_BYTES) if path.read_bytes() != to_json(RUN).encode() else None

    table = READERS["record"]
    for read, error in ((trip, ValueError | AttributeError), (hoard, MemoryError)):
        with pytest.raises(BaseException) as caught:  # noqa: PT011
            fuzz(dataclasses.replace(table, read=read), tmp_path, FEW)
        found = getattr(caught.value, "exceptions", [caught.value])
        assert any(isinstance(one, error) for one in found)
