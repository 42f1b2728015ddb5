"""Annotations are evaluated where the script does not ask for text."""


def paint(steps: int) -> float: ...


print(paint.__annotations__)
