"""Random forgeries of certificates by one that knows the grammar and has the checker.

A forgery changes one thing of a real certificate or several: a key, a rule, a reference, an exponent, the
files of weights, the text. In most of them everything that the derivation finds is filled in anew, and the
seal is made anew. The checker has to refuse it in one sentence; what it accepts has to be true for its own
graph, which `certificate_runs` shows by running it.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import json
import math
import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import stopdown_verify
from models.certificate_runs import find_lies, load
from stopdown_verify import GRAMMAR, KEEPING, NODE, ROUNDING, SATURATING, SMALLER

Node = dict[str, Any]
FACTS = (*NODE,)
"""Keys that every value has; the others are its rule's own."""


@dataclass
class Draft:
    """A certificate and its folder of weights, both of them copies, while they are changed."""

    certificate: Node
    folder: Path
    rng: random.Random
    text: str | None = None

    def __post_init__(self) -> None:
        self.stated = self.rng.choice(self.certificate["components"])
        self.graph = self.rng.choice(self.stated["graphs"])

    @property
    def place(self) -> Path:
        return self.folder / str(self.stated["component"])

    def pick(self, holds: Callable[[Node], Any] = lambda n: True) -> Node:
        """One value for which something holds."""
        found: Node = self.rng.choice([n for n in self.graph["nodes"] if holds(n)])
        return found

    def name(self) -> str:
        return self.rng.choice([*self.stated["weights"]])

    def step(self, most: int = 2) -> int:
        return self.rng.choice([x for x in range(-most, most + 1) if x])


@dataclass
class Outcome:
    """What became of one forgery.

    Attributes:
        verdict: `refused`, `true` or `false`.
        why: what the checker said, or what is false.
        rules: how many values of each rule an accepted one has.
    """

    seed: int
    model: str
    changes: tuple[str, ...]
    verdict: str
    why: str
    rules: Counter[str] = field(default_factory=Counter)


# changes of values


def change_bound(d: Draft) -> None:
    """Another mantissa or exponent, lower or higher."""
    n = d.pick(lambda n: n["bound"] and n["bound"][0])
    if d.rng.random() < 0.5:
        n["bound"][1] += d.step(3)
    else:
        n["bound"][0] = int(n["bound"][0] * d.rng.choice((0.5, 0.9, 0.99, 1.01, 1.1, 2)))


def change_no_bound(d: Draft) -> None:
    """A bound where there is none, or none where there is one."""
    n = d.pick()
    n["bound"] = [1, 0] if n["bound"] is None else None


def change_rule(d: Draft) -> None:
    """Another rule for the same inputs, with the keys as they are or with its own."""
    n = d.pick(lambda n: n["from"])
    n["rule"] = d.rng.choice([x for x in GRAMMAR if x != n["rule"]])
    if d.rng.random() < 0.6:
        count, keys = d.rng.choice(GRAMMAR[n["rule"]])
        for key in [k for k in n if k not in FACTS]:
            n.pop(key)
        draw_keys(d, n, keys)
        least = count if isinstance(count, int) else count[0]
        n["from"] = (n["from"] * max(least, 1))[:least]


def change_function(d: Draft) -> None:
    """Another function of one value, another kind of mix or choice, alike or not."""
    n = d.pick(lambda n: {"function", "of"} & {*n})
    if n["rule"] == "unknown":
        n["alike"] = not n["alike"]
    elif "function" in n:
        known = (*KEEPING, *SMALLER, *SATURATING, "softmax", "sin", "cos", "limit", "clamp")
        n["function"] = d.rng.choice(known)
        n["rule"] = d.rng.choice((n["rule"], "bounded" if n["rule"] == "same" else "same"))
    else:
        n["of"] = d.rng.choice(("places", "rows", "repeats", "mean", "choice", "larger"))


