"""Forged certificates, decoys beside one and hostile files: the checker refuses each in one sentence."""

from __future__ import annotations

import copy
import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stopdown_verify
from plans.test_certificate_files import ROOT, make_net, node, write_weights

Row = tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]


def full(*shape: int, value: float = 1.0) -> Any:
    return np.full(shape, value, dtype=np.float32)


def source(key: str, shape: list[int], largest: float = 64.0, **more: Any) -> dict[str, Any]:
    return node(key, "input", [], shape, name=key, largest=largest, **more)


def times(key: str, count: int = 1001, **more: Any) -> dict[str, Any]:
    given = {"first": 0.0, "last": 1000.0, "count": count, "radius": 0.0, "dtype": "fp32", **more}
    return node(key, "times", [], [1, 1], name=key, **given)


def linear(key: str, of: str, shape: list[int], weight: str = "w", **more: Any) -> dict[str, Any]:
    return node(key, "product", [of], shape, weight=weight, **more)


def state(folder: Path, row: Row) -> dict[str, Any]:
    """A component `net` of one graph, whose last value is the output unless the row states others."""
    tensors, nodes, more = row
    (folder / "net").mkdir(parents=True, exist_ok=True)
    write_weights(folder / "net" / "model.safetensors", tensors)
    folds, wide = more.get("exponents", {}), more.get("wide", ())
    return {
        "component": "net", "class": "Net", "files": ["model.safetensors"], "fp32_modules": [],
        "weights": {k: {"exponents": folds.get(k, []), "wide": k in wide} for k in tensors},
        "graphs": [{"method": "", "nodes": nodes,
                    "outputs": more.get("outputs", [[nodes[-1]["id"], more.get("output", 0)]])}],
    }  # fmt: skip


def refuse(folder: Path, row: Row, reason: str) -> None:
    """Each is refused before anything is filled in, for this reason."""
    with pytest.raises(stopdown_verify.Refused, match=reason):
        stopdown_verify.check_component(state(folder, row), folder, write=True)


X, SQUARE = source("x", [2, 8]), full(8, 8, value=100.0)


def exponents_of_a_product_not_looked_at() -> Row:
    """`alike` on a product: the weights are stored times 2^9, the output is said not to be."""
    nodes = [X, linear("y", "x", [2, 8], alike=True)]
    return {"w": SQUARE}, nodes, {"exponents": {"w": [[0, 0, 8, 9]]}}


def sigmoid_of_a_scaled_value() -> Row:
    """`alike` on a sigmoid: its value is said to be 2^10 smaller than it is."""
    nodes = [
        X,
        linear("l", "x", [2, 8]),
        node("s", "bounded", ["l"], [2, 8], function="sigmoid", alike=True),
        linear("v", "x", [2, 8], "v"),
        node("z", "multiply", ["s", "v"], [2, 8]),
        node("o", "scale", ["z"], [2, 8], by=10),
    ]
    return {"w": SQUARE, "v": SQUARE}, nodes, {"exponents": {"w": [[0, 0, 8, -10]]}}


def product_called_a_softmax() -> Row:
    """`function` on a product by element makes the matmul behind it a mean."""
    nodes = [
        source("q", [1, 4, 64]),
        source("k", [1, 4, 64]),
        node("p", "multiply", ["q", "k"], [1, 4, 64], function="softmax", dim=2),
        source("v", [1, 64, 8]),
        node("o", "matmul", ["p", "v"], [1, 4, 8]),
    ]
    return {"w": SQUARE}, nodes, {}


def empty_witness() -> Row:
    """No witness of a singular value makes the rows of a linear as long as 0."""
    nodes = [
        source("x", [2, 64]),
        linear("y", "x", [2, 64], sigma=[]),
        linear("z", "y", [2, 64]),
    ]
    return {"w": full(64, 64)}, nodes, {}


def two_timesteps_taken_for_one() -> Row:
    """The difference of two timesteps is not 0."""
    nodes = [
        times("t"),
        times("r"),
        node("d", "add", ["t", "r"], [1, 1], factor=-1.0, dtype="fp32"),
        linear("y", "d", [1, 8]),
    ]
    return {"w": full(8, 1, value=100.0)}, nodes, {}


