"""The pages in docs/ are true: every command on them is one that the command line takes, what stands in
`console` blocks runs, and a diagram has its text."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from docs.documentation import (
    Run,
    check_command,
    find_commands,
    parse_command,
    read_blocks,
    read_console,
    read_files,
    run_process,
)

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def list_wrong_commands(text: str) -> list[str]:
    """Commands of a page that the command line would refuse, each with why."""
    commands = dict.fromkeys(find_commands(text))
    return [f"{c}: {problem}" for c in commands if (problem := parse_command(c))]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_command_is_taken(page: Path) -> None:
    """No page names a command or a flag that does not exist."""
    assert list_wrong_commands(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("`stopdown paint SOURCE`", "there is no command paint"),
        ("```console\n$ stopdown generate SOURCE --colour red\n```", "No such option"),
        ("<!-- not run: slow -->\n```sh\nstopdown paint x\n```", "there is no command paint"),
        ('```mermaid\na["stopdown explain x<br/>stopdown doctor --loud"]\n```', "No such option"),
        ("`stopdown plan --json`", "Missing"),
        ("`stopdown plan SOURCE --memory 8GiB`", "--memory is refused"),
    ],
)
def test_a_wrong_command_is_found(text: str, wrong: str) -> None:
    """A command, a flag or an argument that is not there is found in text, block and diagram."""
    (found,) = list_wrong_commands(text)
    assert wrong.lower() in found.lower()


def test_a_right_command_passes() -> None:
    """Parsing refuses nothing that the command line takes, and runs nothing."""
    assert (
        list_wrong_commands("`stopdown generate nowhere 'a cat' --precision fp16 -o a.mp4`") == []
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all commands, as a reader has: what one writes, another reads."""
    made = tmp_path_factory.mktemp("pages")
    for page in PAGES:
        for name, text in read_files(page.read_text(encoding="utf-8")).items():
            (made / name).write_text(text, encoding="utf-8")
    return made


RUNS = list(dict.fromkeys(run for page in PAGES for run in read_console(page.read_text("utf-8"))))
"""What several pages type is run once."""

IN_A_PROCESS = [next(run for run in RUNS if run[0].split()[1] == "doctor")]
"""It runs as it is installed, as `generate` does in `test_packaging.py`; the others in this process."""


LONG = (
    "stopdown convert shapes shapes-fp16",  # tests/pipelines/test_convert{,_forms}.py
    "stopdown compare shapes",  # tests/app/test_compare_command.py
    "stopdown batch shapes",  # tests/batch/test_jobs.py
    'stopdown generate shapes "a yellow square',  # with a journal: tests/pipelines/test_journal.py
)
"""Commands of ten seconds or more that do what the tests behind them do with tiny models: slow."""


SHORTER = {"--steps 20": "--steps 2"}
"""What a page types for a clip that people look at, and what is enough to see that the command runs."""

LONG_PAGES = ("from-pretrained.md", "report.md", "guard.md")
"""Pages whose Python is asked of tiny models: test_loading, test_matrix, test_guard; slow."""


def mark_long(run: tuple[str, int]) -> Any:
    """A run of the default suite, or of the slow one."""
    return pytest.param(*run, marks=pytest.mark.slow if run[0].startswith(LONG) else ())


def list_needed(command: str) -> list[tuple[str, int]]:
    """The documented commands that write a file which this one reads."""
    words = shlex.split(command)
    given = [word for word, before in zip(words[1:], words, strict=False) if before != "-o"]
    read = {one for word in given for one in word.split(",")}
    outputs = {run: re.findall(r" -o (\S+)", run[0]) for run in RUNS if run[0] != command}
    return [run for run, written in outputs.items() if set(written) & read]


def test_what_a_command_reads_is_found_in_lists() -> None:
    """A comparison names a plan among precisions, so the command that writes it comes first."""
    (command,) = {run for run, _ in RUNS if "fp16-plain,plan.json --steps" in run}
    assert [run for run, _ in list_needed(command)] == ["stopdown plan shapes -o plan.json"]


