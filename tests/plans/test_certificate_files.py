"""Certificate files and their checker, which runs without torch and without the library."""

from __future__ import annotations

import copy
import json
import math
import random
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import stopdown_verify
from models.bound_ascent import bound_one, climb
from models.certified_nets import trace
from models.rescaling_models import make_example
from stopdown import rescale_
from stopdown.errors import SourceError
from stopdown.fold_names import name_parameters
from stopdown.plans.certificate_files import export_calls, write_certificate
from stopdown.plans.certified import Scope, certify_plan
from stopdown.records import ComponentPlan, Scaling
from stopdown.scaling.bounds.values import uniform
from stopdown.scaling.graph.nodes import shape_of
from stopdown.scaling.trials import measurement
from stopdown.scaling.trials.traced_calls import TracedCalls
from stopdown.sources.sources import resolve_source
from stopdown.testing import save_pipeline

ROOT = Path(__file__).parents[2]
SAFETENSORS = {"float16": "F16", "float32": "F32"}


def write_weights(path: Path, tensors: dict[str, Any]) -> None:
    """A safetensors file."""
    header, at = {}, 0
    for name, x in tensors.items():
        header[name] = {"dtype": SAFETENSORS[str(x.dtype)], "shape": list(x.shape),
                        "data_offsets": [at, at + x.nbytes]}  # fmt: skip
        at += x.nbytes
    text = json.dumps(header).encode()
    content = (
        len(text).to_bytes(8, "little") + text + b"".join(x.tobytes() for x in tensors.values())
    )
    path.write_bytes(content)


def node(key: str, rule: str, sources: list[str], shape: list[int], **more: Any) -> dict[str, Any]:
    given = {"id": key, "place": "", "rule": rule, "from": sources, "shape": shape}
    return {**given, "dtype": "fp16", **more}


def make_net(folder: Path, size: float = 1.0) -> dict[str, Any]:
    """A gated block behind a norm, between two exponents that cancel; filled in."""
    rng = np.random.default_rng(0)
    shapes = {"up": (12, 8), "gate": (12, 8), "down": (8, 12)}
    tensors = {k: (rng.normal(size=s) * size).astype(np.float32) for k, s in shapes.items()}
    tensors |= {
        "norm": rng.normal(size=8).astype(np.float32),
        "bias": rng.normal(size=8).astype(np.float32),
    }
    (folder / "net").mkdir(parents=True, exist_ok=True)
    write_weights(folder / "net" / "model.safetensors", tensors)
    exponents = {"up": [[0, 0, 12, -3]], "down": [[0, 0, 8, 3]]}
    nodes = [
        node("x", "input", [], [2, 5, 8], largest=64.0, name="x"),
        node("normed", "norm", ["x"], [2, 5, 8], inner=1, eps=0, weight="norm", bias="bias"),
        node("a", "product", ["normed"], [2, 5, 12], weight="up"),
        node("b", "product", ["normed"], [2, 5, 12], weight="gate"),
        node("s", "same", ["b"], [2, 5, 12], function="silu"),
        node("m", "multiply", ["a", "s"], [2, 5, 12]),
        node("y", "product", ["m"], [2, 5, 8], weight="down"),
        node("sum", "add", ["x", "y"], [2, 5, 8]),
    ]  # fmt: skip
    stated = {
        "component": "net", "class": "Net", "files": ["model.safetensors"], "fp32_modules": [],
        "weights": {k: {"exponents": exponents.get(k, []), "wide": False} for k in tensors},
        "graphs": [{"method": "", "nodes": nodes, "outputs": [["sum", 0]]}],
    }  # fmt: skip
    stopdown_verify.check_component(stated, folder, write=True)
    made = {"kind": "certificate", "plan": "", "components": [stated], "left": {}}
    return {**made, "seal": stopdown_verify.seal(made)}


@pytest.fixture(name="net")
def fixture_net(tmp_path: Path) -> tuple[dict[str, Any], Path]:
    return make_net(tmp_path), tmp_path


def test_certificate_of_a_block_is_proven_and_shown_by_the_command(net, tmp_path):
    """The command prints what is covered and assumed, exits with 0, and loads no torch and no Stopdown."""
    certificate, folder = net
    path = tmp_path / "certificate.json"
    path.write_text(json.dumps(certificate))
    code = ("import sys, stopdown_verify; code = stopdown_verify.run_checker(); "
            "assert not {'torch', 'stopdown'} & {*sys.modules}; sys.exit(code)")  # fmt: skip
    command = [sys.executable, "-c", code, str(path), "--weights", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT / "src")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "Proven: none of 12 fp16 values and weights exceeds 65504, for the inputs below.",
        "net: 12 of 12 fp16 values and weights are proven not to exceed 65504",
        "  for inputs: x up to 64, of shape 2 x 5 x 8",
        *(f"assumed throughout: {words}" for words in stopdown_verify.ASSUMED),
    ]
    certificate["components"][0]["graphs"][0]["nodes"][-1]["bound"][1] -= 1
    path.write_text(json.dumps(certificate))
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT / "src")
    assert done.returncode == 1
    assert done.stderr.startswith("Refused: net: sum (add): its bound is ")