def few_timesteps(ways: int = 1) -> Row:
    """A sine that is 0 at both timesteps that are looked at, and 1 between them."""
    nodes = [
        times("t", count=2),
        linear("f", "t", [1, 1], "f", dtype="fp32"),
        node("s", "bounded", ["f"], [1, 1], function="sin", dtype="fp32"),
        linear("y", "s", [1, 8]),
        node("z", "add", ["y", "y"], [1, 8]),
    ]
    tensors = {"w": full(8, 1, value=6e4), "f": full(1, 1, value=3 * math.pi / 1000)}
    return tensors, nodes[: 3 + ways], {}


def no_outputs() -> Row:
    """What does not cancel at the end is not looked at where no output is stated."""
    nodes = [X, linear("y", "x", [2, 8])]
    return {"w": SQUARE}, nodes, {"exponents": {"w": [[0, 0, 8, -8]]}, "outputs": []}


def bias_scaled_by_columns() -> Row:
    """A vector has no columns: an exponent of them would change what is stored and nothing else."""
    nodes = [X, linear("y", "x", [2, 8], bias="b")]
    return {"w": SQUARE, "b": full(8)}, nodes, {"exponents": {"b": [[1, 0, 1, 5]]}}


def rows_beyond_the_groups() -> Row:
    """The rows of a convolution that no group has would be bounded by 0."""
    nodes = [source("x", [1, 4, 9]), linear("y", "x", [1, 3, 9], groups=2)]
    return {"w": full(3, 2, 1, value=1e4)}, nodes, {}


def channels_that_a_weight_does_not_read() -> Row:
    """A linear of 4 values reads one timestep as if it were four."""
    nodes = [times("t"), linear("y", "t", [1, 8])]
    return {"w": full(8, 4)}, nodes, {}


def more_channels_than_a_weight_has() -> Row:
    """A linear of a timestep is said to have sixteen channels where the weight has one."""
    nodes = [times("t"), linear("y", "t", [1, 16])]
    return {"w": full(1, 1)}, nodes, {}


def mean_square_of_whole_numbers() -> Row:
    """A row that is cast to whole numbers before it is squared can be longer than its mean square says."""
    wide = {"dtype": "fp32"}
    nodes = [
        source("x", [2, 8], **wide),
        node("i", "same", ["x"], [2, 8], function="cast", dtype="int"),
        node("q", "power", ["i"], [2, 8], halves=4, **wide),
        node("m", "mix", ["q"], [2, 1], dims=[1], of="mean", **wide),
        node("e", "add", ["m"], [2, 1], number=1e-6, **wide),
        node("r", "power", ["e"], [2, 1], halves=-1, **wide),
        node("u", "unit", ["x", "r"], [2, 8], **wide),
        node("y", "product", ["u"], [2, 8], weight="w"),
    ]
    return {"w": full(8, 8)}, nodes, {}


def mean_square_replaced_by_a_small_number() -> Row:
    """A mean square of which some are another, smaller number is not one."""
    nodes = mean_square_of_whole_numbers()[1]
    nodes = [n for n in nodes if n["id"] != "i"]
    nodes[1]["from"] = ["x"]
    nodes[3].update({"rule": "either", "of": "choice"})
    return {"w": full(8, 8)}, nodes, {}


def three_summands() -> Row:
    """Of three summands the third would not be looked at."""
    nodes = [X, linear("y", "x", [2, 8]), node("z", "add", ["x", "x", "y"], [2, 8])]
    return {"w": SQUARE}, nodes, {}


def output_stated_twice() -> Row:
    """Of an output that is stated with two exponents only the last would be looked at."""
    nodes = [X, linear("y", "x", [2, 8])]
    more = {"exponents": {"w": [[0, 0, 8, -8]]}, "outputs": [["y", 0], ["y", -8]]}
    return {"w": SQUARE}, nodes, more


def tokens_of_other_exponents() -> Row:
    """Queries that are scaled token by token meet the keys of other tokens."""
    nodes = [
        node("q", "weight", [], [1, 2, 4], weight="q"),
        node("k", "weight", [], [1, 2, 4], weight="k"),
        source("v", [1, 2, 4]),
        node("y", "attention", ["q", "k", "v"], [1, 2, 4]),
    ]
    folds = {"q": [[1, 0, 1, 4]], "k": [[1, 0, 1, -4]]}
    return {"q": full(1, 2, 4), "k": full(1, 2, 4)}, nodes, {"exponents": folds}


def cycle() -> Row:
    """A value that is made of itself."""
    nodes = [
        X,
        node("a", "add", ["b", "x"], [2, 8]),
        node("b", "same", ["a"], [2, 8], function="neg"),
    ]
    return {"w": SQUARE}, nodes, {}


