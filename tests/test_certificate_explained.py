"""What the checker says: a verdict in its first line, and the chain of bounds that leads to a value."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

import stopdown_verify
from models.certificate_forgeries import Model
from models.certified_nets import certify_net
from plans.test_certificate_files import ROOT, make_net


@pytest.fixture(name="tokens", scope="module")
def fixture_tokens(tmp_path_factory) -> tuple[Model, Path]:
    """A block of a transformer, certified by the package, and its file."""
    model = certify_net("tokens", tmp_path_factory.mktemp("tokens"))
    path = model.folder / "certificate.json"
    path.write_text(json.dumps(model.certificate))
    return model, path


def ask(path: Path, capsys: Any, *more: str) -> tuple[int, list[str]]:
    """The exit code and the lines of both streams."""
    code = stopdown_verify.run_checker([str(path), *more])
    said = capsys.readouterr()
    return code, (said.out + said.err).splitlines()


def list_chain(lines: list[str]) -> dict[str, str]:
    """Of each value in the chain what its line says."""
    end = next(i for i, line in enumerate(lines) if line.startswith("Rules (p, N: "))
    return dict(line.split(maxsplit=1) for line in lines[2:end])


def test_the_first_line_is_the_verdict(tmp_path, capsys):
    """Proven, proven in part with what is missing, and refused, each with its own exit code."""
    certificate, path = make_net(tmp_path), tmp_path / "c.json"
    weights = ("--weights", str(tmp_path))
    path.write_text(json.dumps(certificate))
    code, (line, *_) = ask(path, capsys, *weights)
    proven = "Proven: none of 12 fp16 values and weights exceeds 65504, for the inputs below."
    assert (code, line) == (0, proven)
    certificate = make_net(tmp_path, 1000.0) | {"left": {"vae": "it runs in bf16"}}
    certificate["seal"] = stopdown_verify.seal(certificate)
    path.write_text(json.dumps(certificate))
    code, (line, *_) = ask(path, capsys, *weights)
    rest = len(certificate["components"][0]["uncovered"])
    assert rest > 0
    assert (code, line) == (
        3,
        f"Proven in part: {12 - rest} of 12 fp16 values and weights are proven not to exceed 65504. "
        f"Not covered: {rest} values and weights, and whole components (vae).",
    )
    path.write_text(json.dumps({**certificate, "seal": "0" * 64}))
    code, lines = ask(path, capsys, *weights)
    assert (code, lines) == (1, ["Refused: the file was changed: its seal doesn't match"])


def test_inputs_are_said_apart_from_what_is_assumed(tokens, capsys):
    """As data, too, with the seals, all counts and the exit code."""
    model, path = tokens
    _, lines = ask(path, capsys, "--weights", str(model.folder))
    assert "  for inputs: hidden_states up to 64, of shape 1 x 4 x 8" in lines
    assert "  for inputs: every whole timestep from 0 to 1000" in lines
    assert "  assumed: a constant of the call has the values in the certificate" in lines
    assert not [x for x in lines if x.startswith("  assumed: ") and "timestep" in x]
    code, lines = ask(path, capsys, "--weights", str(model.folder), "--json")
    found = json.loads("\n".join(lines))
    assert (found["verdict"], found["exit_code"]) == ("partly", code) == ("partly", 3)
    (stated,) = found["components"]
    assert found["values"] == found["covered"] + len(stated["not_covered"])
    assert found["seal"] == model.certificate["seal"]
    assert found["plan"] == ""
    assert "every whole timestep from 0 to 1000" in stated["inputs"]


def test_a_plan_is_said_to_be_no_certificate(tmp_path, capsys):
    """The wrong file is a mistake of whoever calls, and no forgery."""
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"kind": "plan", "components": []}))
    code, lines = ask(path, capsys, "--weights", str(tmp_path))
    expected = "expected a file that stopdown plan --certificate wrote"
    assert (code, lines) == (2, [f"Can't be read: {path} is a plan, {expected}"])


def test_a_check_needs_the_weights(tmp_path, capsys):
    """Without them nothing is derived; the message says what to type."""
    with pytest.raises(SystemExit) as left:
        stopdown_verify.run_checker([str(tmp_path / "c.json")])
    assert left.value.code == 2
    assert "--weights FOLDER is required: the folder of the pipeline" in capsys.readouterr().err


def test_the_bounds_that_lead_to_a_value_are_shown(tokens, capsys):
    """From the timestep and a norm to a product, each with its rule; nothing that has no part in it."""
    model, path = tokens
    code, lines = ask(path, capsys, "--explain", "net:narrow")
    assert code == 4
    assert lines[0].startswith("Not checked: ")
    nodes = {n["id"]: n for n in model.certificate["components"][0]["graphs"][0]["nodes"]}
    chain = list_chain(lines)
    (last,) = [n for n in nodes.values() if n.get("weight") == "narrow.weight"]
    assert [*chain][-1] == last["id"]
    bound = float(stopdown_verify.read_number(last["bound"]))
    words = f"<= {bound:.4g} (fp16, not covered), from {len(chain) - 1} other values"
    assert lines[1] == f"net:narrow (0:{last['id']}): {words}"
    (wide,) = [x for x in chain if nodes[x].get("weight") == "wide.weight"]
    first, final = min(nodes[wide]["exponents"]), max(nodes[wide]["exponents"])
    assert first < final
    assert f"(fp16 stored times 2^{first} to 2^{final})" in chain[wide]
    (source,) = last["from"]
    assert f"product of {source}, weight narrow.weight, bias narrow.bias" in chain[last["id"]]
    assert [n["rule"] for n in nodes.values() if n["id"] in chain].count("unit") == 1
    assert not [x for x in chain if nodes[x]["rule"] in ("input", "attention", "lookup")]
    assert any("for any input" in x for x in chain.values())
    assert lines[-1].split(maxsplit=1)[0] in stopdown_verify.FORMULAS


def test_what_the_timestep_alone_decides_is_followed_to_it(tokens, capsys):
    """A sine is at most 1 whatever goes in, but what is computed from it depends on its angle."""
    _, path = tokens
    _, lines = ask(path, capsys, "--explain", "net:modulate")
    chain = list_chain(lines)
    assert any("times: every whole timestep from 0 to 1000" in x for x in chain.values())
    assert not any("for any input" in x for x in chain.values())


def test_a_chain_beside_the_weights_begins_with_the_verdict(tokens, capsys):
    """All is checked first: the exit code is that of the certificate, and a forgery shows no chain."""
    model, path = tokens
    weights = ("--weights", str(model.folder), "--explain", "net:out")
    code, lines = ask(path, capsys, *weights)
    assert code == 3
    assert lines[0].startswith("Proven in part: 54 of 56 ")
    assert lines[1].startswith("net:out (0:")
    changed = copy.deepcopy(model.certificate)
    changed["components"][0]["graphs"][0]["nodes"][-1]["bound"][1] -= 1
    other = model.folder / "changed.json"
    other.write_text(json.dumps(changed))
    code, lines = ask(other, capsys, *weights)
    assert code == 1
    assert len(lines) == 1


def test_a_chain_is_data_for_programs(tokens, capsys):
    """Each value of the chain follows from values before it."""
    _, path = tokens
    code, lines = ask(path, capsys, "--explain", "net:narrow", "--json")
    found = json.loads("\n".join(lines))
    assert (code, found["verdict"]) == (4, "unchecked")
    seen = set[str]()
    for x in found["explained"]["chain"]:
        assert seen.issuperset(x["follows_from"])
        seen.add(x["value"])
    assert x["module"] == "narrow"
    assert x["rule"] == "product"
    assert not x["covered"]


def test_a_tensor_is_explained_by_its_exponents(tokens, capsys):
    """Which rows are stored times which power of two, and which value reads them."""
    model, path = tokens
    stated = model.certificate["components"][0]
    name = next(k for k, x in stated["weights"].items() if x["exponents"] and k.startswith("wide"))
    _, lines = ask(path, capsys, "--explain", f"net:{name}")
    dim, first, last, exponent = stated["weights"][name]["exponents"][0]
    assert lines[1] == f"net:{name}: a tensor held in fp16"
    words = f"  {('rows', 'columns')[dim]} {first} to {last - 1}: stored times 2^{exponent}"
    assert lines[2] == words
    reader = next(n["id"] for n in stated["graphs"][0]["nodes"] if n.get("weight") == name)
    assert lines[-1] == f"  read by 0:{reader}"


def test_an_unknown_name_gets_the_closest(tokens, capsys):
    """One line with what is there, before anything is checked."""
    model, path = tokens
    for more in ((), ("--weights", str(model.folder))):
        code, (line, *rest) = ask(path, capsys, "--explain", "net:narow", *more)
        assert (code, rest) == (2, [])
        found = "the certificate has no value 'net:narow', expected COMPONENT:NAME (closest: "
        assert line.startswith(f"Can't be read: {found}")
        assert "net:narrow" in line


def test_every_rule_has_its_formula():
    """Whatever rule a chain has, its formula stands below it."""
    assert {*stopdown_verify.FORMULAS} == {*stopdown_verify.GRAMMAR}


def test_the_page_has_every_exit_code(capsys):
    """The page and the help name each code, and the page each verdict, as JSON has it."""
    page = (ROOT / "docs" / "certificate-file.md").read_text(encoding="utf-8")
    rows = [x.split("|")[1:3] for x in page.splitlines() if x.startswith("| ") and "`" in x]
    stated = {name.strip(" `"): int(code) for code, name in rows if code.strip().isdecimal()}
    assert stated == stopdown_verify.STATUS
    with pytest.raises(SystemExit):
        stopdown_verify.run_checker(["--help"])
    said = capsys.readouterr().out.partition("exit codes:")[2]
    assert [int(x.split()[0]) for x in said.strip().splitlines()] == sorted(stated.values())
