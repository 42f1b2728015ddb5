"""Choose where to cast so that a network's residual stream is fp32 and its matrix products are fp16.

The casts are at modules that write to the stream, read it or multiply. PyTorch promotes fp32 + fp16 to
fp32. So a sum becomes fp32 as soon as the outputs of its *writers* (the last linear of a branch, an
embedding, a first convolution) are cast to fp32. Norms that read it keep their few parameters in fp32,
and every module that multiplies matrices first casts its fp32 inputs to fp16. Layers with almost no
work stay in fp32 as a whole: linears that multiply one row for each picture, the timestep's embedding,
and small layers that read the stream itself. Writers are found in the captured graph: module outputs
that reach a sum of two activations or a norm. The inputs of functional attention (query, key, value,
their norms and rotations, a position bias) stay in fp16, because its operands need one dtype.

An fp32 module can contain such a stream of its own: its linears and convolutions are in 16 bits, all
else in it is fp32, and its output is cast back.

Not covered: products of stream activations without a linear or convolution of a module: their operands, and
all that is summed into these, stay in fp16.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch.fx import Node

from stopdown.component_call_names import is_inside
from stopdown.errors import ScalingError
from stopdown.fold_names import name_parameters
from stopdown.interception.patches import Patches
from stopdown.operations import CONVOLUTIONS, NORMS, find_operation
from stopdown.scaling.exponents.problem import count_node_flops
from stopdown.scaling.folding.folds import put_stream
from stopdown.scaling.graph.capture import Capture, module_path
from stopdown.scaling.graph.mixed_operands import find_mixed_operands
from stopdown.scaling.graph.nodes import arguments, is_float, is_kind, operation, shape_of
from stopdown.scaling_records import ResidualStream

LARGEST_KEPT = 1 << 17
"""Largest number of values in a parameter, such as of a norm, gate or table, that is kept in fp32."""

MOST_WIDE_FLOPS = 0.03
"""Largest share of a call's products that layers which read the stream itself may do in fp32."""

_WEIGHTED = ("linear", *CONVOLUTIONS, "matrix", "table")
_SUMMING = ("power", "square", "rsqrt", "variance", "variance_mean", *NORMS)


def find_stream(
    module: torch.nn.Module,
    captures: Sequence[Capture],
    *,
    attention: bool = False,
    rows: bool = False,
) -> ResidualStream:
    """Find the modules at which a component's residual stream is cast to fp32 and back.

    Args:
        captures: its calls, captured in the dtype of its matrices.
        attention: cast the inputs of modules with functional attention to that dtype as well, as some
            of them cast query and key to the dtype of their input.
        rows: also keep cheap layers in fp32: linears outside lists of blocks that multiply one row for
            each picture (embeddings of a timestep, which every block reads), and layers that read the
            stream without a norm (shortcuts, downsamplers), as their bounds would scale the stream down
            most.

    Raises:
        ScalingError: if there is no residual stream.
    """
    readers = [_Reader(capture) for capture in captures]
    matrices = {path for reader in readers for path in reader.matrices}
    if attention:
        matrices |= {path for reader in readers for path in reader.attentions}
    inner = {path for reader in readers for path in reader.inner}
    writers = {path for reader in readers for path in reader.writers} - inner
    if not writers:
        raise ScalingError(
            f"{type(module).__name__} has no residual stream: no sum and no norm reads what a "
            "linear, convolution or embedding writes.",
            remedy="Use residual None: the ordinary rescaling.",
        )
    first = _find_first_parameter(module)
    wide = {name for reader in readers for name in reader.beside} - first
    wide -= {name for reader in readers for name in reader.narrow}
    norms = {path for reader in readers for path in reader.norms(wide)}
    layers = set[str]()
    if rows:
        own = {name.rpartition(".")[0] for name in first}
        layers = (_find_embedding(module, readers) | _find_bare_readers(readers)) - inner - own
    wide |= {x for x in name_parameters(module) if x.rpartition(".")[0] in layers}
    return ResidualStream(
        cast_output_up=tuple(sorted(writers - layers)),
        cast_input_down=tuple(sorted(matrices - layers)),
        cast_input_up=tuple(sorted(norms | layers)),
        kept=tuple(sorted(wide)),
        returns=_list_output_dtypes(captures[0]) <= {captures[0].dtype},
    )