def test_value_that_can_overflow_is_listed_and_may_not_be_left_out(tmp_path):
    """With weights a thousand times larger the product leaves fp16, and the list has to say so."""
    certificate = make_net(tmp_path, 1000.0)
    stated = certificate["components"][0]
    assert "0:m" in stated["uncovered"]
    lines = stopdown_verify.check_certificate(certificate, tmp_path)
    (line,) = [x for x in lines if x.startswith("  not covered: ")]
    names = line.partition(": ")[2].split(", ")
    assert "0:m" in names
    assert f"  to see why: --explain net:{names[0]}" in lines
    assert stopdown_verify.explain_value(certificate, f"net:{names[0]}")
    stated["uncovered"].remove("0:m")
    with pytest.raises(stopdown_verify.Refused, match="list of uncovered values isn't complete"):
        stopdown_verify.check_certificate(certificate, tmp_path)


def test_no_run_within_the_limits_exceeds_a_bound(net):
    """Random runs in float64, with weights rounded as fp16 stores them, and sign patterns stay below it."""
    certificate, folder = net
    stated = certificate["components"][0]
    weights = stopdown_verify.open_weights(folder / "net", stated["files"], stated["weights"])
    w = {k: np.concatenate([r for _, r in x.read()]).reshape(x.shape) for k, x in weights.items()}
    exponents = {"up": -3.0, "down": 3.0}
    w = {k: (x * 2 ** exponents.get(k, 0.0)).astype(np.float16).astype(float) / 2 ** exponents.get(k, 0.0)
         for k, x in w.items()}  # fmt: skip
    bounds = {
        n["id"]: float(stopdown_verify.read_number(n["bound"]))
        for n in stated["graphs"][0]["nodes"]
    }
    rng, nearest = np.random.default_rng(1), 0.0
    for turn in range(200):
        x = rng.uniform(-64, 64, size=(10, 8))
        if turn % 2:  # aligned with a row of a matrix, as far as the norm allows
            x = np.sign(w["up"][turn % 12] * w["norm"]) * 64 * np.ones((10, 1))
            x[:, turn % 8] *= rng.uniform(-1, 1, size=10)
        n = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * w[
            "norm"
        ] + w["bias"]
        a, b = n @ w["up"].T, n @ w["gate"].T
        m = a * (b / (1 + np.exp(-b)))
        y = m @ w["down"].T
        for name, value in {"normed": n, "a": a, "b": b, "m": m, "y": y, "sum": x + y}.items():
            assert np.abs(value).max() <= bounds[name], name
            nearest = max(nearest, np.abs(value).max() / bounds[name])
    assert nearest > 0.3  # the bounds are not so loose that nothing could break them


def test_checker_that_derives_nothing_would_accept_changes(net, monkeypatch):
    """The changes are refused by the comparison of bounds: without it a lower bound passes."""
    certificate, folder = net
    changed = copy.deepcopy(certificate)
    changed["components"][0]["graphs"][0]["nodes"][2]["bound"][1] -= 1
    changed["seal"] = stopdown_verify.seal(changed)
    with pytest.raises(stopdown_verify.Refused, match=r"a \(product\): its bound is"):
        stopdown_verify.check_certificate(changed, folder)
    monkeypatch.setattr(stopdown_verify.Graph, "compare", lambda self, n, value, users: None)
    changed["components"][0]["uncovered"] = []
    with pytest.raises(stopdown_verify.Refused, match="unread"):  # nothing was read then either
        stopdown_verify.check_certificate(changed, folder)


def test_exponents_that_do_not_cancel_are_refused(net):
    """A sum of two values with other exponents, and a function that wants the values themselves."""
    certificate, folder = net
    stated = certificate["components"][0]
    stated["weights"]["down"]["exponents"] = [[0, 0, 8, 2]]
    with pytest.raises(stopdown_verify.Refused, match="the exponents of a sum differ"):
        stopdown_verify.check_component(stated, folder, write=True)
    stated["weights"]["gate"]["exponents"] = [[0, 0, 12, 1]]
    with pytest.raises(stopdown_verify.Refused, match="silu is given scaled values"):
        stopdown_verify.check_component(stated, folder, write=True)


# five rules once more, in rational arithmetic

ROOT_BITS = 80
FRACTIONS = st.fractions(min_value=-8, max_value=8, max_denominator=64)


def root(x: Fraction) -> Fraction:
    """The square root, less than 2**-80 too large."""
    return Fraction(math.isqrt(math.ceil(x * 4**ROOT_BITS)) + (x > 0), 2**ROOT_BITS)


def agree(found: Any, exact: list[Fraction]) -> None:
    """No less than the exact bound, and more by a millionth at most."""
    values = np.broadcast_to(found, (len(exact),)) if np.ndim(found) else [found] * len(exact)
    for value, wanted in zip(values, exact, strict=True):
        assert (
            wanted
            <= Fraction(float(value))
            <= wanted * (1 + Fraction(1, 10**6)) + Fraction(1, 2**60)
        )


def make_value(peaks: list[Fraction], norm: Fraction) -> stopdown_verify.Value:
    made = stopdown_verify.bound(
        (1, len(peaks)), np.array([list(map(float, peaks))]), float(norm), (1,)
    )
    made.exponents = np.zeros((1, 1), dtype=np.int64)
    return made


