"""Records in a console and in a notebook: short, readable, harmless."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest

import stopdown
from models.comparisons import make_comparison
from stopdown import records
from stopdown.app.cards import print_card
from stopdown.app.progress import open_console
from stopdown.comparison import records as comparison_records
from stopdown.record_display import Displayed, Summary
from stopdown.records import CallSummary, ComponentPlan, Finding, Plan, RunRecord, Scaling

RECORDS = [
    value
    for module in (records, comparison_records)
    for value in vars(module).values()
    if inspect.isclass(value) and dataclasses.is_dataclass(value) and value is not Summary
]

LONG = "a sentence that goes on " * 40


def make_plan(components: int, exponents: int) -> Plan:
    scaling = Scaling(exponents={f"blocks.{i}.ff.net.2.weight": -i for i in range(exponents)})
    entry = ComponentPlan("transformer", "Model", "0" * 64, "fp16", scaling, reasons=(LONG,) * 9)
    versions = {"torch": "2.13.0"}
    return Plan("shapes", "0" * 64, "P", "fp16", versions, (entry,) * components, "cpu", 1.0)


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_every_record_shows_itself(kind: type) -> None:
    """No record has the endless repr that a dataclass writes by itself."""
    assert issubclass(kind, Displayed)
    assert kind.__repr__ is Displayed.__repr__


@pytest.mark.parametrize("components", [1, 3, 50])
def test_a_repr_fits_a_terminal(components: int) -> None:
    """However large a plan is, 22 lines of 80 columns say what it is."""
    text = repr(make_plan(components, 5000))
    lines = text.splitlines()
    assert lines[0].startswith("Plan(")
    assert "source='shapes'" in text
    assert text.count("ComponentPlan(") == min(components, 6)  # the rest is counted
    assert lines[-1] == ")"
    assert len(lines) <= 22
    assert max(map(len, lines)) <= 80


def test_a_repr_leaves_out_what_says_nothing() -> None:
    """Fields at their default are not shown, whichever kind of default; others are."""
    assert repr(ComponentPlan("vae", precision="fp16", reasons=("fast",))) == (
        "ComponentPlan(component='vae', precision='fp16', reasons=('fast',))"
    )
    assert repr(Scaling()) == "Scaling()"
    assert "kept_fp32=('norm',)" in repr(ComponentPlan("vae", kept_fp32=("norm",)))


def test_a_notebook_gets_tables() -> None:
    """Fields are rows, records in a tuple stand side by side, and a long list is counted."""
    shown = make_plan(1, 20).components[0]._repr_html_()
    assert shown.count("<table>") >= 2
    assert "class name</th>" in shown
    assert "and 8 more" in shown
    assert len(shown) < 100_000


def test_a_plan_shows_what_the_command_shows() -> None:
    """A row for each component and its reasons, in a console and in a notebook; its fields in a `repr`."""
    plan = Plan(
        "shapes", components=(ComponentPlan("vae", "X", precision="fp16", reasons=("So & so.",)),)
    )
    assert str(plan) == (
        "component  runs in  tensors  exponents  fp32 modules  headroom\n"
        "vae        fp16     0                   0\n\n"
        "vae: So & so."
    )
    shown = plan._repr_html_()
    assert shown.count("<tr>") == 2
    assert "<b>vae</b>: So &amp; so.</p>" in shown
    assert "overflow-x:auto" in shown
    assert repr(plan).startswith("Plan(")


def test_a_notebook_shows_no_hash_and_cuts_no_word() -> None:
    """Fingerprints are left out, long sentences end between words, and the table stays in its cell."""
    shown = make_plan(2, 3).components[0]._repr_html_()
    assert "0" * 40 not in shown
    assert re.search(r"(a|sentence|that|goes|on) …", shown)
    assert shown.startswith("<div style='max-width:100%;overflow-x:auto'>")
    assert "overflow-wrap:anywhere" in shown
    picture = Finding("dtype", "vae", "data:image/png;base64," + "A" * 5000, "none")
    assert "5,022 characters" in picture._repr_html_()


def test_what_a_model_says_is_no_markup() -> None:
    """Names in a checkpoint may hold anything; a notebook shows it as text."""
    finding = Finding("dtype", "<script>alert(1)</script>", "x & y", "none")
    shown = finding._repr_html_()
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown
    assert "x &amp; y" in shown


def test_a_run_shows_what_the_command_shows() -> None:
    """In a notebook a run is its card: a row for each component, then reasons, costs and findings."""
    record = RunRecord(
        source="shapes",
        fingerprint="0" * 64,
        pipeline="ShapesPipeline",
        request={"prompt": "a cat"},
        device="cpu",
        device_reason="",
        machine={"torch": "2"},
        decisions=(
            ComponentPlan("vae.decode", precision="fp32", stored="bf16", reasons=("Exact.",)),
        ),
        calls=(CallSummary("vae.decode", "decode", 2, 1.25, ("fp32",), 0),),
        stages_s={"load": 0.5, "decode": 1.25},
        peak_bytes=2**20,
        peak_source="counted",
        own_s=0.002,
        findings=(Finding("black", "", "Frame 0 is black.", "Look."),),
        output="a.png",
        elapsed_s=2.0,
    )
    assert str(record) == (
        "component   stored  ran in  calls  seconds  NaN/Inf\n"
        "vae.decode  bf16    fp32    2      1.2      0\n\n"
        "vae.decode: Exact.\n\n"
        "time: 2.0 s (load 0.5 s, decode 1.2 s). Stopdown's overhead: 0.002 s\n\n"
        "memory: 1.0 MiB (counted)\n\n"
        "black: Frame 0 is black. Look."
    )
    shown = record._repr_html_()
    assert "<b>memory</b>: 1.0 MiB (counted)</p>" in shown
    assert "torch" not in shown
    console = open_console()
    with console.capture() as drawn:
        print_card(record, console)
    for said in ("Exact.", "memory  1.0 MiB (counted)", "black: Frame 0 is black."):
        assert said in drawn.get()
    assert drawn.get().startswith(
        "Wrote a.png in 2.0 s: Frame 0 is black.\n→ stopdown explain a.png\n"
    )


def test_a_run_is_named_first() -> None:
    """A record says its class above its table."""
    fields = {entry.name: entry for entry in dataclasses.fields(RunRecord)}
    assert fields["kind"].default == "run"
    assert stopdown.records.RunRecord._repr_html_ is Displayed._repr_html_


def test_a_comparison_fits_a_notebook() -> None:
    """Its pictures, which are long texts, are cut in both."""
    made = make_comparison()
    assert len(repr(made).splitlines()) <= 22
    assert len(made._repr_html_()) < 200_000


def test_a_comparison_shows_its_verdicts() -> None:
    """A row for each precision, and the verdict in one sentence."""
    made = make_comparison()
    shown = str(made)
    assert shown.startswith("precision")
    assert all(variant.name in shown for variant in made.variants)
    assert " ".join(made.headline.split()) in " ".join(shown.split())
    assert "<table>" in made._repr_html_()