def open_fp32_modules(
    module: torch.nn.Module,
    stream: ResidualStream | None,
    fp32_modules: Sequence[str],
    captures: Sequence[Capture],
) -> ResidualStream | None:
    """Choose casts that move the matrix products inside fp32 modules back to 16 bits; all else there
    stays fp32.

    The linears and convolutions inside them compute in 16 bits; their outputs are cast to fp32, where a
    multiply undoes a layer's scaling. So a sum with a table of positions stays in fp32 at little cost.
    Return None if no fp32 module contains such layers.

    Args:
        stream: casts that are used already; None for none.
        captures: the module's calls, in the dtype of its matrices.
    """
    matrices = {path for capture in captures for path in _Reader(capture).matrices}
    inner = {p for p in matrices if is_inside(p, *(x for x in fp32_modules if x != p))}
    opened = [x for x in fp32_modules if any(is_inside(p, x) for p in inner)]
    if not opened:
        return None
    kept = {
        name
        for name, tensor in name_parameters(module).items()
        if tensor.is_floating_point()
        and is_inside(name, *opened)
        and name.rpartition(".")[0] not in inner
    }
    known = stream or ResidualStream((), (), returns=False)
    return replace(
        known,
        cast_output_up=tuple(sorted({*known.cast_output_up, *inner})),
        cast_input_down=tuple(sorted({*known.cast_input_down, *inner})),
        cast_input_up=tuple(sorted({*known.cast_input_up, *opened})),
        kept=tuple(sorted({*known.kept, *kept})),
        cast_output_down=tuple(opened) if stream is None else (),
    )


@contextlib.contextmanager
def with_stream(
    module: torch.nn.Module, stream: ResidualStream | None, dtype: torch.dtype
) -> Iterator[frozenset[str]]:
    """Cast a module's residual stream to fp32 by hooks inside the block; yield the names of its fp32
    parameters.

    A capture made meanwhile contains the casts.
    """
    with Patches() as patches:
        if stream is not None:
            put_stream(module, stream, dtype, patches)
        yield frozenset() if stream is None else frozenset(stream.kept)


def demand_agreement(plain: Capture, streamed: Capture) -> None:
    """Check that with its residual stream in fp32 a call still runs: operands' dtypes agree, outputs
    keep theirs.

    Args:
        plain, streamed: captures of the call without and with the stream.

    Raises:
        ScalingError: if an operation would get fp32 and fp16 operands, or an output another dtype.
    """
    mixed = find_mixed_operands(streamed.graph)
    mixed += find_mixed_operands(streamed.graph, "attention", *NORMS)
    if mixed:
        place = f"{streamed.component}:{module_path(mixed[0])} ({operation(mixed[0])})"
        raise ScalingError(f"{place} would be given fp32 and fp16 together.")
    if _list_output_dtypes(plain) != _list_output_dtypes(streamed):
        raise ScalingError(f"{streamed.component} would return another dtype than without it.")


def measure_wide_flops(capture: Capture) -> float:
    """Return the share of a captured call's matmul FLOPs whose operands are fp32 or wider; 0 without
    matmuls.
    """
    flops = {node: count_node_flops(node) for node in capture.graph.graph.nodes}
    wide = sum(
        size
        for node, size in flops.items()
        if size and node.meta["val"].dtype in (torch.float32, torch.float64)
    )
    return wide / (sum(flops.values()) or 1.0)