def change_key(d: Draft) -> None:
    """Another value of a key of the rule, mostly of its type."""
    n = d.pick(lambda n: {*n} - {*FACTS})
    key = d.rng.choice(sorted({*n} - {*FACTS}))
    kinds = {k: kind for _, keys in GRAMMAR[n["rule"]] for k, kind in keys.items()}
    if d.rng.random() < 0.7 and key in kinds:
        n[key] = draw_key(d, key, kinds[key], n)
    else:
        odd = (0, -1, 1e9, True, None, "f", [], [0], {}, "\x1b[2J", 10**400, math.nan)
        n[key] = d.rng.choice(odd)


def change_keys(d: Draft) -> None:
    """A key left out, or a key of another rule."""
    n = d.pick()
    if d.rng.random() < 0.5:
        n.pop(d.rng.choice([*n]))
        return
    others = [
        (k, kind) for forms in GRAMMAR.values() for _, form in forms for k, kind in form.items()
    ]
    key, kind = d.rng.choice(others)
    n[key] = draw_key(d, key, kind, n)


def change_number(d: Draft) -> None:
    """A shape, a dimension, a number: one more or less."""
    others = ("bound", "exponents", "number_exponent", "by", "eps", "sigma")

    def list_keys(n: Node) -> list[str]:
        return [k for k, x in n.items() if k not in others and _is_number(x)]

    n = d.pick(list_keys)
    key, step = d.rng.choice(list_keys(n)), d.step()
    if isinstance(n[key], list):
        n[key][d.rng.randrange(len(n[key]))] += step
    else:
        n[key] = not n[key] if isinstance(n[key], bool) else n[key] + step


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) or (
        isinstance(x, list) and bool(x) and isinstance(x[0], (int, float))
    )


def change_limit(d: Draft) -> None:
    """Inputs that may be larger, smaller, or of another name."""
    n = d.pick(lambda n: n["rule"] == "input")
    n["largest"] = n["largest"] * d.rng.choice((0, 1e-6, 0.5, 2, 100, 1e4, 1e30))


def change_times(d: Draft) -> None:
    """Fewer timesteps than are printed, cells with gaps or without, a second one."""
    n = d.pick(lambda n: n["rule"] in ("times", "input"))
    keys = GRAMMAR["times"][0][1]
    if n["rule"] == "input":
        n.pop("largest")
        n["rule"] = "times"
    draw_keys(d, n, keys)
    if d.rng.random() < 0.3:
        d.graph["nodes"].insert(0, {**copy.deepcopy(n), "id": "again"})


def change_witness(d: Draft) -> None:
    """No part, a part too few, parts that are smaller, a witness where there was none."""
    n = d.pick(lambda n: n["rule"] == "product" and "groups" not in n)
    known = n.get("sigma") or [stopdown_verify.write_number(d.rng.choice((1e-3, 1.0, 1e3, 1e7)))]
    smaller = [[x, e - d.rng.choice((1, 2))] for x, e in known]
    n["sigma"] = d.rng.choice(
        ([], known[:-1], smaller, [[1, 0]], [[0, 0]], [*known, [0, 0]], known)
    )


def change_dtype(d: Draft) -> None:
    """Another dtype, of one value or of all of the graph that have one."""
    n, dtype = d.pick(), d.rng.choice([*ROUNDING])
    for other in d.graph["nodes"] if d.rng.random() < 0.2 else [n]:
        if other["dtype"] == n["dtype"]:
            other["dtype"] = dtype


def change_exponent(d: Draft) -> None:
    """Another exponent of a value, of an eps, of a number or of a multiply."""
    n = d.pick()
    key = d.rng.choice([k for k in ("exponents", "eps", "by", "number_exponent") if k in n])
    n[key] = [x + d.step() for x in n[key]] if isinstance(n[key], list) else n[key] + d.step(4)


# changes of the graph


def change_edge(d: Draft) -> None:
    """Another value as an input: mostly one that stands before it, or one of the same shape."""
    n = d.pick(lambda n: n["from"])
    nodes = d.graph["nodes"]
    earlier = nodes[: nodes.index(n)] if d.rng.random() < 0.9 else nodes
    at = d.rng.randrange(len(n["from"]))
    shape = next((x["shape"] for x in nodes if x["id"] == n["from"][at]), [])
    alike = [x for x in earlier if x["shape"] == shape and x["id"] != n["from"][at]]
    n["from"][at] = d.rng.choice(alike if alike and d.rng.random() < 0.7 else earlier)["id"]


