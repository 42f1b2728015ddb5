"""Output places of conversions: their form, and checks of what may be replaced."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stopdown.checkpoints.cards import MARK
from stopdown.errors import InputError, OptionError, OutputError
from stopdown.files.outputs import check_target, find_free
from stopdown.number_formats import list_some
from stopdown.records import Conversion, read_record
from stopdown.sources.headers import WEIGHT_FILES, DamagedFileError
from stopdown.sources.single_file_names import find_whole
from stopdown.sources.source import Source
from stopdown.sources.weight_files import open_weight_file

RECORD_NAME = "stopdown.json"
"""Name of the record in a converted folder, which lists all files written there with their sizes."""

_CONVERTED = "a model that convert wrote"

Form = Literal["diffusers", "single", "comfyui"]


@dataclass(frozen=True)
class Target:
    """Path and form of a conversion's output.

    Attributes:
        path: a folder; for `single` a `.safetensors` file.
        form: `diffusers`: a Diffusers folder. `single`: one file with the tensor names of the model's
            authors. `comfyui`: a folder with `diffusion_models`, `text_encoders` and `vae`, one file each.
    """

    path: str | Path
    form: Form


def _refuse_quantised(source: Source) -> None:
    """Refuse a source with quantised weights, as exponents can only be folded into floating weights."""
    file = open_weight_file(source.path)
    if not file.is_quantised:
        return
    kinds = ", ".join(dict.fromkeys(x.stored for x in file.weights if x.is_scaled)) or file.kind
    raise OptionError(
        f"{source.name} has quantised weights ({kinds}).",
        expected="Exponents aren't written into quantised files.",
        remedy="Give a folder as OUT, which gets their values in fp16. Or convert the file that it was "
        "quantised from, and quantise the result.",
    )


def choose_target(output: str | Path | Target, source: Source) -> Target:
    """Return the target, with its form inferred from the path if none is given.

    Raises:
        OptionError: path, form and source do not fit together.
    """
    if not isinstance(output, Target):
        is_file = Path(output).suffix.lower() in WEIGHT_FILES
        output = Target(output, "single" if is_file else "diffusers")
    path = Path(output.path)
    is_file = path.suffix.lower() in WEIGHT_FILES
    if output.form != "diffusers" and source.kind == "file":
        _refuse_quantised(source)
    if is_file and source.kind == "file" and path.suffix.lower() != source.path.suffix.lower():
        raise OptionError(
            f"OUT {path} is another kind of file than {source.name}.",
            expected="A single file keeps its names, its formats and its kind.",
            remedy=f"Name it {path.with_suffix(source.path.suffix)}.",
        )
    if is_file and output.form == "diffusers":
        raise OptionError(
            f'OUT {path} is a single file, and to="diffusers" writes a folder.',
            expected="A Diffusers model is a folder with one for each component.",
            remedy=f'Give a folder, {path.with_suffix("")}, or use to="single".',
        )
    if not is_file and output.form == "single":
        raise OptionError(
            f'OUT {path} is no .safetensors file, and to="single" writes one.',
            expected="All components are in one file.",
            remedy=f'Give {path}.safetensors, or use to="comfyui" for a file each.',
        )
    if is_file and source.kind != "file":
        _refuse_unread(source)
    if is_file and output.form == "comfyui":
        if source.kind != "file":
            raise OptionError(
                f'OUT {path} is a single file, and to="comfyui" writes one for each component.',
                expected="ComfyUI reads each from a folder: diffusion_models, text_encoders, vae.",
                remedy=f'Give a folder, {path.with_suffix("")}, or use to="single".',
            )
        return Target(path, "single")  # a file keeps its names, which ComfyUI read before
    return Target(path, output.form)


def _refuse_unread(source: Source) -> None:
    """Refuse single-file output for a pipeline with components that single files of it do not contain."""
    names = [name for name in source.components if source.has_weights(name)]
    missing = [name for name in names if name not in find_whole(source.pipeline_class).prefixes]
    if missing and len(names) > 1:
        raise OptionError(
            f"No known program reads a {source.pipeline_class} from one file: it would hold the "
            f"{' and '.join(missing)} beside the rest.",
            expected="Files for ComfyUI hold one component each.",
            remedy='Give a folder as OUT, and use to="comfyui".',
        )


def check_place(
    source: Source, target: Path, plan: str | Path | None, force: bool
) -> Callable[[Path], str]:
    """Refuse an output path that cannot be used, before anything is loaded.

    Args:
        force: whether an earlier output of `convert` may be replaced.

    Returns:
        A function that describes what must not be replaced at a path; "" if it may be.
    """
    is_file = target.suffix.lower() in WEIGHT_FILES
    _refuse_nested(source, target, plan)
    describe = describe_other_file if is_file else describe_other_folder

    def replaces(path: Path) -> str:
        is_free = path.is_dir() and not any(path.iterdir())
        what = "" if is_free else describe(path)
        return what or ("" if is_free or force else _CONVERTED)

    if (
        os.path.exists(target) and replaces(target) == _CONVERTED
    ):  # False for a name that is too long
        raise OutputError(
            f"{target} already holds {_CONVERTED}.",
            expected="Existing files aren't replaced.",
            remedy=f'Add allow="overwrite" to replace it, or choose another name: {find_free(target)}.',
        )
    check_target(target, folder=not is_file, option="as OUT", replaces=replaces)
    return replaces


def _refuse_nested(source: Source, target: Path, plan: str | Path | None) -> None:
    """Refuse an output path that is, contains or lies inside an input, after resolving links."""
    place = Path(os.path.realpath(target))
    folder = Path(os.path.realpath(source.path))
    if place == folder:
        raise OutputError(
            f"OUT {target} is the model itself.",
            remedy="Give another place; it isn't overwritten.",
        )
    if source.path.is_dir() and place.is_relative_to(folder):
        raise OutputError(
            f"OUT {target} lies in the folder of the model, {folder}.",
            expected="The output must not contain what is read.",
            remedy="Give another place.",
        )
    read = [*list_files_below(source.path), *([Path(plan)] if plan is not None else [])]
    for path in read:
        if Path(os.path.realpath(path)).is_relative_to(place):
            raise OutputError(
                f"OUT {target} holds {path}, which is read.",
                expected="The output must not contain what is read.",
                remedy="Give another place.",
            )


def list_files_below(path: Path) -> list[Path]:
    """List all files of a folder, following links, or just the file itself."""
    if not path.is_dir():
        return [path]
    return [
        Path(folder, name) for folder, _, names in os.walk(path, followlinks=True) for name in names
    ]


def describe_other_folder(folder: Path) -> str:
    """Describe what in a folder was not written by `convert`; "" if it wrote everything."""
    try:
        record = read_record(folder / RECORD_NAME, Conversion)
    except InputError:
        return "a folder that convert didn't write"
    found = measure_files(folder)
    others = [name for name, size in found.items() if record.files.get(name) != size]
    if not others:
        return ""
    return f"a folder with files that convert didn't write: {list_some(sorted(others), 5)}"


def measure_files(folder: Path) -> dict[str, int]:
    """Return the size of each file below a folder in bytes, by relative path, without the record.

    The size is -1 for links, other entries that are not regular files, and empty folders.
    """
    found = {}
    for place, folders, names in os.walk(folder):
        links = [name for name in folders if Path(place, name).is_symlink()]
        for name in [*names, *links]:
            path = Path(place, name)
            state = path.lstat()
            found[path.relative_to(folder).as_posix()] = (
                state.st_size if stat.S_ISREG(state.st_mode) else -1
            )
        if not folders and not names:
            found[f"{Path(place).relative_to(folder).as_posix()}/"] = -1
    found.pop(RECORD_NAME, None)
    return found


def describe_other_file(path: Path) -> str:
    """Describe a weight file that `convert` did not write; "" if it did."""
    try:
        return "" if MARK in open_weight_file(path).metadata else _NOT_CONVERTED
    except (DamagedFileError, OSError, OptionError):
        return _NOT_CONVERTED


_NOT_CONVERTED = "a file that convert didn't write"
