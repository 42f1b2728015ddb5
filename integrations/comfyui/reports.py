"""Texts that nodes show: what a guard saw, the machine, causes. And any of them as a picture."""

from __future__ import annotations

import io
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

WIDTH = 92
"""Characters of a line in a terminal's layout."""

PICTURE_WIDTH = 80

_FAULT, _GOOD = (186, 56, 40), (38, 120, 72)


def write_report(runs: Sequence[tuple[str, Any]]) -> str:
    """What was seen and done.

    Args:
        runs: the model and its guard's record, of each run.
    """
    lines: list[str] = []
    for name, record in runs:
        for call in record.calls:
            precision = ", ".join(call.precisions)
            faults = f"{call.non_finite} of {call.calls}" if call.non_finite else "none"
            lines.append(
                f"{name}: {call.component} in {precision}: {call.calls} calls, {faults} faulty."
            )
        lines += [f"{name}: {place} was applied from an earlier run." for place in record.reused]
        for repair in record.repairs:
            lines += ["", f"{repair.module_path}: {repair.kind}, {repair.action}.", repair.evidence]
            lines += [repair.reason, *(f"Tried: {tried}" for tried in repair.tried)]
        lines += [f"{name}: {x.module_path}: {x.evidence} {x.remedy}" for x in record.findings]
        lines += [f"Not watched: {text}" for text in record.unwatched]
    if not runs:
        lines = ["Nothing has run since the last report."]
    return "\n".join(lines)


def write_health() -> str:
    """What `stopdown doctor` prints."""
    from stopdown.embedding import examine, print_health

    return _print(lambda console: print_health(examine(), console))


def write_causes(message: str, images: Any) -> str:
    """What `stopdown explain` prints of a message and of pictures.

    Args:
        images: `[B, H, W, 3]` floating in 0 to 1, or None.
    """
    import stopdown
    from stopdown.embedding import print_diagnosis

    found = []
    if message.strip():
        cause = stopdown.explain(message)
        found.append(_print(lambda console: print_diagnosis(cause, console)))
    return (
        "\n\n".join((*found, *_explain_pictures(images))) or "Connect a message, a log or images."
    )


def _explain_pictures(images: Any) -> Iterator[str]:
    """The causes of each fault once, as a clip has many frames with the same one."""
    import stopdown
    from stopdown.embedding import print_diagnosis

    causes: dict[bytes, str] = {}
    numbers: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, image in enumerate(() if images is None else images, start=1):
            path, picture = Path(folder) / "image.png", _open_picture(image)
            if (key := picture.tobytes()) not in causes:
                picture.save(path)
                cause = stopdown.explain(path)
                causes[key] = _print(lambda console, cause=cause: print_diagnosis(cause, console))
            numbers.setdefault(causes[key], []).append(number)
    for text, known in numbers.items():
        if len(images) > 1:
            first = f", number {known[0]} is the first" if known[0] > 1 else ""
            text = f"{len(known)} of {len(images)} images{first}:\n{text}"
        yield text


def _open_picture(image: Any) -> Any:
    from PIL import Image

    return Image.fromarray(image.nan_to_num().clamp(0, 1).mul(255).round().byte().cpu().numpy())


def _print(show: Any) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=WIDTH, highlight=False, color_system=None)
    show(console)
    return str(console.file.getvalue()).rstrip()  # type: ignore[attr-defined]


def draw_text(text: str, *, is_faulty: bool = False) -> Any:
    """A text as an image `[1, H, W, 3]`, with a bar that is red where there was a fault."""
    import numpy as np
    import torch
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(16)
    lines = [
        part for line in text.split("\n") for part in textwrap.wrap(line, PICTURE_WIDTH) or [""]
    ]
    height = 22 * len(lines) + 32
    picture = Image.new("RGB", (720, height), (250, 250, 248))
    draw = ImageDraw.Draw(picture)
    draw.rectangle((0, 0, 8, height), fill=_FAULT if is_faulty else _GOOD)
    for number, line in enumerate(lines):
        draw.text((24, 16 + 22 * number), line, fill=(24, 24, 24), font=font)
    return torch.from_numpy(np.asarray(picture).astype("float32") / 255)[None]