def open_graph(folder: Path, tensors: dict[str, Any]) -> stopdown_verify.Graph:
    write_weights(folder / "a.safetensors", tensors)
    stated = {"nodes": [node("x", "input", [], [1, 3])], "outputs": []}
    return stopdown_verify.Graph(
        stated, stopdown_verify.open_weights(folder, ["a.safetensors"], {}), False
    )


PEAKS = st.lists(st.fractions(min_value=0, max_value=8, max_denominator=64), min_size=3, max_size=3)
NORM = st.fractions(min_value=Fraction(1, 2), max_value=20, max_denominator=8)


@settings(max_examples=40, deadline=None)
@given(PEAKS, NORM, st.lists(FRACTIONS, min_size=6, max_size=6))
def test_rule_of_products_agrees_with_rationals(tmp_path_factory, peaks, norm, entries):
    """The least of magnitudes and norms, room for weights in fp16 and for sums in fp32."""
    w = np.array(list(map(float, entries)), dtype=np.float32).reshape(2, 3)
    graph = open_graph(tmp_path_factory.mktemp("w"), {"w": w})
    x = make_value(peaks, norm)
    found = stopdown_verify.rule_product(
        graph, node("y", "product", ["x"], [1, 2], weight="w"), [x]
    )
    low, more, exact = Fraction(1, 2**25), 1 + Fraction(1, 2**11), []
    norm = min(norm, root(sum(p * p for p in peaks)))
    peaks = [min(p, norm) for p in peaks]
    for row in w:
        row = [abs(Fraction(float(v))) for v in row]
        full = sum(v * p for v, p in zip(row, peaks, strict=True)) * more + low * sum(peaks)
        length = root(sum(v * v for v in row)) * more + low * root(Fraction(3))
        exact.append(min(full, length * norm) + 3 * Fraction(1, 2**23) * full)
    whole = root(sum(v * v for v in exact))
    agree(found.peak.reshape(-1), [min(v, whole) for v in exact])


@settings(max_examples=60, deadline=None)
@given(PEAKS, NORM, PEAKS, NORM, st.sampled_from([1, -1, 2]))
def test_rules_of_sums_and_products_by_element_agree_with_rationals(a, norm_a, b, norm_b, factor):
    """Elements and norms of `a + k b` and `a b`."""
    x, y = make_value(a, norm_a), make_value(b, norm_b)
    node = {"shape": [1, 3], "factor": factor}
    norm_a, norm_b = (min(n, root(sum(p * p for p in v))) for n, v in ((norm_a, a), (norm_b, b)))
    a, b = [min(p, norm_a) for p in a], [min(p, norm_b) for p in b]
    total = [p + abs(factor) * q for p, q in zip(a, b, strict=True)]
    norm = min(norm_a + abs(factor) * norm_b, root(sum(v * v for v in total)))
    found = stopdown_verify.rule_add(None, node, [x, y])
    agree(found.peak.reshape(-1), [min(v, norm) for v in total])
    agree(found.norm, [norm])
    product = [p * q for p, q in zip(a, b, strict=True)]
    norm = min(norm_a * max(b), norm_b * max(a), root(sum(v * v for v in product)))
    found = stopdown_verify.rule_multiply(None, {"shape": [1, 3]}, [x, y])
    agree(found.peak.reshape(-1), [min(v, norm) for v in product])
    agree(found.norm, [norm])


@settings(max_examples=40, deadline=None)
@given(st.lists(FRACTIONS, min_size=3, max_size=3), st.lists(FRACTIONS, min_size=3, max_size=3))
def test_rule_of_norms_agrees_with_rationals(tmp_path_factory, gain, shift):
    """`sqrt(d) |g| + |b|` by channel, and `sqrt(d) max |g| + norm(b)` for a row."""
    tensors = {
        k: np.array(list(map(float, v)), dtype=np.float32) for k, v in (("g", gain), ("b", shift))
    }
    graph = open_graph(tmp_path_factory.mktemp("w"), tensors)
    x = make_value([Fraction(1)] * 3, Fraction(2))
    given = {"shape": [1, 3], "inner": 1, "weight": "g", "bias": "b"}
    found = stopdown_verify.rule_norm(graph, given, [x])
    more, low = 1 + Fraction(1, 2**11), Fraction(1, 2**25)
    g = [abs(Fraction(float(v))) * more + low for v in tensors["g"]]
    b = [abs(Fraction(float(v))) * more + low for v in tensors["b"]]
    longest = root(Fraction(3)) * (1 + Fraction(1, 2**10))
    peaks = [longest * p + q for p, q in zip(g, b, strict=True)]
    norm = min(longest * max(g) + root(sum(q * q for q in b)), root(sum(p * p for p in peaks)))
    agree(found.norm, [norm])
    agree(found.peak.reshape(-1), [min(p, norm) for p in peaks])


@settings(max_examples=40, deadline=None)
@given(st.lists(PEAKS, min_size=2, max_size=2), NORM)
def test_rule_of_attention_agrees_with_rationals(tokens, norm):
    """By channel the largest over the tokens; a row is no longer than the longest of the values."""
    peaks = np.array([[list(map(float, row)) for row in tokens]])[None]
    value = stopdown_verify.bound((1, 1, 2, 3), peaks, float(norm), (3,))
    query = stopdown_verify.bound((1, 1, 4, 3), 1.0)
    found = stopdown_verify.rule_attention(None, {"shape": [1, 1, 4, 3]}, [query, value, value])
    norm = min(norm, max(root(sum(p * p for p in row)) for row in tokens))
    exact = [max(min(row[c], norm) for row in tokens) for c in range(3)]
    norm = min(norm, root(sum(p * p for p in exact)))
    agree(found.peak.reshape(-1), [min(p, norm) for p in exact])
    agree(found.norm, [norm])