def change_edges(d: Draft) -> None:
    """An input too few or too many."""
    n = d.pick(lambda n: n["from"])
    n["from"] = n["from"][1:] if d.rng.random() < 0.5 else [*n["from"], n["from"][0]]


def change_nodes(d: Draft) -> None:
    """A value too few, twice, or in another place."""
    nodes = d.graph["nodes"]
    at, way = d.rng.randrange(len(nodes)), d.rng.randrange(3)
    if way == 0:
        nodes.insert(at, copy.deepcopy(nodes[at]))
        return
    gone = nodes.pop(at)
    if way == 1:
        nodes.insert(d.rng.randrange(len(nodes)), gone)
        return
    for n in nodes:  # those that read it read what it read
        n["from"] = [(gone["from"] or [x])[0] if x == gone["id"] else x for x in n["from"]]


def put_in(d: Draft) -> None:
    """A value of another rule between a value and one that reads it, of the same shape if it can be."""
    nodes = d.graph["nodes"]
    n = d.pick(lambda n: n["from"])
    at = nodes.index(n)
    source = next(x for x in nodes if x["id"] == d.rng.choice(n["from"]))
    for number in range(30):
        new = draw_node(d, f"new{number}", nodes[:at], source)
        if fits(d, new, nodes[:at]) and (new["shape"] == source["shape"] or number > 25):
            break
    n["from"] = [new["id"] if x == source["id"] else x for x in n["from"]]
    nodes.insert(at, new)


def draw_graph(d: Draft) -> None:
    """Values of all rules, with keys and shapes that mostly fit, of the component's own tensors."""
    nodes: list[Node] = []
    for number in range(d.rng.randint(3, 12)):
        for _ in range(6):
            new = draw_node(d, f"v{number}", nodes)
            if fits(d, new, nodes):
                nodes.append(new)
                break
    if d.rng.random() < 0.5:
        for entry in d.stated["weights"].values():
            entry["exponents"] = []
    exponent = d.rng.choice((0, 0, 0, 0, -3))
    d.graph.update({"nodes": nodes, "outputs": [[nodes[-1]["id"], exponent]]})


def change_outputs(d: Draft) -> None:
    """No output, one twice, another value, another exponent."""
    outputs, other = d.graph["outputs"], [d.pick()["id"], d.rng.choice((0, 0, -3))]
    scaled = [[name, e + d.step(3)] for name, e in outputs]
    d.graph["outputs"] = d.rng.choice(([], outputs * 2, scaled, [other], [*outputs, other]))


def move_exponent(d: Draft) -> None:
    """A weight that is stored smaller or larger, and what takes it back, or not quite."""
    n = d.pick(lambda n: "weight" in n and n["rule"] in ("product", "norm", "weight"))
    nodes, move = d.graph["nodes"], d.step(6)
    for key in ("weight", "bias"):
        if key in n:
            rows = stopdown_verify.open_weights(d.place, d.stated["files"], {})[n[key]].shape[0]
            d.stated["weights"][n[key]]["exponents"].append([0, 0, rows, move])
    back = -move + d.rng.choice((0, 0, 0, 1, -1))
    scale = {**n, "id": "back", "rule": "scale", "from": [n["id"]], "by": back}
    scale = {k: x for k, x in scale.items() if k in (*FACTS, "by")}
    for other in nodes:
        other["from"] = ["back" if x == n["id"] else x for x in other["from"]]
    nodes.insert(nodes.index(n) + 1, scale)


# changes of what is said of the weights


def change_weight(d: Draft) -> None:
    """Another tensor as the weight or bias of an operation."""
    n = d.pick(lambda n: "weight" in n)
    key = d.rng.choice([k for k in ("weight", "bias") if k in n])
    n[key] = d.name()


