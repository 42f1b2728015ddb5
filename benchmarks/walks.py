"""Count the modules of the package that four requests pass through, on tiny models.

`on the way` are the modules whose functions stand on the call stack when a request reaches its goal: what a
reader follows down. `entered` are all whose functions were called by then. Code that runs when a module is
imported does not count. Each revision is checked out beside this one and walked by this script:

    python benchmarks/walks.py bded623 HEAD
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "walks.json"


class Walk:
    """Follows the calls of one request until `reach` is called, or to its end.

    Attributes:
        entered: modules of the package whose functions were called.
        stack: those that are on the stack when the goal is reached, outermost first.
    """

    def __init__(self, package: Path) -> None:
        self.entered: set[str] = set()
        self.stack: list[str] = []
        self._folder = f"{package}{os.sep}"

    def follow(self, request: Callable[[], Any]) -> None:
        """Make the request."""
        sys.setprofile(self._note)
        try:
            request()
        finally:
            sys.setprofile(None)

    def reach(self) -> None:
        """Keep the stack as it is now, and stop counting. Later calls do nothing."""
        if not self.stack:
            sys.setprofile(None)
            frame: FrameType | None = sys._getframe(1)
            while frame is not None:
                if (name := self._name(frame)) and name not in self.stack:
                    self.stack.insert(0, name)
                frame = frame.f_back

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name != "<module>" and (name := self._name(frame)):
            self.entered.add(name)

    def _name(self, frame: FrameType) -> str:
        """Return the dotted name of a frame's module in the package, "" for other code."""
        path = frame.f_code.co_filename
        if not path.startswith(self._folder):
            return ""
        return path.removeprefix(self._folder).removesuffix(".py").replace(os.sep, ".")


def walk_prompt(walk: Walk, folder: Path) -> None:
    """`stopdown generate shapes PROMPT`, to the first call of the denoiser with values."""
    import torch

    from stopdown.app.generate_command import GenerateOptions, generate

    def look(module: torch.nn.Module, *_: Any) -> None:
        is_dry = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        if type(module).__name__ == "CogVideoXTransformer3DModel" and not is_dry:
            walk.reach()

    torch.nn.modules.module.register_module_forward_pre_hook(look)
    options = GenerateOptions(
        source="shapes", prompt="a red circle", steps=1, quiet=True, force=True,
        output=str(folder / "out.mp4"),
    )  # fmt: skip
    walk.follow(lambda: generate(options))


def make_module() -> tuple[Any, Any]:
    """Return a module whose residual stream leaves fp16, and an input."""
    import torch

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.inner = torch.nn.LayerNorm(16), torch.nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(self.norm(x))

    torch.manual_seed(0)
    model = torch.nn.Sequential(Block(), Block(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 16))
    with torch.no_grad():
        model[0].inner.weight.mul_(1e5)
    return model.eval(), torch.randn(4, 16)


def walk_module(walk: Walk, _: Path) -> None:
    """`rescale_(module, x)`, whole."""
    import stopdown

    model, value = make_module()
    walk.follow(lambda: stopdown.rescale_(model, value, cast=True))


def walk_fault(walk: Walk, _: Path) -> None:
    """A call in fp16 that gives NaN under a guard, from the call to its repaired output."""
    import torch

    import stopdown

    model, value = make_module()
    with stopdown.guard(model.half()), torch.no_grad():
        walk.follow(lambda: model(value.half()))


def walk_certificate(walk: Walk, folder: Path) -> None:
    """`make_plan` of the bundled model by certificate, whole."""
    import stopdown

    walk.follow(lambda: stopdown.make_plan("shapes"))


WALKS = {
    "prompt": walk_prompt,
    "module": walk_module,
    "faulty call": walk_fault,
    "certificate": walk_certificate,
}


def main() -> None:
    """Walk each revision, and store the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revisions", nargs="*", default=["HEAD"])
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        walk = Walk(options.inside / "src" / "stopdown")
        with tempfile.TemporaryDirectory() as folder:
            WALKS[options.revisions[0]](walk, Path(folder))
        print("WALK " + json.dumps({"way": walk.stack, "entered": sorted(walk.entered)}))
        return
    from stopdown.devices.environment import describe_machine

    rows = {}
    for named in options.revisions:
        revision = _git("rev-parse", "--short", named)
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "tree"
            _git("worktree", "add", "--quiet", "--detach", str(place), revision)
            try:
                rows[revision] = {name: _walk(place, name, Path(folder)) for name in WALKS}
            finally:
                _git("worktree", "remove", "--force", str(place))
    report = {
        "command": f"python benchmarks/walks.py {' '.join(rows)}",
        "machine": describe_machine(),
        "rows": rows,
    }
    RESULT.write_text(json.dumps(report, indent=1) + "\n")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _walk(place: Path, name: str, folder: Path) -> dict[str, Any]:
    environment = {
        **os.environ, "PYTHONPATH": str(place / "src"), "STOPDOWN_CACHE": str(folder / "cache"),
    }  # fmt: skip
    command = [sys.executable, __file__, name, "--inside", str(place)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    found = [x for x in done.stdout.splitlines() if x.startswith("WALK ")]
    if not found:
        raise RuntimeError(done.stderr[-2000:])
    row: dict[str, Any] = json.loads(found[0][5:])
    print(
        place.name, name, len(row["way"]), "on the way,", len(row["entered"]), "entered", flush=True
    )
    return row


if __name__ == "__main__":
    main()
