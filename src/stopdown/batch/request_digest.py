"""What a batch was asked for, as one hash that is found without PyTorch.

It is over the items, the options, and name, size and time of every file that these name: the model, plans,
LoRAs, pictures. A batch whose summary has this hash, and all of whose outputs are there, has nothing to do.

Not covered: a file that was rewritten with the same size and time; versions of other libraries.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stopdown.batch.prompts import Item
from stopdown.devices.environment import read_version

_COMMIT = re.compile(r"[0-9a-f]{40}")


def digest_request(items: Iterable[Item], options: Mapping[str, Any], built_in: bool) -> str:
    """Return the hash of what a batch is asked for; "" if it cannot be known without asking elsewhere.

    Args:
        items: with all media in their places.
        options: everything else that determines the outputs, by name; `source` is the model.
        built_in: the model comes with Stopdown.
    """
    listed = [dataclasses.asdict(item) for item in items]
    named = {str(x) for part in (options, *listed) for x in _list_texts(part.values())}
    is_here = built_in or Path(options["source"]).exists()
    is_fixed = _COMMIT.fullmatch(str(options.get("revision"))) is not None
    if not (is_here or is_fixed):
        return ""
    places = {x for name in named for x in (name, name.rpartition(":")[0]) if x}
    stamps = {x: _stamp(Path(x)) for x in places}
    text = json.dumps(
        [read_version("stopdown"), listed, options, stamps], sort_keys=True, default=str
    )
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _list_texts(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, tuple):
            yield from _list_texts(value)
        elif isinstance(value, str | Path):
            yield value


def _stamp(path: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of a file, or of all files in a folder; nothing if there is none."""
    try:
        paths = sorted(path.rglob("*")) if path.is_dir() else [path]
        told = [(x, x.stat()) for x in paths if x.is_file()]
    except (OSError, ValueError):  # no path can be so long, or have such characters
        return []
    return [(str(x), stat.st_size, stat.st_mtime_ns) for x, stat in told]