def change_fold(d: Draft) -> None:
    """Another exponent of a weight."""
    entry = d.stated["weights"][d.name()]
    if entry["exponents"] and d.rng.random() < 0.7:
        d.rng.choice(entry["exponents"])[3] += d.step(9)
    else:
        end = d.rng.choice((1, 8, 16, 32, 1 << 40))
        entry["exponents"].append([d.rng.choice((0, 0, 1)), 0, end, d.step(9)])


def change_wide(d: Draft) -> None:
    """A weight that is said to stay in fp32, or not to; a module that is said to run in it."""
    entry = d.stated["weights"][d.name()]
    entry["wide"] = not entry["wide"]
    if d.rng.random() < 0.2:
        d.stated["fp32_modules"] = [*d.stated["fp32_modules"], "norm"]


def change_hash(d: Draft) -> None:
    """One digit of a hash."""
    entry = d.stated["weights"][d.name()]
    at = d.rng.randrange(64)
    digit = d.rng.choice([x for x in "0123456789abcdef" if x != entry["sha256"][at]])
    entry["sha256"] = entry["sha256"][:at] + digit + entry["sha256"][at + 1 :]


def change_lists(d: Draft) -> None:
    """An entry too few or too many in the lists of what is not covered and not read."""
    key = d.rng.choice(("uncovered", "unread"))
    if d.stated[key] and d.rng.random() < 0.5:
        d.stated[key].pop(d.rng.randrange(len(d.stated[key])))
    else:
        d.stated[key].append(f"0:{d.pick()['id']}" if key == "uncovered" else d.name())


def change_tensors(d: Draft) -> None:
    """A tensor too few in the list of weights, or one that is in no file."""
    weights = d.stated["weights"]
    if d.rng.random() < 0.5:
        weights.pop(d.name())
    else:
        weights[f"{d.name()}.other"] = copy.deepcopy(weights[d.name()])


def change_files(d: Draft) -> None:
    """Other names of files, in a list of none, twice, or in another folder."""
    files = d.stated["files"]
    odd = (["../a.safetensors"], ["..\\a.safetensors"], ["b.safetensors"], files * 2, [], ["a.bin"])
    d.stated["files"] = d.rng.choice(odd)


# changes of the files of weights


def _open(d: Draft) -> tuple[Path, Node, bytes]:
    path = d.place / d.rng.choice(d.stated["files"])
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    return path, json.loads(content[8:begin]), content[begin:]


def _write(path: Path, header: str, data: bytes) -> None:
    path.write_bytes(len(header.encode()).to_bytes(8, "little") + header.encode() + data)