HEADS, WIDTH, INNER = 2, 4, 12


def make_attention(
    folder: Path, dtype: str = "fp16"
) -> tuple[stopdown_verify.Graph, dict[str, Any]]:
    """A norm, attention over its rows with a bias on the values, and the linear behind it."""
    rng = np.random.default_rng(3)
    tensors = {"v": rng.normal(size=(HEADS * WIDTH, INNER)), "b": rng.normal(size=HEADS * WIDTH),
               "o": rng.normal(size=(6, HEADS * WIDTH)), "g": np.ones(INNER)}  # fmt: skip
    tensors = {k: x.astype(np.float32) for k, x in tensors.items()}
    write_weights(folder / "a.safetensors", tensors)
    whole, split = [1, 3, HEADS * WIDTH], [1, 3, HEADS, WIDTH]
    turned = [1, HEADS, 3, WIDTH]
    nodes = [
        node("x", "input", [], [1, 3, INNER], name="x", largest=64.0),
        node("n", "norm", ["x"], [1, 3, INNER], weight="g", inner=1, eps=0),
        node("v", "product", ["n"], whole, weight="v", bias="b"),
        node("view", "view", ["v"], split),
        node("turn", "order", ["view"], turned, order=[0, 2, 1, 3]),
        node("cast", "same", ["turn"], turned, function="cast") | {"dtype": dtype},
        node("mean", "attention", ["cast", "cast", "cast"], turned) | {"dtype": dtype},
        node("back", "order", ["mean"], split, order=[0, 2, 1, 3]),
        node("rows", "view", ["back"], whole),
        node("y", "product", ["rows"], [1, 3, 6], weight="o"),
    ]  # fmt: skip
    weights = stopdown_verify.open_weights(folder, ["a.safetensors"], {})
    return stopdown_verify.Graph({"nodes": nodes, "outputs": []}, weights, True), tensors


def test_values_and_output_are_one_map(tmp_path):
    """Tokens that each point along a head's part of one output come near its bound, and none is beyond."""
    graph, w = make_attention(tmp_path)
    graph.check()
    v, o = (w[k].astype(np.float64) for k in ("v", "o"))
    parts = (
        o.reshape(6, HEADS, WIDTH).transpose(1, 0, 2) @ v.reshape(HEADS, WIDTH, INNER)
    ).transpose(1, 0, 2)
    reached = np.linalg.norm(parts, axis=2).sum(1) * math.sqrt(INNER) + np.abs(o @ w["b"])
    found = float(stopdown_verify.read_number(graph.nodes["y"]["bound"]))
    assert reached.max() <= found <= reached.max() * 1.05
    apart = np.linalg.norm(o, axis=1) * math.sqrt(INNER) * np.linalg.norm(v, 2)
    assert found < apart.max()


def test_values_are_followed_through_heads_alone(tmp_path):
    """In bf16 the mean is rounded more coarsely; other dimensions are not the heads of the values."""
    graph, _ = make_attention(tmp_path, "bf16")
    assert graph.find_heads(graph.nodes["y"]) is None
    graph, _ = make_attention(tmp_path)
    assert graph.find_heads(graph.nodes["y"]) == (HEADS, WIDTH, graph.nodes["v"])
    for key, name, other in (("turn", "order", [0, 1, 2, 3]), ("view", "shape", [1, 3, 4, 2]),
                             ("mean", "shape", [1, 4, 3, 2]), ("rows", "rule", "join")):  # fmt: skip
        changed = copy.deepcopy(graph.stated)
        next(n for n in changed["nodes"] if n["id"] == key)[name] = other
        other = stopdown_verify.Graph(changed, graph.weights, True)
        assert other.find_heads(other.nodes["y"]) is None


def test_norm_of_mixed_elements_holds_only_where_rows_are_whole():
    """Each channel may take its element from another row, as a maximum does: a row can become longer."""
    rows = np.array([[3.0, 0.0], [0.0, 3.0]])  # each of norm 3, the maximum over both of norm 4.2
    x = replace(stopdown_verify.bound((1, 2, 2), 3.0, 3.0, (2,)), exponents=0)
    node = {"shape": [1, 1, 2], "dims": [1], "of": "places"}
    found = stopdown_verify.rule_mix(None, node, [x])
    assert found.norm >= np.linalg.norm(rows.max(0))
    for of in ("rows", "mean", "repeats"):
        found = stopdown_verify.rule_mix(None, {**node, "of": of}, [x])
        assert 3.0 <= found.norm < 3.001


def test_a_mix_of_nothing_is_refused():
    """Means of neighbours name the dimension that they are taken along, even where it keeps its size."""
    x = replace(stopdown_verify.bound((1, 2, 2), np.array([[[1.0, 2.0], [8.0, 4.0]]])), exponents=0)
    with pytest.raises(stopdown_verify.Refused, match="nothing is mixed"):
        stopdown_verify.check_shape(
            node("y", "mix", [], [1, 2, 2], dims=[], of="rows"), [x.shape], {}
        )
    mixed = node("y", "mix", [], [1, 2, 2], dims=[1], of="rows")
    stopdown_verify.check_shape(mixed, [x.shape], {})
    found = stopdown_verify.rule_mix(None, mixed, [x])
    assert found.peak.reshape(-1).tolist() == pytest.approx([8.0, 4.0])


