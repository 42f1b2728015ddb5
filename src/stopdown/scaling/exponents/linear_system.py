"""Unknown integer scale exponents, and the linear equations between them that keep a network's result
unchanged.

Every activation, parameter and eps has an integer unknown: it is stored multiplied by `2**unknown`. Most
operations only equate two unknowns, so equal ones are merged at once (union-find) and few are left for
the solver. Unknown 0 is the constant zero: to pin an unknown is to merge it with that.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

ZERO = 0
"""Index of the unknown that is always 0."""


@dataclass
class System:
    """Integer unknowns, merged if equal, and equations `sum(factor * unknown) == 0`.

    Attributes:
        keys: maps the key of a value, parameter or eps to the index of its unknown.
        equations: each maps the index of an unknown to its factor.
    """

    keys: dict[Hashable, int] = field(default_factory=dict)
    equations: list[dict[int, int]] = field(default_factory=list)
    _parents: list[int] = field(default_factory=lambda: [ZERO])

    def copy(self) -> System:
        """Return an independent copy of the unknowns and equations."""
        return System(dict(self.keys), [dict(row) for row in self.equations], list(self._parents))

    def unknown(self, key: Hashable) -> int:
        """Return the index of the unknown with this key; add one if the key is new."""
        if key not in self.keys:
            self.keys[key] = len(self._parents)
            self._parents.append(self.keys[key])
        return self.keys[key]

    def find(self, unknown: int) -> int:
        """Return the index that represents all unknowns merged with this one."""
        root = unknown
        while self._parents[root] != root:
            root = self._parents[root]
        while self._parents[unknown] != root:
            self._parents[unknown], unknown = root, self._parents[unknown]
        return root

    def equate(self, *unknowns: int) -> None:
        """Merge these unknowns into one, so that they are equal in every solution."""
        roots = sorted({self.find(x) for x in unknowns})
        for root in roots[1:]:
            self._parents[root] = roots[0]

    def pin(self, *unknowns: int) -> None:
        """Merge these unknowns with the constant 0, which fixes them at 0."""
        self.equate(ZERO, *unknowns)

    def relate(self, *terms: tuple[int, int]) -> None:
        """Add the equation that the sum of `factor * unknown` over pairs (unknown, factor) is 0."""
        row: dict[int, int] = {}
        for unknown, factor in terms:
            row[unknown] = row.get(unknown, 0) + factor
        self.equations.append(row)

    def reduced(self) -> list[dict[int, int]]:
        """Return the distinct equations in terms of representatives, without zero terms or empty equations.

        Unknowns that a single equation makes equal, or 0, are merged first.
        """
        rows: dict[tuple[tuple[int, int], ...], dict[int, int]] = {}
        while self._merge_simple():
            pass
        for row in map(self._reduce, self.equations):
            if row:
                rows[tuple(sorted(row.items()))] = row
        return list(rows.values())

    def _reduce(self, row: Mapping[int, int]) -> dict[int, int]:
        merged: dict[int, int] = {}
        for unknown, factor in row.items():
            root = self.find(unknown)
            if root != ZERO:
                merged[root] = merged.get(root, 0) + factor
        return {unknown: factor for unknown, factor in merged.items() if factor}

    def _merge_simple(self) -> bool:
        """Merge unknowns that an equation `a = 0` or `a = b` decides; return whether there were any."""
        found, rest = False, []
        for row in self.equations:
            reduced = self._reduce(row)
            factors = list(reduced.values())
            if len(factors) == 1:
                self.pin(*reduced)
                found = True
            elif len(factors) == 2 and sum(factors) == 0:
                self.equate(*reduced)
                found = True
            elif reduced:
                rest.append(reduced)
        self.equations = rest
        return found
