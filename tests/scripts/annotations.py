"""Dataclasses and type hints of a script, with annotations as text."""

from __future__ import annotations

import dataclasses
import typing


@dataclasses.dataclass
class Request:
    steps: int = 4
    sizes: list[int] = dataclasses.field(default_factory=list)


class Named(typing.NamedTuple):
    a: int


print(Request(), typing.get_type_hints(Request), typing.get_type_hints(Named), Named(1))
