"""A class of another program cast to fp16 by hand: what it does, what `check` and `mend` say.

    python tests/readers/foreign_checks.py "imaginAIry VideoUNet"

One process a class: two of the programs have a package of the same name.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from models.foreign_models import make_foreign
from stopdown import check, mend


def describe_half(name: str) -> dict[str, Any]:
    """Errors before and after mending, with the findings before and what was left."""
    module, calls = make_foreign(name)
    module.half()

    def cast(value: Any) -> Any:
        is_value = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 1
        return value.half() if is_value else value  # and times stay as samplers give them

    def run() -> None:
        for call, args, kwargs in calls:
            with torch.no_grad():
                call(*map(cast, args), **kwargs)

    def find_error() -> str:
        try:
            run()
        except RuntimeError as error:
            return str(error)
        return ""

    plain, found = find_error(), check(module, device="cpu", run=run)
    with mend(module, device="cpu", run=run) as mended:
        return {
            "plain": plain,
            "found": [[x.severity, x.kind, x.module_path] for x in found],
            "done": mended.done,
            "left": [[x.severity, x.kind, x.module_path] for x in mended.remaining],
            "mended": find_error(),
        }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(describe_half(sys.argv[1])))
