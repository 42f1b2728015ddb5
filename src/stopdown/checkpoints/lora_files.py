"""Conversion of a LoRA for a converted model: its matrices are scaled by the exponents of the weights.

The exponents are read from the metadata of the converted model, or from a plan and the model that it names.
Names, order, alphas and dtypes are unchanged, except that a tensor is written in fp32 if scaling would lose
bits in its own dtype.

Not covered: a plan whose model was converted with other exponents. `convert` computes new ones if files
cannot store the plan's. Give the converted model instead.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from stopdown.adapter_exponents import find_part_exponents
from stopdown.checkpoints.cards import MARK, list_entries
from stopdown.checkpoints.file_exponents import describe_rest
from stopdown.checkpoints.output_places import describe_other_file, list_files_below
from stopdown.devices.environment import read_version
from stopdown.errors import OptionError, OutputError, ScalingError, SourceError
from stopdown.files.outputs import check_target, written_beside
from stopdown.fold_names import (
    Folds,
    list_folds,
    name_exponents,
    spread_columns,
    spread_rows,
)
from stopdown.number_formats import list_some
from stopdown.pipelines.loader import complete_source
from stopdown.pipelines.loras_and_schedulers import name_lora_as_diffusers
from stopdown.pipelines.single_files import spread_exponents, trace_columns, trace_rows
from stopdown.plans.applier import check_source
from stopdown.plans.plan_files import read_plan
from stopdown.records import Conversion, ConvertedComponent, Plan
from stopdown.scaling import has_more_than_folds
from stopdown.sources.headers import (
    EXPONENTS_ENTRY,
    RESCALED_ENTRY,
    read_header,
    read_metadata,
    refusing_damage,
)
from stopdown.sources.lora_names import (
    Layer,
    find_layer,
    index_layers,
    list_layers,
    split_lora_name,
)
from stopdown.sources.single_file_names import find_comfyui_folder
from stopdown.sources.source import Source, list_weight_files
from stopdown.sources.sources import resolve_source

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Weights:
    """Shapes and exponents of the model's tensors to which a LoRA adds.

    Attributes:
        shapes: shapes by component and tensor name.
        folds: folded exponents of each tensor, by component and tensor name.
        seal: checksum of the plan, or the entry in the files' metadata that contains it.
        note: remark for the conversion's record; "" for none.
        folder: folder of a pipeline whose class can read other programs' LoRA names; None for a single
            file.
    """

    shapes: Mapping[str, Mapping[str, tuple[int, ...]]]
    folds: Mapping[str, Mapping[str, Folds]]
    seal: str
    note: str = ""
    folder: Path | None = None

    def read_rows(self, layer: Layer, kind: str) -> torch.Tensor | None:
        """Return the exponents of the rows of a layer's `weight` or `bias`; None if the layer lacks it."""
        shape = self.shapes[layer.component].get(layer.name_tensor(kind))
        if shape is None:
            return None
        rows = spread_rows(self._find_folds(layer, kind), shape[0] if shape else 1)
        place, parts = layer.part
        return rows.chunk(parts)[place]

    def read_columns(self, layer: Layer) -> torch.Tensor | None:
        """Return the exponents of a layer's weight columns, to be added to those of its rows; or None."""
        shape = self.shapes[layer.component].get(layer.name_tensor("weight"), ())
        return spread_columns(self._find_folds(layer, "weight"), shape[1]) if shape[1:] else None

    def _find_folds(self, layer: Layer, kind: str) -> Folds:
        return self.folds.get(layer.component, {}).get(layer.name_tensor(kind), ())


def convert_lora(
    lora: str | Path, output: str | Path, plan: Plan | str | Path, *, overwrite: bool = False
) -> Conversion:
    """Convert a LoRA file for a model that `convert` wrote.

    Args:
        lora: a safetensors file, with names as in Diffusers, PEFT, kohya's trainers or ComfyUI.
        output: the new file.
        plan: the converted model, a folder or a file; or the plan with which it was converted, if the
            original is still at the path that the plan names.
        overwrite: whether to replace a file that `convert` wrote.

    Raises:
        OptionError: some layers cannot be scaled exactly (all are named), or the LoRA is already converted.
        OutputError: the output exists already or cannot be written.
        PlanError: the plan is damaged, or its model has changed.
        SourceError: the LoRA is damaged, or fits another model.

    Cost: the LoRA's tensors in memory.
    """
    started = time.perf_counter()
    path, target = Path(lora), Path(output)
    metadata = _open(path)
    if target.suffix.lower() != ".safetensors":
        raise OutputError(
            f"OUT {target} is no .safetensors file.",
            expected="A LoRA is written as one file.",
            remedy=f"Use {target.with_suffix('.safetensors')}.",
        )
    read = [path] if isinstance(plan, Plan) else [path, *list_files_below(Path(plan))]
    check_target(
        target, option="as OUT", replaces=describe_other_file, force=overwrite, inputs=read
    )
    weights = read_weights(plan)
    tensors = load_file(path)
    written, changed = _scale_all(path, _rename(tensors, weights), weights)
    entries = list_entries(weights.seal, (), {})
    entries[RESCALED_ENTRY] = (
        f"LoRA for weights that are multiplied by powers of two ({weights.seal})"
    )
    with written_beside(target, option="as OUT", replaces=describe_other_file) as part:
        save_file(written, part, metadata={**metadata, **entries})
    return Conversion(
        source=str(lora),
        output=str(output),
        plan=weights.seal,
        components=tuple(_describe(changed, weights.note)),
        load=f'pipe.load_lora_weights("{output}")',
        elapsed_s=round(time.perf_counter() - started, 3),
        version=read_version("stopdown") or "",
    )


