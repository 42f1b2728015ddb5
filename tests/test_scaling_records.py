"""Records of the core survive JSON, whatever they hold."""

from __future__ import annotations

from stopdown.records import from_json, to_json
from stopdown.scaling_records import ResidualStream, Scaling, Trial


def test_a_scaling_survives_json() -> None:
    """Exponents, outputs by number, streams and trials are the same when they are read."""
    scaling = Scaling(
        exponents={"a.weight[0:64]": -3},
        outputs={1: 4},
        stream=ResidualStream(("a",), ("b",)),
        trial=Trial(calls=2, rel_err=1e-3),
        shapes={"x": (((1, 2), (3,)),)},
    )
    assert from_json(to_json(scaling), Scaling) == scaling
