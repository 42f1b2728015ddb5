"""Runs of a certificate's graphs, by code that shares nothing with its checker, and what they contradict.

An accepted certificate has to be true for its own graphs. `find_lies` runs each on inputs within the
stated limits, drawn and then pushed up the gradient of a value: exactly, with the stated exponents, and
with these as fp16 and the other dtypes store them. Where a rule leaves open what is computed (another
element, a mean, a mask, a function of that kind), it is drawn. The weights are what `safetensors` loads.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional

Node = dict[str, Any]
LARGEST, SLACK, MOST_ELEMENTS = 65504.0, 1 + 1e-9, 1 << 18
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
MOVED = ("view", "order", "part", "join", "spread")
LOADABLE = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf")


class Stopped(Exception):
    """Nothing is promised for the rest of a run: what is listed as not covered left its range."""


def store(x: Tensor, dtype: str) -> Tensor:
    """A value as a dtype holds it, in float64."""
    return x.to(DTYPES[dtype]).double() if dtype in DTYPES else x.trunc() if dtype == "int" else x


class Run:
    """One graph with drawn inputs, which may be run in several ways.

    Attributes:
        drawn: input to its values between -1 and 1, as shares of its limit.
    """

    def __init__(
        self, graph: Node, weights: dict[str, Node], tensors: dict[str, Tensor], seed: int
    ) -> None:
        self.graph, self.weights, self.tensors, self.seed = graph, weights, tensors, seed
        self.drawn: dict[str, Tensor] = {}
        self.scales = self.rounds = False
        self.rng = np.random.default_rng(seed)

    def steps(self, *, scales: bool = False, rounds: bool = False) -> Iterator[tuple[Node, Tensor]]:
        """Each value in order; as it is, times two to its exponents, and rounded as it is stored."""
        self.scales, self.rounds = scales, rounds
        values: dict[str, Tensor] = {}
        for number, n in enumerate(self.graph["nodes"]):
            self.rng = np.random.default_rng([self.seed, number])
            xs = [values[name] for name in n["from"]]
            rule = "move" if n["rule"] in MOVED else n["rule"]
            made = getattr(self, f"_{rule}")(n, xs)
            if n["dtype"] == "int" or rounds:
                made = store(made, n["dtype"])
            values[n["id"]] = made.expand(n["shape"])
            yield n, values[n["id"]]

    def _pick(self, *options: Any) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def _two_to(self, exponent: int) -> float:
        return 2.0**exponent if self.scales else 1.0

    def _number(self, n: Node, default: float = 0.0) -> Tensor:
        number = float(n.get("number", default)) * self._two_to(n.get("number_exponent", 0))
        return torch.tensor(number, dtype=torch.float64)

    def tensor(self, name: str, n: Node) -> Tensor:
        """A weight, with the exponents of its rows and columns, as the node's dtype reads it."""
        value = self.tensors[name].double()
        if self.scales:
            value = value * scale_of(self.weights[name], value.shape)
        if self.rounds:
            wide = self.weights[name]["wide"] and n["dtype"] != "fp16"
            value = store(value, "fp32" if wide else "fp16")
        return value

    # what a graph begins with

    def _input(self, n: Node, xs: list[Tensor]) -> Tensor:
        if n["id"] not in self.drawn:
            drawn = self.rng.uniform(-1, 1, size=n["shape"])
            way = self.rng.integers(4)
            if way == 1:
                drawn = np.sign(drawn)
            if way == 2:
                drawn = drawn * (self.rng.random(n["shape"]) < 0.2)
            if way == 3:
                drawn = np.full(n["shape"], self._pick(-1.0, 1.0))
            self.drawn[n["id"]] = torch.tensor(drawn, dtype=torch.float64)
        largest = min(n["largest"], LARGEST) if n["dtype"] == "fp16" else float(n["largest"])
        value = self.drawn[n["id"]] * largest
        held = store(value.detach(), n["dtype"])
        held = torch.where(held.abs() > largest, store(held * (1 - 2.0**-7), n["dtype"]), held)
        return value + (held - value.detach())

    def _times(self, n: Node, xs: list[Tensor]) -> Tensor:
        first, last = n["first"], n["last"]
        t = self._pick(first, last, self.rng.uniform(first, last), self.rng.uniform(first, last))
        t = t if n["radius"] else np.rint(t) if n["count"] > 1 else first
        exact = torch.tensor(float(t), dtype=torch.float64)
        held = [float(store(exact * factor, n["dtype"])) for factor in (1, 1 - 2.0**-7)]
        within = [x for x in held if first <= x <= last]  # a timestep is a number of its dtype
        return torch.full(n["shape"], [*within, float(t)][0], dtype=torch.float64)

    def _known(self, n: Node, xs: list[Tensor]) -> Tensor:
        return torch.tensor(n["values"], dtype=torch.float64).reshape(n["shape"])

    def _weight(self, n: Node, xs: list[Tensor]) -> Tensor:
        return self.tensor(n["weight"], n)

    def _lookup(self, n: Node, xs: list[Tensor]) -> Tensor:
        w = self.tensor(n["weight"], n)
        return w[torch.tensor(self.rng.integers(len(w), size=n["shape"][:-1]))]

    # what moves and mixes

    def _move(self, n: Node, xs: list[Tensor]) -> Tensor:
        x = xs[0]
        if n["rule"] == "view":
            return x.reshape(n["shape"])
        if n["rule"] == "order":
            return x.permute(n["order"])
        if n["rule"] == "part":
            return x[(slice(None),) * n["dim"] + (slice(n["start"], n["stop"], n["step"]),)]
        return torch.cat(xs, n["dim"]) if n["rule"] == "join" else x.expand(n["shape"])

    def _mix(self, n: Node, xs: list[Tensor]) -> Tensor:
        x, dims, of = xs[0], n["dims"], n["of"]
        if of == "mean":
            return x.mean(tuple(dims), keepdim=True) if dims else x
        kept = [d for d in range(x.ndim) if d not in dims]
        order = [*dims, *kept]
        count = math.prod(x.shape[d] for d in dims)
        made, rest = math.prod(n["shape"][d] for d in dims), math.prod(x.shape[d] for d in kept)
        width = rest if of == "places" else 1
        flat = x.permute(order).reshape(count, rest)
        first, second = (
            flat.gather(0, self._draw_places(count, made, width).expand(made, rest))
            for _ in range(2)
        )
        ways = self.rng.random((made, width))
        mean, zero = (torch.tensor(ways < y) for y in (0.1, 0 if of == "repeats" else 0.05))
        taken = torch.where(mean, (first + second) / 2, first) if of != "repeats" else first
        shape = [n["shape"][d] for d in order]
        mixed = torch.where(zero, taken * 0, taken).reshape(shape)
        return mixed.permute([order.index(d) for d in range(x.ndim)])

    def _draw_places(self, count: int, *size: int) -> Tensor:
        return torch.tensor(self.rng.integers(count, size=size))

    def _either(self, n: Node, xs: list[Tensor]) -> Tensor:
        parts = [x.expand(n["shape"]) for x in xs]
        if "number" in n:
            sign = self._pick(-1.0, 1.0) if n["of"] == "choice" else 1.0
            parts.append((sign * self._number(n)).expand(n["shape"]))
        stacked = torch.stack(parts)
        if n["of"] == "larger":
            return stacked.amax(0)
        return stacked.gather(0, self._draw_places(len(parts), 1, *n["shape"]))[0]

    # functions

    def _same(self, n: Node, xs: list[Tensor]) -> Tensor:
        slope, x = self._pick(0.01, 0.2, 1.0, -1.0), xs[0]
        ways: dict[str, Callable[[], Tensor]] = {
            "cast": lambda: x, "copy": lambda: x, "relu": x.relu, "neg": x.neg, "abs": x.abs,
            "leaky_relu": lambda: torch.where(x < 0, slope * x, x),
            "range_clamp": lambda: x.clamp(-LARGEST, LARGEST) if self.scales else x,
            "triangle": lambda: self._pick(torch.tril, torch.triu)(x) if x.ndim > 1 else x,
            "silu": lambda: functional.silu(x), "mish": lambda: functional.mish(x),
            "gelu": lambda: functional.gelu(x, approximate=self._pick("none", "tanh")),
            "hardswish": lambda: functional.hardswish(x),
        }  # fmt: skip
        return ways[n["function"]]()

    def _scale(self, n: Node, xs: list[Tensor]) -> Tensor:
        return xs[0] * self._two_to(n["by"])

    def _bounded(self, n: Node, xs: list[Tensor]) -> Tensor:
        name, number = n["function"], float(n.get("number", 1.0))
        if name == "filled":
            return torch.full(n["shape"], self._pick(-1, 1) * number, dtype=torch.float64)
        if not xs:  # the sine and the cosine of an angle that is in no graph
            return torch.tensor(self.rng.uniform(-4, 4, size=n["shape"])).cos()
        if name in ("clamp", "limit"):
            low = self._pick(-1.0, 0.5) if name == "clamp" else self._pick(-1.0, 0.0)
            return xs[0].clamp(low * number, number)
        if name == "softmax":
            return xs[0].softmax(n["dim"])
        made: Tensor = getattr(torch, name)(xs[0])
        return made

    def _add(self, n: Node, xs: list[Tensor]) -> Tensor:
        other = xs[1] if len(xs) > 1 else self._number(n)
        return xs[0] + float(n.get("factor", 1)) * other

    def _multiply(self, n: Node, xs: list[Tensor]) -> Tensor:
        return xs[0] * (xs[1] if len(xs) > 1 else float(n["number"]))

    _unit = _multiply

    def _power(self, n: Node, xs: list[Tensor]) -> Tensor:
        halves = n["halves"]
        return xs[0].abs() ** (halves / 2) if halves % 2 else xs[0] ** (halves // 2)

    def _exp(self, n: Node, xs: list[Tensor]) -> Tensor:
        return xs[0].exp()

    def _unknown(self, n: Node, xs: list[Tensor]) -> Tensor:
        """Any function; one that is alike is that of values twice as large, twice as large."""
        size = 10 ** self.rng.uniform(-2, 4) * self.rng.normal(size=n["shape"])
        made, floats = torch.tensor(size), [x for x in xs if x.numel()]
        if not floats:
            return made
        x = self._pick(*floats).reshape(-1)
        x = x[self._draw_places(len(x), *n["shape"])]
        return made * x / 1e2 if n["alike"] else made * x.cos()

    # what reads weights

    def _norm(self, n: Node, xs: list[Tensor]) -> Tensor:
        shape, x = n["shape"], xs[0]
        rank, inner = len(shape), n.get("inner", 0)
        dims = range(rank - inner, rank) if inner else (1,)
        split = [*shape[: rank - inner], -1] if inner else [shape[0], n["groups"], -1]
        rows, eps = x.reshape(split), self._pick(1e-12, 1e-6, 1e-2) * self._two_to(n["eps"])
        rows = rows - rows.mean(-1, keepdim=True) * self._pick(0, 1)
        made = (rows / (rows.square().mean(-1, keepdim=True) + eps).sqrt()).reshape(shape)
        place = [shape[d] if d in dims else 1 for d in range(rank)]
        made = made * self.tensor(n["weight"], n).reshape(place) if "weight" in n else made
        return made + self.tensor(n["bias"], n).reshape(place) if "bias" in n else made

    def _product(self, n: Node, xs: list[Tensor]) -> Tensor:
        """A linear, or what a convolution may be: each place reads some places, none twice, or zeros."""
        x, cut = xs[0], slice(*n.get("part", (None,)))
        w = self.tensor(n["weight"], n)[cut]
        bias = self.tensor(n["bias"], n)[cut] if "bias" in n else w.new_zeros(1)
        if w.ndim == 2:
            return x @ w.T + bias
        places, groups, channel = math.prod(w.shape[2:]), n["groups"], x.ndim - w.ndim + 1
        inside, outside = (math.prod(s[channel + 1 :]) for s in (x.shape, n["shape"]))
        batch = math.prod(n["shape"][:channel])
        reads = [self.rng.permutation(inside + places)[:places] for _ in range(outside)]
        flat = x.reshape(batch, x.shape[channel], inside)
        flat = torch.cat([flat, flat.new_zeros(*flat.shape[:2], places)], 2)
        patches = flat[:, :, torch.tensor(np.stack(reads))].unflatten(1, (groups, w.shape[1]))
        rows = w.reshape(groups, -1, w.shape[1], places)
        made = torch.einsum("bgcop,grcp->bgro", patches, rows).flatten(1, 2) + bias[:, None]
        return made.reshape(n["shape"])

    def _matmul(self, n: Node, xs: list[Tensor]) -> Tensor:
        return xs[0] @ xs[1]

    def _attention(self, n: Node, xs: list[Tensor]) -> Tensor:
        q, k, v = xs[:3]
        for dim in range(q.ndim - 2):
            k, v = (x.repeat_interleave(q.shape[dim] // x.shape[dim], dim) for x in (k, v))
        scores = q @ k.mT * self._pick(0.0, 1e-3, 1.0)
        hidden = torch.tensor(self.rng.random(scores.shape[-2:]) < self._pick(0.0, 0.7))
        hidden[:, int(self.rng.integers(hidden.shape[1]))] = False
        return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v


def scale_of(entry: Node, shape: Sequence[int]) -> Tensor:
    """Two to the exponents of a tensor's rows and columns."""
    exponents = np.zeros(tuple(shape) or (1,))
    for dim, begin, end, exponent in entry["exponents"]:
        exponents[(slice(None),) * dim + (slice(begin, end),)] += exponent
    return torch.tensor(2.0**exponents).reshape(tuple(shape))


# what a run contradicts


def find_lies(
    stated: Node, found: Node, tensors: dict[str, Tensor], seed: int, runs: int = 3
) -> list[str]:
    """What an accepted component states that its own weights or a run of its own graphs contradict.

    Args:
        stated: the component in the certificate.
        found: what the checker says of it, as data.
        tensors: the weights as they are loaded.
        runs: how many inputs are drawn; from each a value is pushed up.
    """
    lies = _check_tensors(stated, found, tensors)
    for number, graph in enumerate(stated["graphs"]):
        if max(math.prod(n["shape"]) for n in graph["nodes"]) > MOST_ELEMENTS:
            continue
        names = [x.partition(":")[2] for x in found["not_covered"] if x.startswith(f"{number}:")]
        saturated = [x.partition(":")[2] for x in found["saturated"]]
        weights = {x for x in tensors if x in found["not_covered"]}
        for turn in range(runs):
            run = Run(graph, stated["weights"], tensors, seed * runs + turn)
            lies += _contradict(run, {*names}, {*saturated}, weights)
            if not lies and climb(run):
                lies += _contradict(run, {*names}, {*saturated}, weights)
            if lies:
                return lies
    return lies


def _check_tensors(stated: Node, found: Node, tensors: dict[str, Tensor]) -> list[str]:
    """What is said of the weights: which they are, which are read, held in fp32, and leave fp16."""
    lies, reads = [], list[tuple[str, str]]()
    for n in (n for graph in stated["graphs"] for n in graph["nodes"]):
        reads += [(n[key], n["dtype"]) for key in ("weight", "bias") if key in n]
        if n["rule"] == "input" and not any(f"{n['name']} up to" in x for x in found["inputs"]):
            lies.append(f"the limit of {n['name']} is not said")
    if {*tensors} != {*stated["weights"]}:
        lies.append("a loader takes other tensors")
        return lies
    for name, value in tensors.items():
        entry = stated["weights"][name]
        raw = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        if hashlib.sha256(raw).hexdigest() != entry["sha256"]:
            lies.append(f"a loader takes another {name}")
        dtypes = {dtype for other, dtype in reads if other == name}
        if bool(dtypes) == (name in found["unread"]):
            lies.append(f"{name} is read, or is not, other than said")
        if entry["wide"] and dtypes and f"{name} is held in fp32" not in found["assumed"]:
            lies.append(f"that {name} is held in fp32 is not said")
        stored = store(value.double() * scale_of(entry, value.shape), "fp16")
        if dtypes and not (entry["wide"] and "fp16" not in dtypes) and not stored.isfinite().all():
            lies += [] if name in found["not_covered"] else [f"{name} leaves fp16"]
    return lies


def climb(run: Run, steps: int = 3) -> bool:
    """Push the inputs up the gradient of the value that is nearest to its bound, as far as they may go."""
    nearest, most = None, 0.0
    with torch.no_grad():
        for n, value in run.steps():
            size = measure(value)
            limit = _read(n["bound"]) if n["bound"] else 0.0
            if n["rule"] != "input" and limit and math.isfinite(size) and size / limit > most:
                nearest, most = n["id"], size / limit
    for _ in range(steps if nearest and run.drawn else 0):
        run.drawn = {k: x.detach().requires_grad_() for k, x in run.drawn.items()}
        value = next(x for n, x in run.steps() if n["id"] == nearest)
        if not value.requires_grad:
            break
        value.abs().max().backward()
        grads = {k: x.grad for k, x in run.drawn.items()}
        run.drawn = {
            k: x.detach() if (g := grads[k]) is None else torch.where(g == 0, x, g.sign()).detach()
            for k, x in run.drawn.items()
        }
    return bool(nearest and run.drawn)


def _read(pair: Sequence[int]) -> float:
    return math.ldexp(pair[0], pair[1]) if pair[1] < 900 else math.inf


@torch.no_grad()
def _contradict(run: Run, open_: set[str], saturated: set[str], weights: set[str]) -> list[str]:
    exact: dict[str, Tensor] = {}
    scaled: dict[str, Tensor] = {}
    lies = _exceed_bounds(run, exact) + _miss_exponents(run, exact, scaled)
    return lies + _leave_formats(run, exact, scaled, (open_, saturated, weights))


def _exceed_bounds(run: Run, exact: dict[str, Tensor]) -> list[str]:
    """Bounds of the values as they are, which go into `exact`."""
    lies = []
    for n, value in run.steps():
        size = measure(value)
        if n["bound"] is None and not math.isfinite(size):
            break  # it is assumed to be finite
        if n["bound"] is not None and not size <= _read(n["bound"]) * SLACK:
            lies.append(f"{n['id']} ({n['rule']}) is {size:g}, beyond its bound")
        exact[n["id"]] = value
    return lies


def _miss_exponents(run: Run, exact: dict[str, Tensor], scaled: dict[str, Tensor]) -> list[str]:
    """Exponents of the values times two to these, which go into `scaled`, and those of outputs."""
    lies, outputs = [], dict(run.graph["outputs"])
    for n, value in run.steps(scales=True):
        clamped = n.get("function") == "range_clamp" and measure(value) >= LARGEST
        if n["id"] not in exact or clamped or (n["dtype"] == "int" and any(n["exponents"])):
            break
        scaled[n["id"]] = value
        if not _agree(exact[n["id"]], value, n["exponents"]):
            lies.append(f"{n['id']} ({n['rule']}) is stored with other exponents than stated")
        if n["id"] in outputs and not _agree(exact[n["id"]], value, [outputs[n["id"]]]):
            lies.append(f"the output {n['id']} is not what it is")
    return lies


def _leave_formats(
    run: Run, exact: dict[str, Tensor], scaled: dict[str, Tensor],
    named: tuple[set[str], set[str], set[str]],
) -> list[str]:  # fmt: skip
    """Bounds and formats of what is stored: a listed value that leaves them ends a run."""
    lies, (open_, saturated, weights) = [], named
    for n, value in run.steps(scales=True, rounds=True):
        if n["id"] not in scaled or {n.get("weight"), n.get("bias")} & weights:
            break
        if n["id"] in saturated or n["bound"] is None:
            if n["bound"] is None and not value.isfinite().all():
                break
            continue
        if not value.isfinite().all():
            words = f"{n['id']} ({n['rule']}) is {measure(value):g} in {n['dtype']}"
            return [*lies, words] if n["id"] not in open_ else lies
        shares = (scaled[n["id"]] / exact[n["id"]]).abs().log2().round()
        found = 2.0 ** -torch.where(shares.isfinite(), shares, max(n["exponents"]))
        if measure(value * found) > _read(n["bound"]) * SLACK:
            size = measure(value * found)
            lies.append(f"{n['id']} ({n['rule']}) is {size:g} as stored, beyond its bound")
    return lies


def measure(value: Tensor) -> float:
    """The largest magnitude; NaN if there is one."""
    return float(value.abs().max()) if value.numel() else 0.0


def _agree(exact: Tensor, stored: Tensor, exponents: Sequence[int]) -> bool:
    """Whether each element is stored times two to one of the exponents."""
    room = 1e-9 * exact.abs() + 1e-12 * (exact.abs().max() if exact.numel() else 0)
    near = [(stored * 2.0**-e - exact).abs() <= room for e in exponents]
    return bool(torch.stack(near).any(0).all())


# what a loader takes


def load(folder: Path, files: Sequence[str]) -> dict[str, Tensor]:
    """The tensors that a loader takes: those that an index names, else those of the one file.

    Raises:
        ValueError: another file could be loaded instead of these, or `safetensors` reads none of them.
    """
    names = sorted(path.name for path in folder.iterdir())
    for name in names:
        if name.lower().endswith(LOADABLE) and name not in files:
            raise ValueError(f"{name} could be loaded instead")
    indices = [x for x in names if x.endswith(".safetensors.index.json")]
    places = [json.loads((folder / x).read_text())["weight_map"] for x in indices]
    if not places and len(files) != 1:
        raise ValueError("several files could be loaded alone")
    found: dict[str, Tensor] = {}
    for taken in {name for place in places for name in place.values()} or {*files}:
        try:
            with safe_open(folder / taken, framework="pt") as file:
                found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except Exception as error:
            raise ValueError(f"{taken} can't be loaded: {error}") from error
    return found