class _Reader:
    """Finds which modules and parameters of a captured call write to, read or multiply its residual stream.

    A weighted layer is a linear, a convolution or an embedding.

    Attributes:
        matrices: paths of the modules that multiply by a parameter.
        attentions: paths of the modules whose own code multiplies two activations, as attention does.
        inner: paths of the weighted layers whose output such a product reads (query, key and value).
        writers: paths of the weighted layers whose output reaches a sum or a norm.
        narrow: parameters that are matrices, or that such a product reads.
        beside: parameters that are small enough to stay in fp32.
    """

    def __init__(self, capture: Capture) -> None:
        self.capture, self.nodes = capture, list(capture.graph.graph.nodes)
        self.weighted = {node for node in self.nodes if self._is_weighted(node)}
        self.interior = self._find_interior()
        own = {node: module_path(node) for node in self.weighted}
        self.matrices = {own[n] for n in own if own[n] and not is_kind(n, "table")}
        self.attentions = {module_path(n) for n in self.nodes if self._is_functional(n)} - {""}
        self.inner = {own[node] for node in own if node in self.interior}
        self.writers = {own[n] for n in own if self._is_writer(n)} & capture.single_outputs
        parameters = {
            n: name
            for n in self.nodes
            if (name := capture.parameters.get(n.name)) and n.users
            if is_float(n) and n.meta["val"].dtype == capture.dtype
        }
        self.narrow = {name for n, name in parameters.items() if self._stays_narrow(n)}
        self.beside = {
            name for n, name in parameters.items() if math.prod(shape_of(n)) <= LARGEST_KEPT
        }

    def norms(self, kept: set[str]) -> set[str]:
        """Return the paths of the modules that normalise with one of these fp32 parameters, outside
        attention.

        Args:
            kept: names of parameters that stay in fp32.
        """
        found = set()
        for node in self.nodes:
            if is_kind(node, *NORMS) and node not in self.interior:
                names = {self.capture.parameters.get(x.name) for x in node.all_input_nodes}
                found |= {module_path(node)} if names & kept else set()
        return found

    def _is_weighted(self, node: Node) -> bool:
        """Return whether a node multiplies by a parameter (linear, convolution) or looks up rows of one
        (embedding).
        """
        if not is_kind(node, *_WEIGHTED) or not is_float(node):
            return False
        given = arguments(node)
        weight = given.get("weight", given.get("mat2"))
        return isinstance(weight, Node) and _find_origin(weight).name in self.capture.parameters

    def _find_interior(self) -> set[Node]:
        """Find the nodes between weighted layers and products of two activations: attention's queries,
        keys, values.

        Both operands of a product need one dtype, so these nodes stay in 16 bits.
        """
        found: set[Node] = set()
        waiting = [x for n in self.nodes if self._is_functional(n) for x in n.all_input_nodes]
        while waiting:
            node = waiting.pop()
            if node in found or not _has_floats(node):
                continue
            found.add(node)
            if node not in self.weighted and not self._is_functional(node):
                waiting.extend(node.all_input_nodes)
        return found

    def _is_functional(self, node: Node) -> bool:
        """Return whether a node multiplies two activations in the matrices' dtype, as attention does."""
        if node in self.weighted or not is_float(node):
            return False
        is_product = count_node_flops(node) > 0 or is_kind(node, "einsum")
        return is_product and node.meta["val"].dtype == self.capture.dtype

    def _is_writer(self, node: Node) -> bool:
        """Return whether a layer's result is added to the residual stream: it reaches a sum or norm
        outside its module.
        """
        path, seen, waiting = module_path(node), {node}, [node]
        if not path or node in self.interior:
            return False
        while waiting:
            for user in waiting.pop().users:
                if user in seen or user.op == "output" or user in self.weighted:
                    continue
                if not is_inside(module_path(user), path) and _sums(user):
                    return True
                seen.add(user)
                if not self._is_functional(user) and not _is_pinned(user):
                    waiting.append(user)
        return False

    def _stays_narrow(self, node: Node) -> bool:
        """Return whether a parameter must stay in 16 bits: a matrix, its bias, or one that attention
        reads.
        """
        if node in self.interior or any(user in self.weighted for user in node.users):
            return True
        return any(_find_origin(x) is node for user in self.weighted for x in user.all_input_nodes)


