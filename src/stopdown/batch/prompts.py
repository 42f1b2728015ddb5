"""Reading of batch items from a text file with one prompt per line, JSON lines, CSV or standard input.

`digest_request` hashes a batch's request without PyTorch: the items, the options, and name, size and time
of every file among them (the model, plans, LoRAs, pictures). If the summary of an earlier batch has this
hash and all outputs exist, there is nothing to do.

Not covered: a file that was rewritten with the same size and time; versions of other libraries.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stopdown.batch.records import MOST_ITEMS
from stopdown.devices.environment import read_version
from stopdown.errors import InputError, take_first_line
from stopdown.files.json_files import UnreadableError, parse_json, read_small_file
from stopdown.pipelines.requests import FIELDS, MEDIA, Request

LONGEST = 4096
"""Maximum number of characters in a prompt; T5 with 512 tokens reads about 2,000."""


_KINDS = {x.name: str if x.name in MEDIA else x.metadata["kind"] for x in FIELDS}

_Asked: Any = dataclasses.make_dataclass(
    "_Asked", [("line", int), *((x, kind | None, None) for x, kind in _KINDS.items())], frozen=True
)
"""Record with every field of a request; pictures and videos are given as paths."""


@dataclass(frozen=True)
class Item(_Asked):
    """One prompt with its settings, as read from a prompts file.

    Attributes:
        name: name of its output, without suffix; None for words of the prompt and its hash.

    The other fields are those of `Request`; if one is None, the command's option applies. Relative paths
    are resolved against the folder of the prompts file.
    """

    name: str | None = None

    @property
    def values(self) -> dict[str, Any]:
        """The fields of the request that the item sets, by name."""
        said = {x.name: getattr(self, x.name) for x in FIELDS}
        return {name: value for name, value in said.items() if value is not None}

    @property
    def media(self) -> dict[str, str]:
        return {name: place for name, place in self.values.items() if name in MEDIA}

    def make_request(self) -> Request:
        """Return the item's request to the pipeline, without pictures and videos."""
        return Request(**{k: v for k, v in self.values.items() if k not in MEDIA})


_MOST_BYTES = 2**28
_FIELDS = tuple(entry.name for entry in dataclasses.fields(Item) if entry.name != "line")
_MOST_NAME_BYTES = 200  # of 255, with suffixes and the name of a temporary file
_NAME = re.compile(r"\w[\w .+-]{0,99}")
_FORMS = (
    "A prompts file is UTF-8 text with one prompt on each line, or a .jsonl or .csv file with the fields "
    f"{', '.join(_FIELDS)}"
)


@contextmanager
def naming_line(
    item: Item, prompts: str = "", kind: type[InputError] = InputError
) -> Iterator[None]:
    """Add the item's line, and the prompts file if given, to errors of type `kind` raised in the block."""
    try:
        yield
    except kind as error:
        where = f"Line {item.line} of the prompts {prompts}".rstrip()
        raise type(error)(
            f"{where}: {error.what}", expected=error.expected, remedy=error.remedy
        ) from error


def read_items(given: str | None, prompts: Sequence[str] = ()) -> list[Item]:
    """Return the items of a prompts file in order, followed by those of the command line.

    Args:
        given: path, or `-` for standard input, which is read as JSON lines if it begins with a brace;
            None for no file.
        prompts: prompts of the command line, numbered after the lines of the file.
    """
    items = [] if given is None else _read_file(given)
    last = items[-1].line if items else 0
    if "" in prompts:
        raise InputError(
            "The prompt is empty.",
            expected="An empty prompt often comes from a shell variable that isn't set.",
            remedy='Describe the picture. A space, " ", is an empty prompt.',
        )
    items += [_read_line("", n, {"prompt": x.strip()}) for n, x in enumerate(prompts, last + 1)]
    if not items:
        raise InputError(
            "No prompts were given.",
            expected="A batch takes them from a file, or one by one.",
            remedy="Give them: stopdown batch SOURCE --prompts prompts.txt.",
        )
    return items