def change_bits(d: Draft) -> None:
    """Some bits of values in a file of weights: other numbers, some of them not finite."""
    path, header, data = _open(d)
    changed = bytearray(data)
    for _ in range(d.rng.choice((1, 1, 20))):
        changed[d.rng.randrange(len(changed))] ^= 1 << d.rng.randrange(8)
    if d.rng.random() < 0.3:
        at = 4 * d.rng.randrange(len(changed) // 4)
        changed[at : at + 4] = d.rng.choice((b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\xff\xff\x7f\x7f"))
    _write(path, json.dumps(header), bytes(changed))


def change_header(d: Draft) -> None:
    """Another dtype, shape or place of a tensor, another name, a name twice, no JSON."""
    path, header, data = _open(d)
    names = [x for x in header if x != "__metadata__"]
    one, other = (header[d.rng.choice(names)] for _ in range(2))
    way = d.rng.randrange(8)
    if way == 0:
        one["dtype"] = d.rng.choice(("I32", "U32", "F8_E5M2", "BF16", "F64", "C64", "F32 "))
    elif way == 1:  # the same bytes, read as two 16-bit values each
        one["dtype"], one["shape"] = (
            d.rng.choice(("F16", "BF16")),
            [*one["shape"][:-1], one["shape"][-1] * 2],
        )
    elif way == 2:
        one["shape"] = d.rng.choice(
            (one["shape"][::-1], [*one["shape"], 1], [math.prod(one["shape"])])
        )
    elif way == 3:
        one["data_offsets"], other["data_offsets"] = other["data_offsets"], one["data_offsets"]
    elif way == 4:
        header[d.rng.choice(names)[::-1]] = one
    elif way == 5:
        header = {names[0]: header.pop(names[-1]), **header}
    text = json.dumps(header)
    if way == 6:
        text = text[:-1] + f", {json.dumps(names[0])}: {json.dumps(other)}}}"
    _write(path, text[1:] if way == 7 else text, data)


def put_beside(d: Draft) -> None:
    """A file of weights or an index beside those of the certificate, which a loader could take."""
    name = d.rng.choice((
        "diffusion_pytorch_model.fp16.safetensors", "pytorch_model.bin", "MODEL.SAFETENSORS", "a.ckpt",
        "model.safetensors.index.json", "diffusion_pytorch_model.safetensors.index.json", "config.json",
    ))  # fmt: skip
    first = d.stated["files"][0]
    places = d.rng.choice(
        ({}, dict.fromkeys(d.stated["weights"], first), {d.name(): "other.safetensors"})
    )
    if name.endswith(".json"):
        (d.place / name).write_text(json.dumps({"weight_map": places}))
    else:
        shutil.copyfile(d.place / first, d.place / name)


def split_file(d: Draft) -> None:
    """The tensors in two files, with an index of them or without."""
    path, header, data = _open(d)
    header.pop("__metadata__", None)
    names, first = [*header], d.rng.randrange(1, len(header))
    places = {}
    for number, part in enumerate((names[:first], names[first:])):
        name = d.rng.choice((path.name, f"{path.stem}-{number}.safetensors")) if number == 0 else (
            f"{path.stem}-{number}.safetensors")  # fmt: skip
        made, pieces, at = {}, b"", 0
        for key in part:
            begin, end = header[key]["data_offsets"]
            made[key] = {**header[key], "data_offsets": [at, at + end - begin]}
            pieces, at, places[key] = pieces + data[begin:end], at + end - begin, name
        _write(d.place / name, json.dumps(made), pieces)
    if path.name not in places.values():
        path.unlink()
    d.stated["files"] = sorted({*places.values()})
    if d.rng.random() < 0.8:
        index = d.place / f"{d.rng.choice((path.stem, 'other'))}.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": places}))


# changes of the whole


def change_whole(d: Draft) -> None:
    """Another key of the certificate or of a component, or one too few or too many."""
    where = d.rng.choice((d.certificate, d.stated, d.graph))
    key = d.rng.choice([*where])
    odd: Sequence[Any] = (None, [], {}, "", 7, "../net", "..", "net\x1b[2J", [[]], {"a": "b"}, [{}])
    way = d.rng.randrange(4)
    if way == 0:
        where.pop(key)
    elif way == 1:
        where["another"] = d.rng.choice(odd)
    elif way == 2:
        where[key] = d.rng.choice(odd)
    else:
        d.certificate["components"] = d.rng.choice((d.certificate["components"] * 2, [d.stated]))


def change_text(d: Draft) -> None:
    """The file as text: a key twice, a part of it, no number, no UTF-8, brackets without an end."""
    text = json.dumps(d.certificate)
    at = d.rng.randrange(len(text))
    made = d.rng.choice((
        text[:at], text[:at] + text[at + 1 :], text[:at] + "\x00" + text[at:], "[" * 100_000, "null", "",
        text[:-1] + ', "left": {}}', text.replace("64.0", "NaN"), text.replace("64.0", "1e999"),
        text.replace('"rule"', '"rule": "input", "rule"', 1), text.replace('"fp16"', '"\\ud800"', 1),
    ))  # fmt: skip
    d.text = None if made == text else made  # what was to be replaced may not be there


