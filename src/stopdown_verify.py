"""Check a certificate, which claims that no fp16 value of a model exceeds 65504, whatever its inputs.

A certificate is a JSON file that `stopdown plan --certificate FILE` writes. It lists the values of each
component's graph, each with the rule and the values that imply its bound. This module derives every bound
again from the weights. It needs NumPy and nothing else: no torch, nothing of Stopdown.
`docs/certificate-file.md` has the rules as formulas, and what is assumed.

**Catches** keys, types and ranges that the grammar below does not have, bounds that do not follow,
exponents that do not cancel, values beyond 65504, weights that are not the certificate's or that no graph
reads, files that a loader could take instead, and lists of uncovered values that are not complete.
**Does not catch** a graph that is not the model's: the file says what the model computes.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import itertools
import json
import math
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

if Path(sys.argv[0]).stem.replace("-", "_") == "stopdown_verify":  # the program itself
    # OpenBLAS's own threads wait busily for each other: five times as long on a busy machine
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

Array = Any
Node = dict[str, Any]
Shape = tuple[int, ...]
Known = tuple[Array, Array, float]

LARGEST, STORED, TOLERANCE = 65504, 2.0**-25, 1 + Fraction(1, 2**9)
UP = 1 + 2.0**-30  # more than float64 loses in a sum of 2**20 terms
ROUNDING = {"fp16": 2.0**-10, "bf16": 2.0**-7, "fp32": 2.0**-22, "fp64": 2.0**-50, "int": 0.0}
LEAST = {"fp16": STORED, "bf16": 2.0**-134, "fp32": 2.0**-150, "fp64": 0.0, "int": 1.0}
RANGE = {
    "bf16": 2.0**128 - 2.0**120,
    "fp32": 2.0**128 - 2.0**104,
    "int": 2.0**63,
}  # beyond it is Inf
WEIGHT, SUM, NORM = 2.0**-11, 2.0**-23, 2.0**-10  # relative: of a weight, a term of a sum, a norm
MOST, SMALL, ENTRIES, BASIS = 1 << 19, 1 << 21, 1 << 20, 32
CHUNK = 1 << 17  # numbers in float64 that stay in a processor's cache
MOST_EXPONENT, LEAST_EPS = 512, 2.0**50

THREADS = min(os.cpu_count() or 1, 8) if os.environ.get("OPENBLAS_NUM_THREADS") == "1" else 1
POOL = ThreadPoolExecutor(THREADS)


# the grammar: what a certificate can say. Every object has exactly the keys that stand here


@dataclass(frozen=True)
class Kind:
    """Grammar of the value of a key in a certificate.

    Attributes:
        words: description for errors.
        holds: tests a value.
        optional: whether the key may be missing.
    """

    words: str
    holds: Callable[[Any], bool]
    optional: bool = False


def whole(first: int, last: int) -> Kind:
    words = f"a whole number from {first} to {last}"
    return Kind(words, lambda x: type(x) is int and first <= x <= last)


def real(first: float, last: float) -> Kind:
    words = f"a number from {first:g} to {last:g}"
    return Kind(words, lambda x: type(x) in (int, float) and first <= x <= last)


def one_of(*words: str) -> Kind:
    return Kind(f"one of {', '.join(words)}", lambda x: type(x) is str and x in words)


def text(pattern: str, words: str) -> Kind:
    fits = re.compile(pattern).fullmatch
    return Kind(words, lambda x: type(x) is str and x.isprintable() and bool(fits(x)))


def listed(kind: Kind, first: int = 0, last: int = 1 << 22) -> Kind:
    words = f"a list of {first if first == last else f'{first} to {last}'}, each {kind.words}"
    return Kind(
        words, lambda x: type(x) is list and first <= len(x) <= last and all(map(kind.holds, x))
    )


def row(*kinds: Kind) -> Kind:
    words = f"a list of {'; '.join(kind.words for kind in kinds)}"
    return Kind(
        words,
        lambda x: (
            type(x) is list
            and len(x) == len(kinds)
            and all(kind.holds(value) for kind, value in zip(kinds, x, strict=True))
        ),
    )


def named(name: Kind, kind: Kind) -> Kind:
    def holds(x: Any) -> bool:
        return type(x) is dict and all(name.holds(k) and kind.holds(v) for k, v in x.items())

    return Kind(f"an object of {kind.words} by {name.words}", holds)


def maybe(kind: Kind) -> Kind:
    return replace(kind, optional=True)


FLAG = Kind("true or false", lambda x: type(x) is bool)
OBJECT = Kind("an object", lambda x: type(x) is dict)
WORDS = Kind("text", lambda x: type(x) is str)
TEXT, NAME = text(r".{0,2000}", "printable text"), text(r".{1,500}", "a printable name")
FOLDER = text(r"[A-Za-z_][A-Za-z0-9_]{0,99}", "the name of a component, a folder beside the others")
FILE = text(r"\w[\w.-]{0,190}\.safetensors", "the name of a safetensors file, without a folder")
HASH = text(r"[0-9a-f]{64}", "a sha256")
SIZE, PLACE, DIM = whole(0, 1 << 40), whole(0, 1 << 40), whole(0, 11)
EXPONENT, NUMBER, COUNT = whole(-128, 128), real(-3.5e38, 3.5e38), whole(1, 1 << 20)
BOUND = row(whole(0, 1 << 17), whole(-1200, 1200))  # mantissa and exponent
UNBOUNDED = Kind(f"null, or {BOUND.words}", lambda x: x is None or BOUND.holds(x))

CERTIFICATE = {
    "kind": one_of("certificate"), "plan": text(r"[0-9a-f]{64}|", "the seal of a plan, or nothing"),
    "components": listed(OBJECT, 1, 100), "left": named(NAME, TEXT), "seal": HASH,
}  # fmt: skip
COMPONENT = {
    "component": FOLDER, "class": TEXT, "files": listed(FILE, 1, 10_000),
    "weights": named(NAME, OBJECT), "graphs": listed(OBJECT, 1, 1000),
    "fp32_modules": listed(NAME), "unread": listed(NAME), "uncovered": listed(NAME),
}  # fmt: skip
TENSOR = {
    # dimension 0 or 1, from, to, and the exponent of these rows or columns
    "exponents": listed(row(whole(0, 1), PLACE, PLACE, EXPONENT)), "wide": FLAG, "sha256": HASH,
}  # fmt: skip
HEADER = {  # of a tensor in a safetensors file
    "dtype": text(r"\w{1,20}", "a dtype"), "shape": listed(SIZE, 0, 12),
    "data_offsets": row(PLACE, PLACE),
}  # fmt: skip
METADATA = {"__metadata__": named(WORDS, WORDS)}
GRAPH = {
    "method": TEXT, "nodes": listed(OBJECT, 1), "outputs": listed(row(NAME, EXPONENT), 1),
}  # fmt: skip
NODE = {
    "id": NAME, "place": TEXT, "rule": NAME, "from": listed(NAME), "shape": listed(SIZE, 0, 12),
    "dtype": one_of(*ROUNDING), "bound": UNBOUNDED, "exponents": listed(whole(-512, 512), 1),
}  # fmt: skip

MOVING = ("view", "order", "part", "join", "spread")
KEEPING = ("cast", "copy", "relu", "neg", "abs", "leaky_relu", "range_clamp", "triangle")
SMALLER = ("silu", "gelu", "hardswish", "mish")
SATURATING = ("sigmoid", "tanh", "erf")
SHRINKING = ("tanh", "sin", "limit")
_READS = {"weight": NAME, "bias": maybe(NAME), "part": maybe(row(PLACE, PLACE))}

# rule: its forms, each how many values it is made of, and its own keys beside those of every node
GRAMMAR: dict[str, tuple[tuple[int | range, dict[str, Kind]], ...]] = {
    "input": ((0, {"name": NAME, "largest": real(0, 3.5e38)}),),
    "times": ((0, {"name": NAME, "first": NUMBER, "last": NUMBER, "count": whole(1, 10_001),
                   "radius": real(0, 1e6)}),),
    "known": ((0, {"name": NAME, "values": listed(NUMBER)}),),
    "weight": ((0, {"weight": NAME}),),
    "view": ((1, {}),),
    "order": ((1, {"order": listed(DIM, 0, 12)}),),
    "part": ((1, {"dim": DIM, "start": PLACE, "stop": PLACE, "step": COUNT}),),
    "join": ((range(1, 1 << 20), {"dim": DIM}),),
    "spread": ((1, {}),),
    "mix": ((1, {"dims": listed(DIM, 0, 12), "of": one_of("places", "rows", "repeats", "mean")}),),
    "either": ((range(1, 1 << 20), {"of": one_of("choice", "larger"), "number": maybe(NUMBER),
                                    "number_exponent": maybe(EXPONENT)}),),
    "same": ((1, {"function": one_of(*KEEPING, *SMALLER)}),),
    "scale": ((1, {"by": EXPONENT}),),
    "bounded": ((1, {"function": one_of(*SATURATING, "sin", "cos", "sign")}),
                (0, {"function": one_of("sin", "cos")}),
                (1, {"function": one_of("softmax"), "dim": DIM}),
                (1, {"function": one_of("clamp", "limit"), "number": real(0, 3.5e38)}),
                (0, {"function": one_of("filled"), "number": real(0, 3.5e38)})),
    "add": ((2, {"factor": maybe(NUMBER)}),
            (1, {"number": NUMBER, "number_exponent": maybe(EXPONENT)})),
    "multiply": ((2, {}), (1, {"number": NUMBER})),
    "unit": ((2, {}),),
    "power": ((1, {"halves": whole(-64, 64)}),),
    "exp": ((1, {}),),
    "norm": ((1, {"inner": whole(1, 12), "eps": EXPONENT, "weight": maybe(NAME), "bias": maybe(NAME)}),
             (1, {"groups": COUNT, "eps": EXPONENT, "weight": maybe(NAME), "bias": maybe(NAME)})),
    "product": ((1, {**_READS, "sigma": maybe(listed(BOUND, 1, 1 << 20))}),
                (1, {**_READS, "groups": COUNT})),
    "lookup": ((0, {"weight": NAME}),),
    "matmul": ((2, {}),),
    "attention": ((range(3, 5), {}),),
    "unknown": ((range(1 << 20), {"function": NAME, "alike": FLAG}),),
}  # fmt: skip
FLOATS = ("fp16", "fp32", "fp64")  # the dtypes of what reads weights

STORAGE = {  # dtypes of safetensors files; every other one is refused
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I64": np.int64,
    "I32": np.int32, "I16": np.int16, "I8": np.int8, "U64": np.uint64, "U32": np.uint32,
    "U16": np.uint16, "U8": np.uint8, "BOOL": np.uint8,
}  # fmt: skip
LOADABLE = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf")  # what a loader may take
ASSUMED = (
    "the model computes what the graphs describe, for inputs up to the shapes listed",
    "IEEE 754 with subnormal numbers; sums, norms and softmax in fp32 or wider unless stated otherwise",
    "no mask hides a whole row",
)

FUNCTIONS: dict[str, tuple[Callable[[Array], Array], float]] = {
    "silu": (lambda x: x / (1 + np.exp(-x)), 1.13), "relu": (lambda x: np.maximum(x, 0), 1.0),
    "sin": (np.sin, 1.0), "cos": (np.cos, 1.0), "neg": (np.negative, 1.0), "tanh": (np.tanh, 1.0),
    "cast": (lambda x: x, 1.0), "copy": (lambda x: x, 1.0),
}  # fmt: skip


class Refused(Exception):
    """Raised if the certificate does not prove its claim."""


class Unknown(Exception):
    """Raised if a certificate has no value with a requested name."""


class Unbounded(Exception):
    """Raised by a rule that has no bound for its inputs."""


BROKEN = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError,
          ValueError)  # fmt: skip


def demand(holds: Any, what: str) -> None:
    if not holds:
        raise Refused(what)


def read_json(content: bytes, name: str = "it") -> Any:
    """Parse JSON; refuse duplicate names in one object, NaN and infinities."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name, value in pairs:
            demand(name not in made, f"the name {name!r} stands twice in one object")
            made[name] = value
        return made

    def no_number(name: str) -> None:
        raise Refused(f"{name} is no number")

    try:
        return json.loads(content.decode(), object_pairs_hook=once, parse_constant=no_number)
    except (ValueError, RecursionError, MemoryError) as error:
        raise Refused(f"{name} can't be read as JSON: {error}") from None


