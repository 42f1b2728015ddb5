"""Random forgeries of certificates are refused, or no run of their own graph contradicts them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import stopdown_verify
from models.certificate_forgeries import CHANGES, Model, Outcome, forge, judge
from models.certified_nets import NETS, certify_net


@pytest.fixture(name="models", scope="module")
def fixture_models(tmp_path_factory) -> dict[str, Model]:
    place = tmp_path_factory.mktemp("certified")
    return {name: certify_net(name, place / name) for name in NETS}


def test_certificates_that_are_forged_have_every_rule(models):
    """The package's own certificates of the small modules have each rule, and all keys but one."""
    nodes = [n for x in models.values() for n in list_nodes(x.certificate)]
    assert {n["rule"] for n in nodes} == {*stopdown_verify.GRAMMAR}
    assert {n["of"] for n in nodes if n["rule"] == "mix"} == {"places", "rows", "repeats", "mean"}
    keys = {key for n in nodes for key in n}
    known = {k for forms in stopdown_verify.GRAMMAR.values() for _, form in forms for k in form}
    assert known - keys == {"number_exponent"}


def list_nodes(certificate: dict[str, Any]) -> list[dict[str, Any]]:
    return [n for x in certificate["components"] for g in x["graphs"] for n in g["nodes"]]


def try_forgeries(
    models: dict[str, Model], scratch: Path, seeds: range, changes: Sequence[str] = ()
) -> list[Outcome]:
    """One of each seed, of the kinds of change one after the other if there are any."""
    found = []
    for seed in seeds:
        kind = [changes[seed % len(changes)]] if changes else ()
        found.append(forge([*models.values()][seed % len(models)], seed, scratch, kind))
    assert [x for x in found if x.verdict == "false"] == []
    return found


@pytest.mark.parametrize("name", [*NETS])
def test_random_forgery_is_refused_or_true(name, models, tmp_path):
    """Some of the forgeries are accepted, and no value of these exceeds its bound or what fp16 holds."""
    found = try_forgeries({name: models[name]}, tmp_path / "forged", range(12))
    assert {x.verdict for x in found} == {"refused", "true"}


@pytest.mark.thorough
def test_each_kind_of_change_is_refused_or_true(models, tmp_path):
    """Two hundred more, half of them with one change of each kind in turn."""
    found = try_forgeries(models, tmp_path / "forged", range(1000, 1100))
    found += try_forgeries(models, tmp_path / "forged", range(2000, 2100), [*CHANGES])
    assert {x.changes[0] for x in found} == {*CHANGES}
    assert sum(x.verdict == "true" for x in found) > 20


# what can fail


SWITCHED_OFF = [
    ("an output is scaled", "outputs"), ("its exponents are [", "exponent of a value"),
    ("could be loaded", "file or index beside"), ("its bound is", "bound"),
    ("is another tensor", "bits of weights"),
    ("no index names them", "files split"), ("leave others out", "timesteps"),
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.default_rows(1)
@pytest.mark.parametrize(("words", "change"), SWITCHED_OFF)
def test_checker_that_lacks_one_check_lets_a_false_one_through(
    words, change, models, tmp_path, monkeypatch
):
    """With one demand switched off some forgery is accepted, and its own runs contradict it."""
    demand = stopdown_verify.demand
    monkeypatch.setattr(stopdown_verify, "demand", lambda x, what: demand(x or words in what, what))
    forged = (
        forge(model, seed, tmp_path / "forged", [change])
        for seed in range(50)
        for model in models.values()
    )
    found = next((x for x in forged if x.verdict == "false"), None)
    assert found is not None
    assert found.why


def test_certificates_of_the_small_modules_are_true(models):
    """Nothing that a run of them gives contradicts what they state."""
    for model in models.values():
        found = stopdown_verify.examine_certificate(model.certificate, model.folder)
        assert judge(model.certificate, found, model.folder, 0) == []


def test_runs_contradict_what_is_false_of_a_graph(models):
    """A bound, an exponent, a limit, an output and a list that are false are each found."""
    model = models["tokens"]
    found = stopdown_verify.examine_certificate(model.certificate, model.folder)

    def find(key: str, value: Any, rule: str = "") -> str:
        changed = copy.deepcopy(model.certificate)
        (stated,) = changed["components"]
        n = next((n for n in list_nodes(changed) if rule in (n["id"], n["rule"])), stated)
        n[key] = value
        return "; ".join(judge(changed, found, model.folder, 0))

    assert "silu (same) is " in find("bound", [1, -9], "silu")
    assert "silu (same) is stored with other exponents" in find("exponents", [3], "silu")
    assert "beyond its bound" in find("largest", 6e4, "input")
    graph = model.certificate["components"][0]["graphs"][0]
    name = graph["outputs"][0][0]
    assert f"the output {name} is not what it is" in find(
        "graphs", [{**graph, "outputs": [[name, 1]]}]
    )
    weights = model.certificate["components"][0]["weights"]
    wide = {k: {**x, "wide": True} for k, x in weights.items()}
    assert "is held in fp32 is not said" in find("weights", wide)
    moved = {k: {**x, "exponents": [[0, 0, 1, 90]]} for k, x in weights.items()}
    assert "leaves fp16" in find("weights", moved)
    other = {k: {**x, "sha256": "0" * 64} for k, x in weights.items()}
    assert "a loader takes another" in find("weights", other)
    assert "could be loaded instead" in find("files", ["other.safetensors"])
