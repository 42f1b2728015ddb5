"""What is tried after a fault, in which order."""

from __future__ import annotations

import pytest

from stopdown.runtime.repair_order import list_remedies

CASES = {
    "an infinite weight": (("weight", "fp16"), []),
    "an infinite input": (("input", "fp16"), []),
    "once only": (("intermittent", "fp16"), ["replayed", "cast fp32"]),
    "range": (("range", "fp16", ("a", "b", "c"), True),
              ["rescaled native", "rescaled fp32", "fp32-module a", "fp32-module b", "cast bf16",
               "cast fp32"]),
    "range without bf16": (("range", "fp16"), ["rescaled native", "rescaled fp32", "cast fp32"]),
    "range in bf16": (("range", "bf16", ("a",)), ["fp32-module a", "cast fp32"]),
    "range in fp32": (("range", "fp32", ("a",)), []),
}  # fmt: skip


@pytest.mark.parametrize(("given", "expected"), CASES.values(), ids=CASES)
def test_remedies_go_from_the_fastest_to_the_widest(
    given: tuple[str, ...], expected: list[str]
) -> None:
    """Exponents come before fp32 modules, those before a cast; nothing is tried that cannot help."""
    short = {"rescaled": "residual", "fp32-module": "path", "cast": "precision"}
    found = [
        f"{x.action} {getattr(x, short[x.action])}" if x.action in short else x.action
        for x in list_remedies(*given)
    ]
    assert found == expected


def test_a_record_names_the_format_of_a_cast() -> None:
    """Other remedies are named by their action."""
    assert [x.recorded for x in list_remedies("range", "bf16", ("a",))] == ["fp32-module", "fp32"]