@pytest.mark.parametrize("shape", [(1 << 20,), (1, 1 << 20), (1 << 20, 2)])
def test_a_bound_of_many_places_has_fewer(shape):
    """The largest along the longest dimension is kept; along the last one only where it is alone."""
    peak = np.arange(math.prod(shape), dtype=np.float64).reshape(shape)
    found = stopdown_verify.bound(shape, peak)
    assert found.peak.size <= stopdown_verify.MOST
    assert peak.max() <= found.peak.max() <= peak.max() * 1.001


def test_a_join_of_many_places_is_bounded_by_its_parts():
    """Where it has too many places to keep one bound for each, a channel has the larger of the two."""
    rng = np.random.default_rng(0)
    shape, peaks = (1, 1 << 14, 64), [rng.random((1, 1, 64)) for _ in range(2)]
    parts = [stopdown_verify.bound(shape, x) for x in peaks]
    joined = {"rule": "join", "dim": 1, "shape": [1, 1 << 15, 64]}
    found = stopdown_verify.move_value(joined, parts)
    assert (np.maximum(*peaks) <= found.peak).all()
    assert (found.peak <= np.maximum(*peaks) * 1.001).all()
    assert found.norm == pytest.approx(max(np.linalg.norm(x) for x in peaks))


@pytest.mark.parametrize("function", ["sigmoid", "tanh", "erf"])
def test_value_without_bound_is_listed_before_a_saturating_function(function):
    """It may be NaN, which no saturating function mends; with a bound beyond fp16 it is at most Inf."""

    def list_uncovered(rule: str, **more: Any) -> list[str]:
        nodes = [
            node("x", "input", [], [4], name="x", largest=1000.0),
            node("u", rule, ["x"], [4], **more),
            node("y", "bounded", ["u"], [4], function=function),
        ]  # fmt: skip
        graph = stopdown_verify.Graph({"nodes": nodes, "outputs": [["y", 0]]}, {}, True)
        graph.check()
        return graph.uncovered

    assert list_uncovered("unknown", function="f", alike=False) == ["u"]
    assert list_uncovered("power", halves=4) == []


class Moving(torch.nn.Module):
    """One operation that keeps the size between a value with small and large places and the output."""

    def __init__(self, operation: str) -> None:
        super().__init__()
        self.operation = operation
        self.register_parameter("size", torch.nn.Parameter(torch.tensor([1.0, 2.0, 100.0, 4.0])))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.tanh() * self.size
        made = {
            "avg_pool1d": lambda: F.avg_pool1d(x, 3, stride=1, padding=1),
            "avg_pool2d": lambda: F.avg_pool2d(x[None], (1, 3), stride=1, padding=(0, 1))[0],
            "pad": lambda: F.pad(x, (1, -1)),
            "pad_sequence": lambda: torch.nn.utils.rnn.pad_sequence([x[0, :1], x[0]], True)[1:],
            "rotation": lambda: torch.view_as_real(
                torch.view_as_complex(x.unflatten(2, (2, 2)))
                * torch.polar(torch.ones(2, 2), torch.tensor([[0.0, 1.0], [2.0, 3.0]]))
            ).flatten(2),
            "einsum": lambda: torch.einsum("abc->bca", x).permute(2, 0, 1),
            "repeat_interleave": lambda: torch.repeat_interleave(
                x, torch.tensor([0, 0, 4, 0]), dim=2, output_size=4
            ),
        }  # fmt: skip
        return made[self.operation]() * 1


def export_net(
    module: torch.nn.Module, calls: list[Any], folder: Path, scaling: Scaling | None = None
) -> Any:
    """What a certificate says of a module, whose weights are saved as those of the component `net`."""
    from safetensors.torch import save_model

    (folder / "net").mkdir()
    save_model(module, str(folder / "net" / "a.safetensors"))
    entry = ComponentPlan("net", precision="fp16", scaling=scaling or Scaling())
    load = name_parameters(module).__getitem__
    return export_calls(trace(module, calls), entry, folder, ["a.safetensors"], load)


def read_graph(stated: dict[str, Any], folder: Path) -> stopdown_verify.Graph:
    weights = stopdown_verify.open_weights(folder / "net", stated["files"], stated["weights"])
    return stopdown_verify.Graph(stated["graphs"][0], weights, True)


def export_one(module: torch.nn.Module, x: torch.Tensor, folder: Path) -> Any:
    """The certificate of a module that is called with one tensor in fp16, and its graph."""
    module.eval().requires_grad_(False)
    stated = export_net(module, [(module, (x,), {})], folder)
    return stated, read_graph(stated, folder)


MOVES = (
    "avg_pool1d", "avg_pool2d", "pad", "einsum", "pad_sequence", "rotation", "repeat_interleave",
)  # fmt: skip