FORGERIES = {
    "A": (exponents_of_a_product_not_looked_at, r"y \(product\): 'alike' is no key of it"),
    "A2": (sigmoid_of_a_scaled_value, r"s \(bounded\): 'alike' is no key of it"),
    "B": (product_called_a_softmax, r"p \(multiply\): 'function' is no key of it"),
    "C": (empty_witness, r"y \(product\): 'sigma' is \[\], expected a list of 1 to 1048576"),
    "D": (two_timesteps_taken_for_one, r"r \(times\): a second timestep"),
    "E": (few_timesteps, r"t \(times\): 2 timesteps from 0 to 1000, .* leave others out"),
    "E2": (lambda: few_timesteps(2), r"t \(times\): 2 timesteps from 0 to 1000, .* leave others out"),
    "H": (no_outputs, r"'outputs' is \[\], expected a list of 1 to"),
    "columns of a bias": (bias_scaled_by_columns, "b: no dimension 1 from 0 to 1 to scale"),
    "rows without a group": (rows_beyond_the_groups, r"y \(product\): no product"),
    "channels read": (channels_that_a_weight_does_not_read, r"y \(product\): no product"),
    "channels made": (more_channels_than_a_weight_has, r"y \(product\): no product"),
    "three summands": (three_summands, r"z \(add\): it is made of 3 values, expected 2"),
    "output twice": (output_stated_twice, "an output is stated twice"),
    "exponents of tokens": (tokens_of_other_exponents, "exponents differ inside of a sum"),
    "cycle": (cycle, r"a \(add\): 'b' is no value before it"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*FORGERIES])
def test_forged_certificate_is_refused(name, tmp_path):
    """Each states bounds that its own graph exceeds, or prints more than was looked at."""
    made, reason = FORGERIES[name]
    refuse(tmp_path, made(), reason)


def list_uncovered(folder: Path, row: Row) -> list[str]:
    """What is not covered; a list without it is refused."""
    stated = state(folder, row)
    stopdown_verify.check_component(stated, folder, write=True)
    found = stated["uncovered"]
    if found:
        with pytest.raises(
            stopdown_verify.Refused, match="list of uncovered values isn't complete"
        ):
            stopdown_verify.check_component({**stated, "uncovered": []}, folder)
    return found


def test_weight_that_fp16_reads_is_not_taken_to_be_wide(tmp_path):
    """Forgery F: a weight of 1e6 that is said to be in fp32, and that a product in fp16 reads."""
    row = {"w": full(8, 8, value=1e6)}, [source("x", [2, 8], 1e-3), linear("y", "x", [2, 8])]
    assert list_uncovered(tmp_path, (*row, {"wide": ("w",)})) == ["w"]


def test_wide_weight_is_printed(tmp_path):
    """A weight that only fp32 reads is no fp16 weight, and that it stays in fp32 is an assumption."""
    row = (
        {"w": full(8, 8, value=1e6)},
        [source("x", [2, 8]), linear("y", "x", [2, 8], dtype="fp32")],
    )
    stated = state(tmp_path, (*row, {"wide": ("w",)}))
    assert stopdown_verify.check_component(stated, tmp_path, write=True) == (0, 0, [])
    assert "w is held in fp32" in stopdown_verify.list_assumed(stated)


@pytest.mark.parametrize(
    "made", [mean_square_of_whole_numbers, mean_square_replaced_by_a_small_number]
)
def test_row_is_of_length_one_only_by_its_own_mean_square(made, tmp_path):
    """What is divided by the root of something else has no bound."""
    assert list_uncovered(tmp_path, made()) == ["0:y"]


def test_softmax_that_is_rounded_to_bf16_is_no_mean(tmp_path):
    """Its weights can sum to more than the room that a mean has."""
    nodes = [
        source("s", [1, 2, 64], dtype="fp32"),
        node("p", "bounded", ["s"], [1, 2, 64], function="softmax", dim=2, dtype="fp32"),
        node("b", "same", ["p"], [1, 2, 64], function="cast", dtype="bf16"),
        source("v", [1, 64, 8]),
        node("o", "matmul", ["b", "v"], [1, 2, 8]),
    ]
    stated = state(tmp_path, ({}, nodes, {}))
    stopdown_verify.check_component(stated, tmp_path, write=True)
    assert float(stopdown_verify.read_number(nodes[-1]["bound"])) >= 64 * (1 + 2.0**-9)


