"""Mapping between a component's tensor names and those in single files: renamed, fused or transposed.

Diffusers' converters only read such files, and no library writes them. The mapping back is data, one table
for each class in `knowledge/rules/single_file_names.toml`. Every value of a component has one place in its
file.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import torch

from stopdown.component_calls.components import is_of_transformers
from stopdown.errors import OptionError, ScalingError
from stopdown.files.toml_files import read_rows

_SUM = re.compile(r"<([^<>]*)>")


class Layout(msgspec.Struct, frozen=True, rename={"class_name": "class"}):
    """Rules that turn the names of a class's tensors into those in single files.

    Attributes:
        class_name: class in Diffusers or Transformers.
        rules: pairs of a regular expression and its replacement, applied one after the other.
        like: class whose rules are applied after these.
        merged: maps a 1 x 1 convolution that other programs lack to the convolution before it, into which
            it is multiplied.
        narrow: module classes that Diffusers runs in fp32 and other programs in the format of their input.
    """

    class_name: str
    source: str
    rules: tuple[tuple[str, str], ...]
    like: str = ""
    merged: dict[str, str] = {}
    narrow: tuple[str, ...] = ()


class Whole(msgspec.Struct, frozen=True):
    """Name prefixes of the components in a single file with a whole pipeline.

    Attributes:
        prefixes: prefix by component.
        layouts: by component, the name of the `Layout` to use instead of that of the component's class.
    """

    pipeline: str
    source: str
    prefixes: dict[str, str]
    layouts: dict[str, str] = {}


class Piece(msgspec.Struct, frozen=True, order=True):
    """A component's tensor as a part of a tensor in a single file.

    Attributes:
        order: position among the parts, which are concatenated along dim 0.
        name: name in the component.
        change: change of its layout: `swap` (of its halves), `1x1`, `1x1x1` (added dims), `T`, or "".
    """

    order: int
    name: str
    change: str = ""


@functools.cache
def read_layouts() -> dict[str, Layout]:
    return {
        layout.class_name: layout for layout in read_rows("single_file_names", "layouts", Layout)
    }


@functools.cache
def find_whole(pipeline_class: str) -> Whole:
    """Return the name prefixes of a pipeline's components in a single file that contains all of them.

    For an unknown pipeline there are none.
    """
    rows = read_rows("single_file_names", "whole", Whole)
    return next((row for row in rows if row.pipeline == pipeline_class), Whole("", "", {}))


def find_comfyui_folder(component: str) -> str:
    """Return the name of the folder in ComfyUI's `models` for a component's file."""
    for prefix, folder in (("text_encoder", "text_encoders"), ("vae", "vae")):
        if component.startswith(prefix):
            return folder
    return "clip_vision" if component == "image_encoder" else "diffusion_models"


def check_layouts(program: Any, components: Iterable[str]) -> None:
    """Raise `OptionError` if the tensor names of some components in single files are unknown."""
    problems = []
    for name in components:
        try:
            lay_out(getattr(program, name))
        except ScalingError as error:
            problems.append(f"{name}: {error.what}")
    if problems:
        raise OptionError(
            f"The model can't be written as single files. {' '.join(problems)}",
            expected=f"They are known for {', '.join(sorted(read_layouts()))}, and for text encoders.",
            remedy='Use to="diffusers".',
        )


def lay_out(module: torch.nn.Module, table: str = "") -> dict[str, tuple[Piece, ...]]:
    """Map each tensor name in a single file to the component's tensors that it consists of.

    Args:
        table: name of the `Layout` to use; "" for that of the module's class.
    """
    found = _find_layout(module, table)
    rules = (*found.rules, *(read_layouts()[found.like].rules if found.like else ()))
    names = [name for name in module.state_dict() if name.rpartition(".")[0] not in found.merged]
    numbers = _count(module, names)
    made: dict[str, list[Piece]] = {}
    for name in names:
        target, _, mark = rename_tensor(name, rules, numbers).partition("@")
        order = int(mark) if mark.isdigit() else 0
        made.setdefault(target, []).append(Piece(order, name, "" if mark.isdigit() else mark))
    return {target: tuple(sorted(pieces)) for target, pieces in made.items()}


def _find_layout(module: torch.nn.Module, table: str = "") -> Layout:
    class_name = table or type(module).__name__
    found = read_layouts().get(class_name)
    if found is None and is_of_transformers(type(module)):
        found = Layout(class_name, "as Transformers names them", ())
    if found is None:
        raise ScalingError(f"The names of a {class_name} in single files aren't known.")
    return found


def rename_tensor(name: str, rules: Iterable[tuple[str, str]], numbers: Mapping[str, int]) -> str:
    """Convert the name of a component's tensor to its name in a single file.

    If the tensor is changed there, such as transposed, or is a part of a larger one, `@` follows with the
    change or the number of the part.

    Args:
        rules: rules of a `Layout`.
        numbers: values of the variables in the rules' replacements, such as `n1`.
    """
    for pattern, replacement in rules:
        name = re.sub(pattern.replace("<last>", str(numbers["last"])), replacement, name)
        name = _SUM.sub(lambda found: str(_add(found[1], numbers)), name)
    return name


def _add(text: str, numbers: Mapping[str, int]) -> int:
    """Compute a number in a tensor's name, given as a sum of products such as `1+n1*2`.

    Args:
        numbers: values of the variables.
    """
    return sum(
        math.prod(numbers[x] if x in numbers else int(x) for x in product.split("*"))
        for product in text.split("+")
    )


def _count(module: torch.nn.Module, names: Iterable[str]) -> dict[str, int]:
    """Return the values of the variables in a `Layout`'s rules for a component, such as `n1`.

    Examples are layers per block and the number of the last block. They are read from the component's
    config and the names of its tensors.
    """
    config: Any = getattr(module, "config", {})

    def read(*fields: str) -> Any:
        values = (getattr(config, field, None) for field in fields)
        return next((x for x in values if x is not None), 0)

    layers, widths = read("layers_per_block", "num_res_blocks"), read("block_out_channels")
    layers = layers if isinstance(layers, int) else 0
    places = re.findall(
        r"^((?:en|de)coder)(\.(?:(?:down|up)_blocks\.\d+|mid_block)\.(?!time_embedder)\w+)",
        "\n".join(names),
        re.MULTILINE,
    )
    coders = {coder: list(dict.fromkeys(x for y, x in places if y == coder)) for coder, _ in places}
    ups = {name.split(".")[1] for name in names if name.startswith("up_blocks.")}
    attentive = {
        name.split(".")[1] for name in names if re.match(r"up_blocks\.\d+\.attentions", name)
    }
    return {
        "n": layers,
        "n1": layers + 1,
        "n2": layers + 2,
        "last": (len(widths) if widths else read("num_layers")) - 1,
        **{f"a{block}": 2 if block in attentive else 1 for block in ups},
        **{coder + x: place for coder, found in coders.items() for place, x in enumerate(found)},
    }


def arrange(module: torch.nn.Module, table: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of a component with the names and layout of single files; tied ones once.

    Cost: the memory of fused tensors.
    """
    state, seen = _merge(module, table), set[int]()
    made = {}
    for target, pieces in lay_out(module, table).items():
        parts = [change_tensor(state[piece.name], piece.change) for piece in pieces]
        if len(parts) == 1 and state[pieces[0].name].data_ptr() in seen:
            continue
        seen |= {state[piece.name].data_ptr() for piece in pieces}
        made[target] = (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous()
    return made


def _merge(module: torch.nn.Module, table: str) -> dict[str, torch.Tensor]:
    """Return a component's state dict without the convolutions that single files lack.

    Each of them is multiplied, in fp32, into the convolution before it.
    """
    state = module.state_dict()
    for name, before in _find_layout(module, table).merged.items():
        weight, bias = state.pop(f"{name}.weight"), state.pop(f"{name}.bias")
        matrix = weight.flatten(1).float()
        inner, added = state[f"{before}.weight"].float(), state[f"{before}.bias"].float()
        state[f"{before}.weight"] = torch.tensordot(matrix, inner, 1).to(weight.dtype)
        state[f"{before}.bias"] = (matrix @ added + bias.float()).to(bias.dtype)
    return state


def list_merged(module: torch.nn.Module, table: str = "") -> dict[str, str]:
    """Map the weights and biases of convolutions to those of a later one that is merged into them."""
    merged = _find_layout(module, table).merged.items()
    return {f"{x}.{end}": f"{name}.{end}" for name, x in merged for end in ("weight", "bias")}


def find_arranged_shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that `arrange` would return; empty for a class without a table."""
    if type(module).__name__ not in read_layouts():
        return {}
    state, made = module.state_dict(), {}
    for target, pieces in lay_out(module).items():
        shapes = [
            change_tensor(state[piece.name].to("meta"), piece.change).shape for piece in pieces
        ]
        made[target] = (sum(shape[0] for shape in shapes), *shapes[0][1:]) if shapes[0] else ()
    return made


def take_apart(
    module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Reverse `arrange`: return the tensors of a component from those of a single file.

    Merged convolutions become identities.
    """
    state, made = module.state_dict(), dict[str, torch.Tensor]()
    for name in _find_layout(module).merged:
        weight, bias = state[f"{name}.weight"], state[f"{name}.bias"]
        made[f"{name}.weight"] = torch.eye(len(weight)).view(weight.shape)
        made[f"{name}.bias"] = torch.zeros(bias.shape)
    for target, pieces in lay_out(module).items():
        sizes = [len(state[piece.name]) if state[piece.name].dim() else 1 for piece in pieces]
        parts = [tensors[target]] if len(pieces) == 1 else tensors[target].split(sizes)
        for piece, part in zip(pieces, parts, strict=True):
            is_matrix = piece.change in ("1x1", "1x1x1")
            made[piece.name] = part.flatten(1) if is_matrix else change_tensor(part, piece.change)
    return made


def change_tensor(tensor: torch.Tensor, change: str) -> torch.Tensor:
    if change == "swap":
        return torch.cat(tensor.chunk(2)[::-1])
    if change in ("1x1", "1x1x1"):
        return tensor.reshape(*tensor.shape, *map(int, change.split("x")))
    return tensor.T if change == "T" else tensor