@pytest.mark.parametrize("operation", MOVES)
def test_what_moves_elements_and_keeps_the_size_is_bounded(operation, tmp_path):
    """A large place reaches its neighbours: neither the plan's nor the checker's bound is below it."""
    module, x = Moving(operation).eval().requires_grad_(False), torch.full((1, 2, 4), 100.0)
    case, result = bound_one(module, module, (x,), {}), module(x)
    last = case.list_nodes()[-1]
    found = case.bounds.values[last.name].peak
    assert bool((result.abs() <= found * (1 + 1e-6)).all())
    stated = export_net(module, [(module, (x,), {})], tmp_path)
    graph = read_graph(stated, tmp_path)
    peaks: dict[str, Any] = {}
    derive = graph.derive

    def keep(n: dict[str, Any]) -> Any:
        value = derive(n)
        peaks[n["id"]] = value.peak
        return value

    graph.derive = keep  # type: ignore[method-assign]
    graph.check()
    peak = np.broadcast_to(peaks[stated["graphs"][0]["outputs"][0][0]], result.shape)
    assert (result.abs().numpy() <= peak).all()


class Normed(torch.nn.Module):
    """A row of length 1 in one of the ways that code has, times a number that fp16 holds only then."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.register_parameter("size", torch.nn.Parameter(torch.tensor([1e3, 2e3, 100.0, 4.0])))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float() * 3e4  # at the end of fp16, and its squares far beyond
        made = {
            "normalize": lambda: F.normalize(wide, dim=-1),
            "divided": lambda: wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt(),
            "multiplied": lambda: wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6),
            "layer norm": lambda: F.layer_norm(wide, (4,), self.size.float()),
            "exp": lambda: (x.tanh() * 9.0).clamp(-30.0, 20.0).exp(),
        }  # fmt: skip
        return made[self.way]().to(x.dtype) * 4.0


@pytest.mark.parametrize("way", ["normalize", "divided", "multiplied", "layer norm", "exp"])
def test_what_is_of_length_one_has_a_bound(way, tmp_path):
    """Every value in fp16 is covered, and no run exceeds the bound of the output."""
    stated, graph = export_one(Normed(way), torch.full((2, 4), 100.0), tmp_path)
    graph.check()
    assert graph.uncovered == []
    ((output, _),) = stated["graphs"][0]["outputs"]
    bound = float(stopdown_verify.read_number(graph.nodes[output]["bound"]))
    module = Normed(way)
    for x in (torch.tensor([[1.0, 0.0, 0.0, 0.0]]), torch.randn(8, 4)):
        assert float(module(x).detach().abs().max()) <= bound


class Embedded(torch.nn.Module):
    """Two embeddings whose sum another linear reads, as time and text in a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.text, self.out = (
            torch.nn.Linear(8, 16),
            torch.nn.Linear(8, 16),
            torch.nn.Linear(16, 4),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.out(F.silu(self.time(x) + self.text(x)))
        return made


def test_lengths_of_rows_are_asked_for_through_sums(tmp_path):
    """The rows of both embeddings have witnesses of singular values: their sum is read by a linear."""
    module, x = Embedded().requires_grad_(False), torch.ones(2, 8)
    stated = export_net(module, [(module, (x,), {})], tmp_path)
    asked = {n["weight"]: "sigma" in n for n in stated["graphs"][0]["nodes"] if "weight" in n}
    assert asked == {"time.weight": True, "text.weight": True, "out.weight": False}


def test_whole_numbers_are_off_by_what_a_cast_cuts_off():
    """Steps of 0.9 that are cast to whole numbers are 0, and the known value has to say so."""
    nodes = [
        node("t", "times", [], [1], name="t", first=0.9, last=0.9, count=1, radius=0.0, dtype="fp32"),
        node("i", "same", ["t"], [1], function="cast", dtype="int"),
    ]  # fmt: skip
    graph = stopdown_verify.Graph({"nodes": nodes, "outputs": []}, {}, True)
    graph.check()
    center, radius, _ = graph.values["i"].exact
    assert abs(0.0 - center.item()) <= radius.item()


def test_page_has_every_rule():
    """Readers of the page see each rule that the checker knows, as a formula, and no other."""
    page = (ROOT / "docs" / "certificate-file.md").read_text()
    rows = page.partition("## Rules")[2].partition("## What is assumed")[0].splitlines()
    cells = [x.split("|")[1:3] for x in rows if x.startswith("| `")]
    named = [name for first, _ in cells for name in first.split("`")[1::2]]
    known = {*stopdown_verify.RULES, "input", "times", "known", "weight"}
    assert {*named} == known == {*stopdown_verify.GRAMMAR}
    bare = [first.strip(" `") for first, second in cells if second.count("$") < 2]
    assert bare == ["input", "unknown"]


def open_weight(folder: Path, kind: str, content: Any, exponents: Any = ()) -> Any:
    """A tensor of a safetensors file, of any dtype that they have."""
    entry = {"dtype": kind, "shape": list(content.shape), "data_offsets": [0, content.nbytes]}
    header = json.dumps({"w": entry}).encode()
    (folder / "a.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + content.tobytes()
    )
    return stopdown_verify.open_weights(
        folder, ["a.safetensors"], {"w": {"exponents": [list(x) for x in exponents]}}
    )["w"]


KINDS = {
    "BF16": np.uint16, "F16": np.float16, "F32": np.float32, "F64": np.float64, "I8": np.int8,
    "I64": np.int64, "U8": np.uint8,
}  # fmt: skip


@pytest.mark.parametrize("kind", [*KINDS])
@pytest.mark.parametrize("exponents", [(), [(0, 1, 3, 4), (1, 2, 5, -3)]])
def test_largest_magnitude_of_a_weight_is_found_in_its_bits(kind, exponents, tmp_path, monkeypatch):
    """It is that of the values in float64, to the bit, and nothing is widened but the largest."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 256, size=6 * 8 * np.dtype(KINDS[kind]).itemsize, dtype=np.uint8)
    content = bits.view(KINDS[kind])
    if kind in ("F16", "F32", "F64"):
        content = rng.normal(size=48).astype(KINDS[kind])
    if kind == "BF16":
        content = rng.normal(size=48).astype(np.float32).view(np.uint32).astype(np.uint32) >> 16
        content = content.astype(np.uint16)
    weight = open_weight(tmp_path, kind, content.reshape(6, 8), exponents)
    rows = np.concatenate([x for _, x in weight.read()])
    stored = np.abs(rows * 2.0**weight.columns * (2.0**weight.rows)[:, None]).max()
    expected = stored * (1 + stopdown_verify.WEIGHT) + stopdown_verify.STORED
    monkeypatch.setattr(weight, "read", None)
    assert weight.measure() == expected


@pytest.mark.parametrize("kind", ["BF16", "F16", "F32", "F64"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_weight_that_is_no_number_is_not_covered(kind, value, tmp_path):
    """No magnitude that fp16 holds stands for an infinity or for what is no number."""
    content = np.ones((2, 3), np.float32)
    content[1, 2] = value
    if kind == "BF16":
        content = (content.view(np.uint32) >> 16).astype(np.uint16)
    else:
        content = content.astype(KINDS[kind])
    weight = open_weight(tmp_path, kind, content)
    assert not weight.measure() <= stopdown_verify.LARGEST


@pytest.mark.parametrize("found", [0.0, 5e-324, 1.0, 65504.0, 3.3e38, 1.7e308])
def test_stated_bound_follows_exactly_as_a_rational_number_does(found):
    """From one mantissa to the next, around the derived bound and around what may be stated at most."""
    number, exponent = stopdown_verify.write_number(found)
    for mantissa in range(max(number - 300, 0), number + 300):
        stated = stopdown_verify.read_number([mantissa, exponent])
        holds = Fraction(found) <= stated <= Fraction(found) * stopdown_verify.TOLERANCE
        assert stopdown_verify.follows([mantissa, exponent], found) == holds


def test_linears_that_read_one_value_split_its_table_once(tmp_path, monkeypatch):
    """Query, key and value have casts of their own, and one table of timesteps."""
    from models.certified_nets import certify_net

    model, tables = certify_net("tokens", tmp_path), list[Any]()
    split = stopdown_verify.split_table

    def keep(table: Any) -> Any:
        tables.append(table)
        return split(table)

    monkeypatch.setattr(stopdown_verify, "split_table", keep)
    stopdown_verify.check_certificate(model.certificate, tmp_path)
    assert len(tables) == len({id(x) for x in tables}) > 1


def test_what_is_known_is_not_copied_by_a_cast(tmp_path):
    """A table of timesteps that is cast is the same array, so that large ones are held once."""
    nodes = [
        node("t", "times", [], [1, 1], name="t", first=0, last=1000, count=1001, radius=0.0, dtype="fp32"),
        node("y", "product", ["t"], [1, 8], weight="w", dtype="fp32"),
        node("c", "same", ["y"], [1, 8], function="cast"),
    ]  # fmt: skip
    write_weights(tmp_path / "a.safetensors", {"w": np.ones((8, 1), np.float32)})
    weights = stopdown_verify.open_weights(tmp_path, ["a.safetensors"], {})
    graph = stopdown_verify.Graph({"nodes": nodes, "outputs": [["y", 0], ["c", 0]]}, weights, True)
    graph.check()
    assert graph.values["c"].exact[0] is graph.values["y"].exact[0]


# certificates of plans


@pytest.fixture(name="encoder", scope="module")
def fixture_encoder(tmp_path_factory) -> tuple[dict[str, Any], Path, Path]:
    """A tiny T5 that overflows, planned from its weights, and its certificate."""
    place = tmp_path_factory.mktemp("certificate")
    folder = save_pipeline("cogvideox", place / "model", overflow="text_encoder")
    source = resolve_source(folder)
    traced = dict[str, TracedCalls]()
    plan = certify_plan(source, residual="fp32", scope=Scope(("text_encoder",)), traced=traced)
    path = place / "certificate.json"
    return write_certificate(plan, source, path, traced), path, folder


@pytest.mark.thorough
def test_plan_of_an_encoder_is_covered(encoder):
    """Every fp16 value and weight of T5, which leaves fp16 without its exponents."""
    certificate, path, folder = encoder
    assert json.loads(path.read_text()) == certificate
    (_, line, *rest) = stopdown_verify.check_certificate(certificate, folder)
    (stated,) = certificate["components"]
    assert stated["uncovered"] == []
    assert line.startswith("text_encoder: ")
    assert line.split()[1] == line.split()[3]
    assert any(entry["exponents"] for entry in stated["weights"].values())
    assert not any(x.startswith("  not covered") for x in rest)
    assert "transformer: not covered (it isn't in the certificate)" in rest


@pytest.mark.thorough
def test_certificate_takes_the_captures_of_its_plan(
    encoder: tuple[dict[str, Any], Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No call is captured for it again, unless the plan was kept; the content is the same then."""
    monkeypatch.setenv("STOPDOWN_CACHE", str(tmp_path))
    source, captured = resolve_source(encoder[2]), list[str]()
    capture = measurement.capture_call
    monkeypatch.setattr(
        measurement, "capture_call", lambda *x, **y: captured.append("") or capture(*x, **y)
    )
    counts = []
    for _ in range(2):  # its own file is replaced
        traced, scope = dict[str, TracedCalls](), Scope(("text_encoder",), keeps=True)
        plan = certify_plan(source, residual="fp32", scope=scope, traced=traced)
        counts.append(len(captured))
        made = write_certificate(plan, source, tmp_path / "c.json", traced)
        counts.append(len(captured))
        assert made["components"] == encoder[0]["components"]
    assert counts[0] == counts[1] == counts[2] < counts[3]


@pytest.mark.thorough
def test_certificate_without_its_exponents_shows_what_overflows(encoder):
    """Without the folds the same graph leaves fp16: the checker lists it instead of accepting it."""
    certificate, _, folder = encoder
    (stated,) = copy.deepcopy(certificate["components"])
    for entry in stated["weights"].values():
        entry["exponents"] = []
    for n in stated["graphs"][0]["nodes"]:
        n.update({key: 0 for key in ("eps", "by", "number_exponent") if key in n})
    stopdown_verify.check_component(stated, folder, write=True)
    assert stated["uncovered"]


@pytest.mark.thorough
def test_certificate_is_of_a_folder(tmp_path):
    """A source with LoRAs has weights that no file of the folder has."""
    folder = save_pipeline("cogvideox", tmp_path / "model")
    source = resolve_source(folder)
    plan = certify_plan(source, scope=Scope(("text_encoder",)))
    with pytest.raises(SourceError, match="A certificate is of a folder as Diffusers saves it"):
        write_certificate(plan, replace(source, loras=(("a", 1.0),)), tmp_path / "c.json", {})


def test_rows_of_many_norms_are_not_followed():
    """A concatenation of more rows than are followed has none, and not the first few of them."""
    one = np.ones(3)
    x = stopdown_verify.Value((1, 2, 3), affine=((1.0, one, one[None], one),))
    node = {"rule": "join", "dim": 1, "shape": [1, 8, 3]}
    assert len(stopdown_verify.follow_rows(node, [x] * 4, None)) == 4
    assert stopdown_verify.follow_rows(node, [x] * 5, None) == ()


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["CogVideoX rotary", "T5 gated"])
def test_ascent_finds_no_value_beyond_its_bound(name, tmp_path):
    """Inputs that are pushed up the gradient of a value stay below the checker's bounds of all values."""
    module, calls = make_example(name)
    rescaling = rescale_(module, calls=calls, ranges="bound")
    rescaling.undo()
    cases = [bound_one(module, *call) for call in calls]
    stated = export_net(module, calls, tmp_path, rescaling.scaling)
    stopdown_verify.check_component(stated, tmp_path, write=True)
    rng, nearest = random.Random(0), 0.0
    for case, graph in zip(cases, stated["graphs"], strict=True):
        bounds: dict[str, float] = {}
        for n in graph["nodes"]:  # what is written in place later has a second entry, as `name.1`
            if n["bound"] is not None:
                size, key = (
                    float(stopdown_verify.read_number(n["bound"])),
                    n["id"].partition(".")[0],
                )
                bounds[key] = max(bounds.get(key, 0.0), size)
        nodes = [x for x in case.list_nodes() if x.name in bounds]
        assert len(nodes) > 0.8 * len(case.list_nodes())
        values = {x.name: uniform(bounds[x.name], shape_of(x)) for x in nodes}
        known = {k: values.get(k) for k in case.bounds.values}
        checked = replace(case, bounds=replace(case.bounds, values=known))
        best: dict[str, float] = {}
        for _ in range(4):
            assert climb(checked, rng, 3, best) == []
        nearest = max(best[x.name] / bounds[x.name] for x in nodes if bounds[x.name])
    assert nearest > 0.5


def test_what_rests_on_measurement_is_not_covered(tmp_path):
    """With measured exponents the file is accepted, and lists exactly what no bound keeps in range."""
    module = torch.nn.Sequential(
        torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)
    )
    module.requires_grad_(False)
    torch.nn.init.constant_(module[0].weight, 5000.0)  # for inputs up to 64 up to 2.6e6
    torch.nn.init.constant_(module[1].weight, 2.0**-10)
    given = (torch.full((2, 8), 0.01),)
    rescaling = rescale_(module, given)
    rescaling.undo()
    assert rescaling.scaling.exponents == {"0.weight": -1, "1.weight": 1}
    stated = export_net(module, [(module, given, {})], tmp_path, rescaling.scaling)
    stopdown_verify.check_component(stated, tmp_path, write=True)
    assert stated["uncovered"] == ["0:linear"]
    assert stopdown_verify.check_component(stated, tmp_path)[2] == ["0:linear"]
    stated["uncovered"] = []
    with pytest.raises(stopdown_verify.Refused, match="list of uncovered values isn't complete"):
        stopdown_verify.check_component(stated, tmp_path)