def test_copy_into_fewer_digits_is_rounded(tmp_path):
    """A value that moves from fp32 into fp16 can become larger, by a cast or by another name for it."""
    nodes = [
        source("x", [2, 8], 65504.0, dtype="fp32"),
        node("y", "view", ["x"], [16]),
    ]
    assert list_uncovered(tmp_path, ({}, nodes, {})) == ["0:y"]


def test_constant_is_off_by_what_its_dtype_rounds(tmp_path):
    """A constant of 72.47 in fp16 is 72.5: less the same one in fp32 it is not 0."""
    nodes = [
        node("c", "known", [], [1], name="c", values=[72.47]),
        node("d", "known", [], [1], name="d", values=[72.47], dtype="fp32"),
        node("e", "add", ["c", "d"], [1], factor=-1.0, dtype="fp32"),
        node("y", "multiply", ["e"], [1], number=1e8, dtype="fp16"),
    ]
    assert list_uncovered(tmp_path, ({}, nodes, {})) == ["0:y"]


def test_shift_of_a_norm_is_looked_at_at_each_timestep(tmp_path):
    """What a linear makes of rows behind a norm is no less than what it makes of their shift alone."""
    rng = np.random.default_rng(0)
    tensors = {"w": rng.normal(size=(8, 8)), "f": rng.normal(size=(8, 1)), "g": np.full(8, 1e-3)}
    nodes = [
        times("t", count=51, last=50.0),
        linear("f", "t", [1, 8], "f", dtype="fp32"),
        node("s", "bounded", ["f"], [1, 8], function="sin", dtype="fp32"),
        source("x", [1, 8], dtype="fp32"),
        node("n", "norm", ["x"], [1, 8], inner=1, eps=0, weight="g", dtype="fp32"),
        node("m", "add", ["n", "s"], [1, 8], dtype="fp32"),
        linear("y", "m", [1, 8]),
    ]
    row = {k: x.astype(np.float32) for k, x in tensors.items()}, nodes, {}
    stopdown_verify.check_component(state(tmp_path, row), tmp_path, write=True)
    shifts = np.sin(np.arange(51)[:, None] @ tensors["f"].T)
    largest = np.abs(shifts @ tensors["w"].T).max()
    found = float(stopdown_verify.read_number(nodes[-1]["bound"]))
    assert largest <= found <= 1.1 * largest


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_value_beyond_a_wider_dtype_has_no_bound(dtype, tmp_path):
    """The exponential of 100 is Inf in fp32 and bf16, and a small part of it is Inf as well."""
    nodes = [
        source("x", [8], 100.0, dtype=dtype),
        node("e", "exp", ["x"], [8], dtype=dtype),
        node("y", "multiply", ["e"], [8], number=1e-40),
    ]
    assert list_uncovered(tmp_path, ({}, nodes, {})) == ["0:y"]


def test_operation_without_a_rule_has_one_exponent(tmp_path):
    """A sum along channels that are stored with different exponents is not stored as they are."""
    nodes = [
        X,
        linear("y", "x", [2, 8]),
        node("c", "unknown", ["y"], [2, 8], function="cumsum", alike=True),
    ]
    row = {"w": full(8, 8)}, nodes, {"exponents": {"w": [[0, 0, 4, -3]]}, "output": -3}
    refuse(tmp_path, row, r"c \(unknown\): an operation without a rule has several exponents")


def test_row_that_is_divided_by_nothing_has_no_bound(tmp_path):
    """A constant in the place of a mean square is no error in the checker's own code."""
    nodes = [
        X,
        node("c", "bounded", [], [2, 1], function="filled", number=1.0, dtype="fp32"),
        node("y", "unit", ["x", "c"], [2, 8]),
    ]
    assert list_uncovered(tmp_path, ({}, nodes, {})) == ["0:y"]


def test_attention_of_rows_of_other_lengths_is_refused(tmp_path):
    """A query and a key have no product, and three heads do not share two."""
    for shape in ([1, 2, 4, 8], [1, 3, 4, 4]):
        nodes = [source("q", [1, 2, 4, 4]), source("k", shape), source("v", [1, 2, 4, 4])]
        nodes.append(node("y", "attention", ["q", "k", "v"], [1, 2, 4, 4]))
        refuse(tmp_path, ({"w": SQUARE}, nodes, {}), r"y \(attention\): no attention")