def list_faults(value: Any, keys: dict[str, Kind]) -> list[str]:
    """List the keys of an object that are missing, unknown, or have values of the wrong type or range."""
    found = [f"{key!r} is no key of it" for key in value if key not in keys]
    for key, kind in keys.items():
        if key not in value:
            found += [] if kind.optional else [f"{key!r} is missing, expected {kind.words}"]
        elif not kind.holds(value[key]):
            given = repr(value[key])
            given = given if len(given) <= 60 else f"{given[:60]}..."
            found.append(f"{key!r} is {given}, expected {kind.words}")
    return found


def check_keys(value: Any, keys: dict[str, Kind], where: str = "") -> None:
    found = list_faults(value, keys) if type(value) is dict else ["it is no object"]
    demand(not found, where + (found or [""])[0])


FORMS = {  # of each rule how many values a form is made of, and all of its keys
    rule: [(range(c, c + 1) if isinstance(c, int) else c, {**NODE, **keys}) for c, keys in forms]
    for rule, forms in GRAMMAR.items()
}  # fmt: skip


def check_node(n: Node) -> None:
    """Refuse a node unless its keys match one form of its rule in the grammar."""
    forms = FORMS.get(rule, ()) if type(rule := n.get("rule")) is str else ()
    if any(not list_faults(n, keys) and len(n["from"]) in allowed for allowed, keys in forms):
        return
    check_keys({key: x for key, x in n.items() if key in NODE}, NODE)
    demand(n["rule"] in GRAMMAR, f"'rule' is {n['rule']!r}, expected one of {', '.join(GRAMMAR)}")
    faults = []
    for allowed, keys in forms:
        found = list_faults(n, keys)
        if len(n["from"]) not in allowed:
            words = f"{allowed[0]} to {allowed[-1]}" if len(allowed) > 1 else f"{allowed[0]}"
            found.append(f"it is made of {len(n['from'])} values, expected {words}")
        faults.append(found)
    found = min(faults, key=len)
    demand(not found, (found or [""])[0])


def check_graph(graph: Node, weights: dict[str, Any]) -> None:
    """Check that each node has the form of its rule and refers only to earlier nodes."""
    check_keys(graph, GRAPH)
    seen, times = set[str](), 0
    for number, n in enumerate(graph["nodes"]):
        try:
            check_node(n)
            demand(n["id"] not in seen, "the name stands twice")
            for name in n["from"]:
                demand(name in seen, f"{name!r} is no value before it")
            for name in (n[key] for key in ("weight", "bias") if key in n):
                demand(name in weights, f"{name!r} is no tensor of the component")
                demand(n["dtype"] in FLOATS, f"what reads weights is in {', '.join(FLOATS)}")
            times += n["rule"] == "times"
            demand(times < 2, "a second timestep: two of them need not be the same value")
        except Refused as error:
            raise Refused(f"{n.get('id', f'value {number}')} ({n.get('rule')}): {error}") from None
        seen.add(n["id"])
    names = [name for name, _ in graph["outputs"]]
    demand(len({*names}) == len(names), "an output is stated twice")
    for name in names:
        demand(name in seen, f"the output {name!r} is no value of the graph")


def check_grammar(stated: Node) -> None:
    """Check that a certificate's entry of a component has the keys, types and ranges of the grammar.

    Raises:
        Refused: with the first fault and the expected value.
    """
    check_keys(stated, COMPONENT)
    demand(len({*stated["files"]}) == len(stated["files"]), "a file is listed twice")
    for name, entry in stated["weights"].items():
        check_keys(entry, TENSOR, f"{name}: ")
    for graph in stated["graphs"]:
        check_graph(graph, stated["weights"])


# shapes: that of a result follows from those of its inputs and weights


def find_common_shape(*shapes: Shape) -> Shape | None:
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        return None


def check_shape(n: Node, shapes: list[Shape], weights: dict[str, Weight]) -> None:  # noqa: C901 (a table of cases)
    """Check that the shape of a node in a certificate follows from its rule and its inputs' shapes."""
    rule, shape, dim = n["rule"], tuple(n["shape"]), n.get("dim", 0)
    rank, first, wrong = len(shape), (*shapes, ())[0], "the shape doesn't follow"
    if rule not in ("input", "unknown"):
        demand(0 not in shape and all(0 not in x for x in shapes), "a size is 0")
    demand(dim < max(rank, 1), "no such dimension")
    if rule in ("same", "scale", "power", "exp", "norm") or (rule == "bounded" and shapes):
        demand(first == shape, wrong)
    elif rule in ("add", "multiply", "either", "spread"):
        demand(find_common_shape(*shapes, shape) == shape, wrong)
    elif rule == "unit":
        demand(first == shape == find_common_shape(shapes[1], shape), wrong)
    elif rule == "known":
        demand(len(n["values"]) == math.prod(shape), "there are more or fewer values than places")
    elif rule == "view":
        demand(math.prod(first) == math.prod(shape), "a view has other elements")
    elif rule == "order":
        holds = sorted(n["order"]) == [*range(len(first))]
        demand(holds and shape == tuple(first[d] for d in n["order"]), wrong)
    elif rule == "part":
        demand(rank == len(first) and n["start"] < n["stop"] <= first[dim], "no such part")
        size = len(range(n["start"], n["stop"], n["step"]))
        demand(shape == (*first[:dim], size, *first[dim + 1 :]), wrong)
    elif rule == "join":
        others = {(*s[:dim], 0, *s[dim + 1 :]) for s in [shape, *shapes]}
        holds = len(others) == 1 and sum(s[dim] for s in shapes) == shape[dim]
        demand(holds and {len(s) for s in shapes} == {rank}, wrong)
    elif rule == "mix":
        dims = n["dims"]
        kept = tuple(shape[d] if d in dims else size for d, size in enumerate(first))
        holds = kept == shape and len({*dims}) == len(dims) and all(d < rank for d in dims)
        demand(holds and (dims or not shape), "the shape doesn't follow, or nothing is mixed")
        demand(n["of"] != "mean" or all(shape[d] == 1 for d in dims), "a mean has one place")
    elif rule == "matmul":
        a, b = shapes
        demand(min(len(a), len(b), rank) > 1 and a[-1] == b[-2], "no product")
        holds = find_common_shape(a[:-2], b[:-2]) == shape[:-2] and shape[-2:] == (a[-2], b[-1])
        demand(holds, "no product")
    elif rule == "attention":
        q, k, v = shapes[:3]
        holds = rank > 1 and {len(q), len(k), len(v)} == {rank} and k[-2] == v[-2]
        holds = (
            holds
            and q[-1] == k[-1]
            and not any(x % y for s in (k, v) for x, y in zip(q[:-2], s, strict=False))
        )
        demand(holds and shape == (*q[:-1], v[-1]), "no attention")
    elif rule == "lookup":
        w = weights[n["weight"]].shape
        demand(len(w) == 2 and rank > 0 and shape[-1] == w[1], wrong)
    elif rule == "weight":
        demand(weights[n["weight"]].shape == shape, wrong)
    if rule == "norm" and "groups" in n:
        demand(rank > 1 and shape[1] % n["groups"] == 0, "no such groups")
        check_vectors(n, weights, shape[1])
    elif rule == "norm":
        demand(n["inner"] <= rank, "no such dimensions")
        check_vectors(n, weights, math.prod(shape[rank - n["inner"] :]))
    elif rule == "product":
        check_product(n, first, shape, weights)


def check_product(n: Node, first: Shape, shape: Shape, weights: dict[str, Weight]) -> None:
    """Refuse a linear or convolution whose weight doesn't fit its shapes (`first` to `shape`) or groups."""
    w, groups = weights[n["weight"]].shape, n.get("groups", 1)
    demand(len(w) == 2 if "groups" not in n else len(w) > 2, "the weight has other dimensions")
    start, stop = n.get("part", (0, w[0]))
    demand(start < stop <= w[0] and 0 not in w, "no such part of the weight")
    demand("part" not in n or groups == 1, "a part has no groups")
    channel = len(shape) - len(w) + 1
    holds = channel >= 0 and len(first) == len(shape) and first[:channel] == shape[:channel]
    demand(holds and first[channel] == w[1] * groups, "no product")
    demand(shape[channel] == stop - start and (stop - start) % groups == 0, "no product")
    demand(math.prod(w[1:]) <= ENTRIES and len(n.get("sigma", ())) <= w[1], "a sum is too long")
    if "bias" in n:
        bias = weights[n["bias"]].shape
        demand(bias == (w[0],), "a bias has other elements")


def check_vectors(n: Node, weights: dict[str, Weight], size: int) -> None:
    for w in (weights[n[key]] for key in ("weight", "bias") if key in n):
        demand(math.prod(w.shape) == size, "a norm's weight has other elements")


def read_number(pair: Sequence[int]) -> Fraction:
    return Fraction(int(pair[0])) * Fraction(2) ** int(pair[1])


@dataclass
class Value:
    """Bounds of a tensor that hold for every input; the tensor is stored multiplied by `2**exponents`.

    Arrays have the tensor's rank, each size 1 or the tensor's.

    Attributes:
        peak: upper bound of each element's magnitude; None for no bound.
        norm: upper bound of the 2-norm over the dimensions `rows`.
        exact: centre, with a first dimension of timesteps, error radius of each element, and bound of
            the 2-norm of a row's error; None if the tensor is not known at each timestep.
        affine: (radius, gain, table, rest) for rows behind a norm: the tensor is `n * gain + table[t] +
            v` with norm(n) <= radius and |v| <= rest.
    """

    shape: Shape
    peak: Array = None
    norm: float = math.inf
    rows: frozenset[int] = frozenset()
    exponents: Array = 0
    exact: Known | None = None
    affine: tuple[tuple[Any, ...], ...] = ()

    def store(self) -> Array:
        """Return upper bounds of the tensor's elements as stored, that is multiplied by `2**exponents`."""
        return self.peak * 2.0**self.exponents if np.any(self.exponents) else self.peak


def follows(pair: Sequence[int], found: float) -> bool:
    """Return whether a certificate's bound is at least the derived one and at most TOLERANCE times it.

    The comparison is exact.

    Args:
        pair: the certificate's bound: an integer mantissa and a power-of-two exponent.
        found: the derived bound.
    """
    stated, exponent = pair
    number, below = found.as_integer_ratio()
    stated, number = (stated * below) << max(exponent, 0), number << max(-exponent, 0)
    return number <= stated and stated * TOLERANCE.denominator <= number * TOLERANCE.numerator


def write_number(number: float) -> list[int]:
    """Return a bound as certificates store it: an integer mantissa and a power-of-two exponent.

    It is slightly above the given number, and less than TOLERANCE times it.
    """
    mantissa, exponent = math.frexp(number * (1 + 2.0**-11))
    return [math.ceil(math.ldexp(mantissa, 16)), exponent - 16]


# arrays that stand for larger ones


def top(array: Array, dims: Any) -> Array:
    return array.max(axis=tuple(dims), keepdims=True) if array.size else array


def over(squares: Array, shape: Shape, dims: Any) -> float:
    """Return the largest sum of squares over dimensions of a tensor.

    A dimension of size 1 in `squares` stands for one of equal entries, whose number `shape` has.
    """
    for dim in dims:
        sums = squares.sum(axis=dim, keepdims=True)
        squares = squares * shape[dim] if squares.shape[dim] == 1 else sums
    return float(squares.max()) if squares.size else 0.0


def few(array: Array) -> Array:
    """Reduce each dimension along which an array is constant to size 1, to save memory and time."""
    for dim in range(array.ndim):
        first = array[(slice(None),) * dim + (slice(0, 1),)]
        if array.shape[dim] > 1 and (array == first).all():
            array = first
    return array


def bound(shape: Shape, peak: Array, norm: float = math.inf, rows: Any = ()) -> Value:
    """Make a tensor's bounds from its elements' largest magnitudes and, if known, its rows' 2-norm.

    Without a norm, that of a row of such magnitudes is used.

    Args:
        peak: largest magnitudes, broadcastable to `shape`.
        norm: bound of the 2-norm over the dimensions `rows`.
    """
    peak = np.asarray(peak, dtype=np.float64) * UP
    peak = few(peak.reshape((1,) * (len(shape) - peak.ndim) + peak.shape))
    while peak.size > MOST:  # the longest dimension but the last, as long as there is one
        dims = range(peak.ndim - 1) if peak.shape[-1] < peak.size else range(peak.ndim)
        peak = top(peak, [max((peak.shape[d], d) for d in dims)[1]])
    demand(np.isfinite(peak).all(), "a bound isn't finite")
    rows = frozenset(rows) if math.isfinite(norm) else frozenset(range(len(shape))[-1:])
    norm = min(norm, math.sqrt(over(peak**2, shape, rows))) * UP
    return Value(shape, np.minimum(peak, norm), norm, rows)


