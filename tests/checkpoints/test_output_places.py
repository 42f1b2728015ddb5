"""Where convert writes: what it replaces, and what it never does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models.conversions import convert_made
from stopdown.checkpoints import convert as convert_module
from stopdown.checkpoints.convert import convert
from stopdown.errors import OutputError
from stopdown.records import Plan


def test_what_convert_did_not_write_is_never_replaced(
    save_planned: Callable[[str], tuple[Path, Plan]], tmp_path: Path
) -> None:
    """A folder of anything, an original model, the source itself: refused, also with `force`."""
    folder, plan = save_planned("sd")
    taken, model, inside = tmp_path / "taken", tmp_path / "model", folder / "unet"
    for place, name in ((taken, "letter.txt"), (model, "model_index.json")):
        place.mkdir()
        (place / name).write_text("{}")
    only = "Only what Stopdown wrote there for the same purpose is replaced. Choose another name as OUT."
    foreign = "would replace a folder that convert didn't write."
    for place, message in (
        (taken, f"The output {taken} {foreign} {only}"),
        (model, f"The output {model} {foreign} {only}"),
        (folder, f"OUT {folder} is the model itself. Give another place; it isn't overwritten."),
        (inside, f"OUT {inside} lies in the folder of the model, {folder}. "
         "The output must not contain what is read. Give another place."),
    ):  # fmt: skip
        with pytest.raises(OutputError) as caught:
            convert(folder, place, plan, allow=["overwrite"])
        assert str(caught.value) == message
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        *("letter.txt", "model", "model_index.json", "taken")
    ]


def test_force_replaces_what_convert_wrote(
    save_planned: Callable[[str], tuple[Path, Plan]], tmp_path: Path
) -> None:
    """A converted folder is replaced with `force` alone, also through a link, which stays a link."""
    folder, plan = save_planned("sd")
    out, link = tmp_path / "out", tmp_path / "link"
    leave = ["unet", "vae", "text_encoder"]
    first = convert_made("sd", folder, out, plan, leave=leave)
    assert first.files["unet/config.json"] == (out / "unet" / "config.json").stat().st_size
    with pytest.raises(
        OutputError,
        match=r"out already holds a model that convert wrote\..* another name: .*out-2\.",
    ):
        convert_made("sd", folder, out, plan, leave=leave)
    link.symlink_to(out)
    before = (out / "model_index.json").stat().st_ino
    convert_made("sd", folder, link, plan, leave=leave, allow=["overwrite"])
    assert (out / "model_index.json").stat().st_ino != before
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "out"]


@pytest.mark.parametrize("name", [".git/HEAD", "lora.safetensors", "unet/config.json", "adapter"])
def test_force_spares_what_was_put_there(
    name: str, save_planned: Callable[[str], tuple[Path, Plan]], tmp_path: Path
) -> None:
    """A file, a changed file, a link or an empty folder of somebody else's is named, and stays."""
    folder, plan = save_planned("sd")
    leave = ["unet", "vae", "text_encoder"]
    out = tmp_path / "out"
    convert_made("sd", folder, out, plan, leave=leave)
    (out / name).parent.mkdir(exist_ok=True)
    if name == "adapter":
        (out / name).symlink_to(tmp_path)
    else:
        (out / name).write_text("mine")
    with pytest.raises(OutputError) as caught:
        convert_made("sd", folder, out, plan, leave=leave, allow=["overwrite"])
    assert f"a folder with files that convert didn't write: {name}." in str(caught.value)
    assert (out / name).is_dir() or (out / name).read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_force_spares_sources_and_plans_inside(
    save_planned: Callable[[str], tuple[Path, Plan]], tmp_path: Path
) -> None:
    """A model that lies in OUT, reaches into it by a link, or whose plan lies there, is not deleted."""
    from stopdown.plans.plan_files import write_plan

    folder, plan = save_planned("sd")
    leave = ["unet", "vae", "text_encoder"]
    out = tmp_path / "out"
    convert_made("sd", folder, out, plan, leave=leave)
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in folder.iterdir():
        (linked / path.name).symlink_to(out / "unet" if path.name == "unet" else path)
    write_plan(plan, out / "plan.json")
    for source, given, named in (
        (linked, plan, linked / "unet" / "config.json"),
        (folder, out / "plan.json", out / "plan.json"),
    ):
        with pytest.raises(OutputError, match=r"OUT .* holds .*, which is read") as caught:
            convert(source, out, given, leave=leave, allow=["overwrite"])
        assert str(named) in str(caught.value) or "diffusion_pytorch_model" in str(caught.value)
    assert (out / "unet" / "config.json").is_file()


def test_what_comes_into_out_meanwhile_stays(
    save_planned: Callable[[str], tuple[Path, Plan]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file that somebody puts into OUT while it is converted again: the new folder is kept beside."""
    folder, plan = save_planned("sd")
    leave = ["unet", "vae", "text_encoder"]
    out = tmp_path / "out"
    convert_made("sd", folder, out, plan, leave=leave)
    copy = convert_module.copy_descriptions

    def come(*arguments: Any, **options: Any) -> None:
        copy(*arguments, **options)
        (out / "mine").write_text("")

    monkeypatch.setattr(convert_module, "copy_descriptions", come)
    with pytest.raises(OutputError) as caught:
        convert_made("sd", folder, out, plan, leave=leave, allow=["overwrite"])
    assert str(caught.value) == (
        f"The output {out} couldn't be put into its place: The output {out} would replace a folder "
        f"with files that convert didn't write: mine. It is whole, and was kept as {out}-2. "
        f"Move it: mv {out}-2 PLACE"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out-2"]
    assert (out / "mine").is_file()
    assert (tmp_path / "out-2" / "stopdown.json").is_file()
