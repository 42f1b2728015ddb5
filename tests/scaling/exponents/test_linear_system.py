"""Unknown exponents and the equations between them."""

from __future__ import annotations

from stopdown.scaling.exponents.linear_system import ZERO, System


def test_equal_unknowns_are_one() -> None:
    """Equations between two of them merge, whatever their order; what is pinned is zero."""
    system = System()
    a, b, c, d = (system.unknown(x) for x in "abcd")
    assert system.unknown("a") == a
    system.equate(a, b)
    system.relate((b, 1), (c, -1))
    system.relate((d, 2))
    assert system.reduced() == []
    assert system.find(a) == system.find(c)
    assert system.find(d) == ZERO
    assert system.find(a) != ZERO


def test_equations_are_between_representatives() -> None:
    """Terms of one unknown are added, repetitions dropped, and zero terms left out."""
    system = System()
    a, b, c = (system.unknown(x) for x in "abc")
    system.relate((a, 1), (b, 1), (c, -1))
    system.relate((a, 1), (a, 1), (b, 2), (c, -2), (a, -1), (b, -1), (c, 1))
    assert system.reduced() == [{a: 1, b: 1, c: -1}]
    system.equate(a, b)
    assert system.reduced() == [{a: 2, c: -1}]


def test_a_copy_is_independent() -> None:
    """What is pinned in it stays free in the original."""
    system = System()
    a = system.unknown("a")
    copied = system.copy()
    copied.pin(a)
    assert copied.find(a) == ZERO
    assert system.find(a) == a