def bound_norm(x: Value, dims: Sequence[int]) -> float:
    rest = math.prod(x.shape[d] for d in dims if d not in x.rows)
    return min(math.sqrt(over(x.peak**2, x.shape, dims)), x.norm * math.sqrt(rest)) * UP


def find_channel_peaks(x: Value) -> Array:
    return top(x.peak, range(x.peak.ndim - 1)).reshape(-1)


def match_dims(shape: Shape, target: Shape) -> list[tuple[list[int], list[int]]]:
    """Group the dimensions of two shapes into runs that hold the same elements."""
    groups, i, j = [], 0, 0
    while i < len(shape) or j < len(target):
        a, b = i, j
        i, j = min(i + 1, len(shape)), min(j + 1, len(target))
        while (sizes := (math.prod(shape[a:i]), math.prod(target[b:j])))[0] != sizes[1]:
            left = sizes[0] < sizes[1] and i < len(shape)
            i, j = (i + 1, j) if left or j == len(target) else (i, j + 1)
        groups.append(([*range(a, i)], [*range(b, j)]))
    return groups


def view(array: Array, shape: Shape, target: Shape) -> Array:
    sizes, pieces = list(array.shape), list[int]()
    for source, result in match_dims(shape, target):
        alike = all(array.shape[d] == 1 for d in source)
        for dim in () if alike else source:
            sizes[dim] = shape[dim]
        pieces += [1 if alike else target[d] for d in result]
    return np.broadcast_to(array, sizes).reshape(pieces)


def move(n: Node, arrays: list[Array], shapes: list[Shape], lead: int = 0) -> Array:
    """Rearrange arrays by a node's rule: as a view, permutation, slice, concatenation or broadcast.

    Args:
        shapes: shapes of the tensors; sizes of the arrays may be 1 instead.
        lead: number of the arrays' first dimensions that aren't touched.
    """
    rule, first, front, dim = n["rule"], arrays[0], arrays[0].shape[:lead], n.get("dim", 0) + lead
    if rule == "view":
        return view(first, (*front, *shapes[0]), (*front, *n["shape"]))
    if rule == "order":
        return first.transpose([*range(lead), *(d + lead for d in n["order"])])
    if rule == "part":
        cut = slice(n["start"], n["stop"], n["step"]) if first.shape[dim] > 1 else slice(None)
        return first[(slice(None),) * dim + (cut,)]
    if rule == "join":
        sizes = [max(a.shape[d] for a in arrays) for d in range(first.ndim)]
        wide = [[*sizes[:dim], s[dim - lead], *sizes[dim + 1 :]] for s in shapes]
        parts = [np.broadcast_to(a, w) for a, w in zip(arrays, wide, strict=True)]
        return few(np.concatenate(parts, axis=dim))
    added = (1,) * (len(n["shape"]) - len(shapes[0]))
    return first.reshape((*front, *added, *first.shape[lead:]))


