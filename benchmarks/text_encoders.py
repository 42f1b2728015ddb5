"""Text encoders by themselves: plain Transformers in fp16, before and after `stopdown convert`.

Tiny encoders of real classes with random weights that overflow in one of three ways, and a trained one, as
it is published and with an inner layer moved beyond fp16. Errors are relative L2 to fp32 of the last hidden
state, on tokens that the exponents were not measured on. `half` is the model after `.half()`, which also
lowers what its class keeps in fp32.

    python benchmarks/text_encoders.py
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
for folder in (ROOT / "tests", ROOT / "tests" / "pipelines"):
    sys.path.insert(0, str(folder))

from test_text_encoders import (  # noqa: E402
    ENCODERS,
    SENTENCES,
    run_encoder,
    save_example,
    widen,
)

from models.rescaling_models import EXAMPLES  # noqa: E402 (the path is set above)
from models.trained_models import is_downloaded, unpack_minilm  # noqa: E402
from stopdown.checkpoints.text_encoders import convert_encoder, find_encoder  # noqa: E402
from stopdown.devices.environment import describe_machine  # noqa: E402
from stopdown.numerics import relative_l2  # noqa: E402

WAYS = ("residual", "last linear", "gated product")

INTRO = """# Text encoders converted alone

Tiny encoders with random weights that overflow in fp16, and a trained one, before and after `stopdown
convert`. Errors are relative to fp32. *Half before* and *half* are the model after `.half()`, before and
after the conversion; *fp16* is the converted model as its class loads it; *fp32* is the converted model in
fp32. *Folded* counts the scaled tensors.
"""


def measure(folder: Path, target: Path, run: Any, *, certify: bool) -> dict[str, Any]:
    """Errors before and after, and what the conversion did."""
    encoder = find_encoder(folder)
    assert encoder is not None
    started = time.perf_counter()
    (entry,) = convert_encoder(encoder, target, certify=certify).components
    elapsed_s = time.perf_counter() - started
    reference = run(folder, torch.float32)

    def error(place: Path, dtype: torch.dtype, **options: bool) -> float | None:
        found = float(relative_l2(run(place, dtype, **options), reference))
        return found if math.isfinite(found) else None

    return {
        "certified": certify,
        "half before": error(folder, torch.float16, half=True),
        "bf16": error(folder, torch.bfloat16),
        "fp16": error(target, torch.float16),
        "half": error(target, torch.float16, half=True),
        "fp32": error(target, torch.float32),
        "folded": entry.folded,
        "elapsed_s": round(elapsed_s, 1),
    }


def measure_trained(root: Path) -> list[dict[str, Any]]:
    """The trained encoder, if `make trained` has downloaded its package."""
    if not is_downloaded():
        return []
    import transformers

    folder = unpack_minilm()
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(
        list(SENTENCES), padding=True, truncation=True, return_tensors="pt"
    )

    def run(place: Path, dtype: torch.dtype, half: bool = False) -> torch.Tensor:
        module = transformers.BertModel.from_pretrained(place, dtype=dtype).eval()
        if half:
            module.half()
        with torch.no_grad():
            output: torch.Tensor = module(**tokens).last_hidden_state
        return output.float()[tokens["attention_mask"].bool()]

    rows = []
    for number, spread in enumerate((0, 16)):
        place = widen(folder, root / "wide", spread) if spread else folder
        found = measure(place, root / f"trained{number}", run, certify=False)
        way = "attention values, 2**16" if spread else "as published"
        rows.append({"class": "all-MiniLM-L6-v2 (trained)", "way": way, **found})
    return rows


def write_table(rows: list[dict[str, Any]], path: Path) -> None:
    """The rows as Markdown."""
    headings = (
        "class",
        "way",
        "certified",
        "half before",
        "bf16",
        "fp16",
        "half",
        "fp32",
        "folded",
    )
    lines = [" | ".join(headings), " | ".join("---" for _ in headings)]
    for row in rows:
        cells = (row[name] for name in headings)
        lines.append(" | ".join(_show(x) for x in cells))
    text = "".join(f"| {line} |\n" for line in lines)
    path.write_text(f"{INTRO}\n`python benchmarks/text_encoders.py`\n\n{text}")


def _show(value: Any) -> str:
    if value is None:
        return "NaN"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.2g}" if isinstance(value, float) else str(value)


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as text:
        root = Path(text)
        for name in ENCODERS:
            for way in WAYS:
                if way not in EXAMPLES[name].ways:
                    continue
                folder = save_example(name, way, root / f"{name}-{way}".replace(" ", "-"))
                for certify in (True, False):
                    target = root / f"out{len(rows)}"
                    found = measure(folder, target, run_encoder, certify=certify)
                    rows.append({"class": name, "way": way, **found})
                    print(json.dumps(rows[-1]), flush=True)
        rows += measure_trained(root)
    record = {
        "machine": describe_machine(),
        "command": "python benchmarks/text_encoders.py",
        "rows": rows,
    }
    (RESULTS / "text_encoders.json").write_text(json.dumps(record, indent=2) + "\n")
    write_table(rows, RESULTS / "text_encoders.md")


if __name__ == "__main__":
    main()