def _read_file(given: str) -> list[Item]:
    """Return the items of a prompts file; empty lines are skipped."""
    kind = Path(given).suffix.lower()
    if kind in (".json", ".tsv"):
        raise InputError(
            f"The prompts {given} are a {kind} file.",
            expected=f"{_FORMS}.",
            remedy="Write one JSON object on each line, and name the file .jsonl.",
        )
    text = _read_text(given)
    if kind == ".csv":
        items = list(_read_csv(given, text))
    elif kind in (".jsonl", ".ndjson") or (given == "-" and text.lstrip().startswith("{")):
        items = list(_read_json_lines(given, text))
    else:
        lines = enumerate(_split_lines(text), 1)
        items = [_read_line(given, n, {"prompt": x.strip()}) for n, x in lines if x.strip()]
    if not items:
        raise InputError(
            f"The prompts {given} are empty.",
            expected=f"{_FORMS}.",
            remedy='Write one: echo "a red circle moving left" > prompts.txt',
        )
    if len(items) > MOST_ITEMS:
        raise InputError(
            f"The prompts {given} have {len(items)} items.",
            expected=f"A batch has at most {MOST_ITEMS}.",
            remedy=f"Cut the file: split -l {MOST_ITEMS} {given}",
        )
    _refuse_repeated_names(given, items)
    return items


def _split_lines(text: str) -> list[str]:
    """Split a text at line breaks alone, as editors do; `splitlines` also splits at U+2028 and others."""
    return re.split("\r\n|\r|\n", text)


def find_text_fault(text: str) -> str:
    """Return a sentence that explains why a text is not a valid prompt; "" if it is valid."""
    if len(text) > LONGEST:
        return f"It has {len(text)} characters, more than the {LONGEST} that are read."
    if not text.isprintable() and any(ord(sign) < 32 and sign not in "\t\n" for sign in text):
        return "It holds control characters."
    return ""


def _read_text(given: str) -> str:
    try:
        content = _read_bytes(given)
    except (UnreadableError, OSError) as error:
        raise InputError(
            f"The prompts file {given} can't be read: {take_first_line(error).rstrip('.')}.",
            expected=f"{_FORMS}.",
            remedy='Name a file that exists: prompts="prompts.txt"',
        ) from error
    try:
        return content.removeprefix(b"\xef\xbb\xbf").decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"The prompts {given} aren't UTF-8: byte {error.start + 1}, in line {line}.",
            expected=f"{_FORMS}.",
            remedy=f"Convert them: iconv -f latin1 -t utf-8 {given} > prompts-utf8.txt",
        ) from error


def _read_bytes(given: str) -> bytes:
    if given == "-":
        return sys.stdin.buffer.read(_MOST_BYTES)
    return read_small_file(Path(given), most_bytes=_MOST_BYTES)


def _read_json_lines(given: str, text: str) -> Iterator[Item]:
    for number, line in enumerate(_split_lines(text), 1):
        if not line.strip():
            continue
        try:
            found = parse_json(line.encode())
        except UnreadableError as error:
            raise _refuse(given, number, f"{error}.") from error
        if not isinstance(found, dict):
            raise _refuse(given, number, f"it holds a {type(found).__name__} and not a table.")
        yield _read_line(given, number, found)


def _read_csv(given: str, text: str) -> Iterator[Item]:
    reader = csv.DictReader(io.StringIO(text), strict=True)
    try:
        names = [x for name in reader.fieldnames or () if (x := name.strip())]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise _refuse(given, 1, f"the field {twice[0][:60]!r} is there twice.")
        for row in reader:
            if None in row or None in row.values():
                raise _refuse(
                    given, reader.line_num, "it has a different number of fields than the first."
                )
            said = {name.strip(): value.strip() for name, value in row.items()}
            yield _read_line(given, reader.line_num, {k: v for k, v in said.items() if v})
    except csv.Error as error:
        raise _refuse(given, reader.line_num, f"{error}.") from error


def _read_line(given: str, number: int, said: dict[str, Any]) -> Item:
    return make_item(said, number, lambda what: _refuse(given, number, what))


