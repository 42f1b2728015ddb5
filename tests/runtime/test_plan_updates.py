"""A plan's entry and its exponents: every field survives the way there and back, and repairs."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from stopdown.plans.calibrated import describe_scaling
from stopdown.records import (
    ComponentPlan,
    Operands,
    ResidualStream,
    Scaling,
    Trial,
    from_json,
    to_json,
)
from stopdown.runtime.guard import update_entry
from stopdown.runtime.repairs import cast_component

NAMES = st.sampled_from(["encoder.a", "encoder.b.c", "decoder.a", "norm"])
PATHS = st.lists(NAMES, max_size=3, unique=True).map(tuple)
EXPONENTS = st.dictionaries(NAMES, st.integers(-9, 9), max_size=3)
SHARES = st.integers(0, 1000).map(lambda x: x / 1000)
TEXTS = st.sampled_from(["", "Ten values are bounded."])
STREAMS = st.none() | st.builds(
    ResidualStream, PATHS, PATHS, PATHS, PATHS, st.booleans(), cast_output_down=PATHS
)
SCALINGS = st.builds(
    Scaling,
    exponents=EXPONENTS,
    eps=EXPONENTS,
    multiplies=EXPONENTS,
    fp32_modules=PATHS,
    headroom_bits=SHARES | st.none(),
    tightest=NAMES,
    certified=st.booleans(),
    pinned=st.dictionaries(NAMES, PATHS, max_size=2),
    fp32_flops=SHARES,
    kept_buffers=st.none() | PATHS,
    outputs=st.dictionaries(st.integers(0, 3), st.integers(-9, 9), max_size=2),
    stream=STREAMS,
    operands=st.builds(Operands, PATHS, PATHS),
    values=st.integers(0, 99),
    bounded=st.integers(0, 99),
    uncertain=PATHS,
    measured_bits=SHARES | st.none(),
    limits=st.dictionaries(NAMES, SHARES, max_size=2),
    sizes=st.dictionaries(NAMES, st.just(((4, 16),)), max_size=2),
    range_note=st.just("Ten values are bounded."),
    note=TEXTS,
    trial=st.none() | st.builds(Trial, st.integers(0, 9), SHARES, SHARES, TEXTS),
    layers=st.dictionaries(NAMES, st.tuples(st.integers(-9, 9), st.integers(-9, 9)), max_size=2),
    signatures=st.lists(TEXTS, max_size=2).map(tuple),
    shapes=st.dictionaries(TEXTS, st.just((((4, 16), (4,)),)), max_size=2),
)
FIELDS = {x.name for x in dataclasses.fields(Scaling)}
BARE = ComponentPlan("vae", "VAE", "0" * 64, "fp32", kept_fp32=("wo",))


def test_every_field_is_drawn() -> None:
    """A field that is new in a scaling is in these tests."""
    assert SCALINGS.wrapped_strategy.kwargs.keys() == FIELDS  # type: ignore[attr-defined]


@settings(deadline=None)
@given(SCALINGS)
def test_every_field_survives_a_plan(scaling: Scaling) -> None:
    """As an entry, as JSON and back it is the same scaling; and the entry the same entry."""
    entry = describe_scaling(BARE, scaling, "fp16", 3)
    kept = from_json(to_json(entry), ComponentPlan)
    assert kept == entry
    assert kept.scaling == scaling
    assert describe_scaling(kept, kept.scaling, "fp16", 3) == entry
    assert entry.kept_fp32 == BARE.kept_fp32


def test_what_nobody_counted_is_not_in_a_plan() -> None:
    """Without bounds every value would be uncertain: the file does not list them all."""
    scaling = Scaling(values=9, bounded=2, uncertain=("a", "b"))
    entry = describe_scaling(BARE, scaling, "fp16", 3)
    found = entry.scaling
    assert (found.values, found.bounded, found.uncertain) == (0, 0, ())


def certify() -> ComponentPlan:
    scaling = Scaling(
        exponents={"a.weight": -3},
        certified=True,
        values=10,
        bounded=10,
        limits={"forward.hidden_states": 64.0},
        range_note="All 10 activations are certified.",
        outputs={0: 2},
        stream=ResidualStream(("a",), ("b",)),
        trial=Trial(note="Not tried."),
    )
    return describe_scaling(BARE, scaling, "fp16", 0)


def test_a_repaired_entry_is_certified_no_more_and_keeps_its_limits() -> None:
    """An fp32 layer put on top of a certificate: its claim goes, everything else stays."""
    entry = certify()
    applied = (entry, ComponentPlan("vae:a"))
    updated = update_entry(entry, applied, 0, ["A run repaired it."])
    before, now = entry.scaling, updated.scaling
    assert before.certified
    assert not now.certified
    assert (now.values, now.bounded, now.trial) == (0, 0, None)
    assert now.fp32_modules == ("a",)
    changed = {"certified", "values", "bounded", "trial", "fp32_modules", "range_note"}
    for name in FIELDS - changed:
        assert getattr(now, name) == getattr(before, name), name
    for name in {x.name for x in dataclasses.fields(ComponentPlan)} - {"scaling", "reasons"}:
        assert getattr(updated, name) == getattr(entry, name), name
    assert "Its bounds didn't hold in a run, so it is no longer certified." in updated.reasons
    assert not any("100 %" in reason for reason in updated.reasons)
    assert updated.reasons.count("A run repaired it.") == 1


def test_a_cast_entry_keeps_its_fp32_modules() -> None:
    """A component that a repair brought to bf16 has the fp32 modules that its plan lists."""
    updated = update_entry(certify(), (cast_component("bf16"),), 0, ["Why."])
    assert (updated.precision, updated.kept_fp32) == ("bf16", BARE.kept_fp32)