@pytest.mark.default_rows(1)
@pytest.mark.timeout(1200)  # half a minute of a quiet processor for a plan; a busy one is no fault
@pytest.mark.parametrize(("command", "expected"), [mark_long(run) for run in RUNS])
def test_commands_run(
    command: str, expected: int, folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command in a block ends with the exit code that it promises, and writes its file."""
    monkeypatch.chdir(folder)
    for needed, code in list_needed(command):
        if not Path(needed.rpartition(" -o ")[2].split()[0]).exists() and code == 0:
            check_command(needed, code, run)
    for words, fewer in SHORTER.items():
        command = command.replace(words, fewer)
    check_command(command, expected, run_process if (command, expected) in IN_A_PROCESS else run)


def test_no_command_shows_a_wrong_picture() -> None:
    """The bundled model draws other colours in few steps: what is shown is made in 20, or not at all."""
    shown = [command for command, code in RUNS if code == 0 and "shapes" in command]
    few = [x for x in shown if (found := re.search(r"--steps (\d+)", x)) and int(found[1]) < 20]
    assert few == []
    assert any("--steps 20" in command for command in shown)
    others = [command for command, code in RUNS if code == 0 and "solids" in command]
    assert others
    assert not any("--steps" in x or "--guidance" in x for x in others)  # its own are right


@pytest.mark.default_rows(1)
@pytest.mark.filterwarnings("ignore::stopdown.StopdownWarning")  # how a guard reports a repair
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(x, marks=pytest.mark.slow if x.name in LONG_PAGES else (), id=x.name)
        for x in PAGES
        if "zh" not in x.parts
    ],
)
def test_python_runs(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Python block of a page runs as it stands; those of Chinese pages are the same."""
    monkeypatch.chdir(folder)
    for block in read_blocks(page.read_text(encoding="utf-8"), "python"):
        if not block.left:
            exec(compile(block.text, page.name, "exec"), {})  # our own text


def test_what_is_not_run_says_why() -> None:
    """A comment before a block takes it out of the run, and the block behind it stays in."""
    page = "<!-- not run: slow -->\n```sh\nstopdown a\n```\n\n```sh\nstopdown b  # exit 1\n```\n"
    assert [block.left for block in read_blocks(page, "sh")] == ["slow", ""]
    assert read_console(page) == [("stopdown b", 1)]


def test_no_block_harms_the_shell_it_is_pasted_into() -> None:
    """No line of a block that is there to be pasted is `exit`, which would close the reader's shell."""
    for page in PAGES:
        for block in read_blocks(page.read_text(encoding="utf-8"), "sh"):
            assert not re.search(r"^\s*exit\b", block.text, re.MULTILINE)


def test_the_flowcharts_are_told_in_words() -> None:
    """Whoever cannot see the diagrams finds each of their commands in the text below them."""
    page = (ROOT / "docs" / "black.md").read_text(encoding="utf-8")
    diagrams, words = page.split("## Step by step")
    assert diagrams.count("```mermaid") == 2
    drawn = set(find_commands(diagrams))
    assert len(drawn) >= 8
    assert drawn <= set(find_commands(words))


def test_every_branch_of_the_flowchart_ends() -> None:
    """Each node is drawn and reached, and whatever is no end leads on."""
    page = (ROOT / "docs" / "black.md").read_text(encoding="utf-8")
    for diagram, first in zip(page.split("```mermaid")[1:], ("start", "machine"), strict=True):
        text = diagram.split("```")[0]
        edges = re.findall(r"^\s*(\w+)[^\n]*?-->\s*(\w+)", text, re.MULTILINE)
        drawn = set(re.findall(r"(\w+)(?:\[\"|\{\"|\(\[\")", text))
        named = {name for edge in edges for name in edge}
        assert named == drawn
        reached = {target for _, target in edges}
        assert drawn - reached == {first}


def list_linked(page: Path) -> set[Path]:
    """Pages of the documentation that a page links to."""
    found = re.findall(r"\]\(([^)#\s:]+\.md)", page.read_text(encoding="utf-8"))
    return {(page.parent / link).resolve() for link in found} & set(PAGES)


def test_every_page_is_two_steps_from_the_quick_start() -> None:
    """Whoever begins at the quick start finds each page in two links; others stand under *How it works*."""
    docs = ROOT / "docs"
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("- How it works:")[2]
    internals = {docs / name for name in re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)}
    assert internals
    internals |= list_linked(docs / "decisions" / "index.md")
    for name in ("other-programs.md", "certificates.md", "architecture.md"):
        internals |= list_linked(docs / name)
    starts = {docs / "start.md", docs / "zh" / "start.md"}
    near = set().union(*map(list_linked, starts))
    found = near.union(*map(list_linked, near)) | starts | internals | {docs / "index.md"}
    assert sorted(set(PAGES) - {ROOT / "README.md"} - found) == []


def test_decisions_are_short_and_whole() -> None:
    """A page of a decision has at most 200 words: measured, decided, and what would change it."""
    pages = [
        x for x in PAGES if x.parent.name == "decisions" and x.stem not in ("index", "removed")
    ]
    assert pages
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert len(text.split()) <= 200, page.name
        found = re.findall(r"^\*\*([^*]+)\.\*\*", text, re.MULTILINE)
        assert found == ["Measured", "Decision", "What would change it"], page.name


def test_the_card_is_explained() -> None:
    """The page on the card has each stage that a run has, that on memory each placement of weights."""
    from stopdown.memory.strategies import PLACEMENTS
    from stopdown.records import STAGES

    card = (ROOT / "docs" / "card.md").read_text(encoding="utf-8")
    assert [name for name in STAGES if f"| {name} |" not in card] == []
    memory = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    assert [name for name in PLACEMENTS if f"| {name} |" not in memory] == []