CHANGES: dict[str, Callable[[Draft], None]] = {
    "bound": change_bound, "bound or none": change_no_bound, "rule": change_rule,
    "function, mix, alike": change_function, "value of a key": change_key, "set of keys": change_keys,
    "shape, dimension, number": change_number, "limit of an input": change_limit,
    "timesteps": change_times, "witness": change_witness, "dtype": change_dtype,
    "exponent of a value": change_exponent, "reference": change_edge,
    "number of references": change_edges, "value left out, doubled or moved": change_nodes,
    "value put in": put_in, "graph drawn anew": draw_graph, "outputs": change_outputs,
    "exponent moved": move_exponent, "weight of an operation": change_weight,
    "exponent of a weight": change_fold, "wide": change_wide, "hash": change_hash,
    "lists of values": change_lists, "list of tensors": change_tensors, "list of files": change_files,
    "bits of weights": change_bits, "header": change_header, "file or index beside": put_beside,
    "files split": split_file, "keys of the whole": change_whole, "text": change_text,
}  # fmt: skip
MOST_ACCEPTED = ("graph drawn anew", "value put in", "exponent moved", "reference", "dtype", "rule")
"""Changes that are drawn three times as often: many of them make another true certificate."""


# values that are drawn


def draw_keys(d: Draft, n: Node, keys: dict[str, Any]) -> None:
    drawn = {key: draw_key(d, key, kind, n) for key, kind in keys.items()}
    if "radius" in keys and d.rng.random() < 0.7:  # no timestep is left out
        last, count, radius = d.rng.choice(((10.0, 11, 0.0), (999.0, 1000, 0.0), (1.0, 11, 0.05)))
        drawn |= {"first": 0.0, "last": last, "count": count, "radius": radius}
    n |= {k: x for k, x in drawn.items() if not keys[k].optional or d.rng.random() < 0.4}


def draw_key(d: Draft, key: str, kind: Any, n: Node) -> Any:
    """A value of a key that is mostly of its type and fits the value's shape."""
    rng, rank = d.rng, len(n["shape"])
    dim = rng.randrange(max(rank, 1))
    number = rng.choice((0.0, 1e-6, 0.5, -2.0, 100.0, 5e4, 3.0e38))
    ways: dict[str, Callable[[], Any]] = {
        "name": lambda: str(n["id"]), "largest": lambda: abs(number) + 1, "first": lambda: 0.0,
        "weight": d.name, "bias": d.name, "last": lambda: rng.choice((0.0, 10.0, 1000.0)),
        "count": lambda: rng.choice((1, 2, 11, 500, 1001)),
        "radius": lambda: rng.choice((0, 0, 0.5, 1, 50)), "alike": lambda: rng.random() < 0.5,
        "start": lambda: 0, "stop": lambda: rng.randint(1, 8), "step": lambda: rng.choice((1, 2)),
        "dim": lambda: dim, "dims": lambda: rng.choice(([dim], [dim], [*range(rank)])),
        "order": lambda: rng.sample(range(rank), rank), "factor": lambda: number,
        "number": lambda: number if kind.holds(number) else abs(number),
        "number_exponent": lambda: rng.randint(-3, 3), "eps": lambda: rng.choice((0, 0, 4, -6)),
        "by": lambda: rng.randint(-4, 4), "halves": lambda: rng.choice((-2, -1, 1, 2, 4)),
        "inner": lambda: rng.randint(1, 2), "groups": lambda: rng.choice((1, 1, 2, 8)),
        "part": lambda: rng.choice(([0, 4], [0, 8], [8, 16], [1, 3])),
        "sigma": lambda: [[rng.randint(1, 1 << 16), rng.randint(-14, 6)] for _ in range(rng.randint(1, 2))],
        "values": lambda: [rng.gauss(0, 30) for _ in range(math.prod(n["shape"]))],
    }  # fmt: skip
    if key in ways:
        return ways[key]()
    words = kind.words.removeprefix("one of ").split(", ")
    return rng.choice(words) if kind.words.startswith("one of ") else "f"