def make_item(said: Mapping[str, Any], number: int, refuse: Callable[[str], InputError]) -> Item:
    """Validate the fields of an item and return the item.

    Args:
        said: fields by name; numbers may be given as text.
        number: line number of the item.
        refuse: builds the error to raise from a description of the problem.
    """
    unknown = sorted(set(said) - set(_FIELDS))
    if unknown:
        raise refuse(f"the field {unknown[0][:60]!r} is unknown.")
    try:
        item = msgspec.convert({"line": number, **said}, Item, strict=False)
    except msgspec.ValidationError as error:
        raise refuse(f"{_describe(error)}.") from error
    for text in (item.prompt, item.negative):
        if fault := find_text_fault(text or ""):
            raise refuse(fault)
    if item.name is not None and not _NAME.fullmatch(item.name):
        raise refuse(f"{item.name[:60]!r} is no name of a file.")
    if len((item.name or "").encode()) > _MOST_NAME_BYTES:
        raise refuse(f"the name {item.name!r} is too long for a file.")
    return item


_TYPES = {"str": "text", "int": "a whole number", "float": "a number", "null": "nothing"}


def _describe(error: msgspec.ValidationError) -> str:
    """Describe in plain words the type that a field has and the type that it should have."""
    found = re.fullmatch(r"Expected `(\w+)[^`]*`, got `(\w+)`.* - at `\$\.(\w+)`", str(error))
    if found is None:
        return str(error)
    wanted, got, name = found.groups()
    return f"the field {name} holds {_TYPES.get(got, got)} and should hold {_TYPES.get(wanted, wanted)}"


def _refuse(given: str, number: int, what: str) -> InputError:
    return InputError(
        f"Line {number} of the prompts {given} is wrong: {what}"
        if given
        else f"Prompt {number} is wrong: {what}",
        expected=f"{_FORMS}." if given else "A prompt is text.",
        remedy="Correct that line; no item has been made yet.",
    )


def _refuse_repeated_names(given: str, items: list[Item]) -> None:
    first: dict[str, int] = {}
    for item in items:
        name = (item.name or "").casefold()
        if name and name in first:
            raise InputError(
                f"Lines {first[name]} and {item.line} of the prompts {given} have the same name: "
                f"{item.name}.",
                expected="Each item has its own output, named after it.",
                remedy="Give one of them another name, or none.",
            )
        first[name] = item.line


_COMMIT = re.compile(r"[0-9a-f]{40}")


def digest_request(items: Iterable[Item], options: Mapping[str, Any], built_in: bool) -> str:
    """Return a hash of a batch's request; "" if it cannot be computed without network access.

    Args:
        items: the batch items, with resolved paths of pictures and videos.
        options: everything else that determines the outputs, by name; `source` is the model.
        built_in: whether the model ships with Stopdown.
    """
    listed = [dataclasses.asdict(item) for item in items]
    named = {str(x) for part in (options, *listed) for x in _list_texts(part.values())}
    is_here = built_in or Path(options["source"]).exists()
    is_fixed = _COMMIT.fullmatch(str(options.get("revision"))) is not None
    if not (is_here or is_fixed):
        return ""
    places = {x for name in named for x in (name, name.rpartition(":")[0]) if x}
    stamps = {x: _stamp(Path(x)) for x in places}
    text = json.dumps(
        [read_version("stopdown"), listed, options, stamps], sort_keys=True, default=str
    )
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _list_texts(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, tuple):
            yield from _list_texts(value)
        elif isinstance(value, str | Path):
            yield value


def _stamp(path: Path) -> list[tuple[str, int, int]]:
    """Return the path, size and modification time of a file, or of all files in a folder.

    Empty if there is none.
    """
    try:
        paths = sorted(path.rglob("*")) if path.is_dir() else [path]
        told = [(x, x.stat()) for x in paths if x.is_file()]
    except (OSError, ValueError):  # no path can be so long, or have such characters
        return []
    return [(str(x), stat.st_size, stat.st_mtime_ns) for x, stat in told]
