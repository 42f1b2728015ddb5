"""Checks of a model's descriptions (`config.json` and other JSON), before a library reads them.

A configuration chooses classes, sizes and counts. A wrong one can therefore execute code, or take hours or
all memory. Nested configurations are checked as well.

**Catches** custom code, kernels that Transformers would fetch from the Hub, counts and sizes that no model
has, and divisors of zero.
**Does not catch** plausible values that are wrong; the weights do not fit these (`loader`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stopdown.errors import SourceError
from stopdown.files.json_files import MOST_BYTES, UnreadableError, read_json_table

MOST_CONFIG_BYTES = 4 * 2**20
"""Size limit of configurations; the longest list some thousand parameters that are not quantised."""

BUILT_IN = ("eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm")
"""Implementations of attention and experts that are part of PyTorch and Transformers.

`flash_attention_2` is not: without flash-attn, Transformers fetches a kernel from the Hub
(transformers/modeling_utils.py, `_check_and_adjust_attn_implementation`, 5.0).
"""

LIMITS = (
    # built one by one, in Python
    (
        re.compile(r"(^|_)layers(_per_block)?$|_blocks$|^n_layers?$|^depths?$|_depths?$|_experts$"),
        (0, 1000),
    ),
    (re.compile(r"^extra_ids$"), (0, 10_000)),
    # tables of one row each, made when the object is
    (re.compile(r"^num_train_timesteps$"), (1, 1_000_000)),
    (re.compile(r"^(sample|pos_embed_max)_(size|height|width|frames|length)$"), (1, 2**16)),
    # divisors of sizes
    (re.compile(r"^patch_size(_t)?$"), (1, 2**10)),
)
"""Patterns of field names, with the least and largest value; the first pattern that matches applies.

Published models stay far below: 120 layers, 100 extra ids, 1000 timesteps, sides of 1024 latents.
"""

MOST_POSITIONS = 2**26
"""Maximum number of latent positions in a model's configuration; 49 frames of 720 by 1360 have 0.3 M."""

_CODE = ("trust_remote_code", "custom_pipeline", "custom_pipelines")
_DIVISORS = ("scaling_factor",)
_INFINITE = ("lambda_min_clipped", "s_tmax", "time_step_limit")
"""Fields of schedulers and models whose default in Diffusers or Transformers is infinite."""


def read_description(path: Path) -> dict[str, Any]:
    try:
        return read_table(path)
    except UnreadableError as error:
        raise SourceError(
            f"{path} can't be read as a JSON object: {error}.",
            expected="This file describes the model.",
            remedy="Download or save the model again.",
        ) from error


def read_table(path: Path) -> dict[str, Any]:
    """Read a model's JSON file, such as a `config.json`, as a dict.

    Raises:
        UnreadableError: the file can't be read, or isn't a JSON object.
    """
    most = MOST_CONFIG_BYTES if "config" in path.name or "index" in path.name else MOST_BYTES
    return read_json_table(path, most_bytes=most, allows_infinity="config" in path.name)


def list_custom_code(content: dict[str, Any]) -> Iterator[str]:
    """Yield the paths of fields that request custom code, such as `auto_map` or `trust_remote_code`."""
    return (
        path for path, key, value in _walk(content) if key == "auto_map" or (key in _CODE and value)
    )


def find_kernels(content: dict[str, Any]) -> Iterator[str]:
    """Yield `path = name` for each field that chooses an attention or expert kernel not in `BUILT_IN`.

    `BUILT_IN` lists those of PyTorch and Transformers. Transformers may download others from the Hub.
    """
    for path, key, value in _walk(content):
        if "implementation" in key:
            yield from (f"{path} = {name!r}" for name in _list_texts(value) if name not in BUILT_IN)


def find_excess(content: dict[str, Any]) -> list[tuple[str, str]]:
    """List fields with implausible numbers, each as `path = value` with its permitted range."""
    found = [entry for path, key, value in _walk(content) for entry in _judge(path, key, value)]
    sides = [content.get(f"sample_{name}", 1) for name in ("height", "width", "frames")]
    square = [content.get(name, 1) for name in ("sample_size", "pos_embed_max_size")]
    counts = [
        math.prod(side for side in sides if isinstance(side, int)),
        *(side**2 for side in square if isinstance(side, int)),
    ]
    positions = max(map(abs, counts))  # of latents, that the sizes of a denoiser stand for
    if positions > MOST_POSITIONS and not found:
        found.append((f"{positions} latent positions", f"at most {MOST_POSITIONS}"))
    return found


def _judge(path: str, key: str, value: Any) -> Iterator[tuple[str, str]]:
    limits = next((limits for name, limits in LIMITS if name.search(key)), (-math.inf, math.inf))
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            continue
        if not limits[0] <= number <= limits[1]:
            yield f"{path} = {number:.6g}", f"between {limits[0]} and {limits[1]}"
        elif not math.isfinite(number) and key not in _INFINITE:
            yield f"{path} = {number}", "a finite number there"
        elif key in _DIVISORS and not number:
            yield f"{path} = {number}", "a number other than 0, by which latents are divided"


def _walk(content: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield the path, key and value of each field, including those in nested tables and lists."""
    left: list[tuple[str, Any]] = [("", content)]
    while left:
        above, table = left.pop()
        for key, value in table.items() if isinstance(table, dict) else enumerate(table):
            path = f"{above}.{key}" if above else str(key)
            if isinstance(table, dict):
                yield path, str(key), value
            if isinstance(value, (dict, list)):
                left.append((path, value))


def _list_texts(value: Any) -> list[str]:
    """List the texts in a value: the value itself, or the texts in its fields."""
    if isinstance(value, dict):
        return [text for inner in value.values() for text in _list_texts(inner)]
    return [value] if isinstance(value, str) else []