PRIVATE = r"\b(islands?|rehears\w+|stand-?ins?|patients?|doors?|said once|stands? in the record)\b"
"""Words of ours where the field has its own: fp32 module, dry run, skeleton, component call, reported."""


def test_the_words_are_those_of_the_field() -> None:
    """Pages say it in standard terms; what others call an island is named as such."""
    found = [
        (page.name, match[0])
        for page in PAGES
        for line in page.read_text(encoding="utf-8").splitlines()
        if (match := re.search(PRIVATE, line)) and "fp32 island" not in line
    ]
    assert found == []


PHRASES = (
    r"\bend of fp16\b|\bFor that \d|\bwhich found\b|reference's pictures|sets by itself|\bAsked for\."
    r"|\bIts authors keep\b|\bWhat tells more\b|\bpredicted to stay\b|\bdoes not do where\b"
    r"|\bno module in a name\b|\ball the same\b|\bAlways right\b|\bstill stands\b"
)
"""What readers marked: no idiomatic English."""


def test_no_marked_phrase_comes_back() -> None:
    """Neither pages nor code, whose messages and docstrings people read, have a phrase that was marked."""
    places = [ROOT / "src", ROOT / "integrations", ROOT / "notebooks"]
    files = [
        x
        for place in places
        for x in place.rglob("*")
        if x.suffix in (".py", ".toml", ".js", ".ipynb")
    ]
    assert len(files) > 300
    found = [
        (path.name, match[0])
        for path in [*PAGES, *files]
        for match in re.finditer(PHRASES, path.read_text(encoding="utf-8"))
    ]
    assert found == []


TICS = (
    r"\banew\b|\bnearer\b|\boff fp32\b|\bwhat to type\b|\bg[ia]ves? NaN\b|, too\.|\bby inputs\b|\bWritten: "
    r"|\b(?:do|does|did|is|are|was|were|has|have|will|would) not\b|\bcannot\b"
    r"|\bnames? faults\b|\b(?:frozen|clipped) or noise\b|\bby itself|\bgave (?:finite|the same)\b"
)
"""Translated English: the field says recomputed, closer, returns NaN, as well; and people contract."""

FORMAL = ("certificates.md", "certificate-file.md")
"""Pages of proofs, which are written out."""


def list_tics(page: str) -> list[str]:
    """The tics of a page's prose: no code, no quoted message and no heading is looked at."""
    left_out = (
        r"^ *```.*?^ *```$|`[^`\n]*`|\"[^\"\n]{3,200}\"|^#+ [^\n]*$|<!-- figure.*?end -->|<!--.*?-->"
        r"|\*\"[^*]*\"\*|(?i:what is known, and what is not)"
    )
    prose = re.sub(left_out, "", page, flags=re.MULTILINE | re.DOTALL)
    return re.findall(TICS, prose)


def test_the_prose_is_english_and_not_translated() -> None:
    """No page for users has a tic that a reader marked; a page with one is seen."""
    pages = [
        x
        for x in PAGES
        if x.parent.name != "decisions" and x.name not in FORMAL and "zh" not in x.parts
    ]
    found = {page.name: list_tics(page.read_text(encoding="utf-8")) for page in pages}
    assert {name: tics for name, tics in found.items() if tics} == {}
    assert list_tics("It is not nearer, too.\n") == ["is not", "nearer", ", too."]
    assert list_tics('`is not` and "it cannot run"\n') == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of exporters about PyTorch
def test_the_recipe_for_graphs_holds(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A converted encoder that overflows in fp16, as an ONNX and an OpenVINO graph, is near to fp32."""
    for name in ("onnx", "onnxscript", "openvino"):
        pytest.importorskip(name)
    onnxruntime = pytest.importorskip("onnxruntime")
    import openvino
    import torch
    from transformers import T5EncoderModel

    from stopdown.testing import save_pipeline

    page = (ROOT / "docs" / "guides" / "deploy.md").read_text(encoding="utf-8")
    (recipe,) = (x for x in read_blocks(page, "python") if "torch.onnx" in x.text)
    save_pipeline("cogvideox", tmp_path / "model", overflow="text_encoder")
    monkeypatch.chdir(tmp_path)
    assert run("convert", "model", "shapes-fp16")[0] == 0
    exec(recipe.text, {})
    given = torch.arange(16)[None]
    wide = T5EncoderModel.from_pretrained("model", subfolder="text_encoder", dtype=torch.float32)
    with torch.no_grad():
        wanted = wide(input_ids=given)[0].numpy()
    session = onnxruntime.InferenceSession("text_encoder.onnx", providers=["CPUExecutionProvider"])
    options = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model("text_encoder.xml", "CPU", options)
    for made in (
        session.run(None, {"input_ids": given.numpy()}),
        list(compiled({"input_ids": given.numpy()}).values()),
    ):
        assert abs(made[0] - wanted).max() < 0.02 * abs(wanted).max()