@pytest.mark.parametrize("case", ["output", "unknown", "constant"])
def test_value_beyond_fp16_is_listed(case, tmp_path):
    """An output though a sigmoid reads it too, what an operation of that name reads, a constant."""
    read = node("s", "bounded", ["y"], [2, 8], function="sigmoid")
    nodes = [X, linear("y", "x", [2, 8]), read]
    more: dict[str, Any] = {"outputs": [["y", 0], ["s", 0]]}
    if case == "unknown":
        read.update({"rule": "unknown", "function": "sigmoid", "alike": False})
        more = {}
    if case == "constant":
        nodes = [
            node("y", "known", [], [1], name="c", values=[1e5]),
            node("s", "view", ["y"], [1, 1]),
        ]
        more = {}
    expected = {"output": ["0:y"], "unknown": ["0:y", "0:s"], "constant": ["0:y", "0:s"]}
    assert list_uncovered(tmp_path, ({"w": full(8, 8, value=1e4)}, nodes, more)) == expected[case]


def test_value_beyond_fp16_before_a_sigmoid_alone_is_printed(tmp_path):
    """It does no harm, is not counted as covered, and stands in what is printed."""
    nodes = [X, linear("y", "x", [2, 8]), node("s", "bounded", ["y"], [2, 8], function="sigmoid")]
    stated = state(tmp_path, ({"w": full(8, 8, value=1e4)}, nodes, {}))
    assert stopdown_verify.check_component(stated, tmp_path, write=True) == (2, 2, [])
    assert stopdown_verify.list_saturated(stated) == ["0:y"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "every whole t from 0 to 1000"),
        ({"count": 2001, "radius": 0.25}, "every t from 0 to 1000"),
        ({"first": 0.9, "last": 0.9, "count": 1}, "t is 0.9"),
    ],
)
def test_timesteps_are_named_as_they_were_looked_at(given, words, tmp_path):
    """Whole numbers, cells without a gap, or one."""
    stated = state(
        tmp_path, ({"w": full(8, 1)}, [times("t", **given), linear("y", "t", [1, 8])], {})
    )
    stopdown_verify.check_component(stated, tmp_path, write=True)
    assert stopdown_verify.list_inputs(stated) == [words]


def test_what_a_graph_takes_for_granted_is_printed(tmp_path):
    """Homogeneous operations, values that are finite, exponents taken off an output, and sums in fp16."""
    nodes = [
        source("x", [2, 8], dtype="fp32"),
        node("c", "unknown", ["x"], [2, 8], function="cumsum", alike=True, dtype="fp32"),
        node("n", "norm", ["c"], [2, 8], inner=1, eps=0),
        linear("y", "n", [2, 8]),
    ]
    more = {"exponents": {"w": [[0, 0, 8, -3]]}, "output": -3}
    stated = state(tmp_path, ({"w": full(8, 8)}, nodes, more))
    stopdown_verify.check_component(stated, tmp_path, write=True)
    assert stopdown_verify.list_inputs(stated) == ["x up to 64, of shape 2 x 8"]
    assert stopdown_verify.list_assumed(stated) == [
        "c (cumsum) is scaled as its inputs are",
        "c is finite (it has no bound in fp32)",
        "2^-3 is taken off the output y",
    ]


# what lies in the folder


@pytest.fixture(name="net")
def fixture_net(tmp_path: Path) -> tuple[dict[str, Any], Path]:
    return make_net(tmp_path), tmp_path


def put_header(path: Path, header: str, data: bytes = b"") -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + data)


def check(certificate: dict[str, Any], folder: Path) -> list[str]:
    certificate["seal"] = stopdown_verify.seal(certificate)
    return stopdown_verify.check_certificate(certificate, folder)


@pytest.mark.parametrize(
    "name",
    [
        "diffusion_pytorch_model.fp16.safetensors",
        "pytorch_model.bin",
        "MODEL-2.SAFETENSORS",
        "model.ckpt",
    ],
)
def test_weights_that_are_not_listed_are_refused(name, net):
    """A loader could take them instead of the certificate's."""
    certificate, folder = net
    (folder / "net" / name).write_bytes(b"")
    with pytest.raises(
        stopdown_verify.Refused, match=f"net: {name} beside its files could be loaded"
    ):
        check(certificate, folder)


def test_index_is_refused_unless_it_names_the_same_files(net):
    """Diffusers takes an index before a single file; one that names what is listed changes nothing."""
    certificate, folder = net
    stated = certificate["components"][0]
    index = folder / "net" / "model.safetensors.index.json"
    names = dict.fromkeys(stated["weights"], "model.safetensors")
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    check(certificate, folder)
    for changed in (
        {**names, "up": "other.safetensors"},
        {**names, "up": "../model.safetensors"},
        {k: x for k, x in names.items() if k != "up"},
        {},
    ):
        index.write_text(json.dumps({"weight_map": changed}))
        with pytest.raises(stopdown_verify.Refused, match="names other files or tensors than"):
            check(certificate, folder)