def draw_node(d: Draft, name: str, nodes: list[Node], source: Node | None = None) -> Node:
    """A value of any rule, made of what stands before it, in the shape that follows for most rules."""
    rng = d.rng
    begins = ("input", "input", "times", "known", "weight", "lookup")
    rule = rng.choice([*GRAMMAR, "product", "norm", "multiply"] if nodes else begins)
    count, keys = rng.choice(GRAMMAR[rule])
    least = count if isinstance(count, int) else rng.randint(count[0], count[0] + 2)
    sources = [rng.choice(nodes) for _ in range(least if nodes else 0)]
    if source is not None:
        sources[:1] = [source] * bool(sources)
    if len(sources) > 1 and rng.random() < 0.7:
        alike = [x for x in nodes if x["shape"] == sources[0]["shape"]]
        sources[1:] = [rng.choice(alike) for _ in sources[1:]]
    begin = rng.choice(([2, 8], [1, 4, 8], [8], [1, 3, 4, 4], [1, 8, 4, 4], [1, 2, 4, 4], [1]))
    n: Node = {
        "id": name, "place": "", "rule": rule, "from": [x["id"] for x in sources],
        "shape": [*(sources[0]["shape"] if sources else begin)],
        "dtype": rng.choice(("fp16", "fp16", "fp16", "fp32", "bf16", "int")),
        "bound": None, "exponents": [0],
    }  # fmt: skip
    draw_keys(d, n, keys)
    if "weight" in n and rng.random() < 0.9:
        n["dtype"] = rng.choice(stopdown_verify.FLOATS)
    set_shape(d, n, [x["shape"] for x in sources])
    return n


def set_shape(d: Draft, n: Node, shapes: list[list[int]]) -> None:
    """The shape that follows, for most rules."""
    rng, shape, dim = d.rng, n["shape"], n.get("dim", 0)
    w = _shape_of(d, n["weight"]) if "weight" in n else ()
    part = n.get("part", (0, *w[:1]))
    channel = max(len(shape) - max(len(w) - 1, 1), 0)
    size = 1 if n.get("of") == "mean" else rng.randint(1, 4)

    def put(at: int, value: int) -> list[int]:
        return [*shape[:at], value, *shape[at + 1 :]]

    ways: dict[str, Callable[[], list[int]]] = {
        "view": lambda: rng.choice(([math.prod(shape)], [1, *shape], [*shape[:-2], -1])),
        "order": lambda: [shape[x] for x in n["order"]],
        "part": lambda: put(dim, len(range(n["start"], min(n["stop"], shape[dim]), n["step"]))),
        "join": lambda: put(dim, shape[dim] * len(n["from"])),
        "mix": lambda: [size if k in n["dims"] else x for k, x in enumerate(shape)],
        "spread": lambda: [2, *shape], "weight": lambda: [*w], "lookup": lambda: [3, *w[1:]],
        "times": lambda: [1], "product": lambda: put(channel, part[-1] - part[0]),
        "matmul": lambda: [*shape[:-1], shapes[1][-1]], "attention": lambda: [*shape[:-1], shapes[2][-1]],
    }  # fmt: skip
    with contextlib.suppress(IndexError):
        n["shape"] = ways.get(n["rule"], lambda: shape)()
    if -1 in n["shape"]:
        n["shape"][-1] = math.prod(shape[-2:])
    if n["rule"] == "part" and shape:
        n["stop"] = min(n["stop"], shape[dim])


def _shape_of(d: Draft, name: str) -> tuple[int, ...]:
    return stopdown_verify.open_weights(d.place, d.stated["files"], {})[name].shape


def fits(d: Draft, n: Node, nodes: list[Node]) -> bool:
    """Whether the checker would take its keys and its shape."""
    shapes = {x["id"]: tuple(x["shape"]) for x in nodes}
    try:
        stopdown_verify.check_node(n)
        weights = stopdown_verify.open_weights(d.place, d.stated["files"], {})
        stopdown_verify.check_shape(n, [shapes[x] for x in n["from"]], weights)
    except (stopdown_verify.Refused, *stopdown_verify.BROKEN):
        return False
    return True


# a forgery and what becomes of it


@dataclass
class Model:
    """A certificate that is true, and the folder whose weights it is of."""

    name: str
    certificate: Node
    folder: Path


