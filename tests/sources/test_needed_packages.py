"""Packages that pipelines need, read from their classes before anything is loaded."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import diffusers
import pytest
import transformers
from transformers.utils import import_utils
from transformers.utils.import_utils import DummyObject

from stopdown.errors import SourceError
from stopdown.sources.needed_packages import list_missing, refuse_missing_packages
from stopdown.sources.source import Source

SOURCE = """
from diffusers.utils import is_{name}_available
if is_{name}_available():
    import absent
    FLAG = True
else:
    FLAG = False
    class Checker:
        def __init__(self):
            raise ImportError("it is not installed")

class Made:
    __module__ = "diffusers.pipelines.made"
    def __init__(self, enable_checker=True):
        {use}
"""


def make_class(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, use: str) -> type:
    """A class in a module of pipelines whose code uses what may not be there."""
    name = "diffusers.pipelines.made"
    path = tmp_path / "made.py"
    path.write_text(SOURCE.format(name="bs4", use=use))
    module = ModuleType(name)
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("diffusers.utils.is_bs4_available", lambda: False)
    exec(compile(path.read_text(), str(path), "exec"), vars(module))
    made: type = module.Made  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize(
    ("use", "needed"),
    [
        ("absent.fix('a')", ["beautifulsoup4"]),
        ("pass", []),
        ("\n        if FLAG:\n            absent.step()", []),
        ("\n        if enable_checker:\n            absent.check()", ["beautifulsoup4"]),
        ("\n        if not is_bs4_available():\n            return\n        absent.fix('a')", []),
    ],
    ids=["unguarded", "unused", "flag", "switch", "asks itself"],
)
def test_an_unguarded_use_of_a_missing_package_is_found(
    use: str, needed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that does without the package, under a flag or by asking again, needs none."""
    assert list_missing(make_class(monkeypatch, tmp_path, use)) == needed


def test_a_switch_that_is_off_needs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only a switch of the model leads to is not needed when its index has it off."""
    made = make_class(
        monkeypatch, tmp_path, "\n        if enable_checker:\n            absent.check()"
    )
    assert list_missing(made, {"enable_checker"}) == []


def test_ftfy_is_needed_by_those_that_call_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ftfy Wan's image to video ends at it, and PixArt, which asks first, does not."""
    for kind in (diffusers.WanImageToVideoPipeline, diffusers.PixArtAlphaPipeline):
        monkeypatch.delattr(sys.modules[kind.__module__], "ftfy", raising=False)
    assert list_missing(diffusers.WanImageToVideoPipeline) == ["ftfy"]
    assert list_missing(diffusers.PixArtAlphaPipeline) == []


def test_pipelines_that_need_nothing_are_left_alone() -> None:
    """Usual pipelines and components need no package that is not here."""
    for kind in (diffusers.StableDiffusionPipeline, diffusers.FluxPipeline, diffusers.WanPipeline):
        assert list_missing(kind) == []
    assert (
        list_missing(transformers.T5EncoderModel) == list_missing(transformers.CLIPTokenizer) == []
    )


def test_what_stands_for_a_class_names_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of Transformers whose package is missing is an object that names it."""
    absent = (lambda: False, "{0} requires it: `pip install torchvision`")
    monkeypatch.setitem(import_utils.BACKENDS_MAPPING, "torchvision", absent)
    made = DummyObject("Made", (), {"_backends": ["torchvision"], "__module__": "x"})
    assert list_missing(made) == ["torchvision"]
    processor = transformers.Qwen2VLProcessor  # it makes a processor of videos
    assert list_missing(processor) == ["torchvision"]


def test_the_refusal_is_one_sentence_with_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names pipeline and package, and the line that installs it."""
    module = sys.modules[diffusers.WanImageToVideoPipeline.__module__]
    monkeypatch.delattr(module, "ftfy", raising=False)
    source = Source("x", tmp_path, "folder", pipeline_class="WanImageToVideoPipeline")
    with pytest.raises(SourceError) as caught:
        refuse_missing_packages(source)
    assert (
        caught.value.what == "WanImageToVideoPipeline needs ftfy, which this Python doesn't have."
    )
    assert caught.value.remedy == "Install with: pip install ftfy"
