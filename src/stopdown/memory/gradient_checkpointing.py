"""What gradient checkpointing does for a run: nothing."""

from __future__ import annotations

from typing import Any

from stopdown.pipelines.components import find_components

IDLE = (
    "Gradient checkpointing makes training take less memory by computing again what a backward pass "
    "needs; a run that only generates has no backward pass, and it does nothing."
)


def find_checkpointing(pipe: Any) -> tuple[str, ...]:
    """Components that have gradient checkpointing on."""
    found = find_components(pipe).items()
    return tuple(name for name, part in found if _is_on(part))


def _is_on(part: Any) -> bool:
    """Transformers 5 has another name for it, and warns of the old one, which is Diffusers'."""
    new = getattr(part, "is_activation_checkpointing", None)
    return bool(getattr(part, "is_gradient_checkpointing", False) if new is None else new)
