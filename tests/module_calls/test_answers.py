"""Values that code reads from its tensors, in the signature of its calls."""

from __future__ import annotations

import pytest

from stopdown.module_calls.answers import OF_TEST, add_answers, reads_values, strip_answers

SIGNATURE = "forward(x[2d], mask[1d])"


@pytest.mark.parametrize("signature", [SIGNATURE, "forward()"])
@pytest.mark.parametrize("values", [[4], [1, 2.5, True], list(range(100))])
def test_answers_are_added_and_removed(signature: str, values: list[object]) -> None:
    """Short answers are written out, long ones hashed; either comes off again."""
    added = add_answers(signature, [("item", x) for x in values])
    assert reads_values(added)
    assert len(added) < len(signature) + 80
    assert strip_answers(added) == signature


def test_other_answers_are_another_signature() -> None:
    """Also if they are too long to be written out."""
    one, other = (add_answers(SIGNATURE, [("item", x)] * 100) for x in (1, 2))
    assert one != other


def test_tests_of_finiteness_are_left_out() -> None:
    """Code that asks for NaN and Inf goes one way for all finite values."""
    assert add_answers(SIGNATURE, [(f"isinf{OF_TEST}", False)]) == SIGNATURE
    assert not reads_values(SIGNATURE)