def _open(path: Path) -> dict[str, str]:
    """Read a LoRA's metadata; refuse a LoRA that is already converted."""
    with refusing_damage(f"The LoRA {path} is"):
        read_header(path)
        metadata = read_metadata(path)
    if said := metadata.get(RESCALED_ENTRY):
        raise OptionError(
            f"The LoRA {path} is already converted: {said}.",
            expected="It would be scaled twice.",
            remedy="Give the file that it was made from.",
        )
    return dict(metadata)


def read_weights(plan: Plan | str | Path) -> Weights:
    """Read the shapes and exponents of a model's tensors, from a converted model or a plan."""
    if isinstance(plan, Plan):
        return _read_planned(plan)
    path = Path(plan)
    if path.is_dir() or path.suffix.lower() == ".safetensors":
        return _read_converted(path)
    return _read_planned(read_plan(path))


def _read_converted(path: Path) -> Weights:
    files = [path] if path.is_file() else sorted(path.glob("**/*.safetensors"))
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    folds: dict[str, dict[str, Folds]] = {}
    seals: list[str] = []
    for file in files:
        component = "" if file == path or file.parent == path else _name_component(file)
        with refusing_damage(f"{file} is", "Convert it again."):
            held = {name: x.shape for name, x in read_header(file).items()}
            metadata = read_metadata(file)
        shapes.setdefault(component, {}).update(held)
        if EXPONENTS_ENTRY in metadata:
            found = json.loads(metadata[EXPONENTS_ENTRY])
            folds.setdefault(component, {}).update(list_folds(found))
            seals.append(metadata.get(MARK, ""))
    for component, named in folds.items():
        if lost := named.keys() - shapes[component].keys():
            raise OptionError(
                f"{path} has exponents for {list_some(sorted(lost), 3)} and no such tensor.",
                expected="Its class names its weights otherwise in files than in memory.",
                remedy="Fuse the LoRA into the original, and convert that.",
            )
    if not seals:
        raise OptionError(
            f"{path} says nothing of exponents.",
            expected="A plan, or a folder or file that this version of convert wrote.",
            remedy='Convert the model again, or give its plan: plan="plan.json".',
        )
    seal = seals[0].rpartition(" ")[2] or path.name
    is_pipeline = (path / "model_index.json").is_file()
    return Weights(shapes, folds, seal, folder=path if is_pipeline else None)


def _name_component(file: Path) -> str:
    """Name the component of a weight file in a folder, as its own folder in Diffusers' layout does, or the
    end of its name in ComfyUI's.
    """
    last = file.stem.rpartition("-")[2]
    is_comfyui = file.stem != last and find_comfyui_folder(last) == file.parent.name
    return last if is_comfyui else file.parent.name


def _read_planned(plan: Plan) -> Weights:
    beyond = [
        x.component
        for x in plan.components
        if x.precision == "fp16" and has_more_than_folds(x.in_force)
    ]
    if beyond:
        rest = describe_rest(next(x for x in plan.components if x.component == beyond[0]))
        raise OptionError(
            f"The plan's {beyond[0]} has {rest}, so convert writes it with other exponents.",
            expected="A LoRA takes the exponents of the files that it is used with.",
            remedy='Give the converted model instead of the plan: plan="CONVERTED". Under Stopdown a LoRA '
            "needs no conversion: stopdown generate SOURCE --lora FILE --precision plan.json.",
        )
    source = resolve_source(plan.source)
    check_source(plan, source)
    note = ""
    if any(x.in_force.eps for x in plan.components):
        note = (
            "It fits files with the plan's own exponents; where convert recomputed them, "
            "give the converted model instead."
        )
    exponents = {
        x.component: x.in_force.exponents for x in plan.components if x.precision == "fp16"
    }
    if source.kind == "file":
        left = [x.component for x in plan.components if x.component not in exponents]
        return _read_file(complete_source(source), exponents, left, plan.seal, note)
    files = list_weight_files(source)
    shapes = {
        entry.component: {
            name: x.shape
            for file in files[entry.component]
            for name, x in read_header(file).items()
        }
        for entry in plan.components
        if entry.component in files
    }
    folds = {component: list_folds(found) for component, found in exponents.items()}
    return Weights(shapes, folds, plan.seal, note, source.path)