def _find_embedding(module: torch.nn.Module, readers: Sequence[_Reader]) -> set[str]:
    """Find linears outside lists of blocks that multiply one row for each picture, as a timestep's
    embedding does.

    They are so cheap that they can stay in fp32.
    """
    lists = [x for x, part in module.named_modules() if isinstance(part, torch.nn.ModuleList)]
    single, many = set[str](), set[str]()
    for reader in readers:
        shapes = {x: shape_of(x) for x in reader.weighted if is_kind(x, "linear", "matrix")}
        pictures = min((shape[0] for shape in shapes.values() if len(shape) > 2), default=0)
        for node, shape in shapes.items():
            is_row = len(shape) == 2 and shape[0] <= pictures
            (single if is_row else many).add(module_path(node))
    return {x for x in single - many if x and not is_inside(x, *lists)}


def _find_bare_readers(readers: Sequence[_Reader]) -> set[str]:
    """Find the cheapest layers that read the residual stream without a norm, to be kept in fp32.

    Together they do at most the share `MOST_WIDE_FLOPS` of any call's work.
    """
    found: set[str] = set()
    for reader in readers:
        flops = {node: count_node_flops(node) for node in reader.nodes}
        bare = defaultdict[str, float](float)
        for node in reader.weighted:
            if is_kind(node, "linear", *CONVOLUTIONS) and _reads_stream(node):
                bare[module_path(node)] += flops[node]
        left = MOST_WIDE_FLOPS * sum(flops.values())
        for path, work in sorted(bare.items(), key=lambda item: item[::-1]):
            left -= work
            if path and left >= 0:
                found.add(path)
    return found


def _reads_stream(layer: Node) -> bool:
    """Return whether a layer reads a sum of two activations, the residual stream, without a norm
    between.
    """
    read = _trace(arguments(layer).get("input"))
    return any(
        _sums(node) and not is_kind(node, *_SUMMING) and not _shifts_norm(node) for node in read
    )


def _shifts_norm(total: Node) -> bool:
    """Return whether a sum is a norm's output that is scaled and shifted, and so no residual stream."""
    return any(is_kind(x, *_SUMMING) for y in total.all_input_nodes for x in _trace(y, "multiply"))


def _trace(value: object, *kinds: str) -> set[Node]:
    """Find the nodes from which a node's elements come, back through views and operations of these
    kinds.
    """
    found: set[Node] = set()
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, Node) or node in found or not is_float(node):
            continue
        found.add(node)
        known = find_operation(operation(node))
        if known is not None and ("rearranges" in known.traits or known.kind in kinds):
            waiting.extend(node.all_input_nodes)
    return found


def _has_floats(node: Node) -> bool:
    """Return whether a node's result is a floating tensor, or a list (query, key and value) with one."""
    parts = node.meta.get("val")
    if not isinstance(parts, (tuple, list)):
        return is_float(node)
    return any(isinstance(x, torch.Tensor) and x.is_floating_point() for x in parts)


def _find_origin(node: Node) -> Node:
    """Follow a node back through views, casts and other operations with one input; return the first
    that has several.
    """
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node


def _sums(node: Node) -> bool:
    found = find_operation(operation(node))
    if found is not None and found.kind in ("add", "subtract"):
        return len([x for x in node.all_input_nodes if is_float(x)]) == 2
    return found is not None and found.kind in _SUMMING


def _is_pinned(node: Node) -> bool:
    found = find_operation(operation(node))
    return found is not None and found.exponent == "pinned"


def _find_first_parameter(module: torch.nn.Module) -> set[str]:
    """Return the name of the first floating parameter, which must keep its dtype; a set of one.

    A model's class reports this parameter's dtype as the model's own.
    """
    floats = (n for n, x in name_parameters(module).items() if x.is_floating_point())
    return {next(floats, "")}


def _list_output_dtypes(capture: Capture) -> set[torch.dtype]:
    last = capture.graph.graph.output_node()
    return {x.meta["val"].dtype for x in last.all_input_nodes if is_float(x)}
