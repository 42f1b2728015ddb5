"""Decide for which operations the output rows' 2-norm is worth bounding by a singular value, the costliest
number.

The largest singular value of a weight bounds how long a linear makes a row, but a norm forgets it: a query
before its norm, and all that a residual stream adds up, are read by norms alone. Peaks lose nothing: no
element is bounded by more than the length of its row.

Not covered: norms that are written out in a form that `rules.find_written_norm` doesn't know. The lengths
of what they read count as read.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from stopdown.operations import find_operation
from stopdown.scaling.bounds.evaluation import writes_in_place
from stopdown.scaling.bounds.known_values import BoundedOperation
from stopdown.scaling.bounds.rules import find_written_norm
from stopdown.scaling.graph.nodes import is_float, is_split, operation

_PASSING = (
    *("same", "reshape", "permute", "expand", "part", "cat", "stack", "tokens", "choose", "pad"),
    *("add", "multiply", "divide", "repeat", "clamp", "shrink"),
)
"""Rules whose bound of a row's length rests on those of their inputs."""

_FORGETTING = (
    *("normalise", "normalise_groups", "softmax", "saturate", "power", "root", "exponential"),
    *("total", "mean", "any", "places", "subtract_from"),
)
"""Rules that read no length of a row."""


def find_read_lengths(graph: Graph) -> frozenset[Node]:
    """Return the nodes whose output rows' 2-norm some later bound uses; for others, it needn't be
    computed.
    """
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        if any(_reads_length(user, user in found) for user in node.users):
            found.add(node)
    return frozenset(found)


def _reads_length(user: Node, is_read: bool) -> bool:
    """Return whether a node's bound depends on the 2-norm of its inputs' rows.

    Args:
        is_read: whether some later bound depends on that of the node's own rows.
    """
    if user.op == "output" or writes_in_place(user):
        return True
    if is_split(user):
        return is_read
    known = find_operation(operation(user))
    rule = known.bound if known is not None else ""
    if rule in _FORGETTING or (rule in _PASSING and not is_read):
        return False
    if rule in ("multiply", "divide") and is_float(user):
        return find_written_norm(BoundedOperation(user, None)) is None  # type: ignore[arg-type]
    return True