def _read_file(
    source: Source,
    exponents: Mapping[str, Mapping[str, int]],
    left: Sequence[str],
    seal: str,
    note: str,
) -> Weights:
    """Return the shapes and exponents of a single file's tensors, by the file's own names.

    Args:
        exponents: exponents by component and the model's tensor name.
        left: components that were not converted.
    """
    rows = trace_rows(source)
    named = name_exponents(
        spread_exponents(rows, exponents, left), trace_columns(source, rows, exponents)
    )
    shapes = {name: x.shape for name, x in rows.tensors.items()}
    return Weights({"": shapes}, {"": list_folds(named)}, seal, note)


def _rename(tensors: Tensors, weights: Weights) -> Tensors:
    """Rename a LoRA's tensors to the model's names, with Diffusers' converter if they are unknown."""
    index = _index(weights)
    is_known = all(find_layer(stem, index) for stem in _group_by_layer(tensors)[0])
    if is_known or weights.folder is None:
        return tensors
    return name_lora_as_diffusers(weights.folder, tensors) or tensors


def _index(weights: Weights) -> dict[str, dict[str, Layer]]:
    return index_layers(
        layer
        for component, held in weights.shapes.items()
        for layer in list_layers(component, held)
    )


def _scale_all(
    path: Path, tensors: Tensors, weights: Weights
) -> tuple[dict[str, torch.Tensor], Counter[str]]:
    """Return all tensors of a LoRA, scaled for the model, and the number of scaled ones by component."""
    groups, others = _group_by_layer(tensors)
    index = _index(weights)
    written, changed = dict(tensors), Counter[str]()
    strange, problems = list(others), []
    for stem, roles in groups.items():
        layer = find_layer(stem, index)
        if layer is None:
            strange.append(stem)
            continue
        parts = {role: tensors[name] for role, name in roles.items() if role != "alpha"}
        try:
            rows, bias = weights.read_rows(layer, "weight"), weights.read_rows(layer, "bias")
            if rows is None:
                raise ScalingError("it has no weight")
            stored = weights.shapes[layer.component][layer.name_tensor("weight")]
            shape = (len(rows), *stored[1:]) if stored else ()
            if (wrong := _find_other_shape(parts, shape)) is not None:
                raise ScalingError(
                    f"it is for a weight of {wrong}, and that of the model is {_show(shape)}"
                )
            made = find_part_exponents(parts, rows, bias, weights.read_columns(layer))
            for role, exponents in made.items():
                written[roles[role]] = _scale(parts[role], exponents)
        except ScalingError as error:
            problems.append(f"{stem}: {error.what}")
            continue
        changed[layer.component] += len(made)
    _refuse(path, strange, problems, len(groups))
    return written, changed


def _group_by_layer(tensors: Mapping[str, Any]) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Map each layer in a LoRA file to its tensor names by role (up, down, alpha), and list other names."""
    groups: dict[str, dict[str, str]] = {}
    others = []
    for name in tensors:
        if (found := split_lora_name(name)) is None:
            others.append(name)
        else:
            groups.setdefault(found[0], {})[found[1]] = name
    return groups, others


def _find_other_shape(parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> str | None:
    """Return the shape of the weight to which the LoRA's matrices add; None if it is the model's shape."""
    if "lora_A" in parts and "lora_B" in parts:
        wanted = (parts["lora_B"].shape[0], *parts["lora_A"].shape[1:])
        same = wanted[:2] == shape[:2] or (len(shape) < 2)
        return None if same else _show(tuple(wanted))
    if "diff" in parts:
        return None if tuple(parts["diff"].shape) == tuple(shape) else _show(parts["diff"].shape)
    return None


def _show(shape: Any) -> str:
    return "x".join(map(str, shape))


def _scale(tensor: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Multiply a tensor by powers of two; return it in fp32 if its own dtype would lose a bit."""
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise ScalingError(f"a tensor of it is {tensor.dtype}")
    for dtype in (tensor.dtype, torch.float32):
        scaled = torch.ldexp(tensor.to(dtype), exponents).to(dtype)
        if torch.equal(torch.ldexp(scaled, -exponents).to(dtype), tensor.to(dtype)):
            return scaled.contiguous()
    return scaled.contiguous()


def _refuse(path: Path, strange: list[str], problems: list[str], count: int) -> None:
    if strange:
        raise SourceError(
            f"The LoRA {path} doesn't fit the model: it has no layer for {list_some(strange, 4)} "
            f"({len(strange)} of {count}).",
            expected=(
                "A LoRA fits one architecture, and its keys name that model's layers: in "
                "Diffusers' names for a folder, in the file's names for a single file."
            ),
            remedy="Look at which model it is for, and in which form that was converted.",
        )
    if problems:
        raise OptionError(
            f"The LoRA {path} can't be converted exactly. {list_some(problems, 4)}.",
            expected="An adapter has to be scaled by the same powers of two as the weights that it "
            "is added to.",
            remedy="Merge it into the original model (load it there, fuse_lora(), unload_lora_weights(), "
            "save_pretrained()), and convert that.",
        )


def _describe(changed: Mapping[str, int], note: str) -> Iterator[ConvertedComponent]:
    for component, count in changed.items():
        reasons = [
            f"{count} of its tensors have the powers of two of the weights that they add to."
        ]
        reasons += [note] if note and count else []
        yield ConvertedComponent(component or "model", "LoRA", folded=count, reasons=tuple(reasons))