def test_index_that_is_no_file_is_refused(net):
    """A folder or a pipe of that name is not read, which would not end."""
    certificate, folder = net
    index = folder / "net" / "model.safetensors.index.json"
    for make in (Path.mkdir, *([os.mkfifo] if hasattr(os, "mkfifo") else [])):
        make(index)
        with pytest.raises(stopdown_verify.Refused, match=r"net: .*index.json is no file"):
            check(certificate, folder)
        index.rmdir() if index.is_dir() else index.unlink()


def test_several_files_need_an_index(net):
    """Without one a loader takes a single file of them."""
    certificate, folder = net
    write_weights(folder / "net" / "more.safetensors", {"more": full(2)})
    certificate["components"][0]["files"].append("more.safetensors")
    with pytest.raises(stopdown_verify.Refused, match="several files, and no index names them"):
        check(certificate, folder)


ENTRY = '{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
HEADERS = {
    "a name twice": (f'{{"up": {ENTRY}, "up": {ENTRY}}}', "the name 'up' stands twice in one object"),
    "float8": ('{"up": {"dtype": "F8_E5M2", "shape": [4], "data_offsets": [0, 4]}}',
               "'up' is stored in F8_E5M2, expected one of F64, F32"),
    "another float8": ('{"up": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}',
                       "'up' is stored in F8_E4M3, expected one of F64, F32"),
    "more elements than bytes": ('{"up": {"dtype": "F32", "shape": [9], "data_offsets": [0, 4]}}',
                                 "more or fewer bytes than its shape"),
    "beyond the file": ('{"up": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
                        "longer or shorter"),
    "a gap": ('{"up": {"dtype": "U8", "shape": [1], "data_offsets": [3, 4]}}', "overlap, or leave a gap"),
    "no object": ("[]", "is no safetensors file"),
    "no entry": ('{"up": 1}', "'up': it is no object"),
    "a huge size": (f'{{"up": {{"dtype": "F32", "shape": [{10**30}], "data_offsets": [0, 4]}}}}',
                    "expected a list"),
    "deep": ("[" * 100_000, "the header of model.safetensors can't be read as JSON"),
    "metadata in a list": (f'{{"__metadata__": [], "up": {ENTRY}}}', "'__metadata__' is .*, expected an"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*HEADERS])
def test_header_that_no_loader_reads_is_refused(name, net):
    """A name twice, a dtype that is not read, places that do not fit."""
    certificate, folder = net
    header, reason = HEADERS[name]
    put_header(folder / "net" / "model.safetensors", header, b"\0" * 4)
    with pytest.raises(stopdown_verify.Refused, match=reason):
        check(certificate, folder)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "bool"])
def test_whole_numbers_are_read_as_what_they_are(dtype, tmp_path):
    """The bytes of an int64 are no values of their own."""
    values = (np.array([[0, 1], [1, 0]]) * (1 if dtype == "bool" else 77)).astype(dtype)
    kind = {"bool": "BOOL", "uint8": "U8"}.get(dtype, f"I{dtype[3:]}")
    entry = {"dtype": kind, "shape": [2, 2], "data_offsets": [0, values.nbytes]}
    put_header(tmp_path / "a.safetensors", json.dumps({"w": entry}), values.tobytes())
    weight = stopdown_verify.open_weights(tmp_path, ["a.safetensors"], {})["w"]
    assert np.array_equal(np.concatenate([x for _, x in weight.read()]), values.astype(float))


# what a file may say


def replace_in(certificate: dict[str, Any], path: str, value: Any) -> None:
    *keys, last = (int(key) if key.isdigit() else key for key in path.split("/"))
    for key in keys:
        certificate = certificate[key]
    certificate[last] = value


