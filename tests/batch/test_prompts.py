"""Items of a batch, read from text, JSON lines, CSV and the command line."""

from __future__ import annotations

import dataclasses
import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from stopdown.batch import prompts
from stopdown.batch.prompts import (
    LONGEST,
    digest_request,
    find_text_fault,
    make_item,
    naming_line,
    read_items,
)
from stopdown.errors import InputError


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_three_kinds_of_files_hold_the_same_items(tmp_path: Path) -> None:
    """Lines of text, JSON lines and CSV: prompts and lines are the same, numbers are numbers."""
    text = read_items(write(tmp_path, "a.txt", "a red circle\n\n  a blue square \n"))
    lines = read_items(
        write(
            tmp_path,
            "a.jsonl",
            '{"prompt": "a red circle", "seed": 3}\n\n{"prompt": "a blue square"}\n',
        )
    )
    table = read_items(write(tmp_path, "a.csv", "prompt,seed\na red circle,3\na blue square,\n"))
    for items in (text, lines, table):
        assert [x.prompt for x in items] == ["a red circle", "a blue square"]
    assert [x.line for x in text] == [x.line for x in lines] == [1, 3]
    assert [x.line for x in table] == [2, 3]
    assert [x.values for x in lines] == [x.values for x in table]
    assert lines[0].values == {"prompt": "a red circle", "seed": 3}
    assert lines[0].make_request().seed == 3


def test_only_a_line_break_ends_a_prompt(tmp_path: Path) -> None:
    """Signs of other alphabets and forms of text that Python takes for line breaks stay in their prompt."""
    strange = "a cat\u2028in a hat\u2029at\x85home"
    text = read_items(write(tmp_path, "a.txt", f"{strange}\r\na dog\n"))
    lines = read_items(write(tmp_path, "a.jsonl", f'{{"prompt": "{strange}"}}\n'))
    assert [(x.line, x.prompt) for x in text] == [(1, strange), (2, "a dog")]
    assert [(x.line, x.prompt) for x in lines] == [(1, strange)]


def test_prompts_of_the_command_come_after_those_of_the_file(tmp_path: Path) -> None:
    """They are numbered on; without any of them there is nothing to do."""
    given = write(tmp_path, "a.txt", "\none\n")
    assert [(x.line, x.prompt) for x in read_items(given, [" two ", "three"])] == [
        (2, "one"), (3, "two"), (4, "three"),
    ]  # fmt: skip
    assert [x.line for x in read_items(None, ["one"])] == [1]
    with pytest.raises(InputError, match="No prompts were given"):
        read_items(None)


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ('{"prompt": "a"}\n', "a"),
        ('\n {"prompt": "a"}\n', "a"),
        ("a {plain} line\n", "a {plain} line"),
    ],
)
def test_standard_input_that_begins_with_a_brace_is_json(
    text: str, prompt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is piped in has no suffix that says what it is."""
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
    assert [x.prompt for x in read_items("-")] == [prompt]


WRONG = {
    "empty": ("a.txt", " \n", "are empty"),
    "no JSON": ("a.jsonl", '{"prompt": "a"}\n{"prompt"\n', "Line 2 of the prompts"),
    "one JSON": ("a.json", '["a"]\n', "a.json are a .json file"),
    "tabs": ("a.tsv", "prompt\tseed\n", "name the file .jsonl"),
    "no table": ("a.jsonl", "[1]\n", "it holds a list and not a table"),
    "unknown": ("a.jsonl", '{"promt": "a"}\n', "the field 'promt' is unknown"),
    "kind": ("a.jsonl", '{"prompt": "a", "seed": []}\n', "the field seed holds"),
    "fields": ("a.csv", "prompt,seed\na,1,2\n", "a different number of fields than the first"),
    "field": ("a.csv", "prompt,seed,prompt\na,1,b\n", "the field 'prompt' is there twice"),
    "name": ("a.jsonl", '{"prompt": "a", "name": "../x"}\n', "'../x' is no name of a file"),
    "long name": ("a.jsonl", f'{{"name": "{"猫" * 70}"}}\n', "猫' is too long for a file"),
    "names": (
        "a.jsonl",
        '{"prompt": "a", "name": "X"}\n{"prompt": "b", "name": "x"}\n',
        "Lines 1 and 2 of the prompts .* have the same name: x",
    ),
    "control": ("a.txt", "a\x07b\n", "It holds control characters"),
    "long": ("a.txt", "a" * (LONGEST + 1), f"It has {LONGEST + 1} characters"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_refused_by_its_line(case: str, tmp_path: Path) -> None:
    """The message has the line and what is wrong with it."""
    name, text, said = WRONG[case]
    with pytest.raises(InputError, match=said):
        read_items(write(tmp_path, name, text))


def test_a_file_of_too_many_items_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remedy cuts it."""
    monkeypatch.setattr(prompts, "MOST_ITEMS", 2)
    given = write(tmp_path, "a.txt", "a\nb\nc\n")
    with pytest.raises(InputError, match=r"have 3 items") as caught:
        read_items(given)
    assert caught.value.remedy == f"Cut the file: split -l 2 {given}"


def test_lines_and_tabs_are_no_control_characters() -> None:
    """A prompt may have them; the longest is one that is read."""
    assert find_text_fault("a\tb\nc") == find_text_fault("a" * LONGEST) == ""


def test_an_error_gets_the_line_of_its_item() -> None:
    """With the file where there is one; errors of another kind pass as they are."""
    item = make_item({"prompt": "a"}, 7, InputError)
    with (
        pytest.raises(InputError, match=r"^Line 7 of the prompts p\.txt: It is wrong\."),
        naming_line(item, "p.txt"),
    ):
        raise InputError("It is wrong.", remedy="Correct it.")
    with pytest.raises(KeyError), naming_line(item):
        raise KeyError("other")


def test_a_request_is_known_by_all_that_makes_its_outputs(tmp_path: Path) -> None:
    """An item, an option and a file's content each make another; a branch on the Hub may change."""
    items = [make_item({"prompt": "a"}, 1, InputError)]
    picture = tmp_path / "a.png"
    picture.write_bytes(b"x")
    with_picture = [dataclasses.replace(items[0], image=str(picture))]
    options = {"source": "shapes", "steps": 2}
    first = digest_request(items, options, True)
    assert first == digest_request(items, dict(options), True)
    seen = {
        first,
        digest_request(items * 2, options, True),
        digest_request(items, {**options, "steps": 3}, True),
        digest_request(with_picture, options, True),
    }
    picture.write_bytes(b"xx")
    seen.add(digest_request(with_picture, options, True))
    assert len(seen) == 5
    named = {"source": "owner/name", "revision": "main"}
    assert digest_request(items, named, False) == ""
    assert digest_request(items, {**named, "revision": "a" * 40}, False)