def move_value(n: Node, xs: list[Value]) -> Value:
    """Bound a view, permutation, slice, concatenation or broadcast of tensors by the bounds of these.

    A 2-norm is bounded as well if the result still has the dimensions of its rows.
    """
    shapes, shape, x, rule = [x.shape for x in xs], tuple(n["shape"]), xs[0], n["rule"]
    norm, rows, added, peaks = x.norm, set(x.rows), len(shape) - len(x.shape), [x.peak for x in xs]
    if rule == "view":
        rows = set()
        for source, result in match_dims(x.shape, shape):
            inside = [d in x.rows for d in source if x.shape[d] > 1]
            more = (x.shape[d] for d in source if d not in x.rows)
            norm *= math.sqrt(math.prod(more)) if any(inside) else 1
            rows |= {d for d in result if shape[d] > 1 and any(inside)}
    elif rule == "order":
        rows = {n["order"].index(d) for d in rows}
    elif rule == "join":
        rows = set(frozenset.intersection(*(x.rows for x in xs)))
        norms = [bound_norm(x, sorted(rows)) if rows else math.inf for x in xs]
        norm = math.sqrt(sum(x * x for x in norms)) if n["dim"] in rows else max(norms)
        sizes = [max(p.shape[d] for p in peaks) for d in range(len(shape)) if d != n["dim"]]
        if shape[n["dim"]] * math.prod(sizes) > MOST and n["dim"] < len(shape) - 1:
            most = np.max(np.broadcast_arrays(*(top(p, [n["dim"]]) for p in peaks)), axis=0)
            return bound(shape, most, norm if rows else math.inf, rows)
    elif rule == "spread":
        norm *= math.sqrt(math.prod(shape[d + added] // x.shape[d] for d in rows if x.shape[d]))
        rows = {d + added for d in rows}
    return bound(shape, move(n, peaks, shapes), norm if rows else math.inf, rows)


# rules: a bound of the exact result from bounds of the inputs, or Unbounded


def rule_add(c: Graph, n: Node, xs: list[Value]) -> Value:
    a, b = operands(n, xs)
    factor = abs(float(n.get("factor", 1)))
    norm = bound_norm(a, sorted(a.rows)) + factor * bound_norm(b, sorted(a.rows))
    return bound(a.shape, a.peak + factor * b.peak, norm, a.rows)


def rule_multiply(c: Graph, n: Node, xs: list[Value]) -> Value:
    a, b = operands(n, xs)
    norms = a.norm * float(b.peak.max()), b.norm * float(a.peak.max())
    rows = a.rows if norms[0] <= norms[1] else b.rows
    return bound(a.shape, a.peak * b.peak, min(norms), rows)


def operands(n: Node, xs: list[Value]) -> tuple[Value, Value]:
    """Return both operands broadcast to the result's shape; a number counts as an operand."""
    shape = tuple(n["shape"])
    made = [move_value({"rule": "spread", "shape": shape}, [x]) for x in xs]
    return (*made, bound(shape, abs(float(n.get("number", 0)))))[:2]  # type: ignore[return-value]


def rule_unit(c: Graph, n: Node, xs: list[Value]) -> Value:
    """Bound `x * m ** -0.5` with `m >= mean(x**2)`: a row's 2-norm is at most the root of its length."""
    shape, below, kinds = tuple(n["shape"]), n["from"][1], set[str]()
    power, factor, fits, safe = 1.0, 1.0, True, False
    while fits and (at := c.nodes[c.bare(below, kinds)])["rule"] not in ("mix", "unknown"):
        rule, number = at["rule"], float(at.get("number", 0))
        power *= at["halves"] / 2 if rule == "power" else 1
        factor *= number**power if rule == "multiply" and number > 0 else 1
        larger = rule == "add" or (rule == "either" and at["of"] == "larger")
        larger = larger and number > 0 > power
        stored = number * 2.0 ** at.get("number_exponent", 0) if larger else 0.0
        safe = safe or (larger and stored**power <= LEAST_EPS)  # more than what underflows
        fits = rule in ("power", "spread") or larger or (rule == "multiply" and number > 0)
        fits, below = fits and len(at["from"]) == 1, (*at["from"], "")[0]
        kinds.add(at["dtype"])
    mean = fits and at["rule"] == "mix" and at["of"] == "mean"
    square = c.nodes[c.bare(at["from"][0], kinds)] if mean else at
    kind = power, square["rule"], square.get("halves")
    if not (mean and safe and kind == (-0.5, "power", 4)
            and c.bare(square["from"][0], kinds) == c.bare(n["from"][0], kinds)
            and all(at["shape"][d] == 1 for d in at["dims"])
            and kinds | {at["dtype"], square["dtype"]} <= {"fp32", "fp64"}):  # fmt: skip
        raise Unbounded
    norm = factor * math.sqrt(math.prod(shape[d] for d in at["dims"])) * (1 + NORM)
    made, one = bound(shape, norm, norm, at["dims"]), np.ones(shape[-1])
    if at["dims"] == [len(shape) - 1]:
        made.affine = ((norm, one, one[None] * 0, one * 0),)
    return made


def rule_same(c: Graph, n: Node, xs: list[Value]) -> Value:
    return bound(xs[0].shape, xs[0].peak, xs[0].norm, xs[0].rows)


def rule_bounded(c: Graph, n: Node, xs: list[Value]) -> Value:
    """Bound a function by its largest value, and some functions also by their input."""
    shape, name = tuple(n["shape"]), n["function"]
    most = float(n.get("number", 1))
    if name in SHRINKING and xs and xs[0].peak is not None:
        most = np.minimum(most, xs[0].peak)
    return bound(shape, most, *((1.0, (n["dim"],)) if name == "softmax" else ()))


def rule_mix(c: Graph, n: Node, xs: list[Value]) -> Value:
    """Bound a result whose elements are elements of the input along other dimensions, their means, or 0.

    The norm of the input's rows holds for the result only if rows are moved as a whole.
    """
    x, shape, dims = xs[0], tuple(n["shape"]), n["dims"]
    whole = n["of"] != "places" and not x.rows & {*dims}
    return bound(shape, top(x.peak, dims), x.norm if whole else math.inf, x.rows)


def rule_either(c: Graph, n: Node, xs: list[Value]) -> Value:
    peaks = [wide(x.peak, len(n["shape"]), 0) for x in xs]
    most = few(np.max(np.broadcast_arrays(*peaks), axis=0))
    return bound(tuple(n["shape"]), np.maximum(most, abs(float(n.get("number", 0)))))


def rule_matmul(c: Graph, n: Node, xs: list[Value]) -> Value:
    (a, b), shape = xs, tuple(n["shape"])
    inner, last = a.shape[-1], len(a.shape) - 1
    kinds = set[str]()
    source = c.nodes[c.bare(n["from"][0], kinds)]
    is_mean = source["rule"] == "bounded" and source["function"] == "softmax"
    if is_mean and source["dim"] == last and kinds | {source["dtype"]} <= {*FLOATS}:
        return bound(shape, float(b.peak.max()) * (1 + NORM + inner * (SUM + STORED)))
    peaks = inner * float(a.peak.max()) * float(b.peak.max())
    norms = bound_norm(a, [last]) * bound_norm(b, [len(b.shape) - 2])
    return bound(shape, min(norms, peaks) + 2 * inner * SUM * peaks)


def rule_attention(c: Graph, n: Node, xs: list[Value]) -> Value:
    """Bound attention by its values: each output token is a mean of them."""
    value, shape, last = xs[2], tuple(n["shape"]), len(n["shape"]) - 1
    cut = [d for d in range(last) if d != last - 2 or value.shape[d] != shape[d]]
    return bound(shape, top(value.peak, cut), bound_norm(value, [last]), (last,))


def rule_norm(c: Graph, n: Node, xs: list[Value]) -> Value:
    """Bound a normalised row: as its mean square is at most 1, its norm is at most sqrt(length)."""
    shape, groups, rank = tuple(n["shape"]), n.get("groups", 0), len(n["shape"])
    dims = range(1, rank) if groups else range(rank - n["inner"], rank)
    count = math.prod(shape[d] for d in dims) / max(groups, 1)
    place = [shape[d] if d in (dims[:1] if groups else dims) else 1 for d in range(rank)]
    (gain, low), (shift, floor) = c.vector(n, "weight", 1.0), c.vector(n, "bias", 0.0)
    errors = np.abs(gain) * WEIGHT + low, np.abs(shift) * WEIGHT + floor
    g, b = (np.abs(x) + e for x, e in zip((gain, shift), errors, strict=True))
    root = math.sqrt(count) * (1 + NORM)
    sizes = [place if x.size > 1 else [1] * rank for x in (g, b)]
    longest = root * math.sqrt(max(groups, 1)) * float(g.max())
    longest += math.sqrt(over((b**2).reshape(sizes[1]), shape, dims))
    made = bound(shape, root * g.reshape(sizes[0]) + b.reshape(sizes[1]), longest, dims)
    if not groups and n["inner"] == 1:
        one = np.ones(shape[-1])
        made.affine = ((root, g * one, (shift * one)[None], errors[1] * one),)
    return made


def rule_lookup(c: Graph, n: Node, xs: list[Value]) -> Value:
    """Bound an embedding by the rows of its table."""
    w = c.weights[n["weight"]]
    peak = np.max([w.find_largest(part, 0) for _, part in w.read_raw()], axis=0)
    norm = math.sqrt(max(sum_row_squares(rows).max() for _, rows in w.read(entries=CHUNK)))
    floor = STORED * float(2.0 ** -(w.rows.min() + w.columns.min()))
    norm = norm * (1 + WEIGHT) + floor * math.sqrt(w.shape[1])
    return bound(tuple(n["shape"]), peak * (1 + WEIGHT) + floor, norm, (len(n["shape"]) - 1,))


def rule_product(c: Graph, n: Node, xs: list[Value]) -> Value:
    """Bound a linear or convolution: the least bound from magnitudes, norms, and rows behind a norm."""
    x, w, shape, groups = xs[0], c.weights[n["weight"]], tuple(n["shape"]), n.get("groups", 1)
    start, stop = n.get("part", (0, w.shape[0]))
    rank, places, width = len(shape), math.prod(w.shape[2:]), math.prod(w.shape[1:])
    channel = rank - max(len(w.shape) - 1, 1)
    others, spatial = [d for d in range(rank) if d != channel], range(channel + 1, rank)
    peak = np.repeat(top(x.peak, others).reshape(-1) * np.ones(x.shape[channel]), places)
    norm = bound_norm(x, [channel]) * math.sqrt(places)
    norm = min(norm, bound_norm(x, [channel, *spatial])) if spatial else norm
    low, up = STORED * 2.0 ** -w.rows[start:stop], np.repeat(2.0**-w.columns, places)
    affine = [] if spatial else [(r, g, *c.split(t), s) for r, g, t, s in x.affine]
    size, full, euclid, step = *np.zeros((3, stop - start)), (stop - start) // groups
    for g in range(groups):
        part, covered = slice(g * step, g * step + step), peak[g * width : g * width + width]
        sums = [covered]
        for _, _, _, _, left, largest, rest in affine:
            sums += [rest + left + WEIGHT * largest, largest]
        squares = [np.ones(width), *(x[1] ** 2 for x in affine)]
        bases = [row for x in affine for row in x[3]]
        a, s, p = w.multiply(start + part.start, start + part.stop, sums, squares, bases)
        full[part] = a[:, 0] * (1 + WEIGHT) + low[part] * (up @ covered)
        euclid[part] = np.sqrt(s[:, 0]) * (1 + WEIGHT) + low[part] * math.sqrt(up @ up)
        size[part] = np.minimum(full[part], euclid[part] * norm)
    composed = compose_heads(c, n, x)
    if len(w.shape) == 2:
        moved = (np.sqrt(s[:, 0]) * WEIGHT + low * math.sqrt(up @ up)) * norm
        moved = np.minimum(moved, a[:, 0] * WEIGHT + low * (up @ peak)) + width * SUM * size
        c.errors[n["id"]] = norm, moved
    images, at = [], 0
    for k, (radius, gain, steps, base, left, largest, rest) in enumerate(affine):
        image = np.sqrt(s[:, 1 + k]) * (1 + WEIGHT) + low * math.sqrt(((up * gain) ** 2).sum())
        error = STORED * np.abs(steps).sum(1).max() * np.sqrt((base**2).sum(1)).max() * euclid
        moved = find_extremes(p[:, at : at + len(base)], steps)
        image = radius * image + a[:, 1 + 2 * k] * (1 + WEIGHT) + moved + error
        images.append(image + low * (up @ (rest + left + largest)))
        at += len(base)
    values, floor = c.vector(n, "bias", 0.0)
    added = width * SUM * full + np.abs(values) * (1 + WEIGHT) + floor
    spread = (1,) * channel + (-1,) + (1,) * len(spatial)
    size = np.minimum(size, np.max(images, axis=0)) if images else size
    size = np.minimum(size, composed)
    if "sigma" not in n:
        return bound(shape, (size + added).reshape(spread))
    sigma = w.check_sigma(start, stop, n["sigma"])
    sigma += WEIGHT * math.sqrt(s[:, 0].sum()) + math.sqrt((low @ low) * (up @ up))
    longest = sigma * norm + math.sqrt((added**2).sum())
    return bound(shape, (size + added).reshape(spread), longest, (channel,))


def find_extremes(rows: Array, steps: Array) -> Array:
    """Return the largest magnitude that a table of shifts adds to each output of a linear.

    Args:
        rows: products of the weight with `k` basis rows of the table, `[out, k]`.
        steps: coefficients of these rows at each timestep, `[T, k]`.
    """
    count = math.ceil(len(rows) * len(steps) / CHUNK)
    made = (x @ steps.T for x in np.array_split(rows, count))
    return np.concatenate([np.maximum(x.max(1), -x.min(1)) for x in made])


def compose_heads(c: Graph, n: Node, x: Value) -> Array:
    """Bound a linear after attention by the product of value and output weights of each head, `[out]`.

    Attention returns `sum_j p_j (V x_j + b)`. Each output is at most the sum over heads of norm((O_h
    V_h)_i) times the norm of one x_j, plus |O b|. Rounding errors of weights, values and their mean are
    multiplied by |O|. With L L^T = V_h V_h^T, each norm is that of o L. The traces below cover
    float64's errors.
    """
    chain = c.find_heads(n)
    if chain is None or chain[2]["id"] not in c.errors:
        return math.inf
    (heads, width, inner), found = chain, c.errors[chain[2]["id"]]
    w, v, first = c.weights[n["weight"]], c.weights[inner["weight"]], inner.get("part", (0,))[0]
    bias, floor = (y * np.ones(heads * width) for y in c.vector(inner, "bias", 0.0))
    peak, least = (
        find_channel_peaks(x) * np.ones(heads * width),
        STORED * 2.0 ** -float(x.exponents.min()),
    )
    wrong = found[1] + np.abs(bias) * (WEIGHT + 2.0**-40) + floor + 2.0**-8 * peak + 4 * least
    roots, traces = np.zeros((heads, width, width)), np.zeros((heads, 1))
    for h, at in enumerate(range(first, first + heads * width, width)):
        rows = np.concatenate([r for _, r in v.read(at, at + width)])
        gram = rows @ rows.T
        traces[h] = np.trace(gram) + 2.0**-900
        roots[h] = np.linalg.cholesky(
            gram + np.eye(width) * (sum(rows.shape) * 2.0**-49 * traces[h])
        )
    made, up = [], 2.0**-w.columns
    for part, rows in w.read(*n.get("part", (0, w.shape[0]))):
        own = rows.reshape(-1, heads, width).transpose(1, 0, 2)
        lengths = np.sqrt(((own @ roots) ** 2).sum(2)) + 2.0**-40 * np.sqrt(
            traces * (own**2).sum(2)
        )
        more = np.abs(rows) @ (wrong + peak * WEIGHT) + STORED * 2.0 ** -w.rows[part] * (up @ peak)
        made.append(lengths.sum(0) * found[0] + more + np.abs(rows @ bias))
    return np.concatenate(made) * UP


def split_table(table: Array) -> tuple[Array, Array, Array, Array]:
    """Factor a table over timesteps `[T, d]` into steps `[T, k]` times a few rows `[k, d]`.

    Returns:
        The steps, the rows, the residual by channel, and the largest magnitude by channel.
    """
    largest = np.abs(table).max(0)
    if len(table) <= BASIS:
        return np.eye(len(table)), table, largest * 0, largest
    picked = table[np.linspace(0, len(table) - 1, BASIS).round().astype(int)]
    base = np.linalg.qr(picked.T)[0].T
    steps = table @ base.T
    left = np.abs(table - steps @ base).max(0)
    return steps, base, left + 2.0**-40 * (np.abs(steps).max(0) @ np.abs(base) + largest), largest


def rule_power(c: Graph, n: Node, xs: list[Value]) -> Value:
    if n["halves"] < 0:
        raise Unbounded
    return bound(xs[0].shape, xs[0].peak ** (n["halves"] / 2))


def rule_exp(c: Graph, n: Node, xs: list[Value]) -> Value:
    if xs[0].peak.max() > 700:
        raise Unbounded
    return bound(xs[0].shape, np.exp(xs[0].peak))


def rule_unknown(c: Graph, n: Node, xs: list[Value]) -> Value:
    raise Unbounded


RULES: dict[str, Callable[[Graph, Node, list[Value]], Value]] = {
    "add": rule_add, "multiply": rule_multiply, "unit": rule_unit, "same": rule_same,
    "scale": rule_same, "bounded": rule_bounded, "mix": rule_mix, "either": rule_either,
    "matmul": rule_matmul, "attention": rule_attention, "norm": rule_norm, "lookup": rule_lookup,
    "product": rule_product, "power": rule_power, "exp": rule_exp, "unknown": rule_unknown,
    **dict.fromkeys(MOVING, lambda c, n, xs: move_value(n, xs)),
}  # fmt: skip
UNASKED = ("bounded", "norm", "unit", "lookup")  # bounds that need none of the inputs


# values that depend on nothing but the timestep, one by one; and rows behind a norm


def compute(c: Graph, n: Node, xs: list[Value]) -> Known | None:
    """Compute a result at every timestep, if all of its inputs are known there; else return None.

    The result is the centre, the error radius of each element, and the bound of a row's error in 2-norm.
    Rounding of the result isn't included.
    """
    rule, shapes = n["rule"], [x.shape for x in xs]
    known = [x.exact for x in xs if x.exact is not None]
    if not known or len(known) < len(xs):
        return None
    center, radius, length = known[0]
    if rule in MOVING:
        if len({len(x[0]) for x in known}) > 1:
            return None
        moved = (move(n, [x[k] for x in known], shapes, 1 - k) for k in (0, 1))
        return next(moved), next(moved), math.inf
    if rule == "mix" and n["of"] == "repeats" and all(center.shape[d + 1] == 1 for d in n["dims"]):
        inside = n["dims"] and max(n["dims"]) < center.ndim - 2
        return center, radius, length if inside else math.inf
    if rule in ("same", "bounded") and n["function"] in FUNCTIONS:
        function, slope = FUNCTIONS[n["function"]]
        return function(center), slope * radius, slope * length
    if rule == "product" and len(c.weights[n["weight"]].shape) == 2:
        return c.compute_linear(n, known[0])
    if rule not in ("add", "multiply"):
        return None
    number = np.full((1,) * center.ndim, float(n.get("number", 0)))
    rank = len(n["shape"])
    pairs = [*((x[0], x[1]) for x in known), (number, number[0] * 0)][:2]
    (a, r), (b, s) = ((wide(x, rank, 1), wide(y, rank, 0)) for x, y in pairs)
    if rule == "add":
        k = float(n.get("factor", 1))
        alike = abs(k) == 1 and all(s[-1:] == tuple(n["shape"][-1:]) for s in shapes)
        return a + k * b, r + abs(k) * s, sum(x[2] for x in known) if alike else math.inf
    return a * b, np.abs(a).max(0) * s + np.abs(b).max(0) * r + r * s, math.inf


def wide(array: Array, rank: int, lead: int) -> Array:
    added = (1,) * (rank + lead - array.ndim)
    return array.reshape((*array.shape[:lead], *added, *array.shape[lead:]))


def sum_row_squares(array: Array) -> Array:
    """Sum the squares of each row without an array of squares in memory."""
    return np.einsum("...i,...i->...", array, array)


def row_error(radius: Array, shape: Shape, length: float) -> float:
    return min(length, math.sqrt(over(radius**2, shape, range(len(shape))[-1:])))


def follow_rows(n: Node, xs: list[Value], peak: Array) -> tuple[tuple[Any, ...], ...]:
    """Return a result's rows in the form `n * gain + table[t] + v` (n: a norm's output), as `Value.affine`.

    They follow from those of the inputs; () if unknown. Rounding of the result isn't included.
    """
    rule, last = n["rule"], n["shape"][-1:]
    alike = rule in ("view", "spread", "part") or (
        rule == "same" and n["function"] in ("cast", "copy")
    )
    if alike and xs[0].shape[-1:] == tuple(last):
        return xs[0].affine
    if rule == "join" and n["dim"] != len(n["shape"]) - 1 and all(x.affine for x in xs):
        rows = tuple(row for x in xs for row in x.affine)
        return rows if len(rows) <= 4 else ()
    if rule not in ("add", "multiply") or len(xs) < 2 or abs(n.get("factor", 1)) != 1:
        return ()
    a, b = xs if xs[0].affine else xs[::-1]
    if not a.affine or a.shape[-1:] != tuple(last) or b.peak is None or n.get("factor", 1) != 1:
        return ()
    size, table, radius, made = find_channel_peaks(b) * np.ones(last), None, 0.0, []
    if b.exact is not None and math.prod(b.exact[0].shape[1:]) in (1, b.exact[0].shape[-1]):
        table = b.exact[0].reshape(len(b.exact[0]), -1) * np.ones(last)
        radius = b.exact[1].reshape(-1)
    for r, gain, t, rest in a.affine:
        largest = np.abs(t).max(0)
        if rule == "add":
            more = size if table is None else radius
            made.append((r, gain, t if table is None else t + table, rest + more))
        else:
            moved = t[:1] * 0 if table is None else t * table
            more = largest * (size if table is None else radius)
            made.append((r, gain * size, moved, rest * size + more))
    return tuple(made)


# exponents: what is stored is the value times two to this; each rule says what has to cancel


def flat(array: Array, dims: Any, what: str = "its exponents differ inside of a sum") -> Array:
    for dim in dims:
        demand(array.shape[dim] == 1, what)
    return array


def find_exponents(c: Graph, n: Node, xs: list[Value]) -> Array:  # noqa: C901 (a table of cases)
    rule, rank, zero = n["rule"], len(n["shape"]), np.zeros((1,) * len(n["shape"]), dtype=np.int64)
    es = [few(x.exponents) for x in xs]
    if rule in MOVING:
        return few(move(n, es, [x.shape for x in xs]))
    if rule == "scale":
        return es[0] + int(n["by"])
    if rule == "same" and n["function"] in KEEPING:
        return es[0]
    if rule == "mix":
        return flat(es[0], n["dims"])
    if rule == "power":
        demand(not (es[0] * n["halves"] % 2).any(), "half an exponent")
        return es[0] * n["halves"] // 2
    es = [
        wide(e, rank, 0) if rank >= e.ndim else flat(e, range(e.ndim)).reshape(zero.shape)
        for e in es
    ]
    if rule == "unknown" and n["alike"]:
        es = [flat(e, range(rank), "an operation without a rule has several exponents") for e in es]
    if rule in ("add", "either") or (rule == "unknown" and n["alike"]):
        parts = [e for e, x in zip(es, xs, strict=True) if x.peak is None or x.peak.any()]
        if n.get("number"):
            parts.append(zero + int(n.get("number_exponent", 0)))
        demand(all((e == parts[0]).all() for e in parts), "the exponents of a sum differ")
        return few(sum(parts[:1], zero) + sum((0 * e for e in parts), zero))
    if rule in ("multiply", "unit"):
        return few(sum(es, zero))
    if rule == "matmul":
        return sum((flat(e, range(e.ndim)) for e in es), zero)
    if rule == "attention":
        heads = {1} if rank == 4 and len({x.shape[1] for x in xs[:3]}) == 1 else set[int]()
        q, k, v = (flat(e, [d for d in range(rank) if d not in heads and (i < 2 or d < rank - 1)])
                   for i, e in enumerate(es[:3]))  # fmt: skip
        demand(not (q + k).any() and not any(e.any() for e in es[3:]), "scores are scaled")
        return v
    if rule == "norm":
        dims = range(1, rank) if n.get("groups") else range(rank - n["inner"], rank)
        demand((flat(es[0], dims) * 2 == int(n["eps"])).all(), "an eps isn't scaled with its norm")
        return c.result_exponents(n, zero, 1 if n.get("groups") else rank - 1)
    if rule == "product":
        w, channel = c.weights[n["weight"]], rank - max(len(c.weights[n["weight"]].shape) - 1, 1)
        columns = w.columns if n.get("groups", 1) == 1 else flat(w.columns, [0])
        start, stop = n.get("part", (0, w.shape[0]))
        place = [-1 if d == channel else 1 for d in range(rank)]
        sums = flat(few(es[0] + columns.reshape(place)), [channel, *range(channel + 1, rank)])
        made = few(sums + w.rows[start:stop].reshape(place))
        demand(c.fits(n, made, place), "a bias isn't scaled as its sum")
        return made
    if rule == "lookup":
        w = c.weights[n["weight"]]
        return flat(few(w.rows), [0]) + wide(few(w.columns), rank, 0)
    demand(not any(e.any() for e in es), f"{n.get('function', rule)} is given scaled values")
    return zero


class Weight:
    """A tensor in a safetensors file, with the exponents of its rows and columns."""

    def __init__(self, path: Path, start: int, entry: Node, stated: Node) -> None:
        self.shape, self.kind = tuple(entry["shape"]), entry["dtype"]
        dtype, (first, last) = np.dtype(STORAGE[self.kind]), entry["data_offsets"]
        count = (last - first) // dtype.itemsize
        self.raw: Array = np.zeros(0, dtype)
        if count:
            self.raw = np.memmap(path, dtype, "r", start + first, (count,))
        sizes = (*self.shape, 1, 1)
        self.rows, self.columns = (np.zeros(max(size, 1), dtype=np.int64) for size in sizes[:2])
        for dim, begin, end, exponent in stated.get("exponents", ()):
            size = (*self.shape, 1)[0] if dim == 0 else (*self.shape, 0, 0)[1]
            demand(begin < end <= size, f"no dimension {dim} from {begin} to {end} to scale")
            (self.columns if dim == 1 else self.rows)[begin:end] += exponent
        largest = np.abs(self.rows).max() + np.abs(self.columns).max()
        demand(largest <= MOST_EXPONENT, "its exponents are too large")

    def read(
        self,
        start: int = 0,
        stop: int | None = None,
        entries: int = ENTRIES,
        dtype: Any = np.float64,
    ) -> Iterator[tuple[slice, Array]]:
        """Yield slices of rows with their values in `dtype`, flattened to two dimensions."""
        for place, part in self.read_raw(start, stop, entries):
            yield place, self.widen(part).astype(dtype)

    def map(
        self, function: Callable[[slice, Array], Any], start: int, stop: int, dtype: Any
    ) -> Iterator[Any]:
        """Yield, in order, a function of each slice of rows that `read` yields; threads compute ahead."""

        def call(place: slice, part: Array) -> Any:
            with np.errstate(all="ignore"):
                return function(place, self.widen(part).astype(dtype))

        waiting = deque[Future[Any]]()
        for place, part in self.read_raw(start, stop):
            waiting.append(POOL.submit(call, place, part))
            if len(waiting) > THREADS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def read_raw(
        self, start: int = 0, stop: int | None = None, entries: int = ENTRIES
    ) -> Iterator[tuple[slice, Array]]:
        """Yield slices of rows with their stored values, flattened to two dimensions."""
        count, width = (self.shape or (1,))[0], max(math.prod(self.shape[1:]), 1)
        stop, step = count if stop is None else stop, max(1, entries // width)
        for at in range(start, stop, step):
            part = self.raw[at * width : min(at + step, stop) * width]
            yield slice(at, min(at + step, stop)), part.reshape(-1, width)

    def widen(self, part: Array) -> Array:
        """Convert stored bf16 to fp32, since NumPy has no bf16; other types are unchanged."""
        return (part.astype(np.uint32) << 16).view(np.float32) if self.kind == "BF16" else part

    def find_largest(self, part: Array, axis: int) -> Array:
        """Return the largest magnitudes of stored values along an axis, without a float64 copy.

        Without the sign bit, floating-point numbers sort by magnitude when their bits are read as integers.
        Inf and NaN sort last.
        """
        if self.kind not in ("BF16", "F16", "F32", "F64"):
            return np.abs(part.astype(np.float64)).max(axis)
        bits = part.view(f"u{part.dtype.itemsize}")
        most = (bits & np.array((1 << (8 * bits.itemsize - 1)) - 1, bits.dtype)).max(axis)
        return self.widen(most.view(part.dtype)).astype(np.float64)

    def multiply(self, start: int, stop: int, *columns: Sequence[Array]) -> tuple[Array, ...]:
        """Multiply rows of the weight in one pass: magnitudes, squares and values, each by other columns.

        Args:
            start, stop: range of the rows.
            columns: three lists of columns, in that order.
        """
        sums, squares, bases = (np.stack(x, 1) if len(x) else None for x in columns)

        def multiply(_: slice, rows: Array) -> tuple[Array, ...]:
            products = np.zeros((len(rows), 0)) if bases is None else rows @ bases
            np.abs(rows, out=rows)
            lengths = rows @ sums
            return lengths, np.square(rows, out=rows) @ squares, products

        made = zip(*self.map(multiply, start, stop, np.float64), strict=True)
        return tuple(np.concatenate(x) * (UP if i < 2 else 1) for i, x in enumerate(made))

    def check_sigma(self, start: int, stop: int, squares: Sequence[Any]) -> float:
        """Check the squared singular values that a certificate states, and bound the weight's largest one.

        The weight is split into parts, columns side by side. The square of its singular value is at most
        the sum of the squares of theirs. For each part, t - W^T W has a Cholesky decomposition in float64.
        So no eigenvalue exceeds t by more than 2 n (n + 1) 2**-53 of it (Rump 2006). The products of 512
        rows are summed in fp32.

        Args:
            start, stop: range of the rows.
            squares: upper bound t of each part's largest singular value, squared.

        Raises:
            Refused: if a singular value is larger than stated.
        """
        cuts = np.linspace(0, self.shape[1], len(squares) + 1).astype(int)
        grams = [np.zeros((b - a, b - a)) for a, b in itertools.pairwise(cuts)]

        def multiply(_: slice, rows: Array) -> list[list[Array]]:
            pieces = [rows[at : at + 512] for at in range(0, len(rows), 512)]
            return [[x[:, a:b].T @ x[:, a:b] for a, b in itertools.pairwise(cuts)] for x in pieces]

        for products in itertools.chain.from_iterable(self.map(multiply, start, stop, np.float32)):
            for gram, product in zip(grams, products, strict=True):
                gram += product
        total = 0.0
        for gram, pair in zip(grams, squares, strict=True):
            size, error = len(gram), 600 * 2.0**-24 * float(np.trace(gram)) + 2.0**-90
            most = float(read_number(pair))
            try:
                made = np.linalg.cholesky(np.eye(size) * (most - error) - gram)
                demand(np.isfinite(made).all(), "a singular value isn't finite")
            except np.linalg.LinAlgError:
                raise Refused("a singular value is larger than stated") from None
            total += most * (1 + 2 * size * (size + 1) * 2.0**-53)
        return math.sqrt(total) * UP

    def is_held(self) -> bool:
        """Return whether fp16's 11 significant bits suffice for each value; bf16 has 8."""
        parts = (np.frexp(x)[0] * 2.0**11 for _, x in self.read())
        return self.kind in ("BF16", "F16") or all(bool((x == np.rint(x)).all()) for x in parts)

    def measure(self) -> float:
        """Return the largest magnitude of the tensor as stored in fp16."""
        columns = np.repeat(self.columns, max(math.prod(self.shape[2:]), 1))
        found, exponents = [0.0], sorted({*columns.tolist()})
        for place, part in self.read_raw():
            for e in exponents:
                own = part if len(exponents) == 1 else part[:, columns == e]
                found.append((self.find_largest(own, 1) * 2.0 ** (self.rows[place] + e)).max())
        return float(np.max(found)) * (1 + WEIGHT) + STORED


def open_weights(folder: Path, files: Sequence[str], stated: Node) -> dict[str, Weight]:
    """Open the tensors of safetensors files, by name; refuse other files that a loader could read instead.

    Raises:
        Refused: if a header is invalid, a dtype is unknown, or the folder has another file of weights.
    """
    found: dict[str, Weight] = {}
    places: dict[str, str] = {}
    for name in files:
        check_keys({"files": [name]}, {"files": COMPONENT["files"]})
        path = folder / name
        demand(path.is_file(), f"{name} isn't in the folder")
        for key, (start, entry) in read_tensor_table(path).items():
            demand(key not in found, f"{key!r} is in two files")
            try:
                found[key] = Weight(path, start, entry, stated.get(key, {}))
            except Refused as error:
                raise Refused(f"{key}: {error}") from None
            places[key] = name
    check_folder(folder, places, files)
    return found


def read_tensor_table(path: Path) -> dict[str, tuple[int, Node]]:
    """Read the header of a safetensors file: the start of its data and the entry of each tensor."""
    length = path.stat().st_size
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        demand(size <= min(length - 8, 10**8), f"{path.name} is no safetensors file")
        header = read_json(file.read(size), f"the header of {path.name}")
    demand(type(header) is dict, f"{path.name} is no safetensors file")
    check_keys({"__metadata__": header.pop("__metadata__", {})}, METADATA, f"{path.name}: ")
    at = 0
    for key, entry in header.items():
        check_keys(entry, HEADER, f"{path.name}: {key!r}: ")
        kind, (first, last) = entry["dtype"], entry["data_offsets"]
        words = f"{path.name}: {key!r} is stored in {kind}, expected one of {', '.join(STORAGE)}"
        demand(kind in STORAGE, words)
        bytes_ = math.prod(entry["shape"]) * np.dtype(STORAGE[kind]).itemsize
        demand(
            last - first == bytes_, f"{path.name}: {key!r} has more or fewer bytes than its shape"
        )
    for first, last in sorted(entry["data_offsets"] for entry in header.values()):
        demand(first == at, f"{path.name}: its tensors overlap, or leave a gap")
        at = last
    demand(8 + size + at == length, f"{path.name} is longer or shorter than its header says")
    return {key: (8 + size, entry) for key, entry in header.items()}


def check_folder(folder: Path, places: dict[str, str], files: Sequence[str]) -> None:
    """Refuse a folder in which a loader could read other weights, or whose index names other files."""
    indices = 0
    for name in sorted(path.name for path in folder.iterdir()):
        lower = name.lower()
        if ".index." in lower and lower.endswith(".json"):
            demand((folder / name).is_file(), f"{name} is no file")
            index = read_json((folder / name).read_bytes(), name)
            listed = index.get("weight_map") if type(index) is dict else None
            demand(listed == places, f"{name} names other files or tensors than the certificate")
            indices += 1
        elif lower.endswith(LOADABLE):
            demand(name in files, f"{name} beside its files could be loaded, and isn't checked")
    demand(indices or len(files) == 1, "there are several files, and no index names them")


class Graph:
    """Derivation of the bounds of one call's values, in order.

    Args:
        write: write derived bounds into the certificate, instead of comparing them with those in it.
    """

    def __init__(self, stated: Node, weights: dict[str, Weight], write: bool) -> None:
        self.stated, self.weights, self.write = stated, weights, write
        self.nodes = {n["id"]: n for n in stated["nodes"]}
        self.read: set[tuple[str, str]] = set()
        self.uncovered: list[str] = []
        self.values: dict[str, Value] = {}
        self.covered = 0
        self.tables: list[tuple[Array, tuple[Array, ...]]] = []
        self.errors: dict[str, tuple[float, Array]] = {}
        """Linear to the norm of the rows that it reads, and the rounding error of each of its outputs."""

    def split(self, table: Array) -> tuple[Array, ...]:
        """Return `split_table` of a table, from a cache if another linear has read the same table."""
        found = next((made for own, made in self.tables if own is table), None)
        if found is None:
            found = split_table(table)
            self.tables = [*self.tables[-3:], (table, found)]
        return found

    def find_heads(self, n: Node) -> tuple[int, int, Node] | None:
        """Return the heads and width of the attention that a linear reads, and the linear of its values.

        Return None if the graph has another structure.
        """
        ends, kinds = [n], set[str]()
        for rule in ("view", "order", "attention", "order", "view", "product"):
            at = 2 if ends[-1]["rule"] == "attention" else 0
            ends.append(self.nodes[self.bare(ends[-1]["from"][at], kinds)])
            kinds.add(ends[-1]["dtype"])
            if ends[-1]["rule"] != rule:
                return None
        if len(ends[3]["shape"]) != 4:
            return None
        _, rows, turned, mean, values, viewed, inner = ends
        (batch, heads, tokens, width), count = mean["shape"], inner["shape"][1:2]
        fits = (
            kinds <= {"fp16", "fp32"}
            and turned["order"] == values["order"] == [0, 2, 1, 3]
            and rows["shape"] == [batch, tokens, heads * width]
            and inner["shape"] == [batch, *count, heads * width]
            and viewed["shape"] == [batch, *count, heads, width]
            and len(self.weights[n["weight"]].shape) == 2
        )
        return (heads, width, inner) if fits else None

    def bare(self, name: str, passed: set[str] | None = None) -> str:
        """Return the name of the value before casts and copies; add the dtypes of the casts to `passed`."""
        while (n := self.nodes[name])["rule"] == "same" and n["function"] in ("cast", "copy"):
            name, dtype = n["from"][0], n["dtype"]
            if passed is not None and self.nodes[name]["dtype"] != dtype:
                passed.add(dtype)
        return name

    def vector(self, n: Node, key: str, default: float) -> tuple[Array, Array]:
        """Return a bias or a norm's weight, and the rounding error of its subnormal values in fp16."""
        if key not in n:
            return np.full(1, default), np.zeros(1)
        w, cut = self.weights[n[key]], slice(*n.get("part", (None,)) if key == "bias" else (None,))
        whole = np.concatenate([rows.reshape(-1) for _, rows in w.read()])
        holds = len(w.shape) < 2 or w.shape[0] == len(whole)
        demand(holds and not w.columns.any(), f"{n[key]} isn't a vector")
        return whole[cut], STORED * 2.0 ** -w.rows[cut]

    def result_exponents(self, n: Node, zero: Array, dim: int) -> Array:
        place = [-1 if d == dim else 1 for d in range(zero.ndim)]
        made = few(self.weights[n["weight"]].rows.reshape(place)) if "weight" in n else zero
        demand(self.fits(n, made, place), "a bias isn't scaled as its norm")
        return made

    def fits(self, n: Node, made: Array, place: Sequence[int]) -> bool:
        """Return whether a bias is multiplied by the same powers of two as the sum to which it is added."""
        if "bias" not in n:
            return True
        own = self.weights[n["bias"]].rows[slice(*n.get("part", (None,)))]
        return bool((made == own.reshape(place)).all())

    def compute_linear(self, n: Node, known: Known) -> Known:
        """Compute a linear of inputs that are known at each timestep, with all rounding errors."""
        center, radius, length = known
        w, shape = self.weights[n["weight"]], n["shape"]
        start, stop = n.get("part", (0, w.shape[0]))
        flat = (center * np.ones(w.shape[1])).reshape(-1, w.shape[1])
        held, ours = w.is_held(), np.float64 if math.prod(w.shape) <= SMALL else np.float32
        largest = ((np.abs(center).max(0) + radius) * np.ones(w.shape[1])).reshape(-1, w.shape[1])
        wrong = (radius * np.ones((*radius.shape[:-1], w.shape[1]))).reshape(-1, w.shape[1])
        width = w.shape[1]
        a, s, _ = w.multiply(start, stop, [*largest, *wrong], [np.ones(width)], [])
        sums, carried = a.T[: len(largest)], a.T[len(largest) :]
        values, floor = self.vector(n, "bias", 0.0)
        low, up = STORED * 2.0 ** -w.rows[start:stop], 2.0**-w.columns
        made, own = np.empty((len(flat), stop - start)), flat.astype(ours)

        def multiply(part: slice, rows: Array) -> None:
            made[:, part.start - start : part.stop - start] = own @ rows.T

        deque(w.map(multiply, start, stop, ours), 0)
        made += values
        products = 2 if ours is np.float64 else 4  # the model's in fp32, and ours
        lost = (0.0 if held else WEIGHT) + products * (width + 8) * 2.0**-24
        own = lost * sums + np.abs(values) * WEIGHT + floor
        own = own + low * (largest @ up)[:, None]
        error = row_error(radius, (*shape[:-1], width), length)
        carried = np.minimum(carried, np.sqrt(s[:, 0]) * error) * (1 + WEIGHT)
        sigma = w.check_sigma(start, stop, n["sigma"]) if "sigma" in n else math.sqrt(s.sum())
        length = sigma * error + math.sqrt(float((own**2).sum(-1).max()))
        result = made.reshape((*center.shape[:-1], -1))
        return result, (carried + own).reshape((*radius.shape[:-1], -1)), length

    def start(self, n: Node) -> Value:
        """Return the value of an input, a timestep, a constant or a parameter."""
        rule, shape = n["rule"], tuple(n["shape"])
        zero, ones = np.zeros((1,) * len(shape), dtype=np.int64), (1,) * len(shape)
        if rule == "input":
            return replace(bound(shape, float(n["largest"])), exponents=zero)
        if rule == "times":
            first, last, radius = float(n["first"]), float(n["last"]), float(n["radius"]) * UP
            steps = np.linspace(first, last, n["count"]).reshape(-1, *ones)
            describe_times(n)
            exact = steps, np.full(ones, radius), math.inf
        elif rule == "known":
            values = np.array(n["values"], dtype=np.float64).reshape(shape)
            exact = (
                values[None],
                np.abs(values) * 2.0**-20 + find_lost(values, n["dtype"]),
                math.inf,
            )
        else:
            w = self.weights[n["weight"]]
            zero = zero if shape else zero + int(w.rows[0])
            for dim, exponents in enumerate((w.rows, w.columns)[: len(shape)]):
                zero = zero + exponents.reshape([-1 if d == dim else 1 for d in range(len(shape))])
            size = np.concatenate([rows.reshape(-1) for _, rows in w.read()]).reshape(shape)
            low = STORED * 2.0 ** -zero.astype(float)
            if size.size > MOST >> 3:
                peak = top(np.abs(size) * (1 + WEIGHT) + low, range(len(shape) - 1))
                return replace(bound(shape, peak), exponents=few(zero))
            exact = size[None], np.abs(size) * WEIGHT + low, math.inf
        return replace(bound_exact(shape, exact), exponents=few(zero))

    def derive(self, n: Node) -> Value:
        """Derive the bound of a node's value, including its own rounding."""
        rule, xs, shape = n["rule"], [self.values[i] for i in n["from"]], tuple(n["shape"])
        check_shape(n, [x.shape for x in xs], self.weights)
        if not xs and rule not in ("bounded", "lookup", "unknown"):
            return self.start(n)
        exponents, exact = find_exponents(self, n, xs), compute(self, n, xs)
        demand(np.abs(exponents).max(initial=0) <= MOST_EXPONENT, "its exponents are too large")
        if exact is not None:
            made = bound_exact(shape, exact)
        elif any(x.peak is None for x in xs) and rule not in UNASKED:
            return Value(shape, exponents=exponents)
        else:
            try:
                made = RULES[rule](self, n, xs)
                made.affine = made.affine or follow_rows(n, xs, made.peak)
            except Unbounded:
                return Value(shape, exponents=exponents)
        made.exponents = exponents
        sources, dtype = {self.nodes[i]["dtype"] for i in n["from"]}, n["dtype"]
        wider = all(s == dtype or (s, dtype) in WIDER for s in sources)
        whole = sources == {"int"} and dtype in ("fp32", "fp64") and made.peak.max() <= 2.0**24
        return made if is_moved(n) and (wider or whole) else self.round(n, made)

    def limit(self, n: Node, x: Value) -> Value:
        """Remove the bound of a value that may be Inf in its dtype, which is wider than fp16."""
        most = RANGE.get(n["dtype"], math.inf)
        within = x.peak is None or most == math.inf or not (x.store() > most).any()
        return x if within else Value(x.shape, exponents=x.exponents)

    def round(self, n: Node, x: Value) -> Value:
        once = is_moved(n)
        relative = ROUNDING[n["dtype"]] / (2 if once else 1)
        low = LEAST[n["dtype"]] * 2.0 ** -x.exponents.astype(float)
        more, size = relative * x.peak + low, math.prod(x.shape[d] for d in x.rows)
        norm = x.norm * (1 + relative) + float(low.max()) * math.sqrt(size)
        made = bound(x.shape, x.peak + more, norm, x.rows)
        made.exponents = x.exponents
        if x.exact is not None:
            center, radius, length = x.exact
            length += math.sqrt(over(more**2, x.shape, range(len(x.shape))[-1:]))
            made.exact = center, radius + more, length
        by = top(more, range(more.ndim - 1)).reshape(-1)
        made.affine = tuple((r, g, t, rest + by) for r, g, t, rest in x.affine)
        return made

    def check(self) -> None:
        last = {name: n["id"] for n in self.stated["nodes"] for name in n["from"]}
        spent: dict[str, list[str]] = {}
        users: dict[str, list[Node]] = {}
        for name, user in last.items():
            spent.setdefault(user, []).append(name)
        for n in self.stated["nodes"]:
            for name in n["from"]:
                users.setdefault(name, []).append(n)
        outputs = dict(self.stated["outputs"])
        for n in self.stated["nodes"]:
            try:
                self.values[n["id"]] = value = self.limit(n, self.derive(n))
                self.compare(n, value, users.get(n["id"], []))
                if n["id"] in outputs:
                    demand((value.exponents == outputs[n["id"]]).all(), "an output is scaled")
            except (Refused, *BROKEN) as error:
                what = error if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
                raise Refused(f"{n['id']} ({n['rule']}): {what}") from error
            for name in spent.get(n["id"], ()):
                if name not in outputs:
                    self.values[name] = Value(self.values[name].shape)

    def compare(self, n: Node, value: Value, users: list[Node]) -> None:
        """Compare a value's derived bound with the one in the certificate, and with fp16's maximum.

        An fp16 value that may exceed the maximum is recorded as not proven, unless only functions such as
        `tanh` read it.
        """
        self.read |= {(n[key], n["dtype"]) for key in ("weight", "bias") if key in n}
        found = None if value.peak is None else float(value.peak.max()) if value.peak.size else 0.0
        exponents = sorted({int(e) for e in value.exponents.reshape(-1)})
        if self.write:
            n["bound"] = None if found is None else write_number(found)
            n["exponents"] = exponents
        demand((n["bound"] is None) == (found is None), "a bound doesn't follow")
        if found is not None and not follows(n["bound"], found):
            stated = read_number(n["bound"])
            demand(Fraction(found) <= stated, f"its bound is {found:.6g}, not {float(stated):.6g}")
            demand(stated <= Fraction(found) * TOLERANCE, f"{float(stated):.6g} isn't its bound")
        demand(n["exponents"] == exponents, f"its exponents are {exponents}")
        stored = None if found is None else value.store()
        holds = stored is not None and (not stored.size or stored.max() <= LARGEST)
        clamped = n.get("function") == "range_clamp" and value.exponents.any()
        if (
            n["dtype"] != "fp16" and not clamped
        ):  # a clamp that takes effect on scaled values is another one
            return
        begins = n["rule"] in ("input", "times", "known", "weight")
        ends = not users or any(n["id"] == name for name, _ in self.stated["outputs"])
        if holds:
            self.covered += not begins and n["dtype"] == "fp16"
        elif stored is None or ends or not all(is_saturating(u) for u in users):
            self.uncovered.append(n["id"])


def find_lost(values: Array, dtype: str) -> Array:
    """Return the errors of rounding constants to a dtype; 0 for a constant beyond the dtype's range.

    Constants beyond the range are reported as not covered by the certificate.
    """
    held = values
    if dtype == "bf16":
        bits = values.astype(np.float32).view(np.uint32)
        held = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    elif dtype != "fp64":
        held = {"fp16": values.astype(np.float16), "fp32": values.astype(np.float32)}.get(
            dtype, np.trunc(values)
        )
    return np.where(np.isfinite(held), np.abs(held.astype(np.float64) - values), 0.0)


WIDER = {("fp16", "fp32"), ("fp16", "fp64"), ("bf16", "fp32"), ("fp32", "fp64")}


def is_moved(n: Node) -> bool:
    """Return whether a node only moves or casts its input."""
    return n["rule"] in MOVING or (n["rule"] == "same" and n["function"] in KEEPING)


def is_saturating(n: Node) -> bool:
    return n["rule"] == "bounded" and n["function"] in SATURATING


def bound_exact(shape: Shape, exact: Known) -> Value:
    center, radius, length = exact
    rows, alike = range(len(shape))[-1:], center.shape[-1] < shape[-1] if shape else False
    squares = sum_row_squares(center) if shape else center**2
    norm = math.sqrt(float(squares.max()) * (shape[-1] if alike else 1))
    norm += row_error(radius, shape, length)
    made = bound(shape, np.maximum(center.max(0), -center.min(0)) + radius, norm, rows)
    made.exact = exact
    return made


def check_component(stated: Node, folder: Path, write: bool = False) -> tuple[int, int, list[str]]:
    """Check one component of a certificate against its weight files.

    Args:
        write: write the results of the derivation, instead of comparing with them.

    Returns:
        The number of fp16 values and weights, the number that are proven to stay in fp16's range, and the
        names of the others.

    Raises:
        Refused: if the certificate does not prove its claim.
    """
    if write:
        prepare(stated)
    check_grammar(stated)
    place = folder / stated["component"]
    demand(place.is_dir(), "there is no such folder")
    weights = open_weights(place, stated["files"], stated["weights"])
    demand(set(weights) == set(stated["weights"]), "the weights are other tensors")
    read, uncovered, covered = set[tuple[str, str]](), list[str](), 0
    with np.errstate(all="ignore"):
        for number, entry in enumerate(stated["graphs"]):
            graph = Graph(entry, weights, write)
            graph.check()
            read |= graph.read
            covered += graph.covered
            uncovered += [f"{number}:{name}" for name in graph.uncovered]
    hashes = POOL.map(lambda weight: hashlib.sha256(weight.raw).hexdigest(), weights.values())
    for (name, weight), found in zip(weights.items(), hashes, strict=True):
        entry = stated["weights"][name]
        entry.update({"sha256": found} if write else {})
        demand(entry["sha256"] == found, f"{name} is another tensor")
        dtypes = {dtype for other, dtype in read if other == name}
        if dtypes and not (entry["wide"] and "fp16" not in dtypes):
            holds = weight.measure() <= LARGEST
            covered, uncovered = covered + holds, uncovered + [name] * (not holds)
    rest = {"unread": sorted(set(weights) - {name for name, _ in read}), "uncovered": uncovered}
    stated.update(rest if write else {})
    for key, complete in rest.items():
        demand(stated[key] == complete, f"the list of {key} values isn't complete")
    return covered + len(uncovered), covered, uncovered


def prepare(stated: Node) -> None:
    """Add empty fields for results, such as bounds and hashes, to a certificate's component.

    The derivation of the bounds then fills them in.
    """
    stated.update({"unread": [], "uncovered": []})
    for entry in stated["weights"].values():
        entry["sha256"] = "0" * 64
    for n in (n for graph in stated["graphs"] for n in graph["nodes"]):
        n.update({"bound": None, "exponents": [0]})


def seal(certificate: Node) -> str:
    bare = {key: value for key, value in certificate.items() if key != "seal"}
    return hashlib.sha256(json.dumps(bare, sort_keys=True).encode()).hexdigest()


# what is said: which values are proven, for which inputs, what is assumed and what is not covered


def show(number: float) -> str:
    return f"{number:g}" if float(f"{number:g}") == number else repr(number)


def describe_times(n: Node) -> str:
    """Describe in words the timesteps that a certificate covers; refuse a list that leaves gaps."""
    first, last, count = Fraction(n["first"]), Fraction(n["last"]), n["count"]
    name, ends = n["name"], f"from {show(n['first'])} to {show(n['last'])}"
    size = math.prod(n["shape"])
    alike = f", with the same value in {'both' if size == 2 else f'all {size}'} elements"
    alike = alike if size > 1 else ""
    if first == last and count == 1 and not n["radius"]:
        return f"{name} is {show(n['first'])}{alike}"
    if not n["radius"] and first.denominator == 1 and last - first == count - 1:
        return f"every whole {name} {ends}{alike}"
    holds = count > 1 and 2 * Fraction(n["radius"]) * (count - 1) * Fraction(UP) >= last - first > 0
    words = f"{count} timesteps {ends}, each with a radius of {n['radius']:g}, leave others out"
    demand(holds, f"{words}, expected each whole number, or cells without a gap")
    return f"every {name} {ends}{alike}"


def name_method(graph: Node) -> str:
    return f"{graph['method']}: " if graph["method"] else ""


def list_inputs(stated: Node) -> list[str]:
    """List the inputs that the proof of a component covers: limits, shapes and timesteps."""
    made = []
    for graph in stated["graphs"]:
        found = [describe_input(n) for n in graph["nodes"] if n["rule"] in ("input", "times")]
        made += [f"{name_method(graph)}{words}" for words in found]
    return [*dict.fromkeys(made)]


def describe_input(n: Node) -> str:
    if n["rule"] == "times":
        return describe_times(n)
    sizes = " x ".join(map(str, n["shape"]))
    return f"{n['name']} up to {show(n['largest'])}" + (f", of shape {sizes}" if sizes else "")


def list_assumed(stated: Node) -> list[str]:
    """List what a component's certificate assumes and nothing checks, such as constants and dtypes."""
    made = []
    for graph in stated["graphs"]:
        method = name_method(graph)
        made += [f"{method}{words}" for n in graph["nodes"] for words in describe_assumed(n)]
        made += [f"{method}{words}" for words in describe_unbounded(graph["nodes"])]
        made += [f"{method}2^{e} is taken off the output {x}" for x, e in graph["outputs"] if e]
    made += [f"{path} runs in fp32" for path in stated["fp32_modules"]]
    made += [f"{name} is held in fp32" for name, x in stated["weights"].items() if x["wide"]]
    return [*dict.fromkeys(made)]


def describe_assumed(n: Node) -> Iterator[str]:
    rule = n["rule"]
    if rule == "known":
        yield f"{n['name']} has the values in the certificate"
    elif rule == "unknown" and n["alike"]:
        yield f"{n['id']} ({n['function']}) is scaled as its inputs are"


def describe_unbounded(nodes: Sequence[Node]) -> Iterator[str]:
    """Describe the values that are assumed to be finite, in a line for each dtype."""
    free = [(n["dtype"], n["id"]) for n in nodes if n["bound"] is None and n["dtype"] != "fp16"]
    for dtype in dict.fromkeys(dtype for dtype, _ in free):
        names = [name for other, name in free if other == dtype]
        are, have = ("are", "they have") if len(names) > 1 else ("is", "it has")
        yield f"{', '.join(names)} {are} finite ({have} no bound in {dtype})"


def list_saturated(stated: Node) -> list[str]:
    """List the fp16 values that may overflow without harm, as only functions such as `tanh` read them."""
    found = []
    for number, graph in enumerate(stated["graphs"]):
        for n in (n for n in graph["nodes"] if n["dtype"] == "fp16" and n["bound"]):
            beyond = read_number(n["bound"]) * Fraction(2) ** min(n["exponents"]) > LARGEST
            name = f"{number}:{n['id']}"
            found += [name] * (beyond and name not in stated["uncovered"])
    return found


def examine_certificate(certificate: Node, folder: Path) -> dict[str, Any]:
    """Check a certificate against the weights in a folder, and return the results as data.

    Raises:
        Refused: if the certificate does not prove its claim.
    """
    check_keys(certificate, CERTIFICATE)
    names = [stated.get("component") for stated in certificate["components"]]
    demand(len({*map(str, names)}) == len(names), "a component stands twice")
    found: dict[str, Any] = {"verdict": "proven", "values": 0, "covered": 0, "components": []}
    for stated in certificate["components"]:
        try:
            values, covered, rest = check_component(stated, folder)
        except (Refused, *BROKEN) as error:
            raise Refused(f"{stated.get('component')}: {error}") from error
        found["values"] += values
        found["covered"] += covered
        found["components"].append({
            "component": stated["component"], "values": values, "covered": covered,
            "not_covered": rest, "saturated": list_saturated(stated), "unread": stated["unread"],
            "inputs": list_inputs(stated), "assumed": list_assumed(stated),
        })  # fmt: skip
    holds = certificate["seal"] == seal(certificate)
    demand(holds, "the file was changed: its seal doesn't match")
    found["left"] = dict(certificate["left"])
    for path in sorted(folder.iterdir()):
        others = path.iterdir() if path.is_dir() else ()
        if any(x.name.lower().endswith(LOADABLE) for x in others) and path.name not in names:
            found["left"].setdefault(path.name, "it isn't in the certificate")
    found |= {"assumed": list(ASSUMED), "plan": certificate["plan"], "seal": certificate["seal"]}
    if found["left"] or any(x["not_covered"] for x in found["components"]):
        found["verdict"] = "partly"
    return found


def write_verdict(found: dict[str, Any]) -> str:
    """Return the first line of the result: `Proven`, or the number of values that the proof leaves out."""
    share = f"{found['covered']} of {found['values']} fp16 values and weights"
    if found["verdict"] == "proven":
        return f"Proven: none of {share.partition(' of ')[2]} exceeds 65504, for the inputs below."
    rest, names = found["values"] - found["covered"], ", ".join(found["left"])
    parts = [f"{rest} values and weights"] * (rest > 0) + [f"whole components ({names})"] * bool(
        names
    )
    return f"Proven in part: {share} are proven not to exceed 65504. Not covered: {', and '.join(parts)}."


def write_lines(found: dict[str, Any]) -> list[str]:
    lines = [write_verdict(found)]
    for x in found["components"]:
        covered = f"{x['covered']} of {x['values']} fp16 values and weights are proven not to exceed 65504"
        others = ", provided that the others don't either" if x["not_covered"] else ""
        lines.append(f"{x['component']}: {covered}{others}")
        if x["not_covered"]:
            lines.append(f"  not covered: {', '.join(x['not_covered'])}")
            lines.append(f"  to see why: --explain {x['component']}:{x['not_covered'][0]}")
        lines += [f"  beyond 65504 before a saturating function: {y}" for y in x["saturated"]]
        lines += [f"  no graph reads {name}" for name in x["unread"]]
        lines += [f"  for inputs: {words}" for words in x["inputs"]]
        lines += [f"  assumed: {words}" for words in x["assumed"]]
    lines += [f"{name}: not covered ({why})" for name, why in found["left"].items()]
    lines += [f"assumed throughout: {words}" for words in found["assumed"]]
    return lines + ([f"for the plan whose seal is {found['plan']}"] if found["plan"] else [])


def check_certificate(certificate: Node, folder: Path) -> list[str]:
    """Check a certificate against the weights in a folder, and return the results as lines."""
    return write_lines(examine_certificate(certificate, folder))


def print_safely(words: str, stream: Any) -> None:
    """Print text with control characters escaped, in the encoding of the stream."""
    kept = "".join(x if x.isprintable() or x == "\n" else ascii(x)[1:-1] for x in words)
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(kept.encode(encoding, "backslashreplace").decode(encoding) + "\n")


# why: the chain of bounds that leads to one value

FORMULAS = {  # what implies a bound; p, N: the peak and the norm of what goes in
    "input": "the stated limit", "times": "the stated timesteps, one by one",
    "known": "the stated values", "weight": "its own values",
    "view": "p, moved", "order": "p, moved", "part": "p of the part", "join": "p of the parts",
    "spread": "p, repeated", "mix": "max p over the mixed dimensions", "either": "max(p_a, p_b)",
    "same": "|f(x)| <= |x|", "scale": "the same value, stored with another exponent",
    "bounded": "the largest value of the function", "add": "p_a + |k| p_b",
    "multiply": "p_a p_b, or min(N_a max p_b, N_b max p_a)",
    "unit": "sqrt(d): the mean square of a row is at most 1",
    "power": "p^k", "exp": "exp(p)",
    "norm": "sqrt(d) |g| + |b|: the mean square of a row is at most 1",
    "product": "the least of |W| p, norm(W) N, and what is known about rows after a norm; + |b|",
    "lookup": "the largest of each column", "matmul": "min(N_a N_b, n max p_a max p_b)",
    "attention": "max p over the tokens: a mean of them", "unknown": "none",
}  # fmt: skip


def list_places(certificate: Node) -> dict[str, tuple[Node, int | None, str]]:
    """Map the names that `--explain` accepts to the component, and the value or tensor that they mean.

    A module's name means its last value. Values of a second call have their own names, such as `1:add`.

    Returns:
        By name: the component, the number of its graph (None for a tensor), and the name in it.
    """
    found: dict[str, tuple[Node, int | None, str]] = {}
    for stated in certificate["components"]:
        own = f"{stated['component']}:"
        found |= {f"{own}{name}": (stated, None, name) for name in stated["weights"]}
        for number, graph in [*enumerate(stated["graphs"])][::-1]:
            for n in graph["nodes"]:
                steps = n["place"].split(".") if n["place"] else []
                places = [".".join(steps[:count]) for count in range(1, len(steps) + 1)]
                for name in (*places, *(f"{number}:{x}" for x in places)):
                    found[f"{own}{name}"] = stated, number, n["id"]
            for n in graph["nodes"]:
                for name in (n["id"], f"{number}:{n['id']}"):
                    found[f"{own}{name}"] = stated, number, n["id"]
    return found


def find_place(certificate: Node, name: str) -> tuple[Node, int | None, str]:
    found = list_places(certificate)
    if name not in found:
        near = difflib.get_close_matches(name, found, 3, 0.3)
        words = f"closest: {', '.join(near)}" if near else f"such as {next(iter(found))}"
        raise Unknown(f"the certificate has no value {name!r}, expected COMPONENT:NAME ({words})")
    return found[name]


def find_needed(nodes: Iterable[Node]) -> dict[str, list[str]]:
    """Map each value to those from which its bound follows; the bound of a norm needs none.

    Values that depend only on the timestep are computed, so they need their inputs even if the function
    is bounded.
    """
    found: dict[str, list[str]] = {}
    computed = set[str]()
    for n in nodes:
        if n["rule"] in ("times", "known", "weight") or computed.issuperset(n["from"] or [""]):
            computed.add(n["id"])
        found[n["id"]] = [*dict.fromkeys(n["from"] if n["id"] in computed else list_needed(n))]
    return found


def list_needed(n: Node) -> list[str]:
    if n["rule"] == "attention":
        return [n["from"][2]]
    if n["rule"] in UNASKED:
        limit, peak = n.get("number", 1), n["bound"] and read_number(n["bound"])
        return n["from"] if n.get("function") in SHRINKING and peak < limit else []
    return n["from"]


def explain_value(certificate: Node, name: str) -> dict[str, Any]:
    """Return the certificate's bounds of a value and of all values that they follow from, in order."""
    stated, number, key = find_place(certificate, name)
    if number is None:
        return {"name": name, **explain_tensor(stated, key)}
    nodes = stated["graphs"][number]["nodes"]
    follows, needed, waiting = find_needed(nodes), set[str](), [key]
    while waiting:
        needed.add(at := waiting.pop())
        waiting += [x for x in follows[at] if x not in needed]
    chain = []
    for n in (n for n in nodes if n["id"] in needed):
        key, follows_from = n["id"], follows[n["id"]]
        chain.append({
            "value": key, "module": n["place"], "rule": n["rule"], "dtype": n["dtype"],
            "bound": None if n["bound"] is None else float(read_number(n["bound"])),
            "exponents": n["exponents"], "follows_from": follows_from,
            "why": describe_rule(n, bool(n["from"]) and not follows_from),
            "covered": f"{number}:{key}" not in stated["uncovered"],
        })  # fmt: skip
    return {"name": name, "graph": number, "chain": chain}


def explain_tensor(stated: Node, key: str) -> dict[str, Any]:
    """Return a weight's exponents, whether it stays fp32, whether it's proven to fit, and what reads it.

    A weight in fp16 fits if its scaled values can't exceed 65504.
    """
    nodes = [(i, n) for i, graph in enumerate(stated["graphs"]) for n in graph["nodes"]]
    reads = [f"{i}:{n['id']}" for i, n in nodes if key in (n.get("weight"), n.get("bias"))]
    return {"tensor": key, "read_by": reads, "wide": stated["weights"][key]["wide"],
            "exponents": stated["weights"][key]["exponents"],
            "covered": key not in stated["uncovered"]}  # fmt: skip


def describe_rule(n: Node, free: bool) -> str:
    """Describe in words how a value is computed: its rule and its inputs.

    Args:
        free: whether its bound holds for any inputs.
    """
    rule, names = n["rule"], [*dict.fromkeys(n["from"])]
    if rule in ("input", "times"):
        return f"{rule}: {describe_input(n)}"
    if rule in ("known", "weight"):
        return f"{rule}: {n['name' if rule == 'known' else 'weight']}"
    what = n.get("function") or rule
    of = f" of {', '.join(names[:4])}{' and others' if len(names) > 4 else ''}" if names else ""
    of += f" and {show(float(n['number']))}" if "number" in n else ""
    reads = [f"{key} {n[key]}" for key in ("weight", "bias") if key in n]
    return what + of + "".join(f", {x}" for x in reads) + ", for any input" * free


def write_explained(found: dict[str, Any]) -> list[str]:
    """Return the chain of bounds as lines, the requested value last, then the formulas of its rules."""
    if "tensor" in found:
        dtype = "fp32" if found["wide"] else "fp16"
        folds = [
            f"  {('rows', 'columns')[d]} {a} to {b - 1}: stored times 2^{e}"
            for d, a, b, e in found["exponents"]
        ]
        reads = [f"  read by {name}" for name in found["read_by"]]
        kept = "" if found["covered"] else ", where it may exceed 65504"
        return [f"{found['name']}: a tensor held in {dtype}{kept}", *folds, *reads]
    chain = found["chain"]
    bounds, count = [show_bound(x) for x in chain], len(chain) - 1
    own = f"{found['graph']}:{chain[-1]['value']}"
    others = f"from {count} other value{'s' * (count != 1)}"
    lines = [f"{found['name']} ({own}): {bounds[-1]}, {others}"]
    widths = [max(len(x["value"]) for x in chain), max(map(len, bounds))]
    for x, words in zip(chain, bounds, strict=True):
        where = f"  [{x['module']}]" if x["module"] else ""
        lines.append(f"  {x['value']:{widths[0]}}  {words:{widths[1]}}  {x['why']}{where}")
    rules = [*dict.fromkeys(x["rule"] for x in chain)]
    width = max(map(len, rules))
    lines += [
        "Rules (p, N: the largest magnitude and the norm of the input; see docs/certificate-file.md)"
    ]
    return lines + [f"  {rule:{width}}  {FORMULAS[rule]}" for rule in rules]


def show_bound(x: dict[str, Any]) -> str:
    if x["bound"] is None:
        return f"no bound ({x['dtype']})"
    first, last = min(x["exponents"]), max(x["exponents"])
    span = f"2^{first} to 2^{last}" if first < last else f"2^{first}"
    stored = f" stored times {span}" if first or last else ""
    beyond = "" if x["covered"] else ", not covered"
    return f"<= {x['bound']:.4g} ({x['dtype']}{stored}{beyond})"


CODES = """exit codes:
  0  proven: every fp16 value and weight of every component
  1  refused: the file doesn't prove what it claims, or belongs to other weights
  2  the certificate or the folder can't be read, or the command is wrong
  3  proven in part: what isn't covered is listed
  4  nothing was checked: --explain without --weights"""
STATUS = {"proven": 0, "refused": 1, "unreadable": 2, "partly": 3, "unchecked": 4}
UNCHECKED = (
    "Not checked: these bounds come from the file itself. To check them, add --weights FOLDER."
)


def read_certificate(path: Path) -> Node:
    """Read a certificate without checking its grammar.

    Raises:
        OSError: if it can't be read, or is a file of another kind, such as a plan.
    """
    found = read_json(path.read_bytes())
    kind = found.get("kind", "certificate") if type(found) is dict else "certificate"
    if type(kind) is str and kind != "certificate":
        raise OSError(f"{path} is a {kind}, expected a file that stopdown plan --certificate wrote")
    return found


def examine_or_explain(path: Path, folder: Path | None, name: str | None) -> dict[str, Any]:
    if not (path.is_file() and (folder is None or folder.is_dir())):
        both = f"expected a file {path}" + (f" and a folder {folder}" if folder else "")
        raise FileNotFoundError(both)
    certificate = read_certificate(path)
    if folder is None:
        check_keys(certificate, CERTIFICATE)
        for stated in certificate["components"]:
            check_grammar(stated)
        found: dict[str, Any] = {"verdict": "unchecked"}
    else:
        if name is not None:
            check_keys(certificate, CERTIFICATE)
            for stated in certificate["components"]:
                check_grammar(stated)
            find_place(certificate, name)  # before the check, which can take minutes
        found = examine_certificate(certificate, folder)
    return found if name is None else {**found, "explained": explain_value(certificate, name)}


def run_checker(arguments: Sequence[str] | None = None) -> int:
    """Check a file, and return the exit code: 0 only if it proves its claim for every component."""
    parser = argparse.ArgumentParser(
        prog="stopdown-verify", description=(__doc__ or "").split("\n")[0], epilog=CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("certificate", type=Path)
    parser.add_argument("--weights", type=Path, metavar="FOLDER", help="Folder of the pipeline.")
    parser.add_argument("--json", action="store_true", help="Print what was found as JSON.")
    parser.add_argument("--explain", metavar="COMPONENT:NAME",
                        help="Show how the bound of a value, module or tensor follows from others, such as "
                             "transformer:transformer_blocks.17.attn1.to_v.")  # fmt: skip
    options = parser.parse_args(arguments)
    if options.weights is None and options.explain is None:
        parser.error("--weights FOLDER is required: the folder of the pipeline to check")
    try:
        found = examine_or_explain(options.certificate, options.weights, options.explain)
    except (Refused, *BROKEN) as error:
        found = {"verdict": "refused", "why": str(error)}
    except (OSError, Unknown) as error:
        found = {"verdict": "unreadable", "why": str(error)}
    code = found["exit_code"] = STATUS[found["verdict"]]
    if options.json:
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
    elif "why" in found:
        begins = "Refused" if code == 1 else "Can't be read"
        print_safely(f"{begins}: {found['why']}", sys.stderr)
    else:
        checked = code != STATUS["unchecked"]
        lines = write_explained(found["explained"]) if options.explain else write_lines(found)[1:]
        print_safely(
            "\n".join([write_verdict(found) if checked else UNCHECKED, *lines]), sys.stdout
        )
    return code


if __name__ == "__main__":
    sys.exit(run_checker())