NODE = "components/0/graphs/0/nodes/"
VALUES = [
    ("components", [], r"'components' is \[\], expected a list of 1 to 100"),
    ("components", {}, "'components' is {}, expected a list"),
    ("components/0", [], "'components' is .*, expected a list of 1 to 100, each an object"),
    ("components/0/component", "../../x", "'component' is '../../x', expected the name of a component"),
    ("components/0/component", "..", "'component' is '..', expected the name of a component"),
    ("components/0/component", "c:", "'component' is 'c:', expected the name of a component"),
    ("components/0/files/0", "..\\model.safetensors", "'files' is .*, each the name of a safetensors file"),
    ("components/0/files/0", "../net/model.safetensors", "'files' is .*, without a folder"),
    ("components/0/files", ["model.safetensors"] * 2, "a file is listed twice"),
    ("components/0/fp32_modules", "up", "'fp32_modules' is 'up', expected a list"),
    ("components/0/extra", 1, "'extra' is no key of it"),
    ("components/0/weights/up/wide", 0, "up: 'wide' is 0, expected true or false"),
    ("components/0/weights/up/exponents", [[2, 0, 1, 1]], "up: 'exponents' is"),
    ("components/0/weights/up/exponents", [[0, 0, 1, 10**400]], "up: 'exponents' is"),
    ("components/0/weights/up/exponents", [[0, 5, 5, 1]], "no dimension 0 from 5 to 5 to scale"),
    ("components/0/graphs", [], "'graphs' is"),
    ("components/0/graphs/0/method", None, "'method' is None, expected printable text"),
    (f"{NODE}0/largest", float("nan"), "'largest' is nan, expected a number from 0"),
    (f"{NODE}0/largest", float("inf"), "'largest' is inf, expected a number from 0"),
    (f"{NODE}0/largest", 10**400, "'largest' is 1000.*, expected a number from 0"),
    (f"{NODE}0/largest", True, "'largest' is True, expected a number from 0"),
    (f"{NODE}0/shape", [2, -5, 8], "'shape' is"),
    (f"{NODE}0/shape", [1 << 62], "'shape' is"),
    (f"{NODE}0/shape", [0, 5, 8], r"x \(input\)|normed \(norm\): a size is 0"),
    (f"{NODE}0/dtype", "fp8", "'dtype' is 'fp8', expected one of fp16"),
    (f"{NODE}0/id", "\x1b[2J\x1b[32mAll verified\x1b[8m", "expected a printable name"),
    (f"{NODE}1/eps", 0.5, "'eps' is 0.5, expected a whole number"),
    (f"{NODE}1/inner", 9, "no such dimensions"),
    (f"{NODE}1/groups", 2, r"normed \(norm\): '(groups|inner)' is no key of it"),
    (f"{NODE}2/weight", "nothing", r"a \(product\): 'nothing' is no tensor of the component"),
    (f"{NODE}2/weight", ["up"], r"a \(product\): 'weight' is \['up'\], expected a printable name"),
    (f"{NODE}2/rule", "trust me", "'rule' is 'trust me', expected one of input, times"),
    (f"{NODE}2/dtype", "bf16", "what reads weights is in fp16, fp32, fp64"),
    (f"{NODE}2/bound", [1, 10**9], "'bound' is"),
    (f"{NODE}2/from", ["normed", "x"], "it is made of 2 values, expected 1"),
    (f"{NODE}4/function", "sigmoid", "'function' is 'sigmoid', expected one of cast"),
    (f"{NODE}5/id", "a", "the name stands twice"),
    ("left", {"vae": 1}, "'left' is"),
    ("seal", "", "'seal' is '', expected a sha256"),
    ("plan", 7, "'plan' is 7"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "reason"), VALUES, ids=range(len(VALUES)))
def test_value_outside_of_the_grammar_is_refused(path, value, reason, net):
    """The sentence says which component, value and key, and what was expected there."""
    certificate, folder = net
    replace_in(certificate, path, value)
    if path != "seal":
        certificate["seal"] = stopdown_verify.seal(certificate)
    with pytest.raises(stopdown_verify.Refused, match=reason):
        stopdown_verify.check_certificate(certificate, folder)