def forge(model: Model, seed: int, scratch: Path, changes: Sequence[str] = ()) -> Outcome:
    """Change a certificate at random and see whether the checker refuses it, or whether it is true.

    Args:
        model: what is changed, in a copy.
        seed: of everything that is drawn.
        scratch: an empty folder, or one of an earlier forgery.
        changes: one of these, instead of any.
    """
    rng = random.Random(seed)
    often = [*CHANGES, *MOST_ACCEPTED, *MOST_ACCEPTED]
    for tried in itertools.count():
        changes = changes if tried < 20 else ()  # not every certificate has what they change
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.copytree(model.folder, scratch)
        d = Draft(copy.deepcopy(model.certificate), scratch, rng)
        done = [rng.choice([*changes] or often)]
        done += (
            [rng.choice(often) for _ in range(rng.choice((0, 0, 0, 1, 2)))] if not changes else []
        )
        before = _read_all(d)
        for name in done:
            with contextlib.suppress(IndexError, KeyError, TypeError, ValueError, AttributeError,
                                     OSError, StopIteration, stopdown_verify.Refused):  # fmt: skip
                CHANGES[name](d)
        if _read_all(d) != before:  # else nothing of that kind can be changed
            break
    if rng.random() < 0.75:
        fill(d, before)
    if rng.random() < 0.95:
        d.certificate["seal"] = stopdown_verify.seal(d.certificate)
    code, found = check(d)
    if code in (1, 2):
        return Outcome(seed, model.name, tuple(done), "refused", str(found["why"]))
    certificate = json.loads(d.text) if d.text else d.certificate
    lies = judge(certificate, found, scratch, seed)
    rules = Counter(
        n["rule"] for x in certificate["components"] for g in x["graphs"] for n in g["nodes"]
    )
    return Outcome(
        seed, model.name, tuple(done), "false" if lies else "true", "; ".join(lies[:3]), rules
    )


def _read_all(d: Draft) -> Any:
    files = {str(p): p.read_bytes() for p in sorted(d.folder.rglob("*")) if p.is_file()}
    return json.dumps(d.certificate), d.text, files


def fill(d: Draft, before: Any) -> None:
    """Put in what the derivation finds, as far as it gets, unless that takes the change back."""
    changed = copy.deepcopy(d.certificate)
    with contextlib.suppress(stopdown_verify.Refused, *stopdown_verify.BROKEN):
        for stated in d.certificate["components"]:
            stopdown_verify.check_component(stated, d.folder, write=True)
    if _read_all(d) == before:
        d.certificate = changed


def check(d: Draft) -> tuple[int, Node]:
    """The exit code of the checker's command and what it found; a refusal is one line.

    Raises:
        AssertionError: it was refused in another way.
    """
    path = d.folder / "certificate.json"
    text = json.dumps(d.certificate) if d.text is None else d.text
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    command = [str(path), "--weights", str(d.folder)]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = stopdown_verify.run_checker([*command, "--json"])
    found: Node = json.loads(said.getvalue())
    if code in (1, 2):
        with (
            contextlib.redirect_stdout(io.StringIO()) as out,
            contextlib.redirect_stderr(io.StringIO()) as said,
        ):
            again = stopdown_verify.run_checker(command)
        line = said.getvalue()
        begins = {1: "Refused: ", 2: "Can't be read: "}[code]
        assert (again, out.getvalue(), line.count("\n")) == (code, "", 1), line
        assert line.startswith(begins), line
        assert line.rstrip("\n").isprintable(), line
    return code, found


def judge(certificate: Node, found: Node, folder: Path, seed: int) -> list[str]:
    """What an accepted certificate says that is false."""
    lies = []
    said = {x["component"]: x for x in found["components"]}
    for stated in certificate["components"]:
        name = stated["component"]
        try:
            tensors = load(folder / name, stated["files"])
            lies += [f"{name}: {x}" for x in find_lies(stated, said[name], tensors, seed)]
        except (ValueError, IndexError, KeyError, RuntimeError) as error:
            lies.append(f"{name} can't be run: {error}")
    return lies