def test_every_key_is_needed_and_no_other_is_allowed(net):
    """Each key of each object is left out once, and each object has one too many once."""
    certificate, folder = net
    check(certificate, folder)

    def list_objects(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        below = [(k, x) for k, x in pairs if isinstance(x, (dict, list))]
        here = (
            [path] if isinstance(value, dict) and path[-1:] not in (("weights",), ("left",)) else []
        )
        return here + [y for k, x in below for y in list_objects(x, (*path, k))]

    tried = 0
    for path in list_objects(certificate):
        for key in [x for x in (*_find(certificate, path), "another") if x != "seal"]:
            changed = copy.deepcopy(certificate)
            where = _find(changed, path)
            if where.pop(key, None) is None and key == "another":
                where[key] = 1
            with pytest.raises(stopdown_verify.Refused):
                check(changed, folder)
            tried += 1
    assert tried > 100


def _find(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def test_exponents_cannot_run_over(tmp_path):
    """Squares of squares double an exponent each time: it is refused before 64 bits are full."""
    nodes = [node("w", "weight", [], [1], weight="w")]
    nodes += [
        node(f"s{i}", "multiply", [x] * 2, [1])
        for i, x in enumerate(["w", *(f"s{i}" for i in range(69))])
    ]
    row = {"w": full(1, value=0.5)}, nodes, {"exponents": {"w": [[0, 0, 1, 1]]}}
    refuse(tmp_path, row, r"s9 \(multiply\): its exponents are too large")


# the command


def run(folder: Path, *more: str, **environment: str) -> Any:
    """The command in a process of its own, as an installed one."""
    command = [
        sys.executable,
        "-m",
        "stopdown_verify",
        str(folder / "c.json"),
        "--weights",
        str(folder),
        *more,
    ]
    return subprocess.run(
        command, capture_output=True, check=False, cwd=ROOT / "src", env={"PATH": "", **environment}
    )  # fmt: skip


HOSTILE = {
    "nothing": b"", "no object": b"[]", "null": b"null", "a number": b"1e999", "not UTF-8": b"\xff\xfe{",
    "deep": b"[" * 200_000, "digits": b"9" * 5000, "NaN": b'{"components": NaN}',
    "twice": b'{"a": 1, "a": 2}',
    "no components": b'{"kind": "certificate", "plan": "", "components": [], "left": {}, "seal": ""}',
    "strings": b'{"kind": "certificate", "plan": "", "components": ["x"], "left": {}, "seal": ""}',
}  # fmt: skip


@pytest.mark.parametrize("name", [*HOSTILE])
def test_hostile_file_is_refused_in_one_line(name, tmp_path, capsys):
    """No traceback, exit code 1."""
    path = tmp_path / "c.json"
    path.write_bytes(HOSTILE[name])
    assert stopdown_verify.run_checker([str(path), "--weights", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("Refused: ")
    assert said.err.count("\n") == 1


def test_exit_codes_tell_apart_what_holds(net, capsys):
    """0 if all is covered, 3 if something is not, 1 if it is refused, 2 if nothing can be read."""
    certificate, folder = net
    path = folder / "c.json"

    def verify(*more: str) -> int:
        certificate["seal"] = stopdown_verify.seal(certificate)
        path.write_text(json.dumps(certificate))
        return stopdown_verify.run_checker([str(path), "--weights", str(folder), *more])

    assert verify() == 0
    certificate["left"] = {"vae": "it runs in bf16"}
    assert verify() == 3
    assert "vae: not covered (it runs in bf16)" in capsys.readouterr().out
    certificate["left"] = {}
    (folder / "unet").mkdir()
    write_weights(folder / "unet" / "model.safetensors", {"w": full(1)})
    assert verify() == 3
    assert "unet: not covered (it isn't in the certificate)" in capsys.readouterr().out
    assert verify("--json") == 3
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "partly"
    assert found["left"] == {"unet": "it isn't in the certificate"}
    assert found["components"][0]["values"] == found["components"][0]["covered"] == 12
    certificate["components"][0]["graphs"][0]["nodes"][-1]["bound"][1] -= 1
    assert verify("--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "refused"
    assert found["why"].startswith("net: sum (add): its bound is")
    assert stopdown_verify.run_checker([str(folder / "nothing"), "--weights", str(folder)]) == 2
    assert capsys.readouterr().err.startswith("Can't be read: ")


@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "utf-8"])
def test_names_do_not_reach_the_terminal_with_their_escapes(encoding, tmp_path):
    """Neither a verdict that a name paints nor a letter that an encoding lacks gets through."""
    certificate = make_net(tmp_path)
    certificate["left"] = {"变换器": "läuft in bf16"}
    certificate["seal"] = stopdown_verify.seal(certificate)
    (tmp_path / "c.json").write_text(json.dumps(certificate))
    done = run(tmp_path, PYTHONIOENCODING=encoding)
    assert done.returncode == 3, done.stderr
    words = done.stdout.decode(encoding)
    assert ("变换器" in words) == (encoding == "utf-8")
    assert "\\u53d8" in words or encoding == "utf-8"
    certificate["\x1b[2J\x1b[32mAll 7 of 7 verified\x1b[8m"] = 1
    (tmp_path / "c.json").write_text(json.dumps(certificate))
    done = run(tmp_path, PYTHONIOENCODING=encoding)
    assert done.returncode == 1
    assert b"\x1b" not in done.stdout + done.stderr
    assert b"\\x1b[2J" in done.stderr
