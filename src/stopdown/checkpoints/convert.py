"""`convert`: write a plan's exponents into weights and configurations, for programs without Stopdown.

Each component's exponents are first expressed in a form that files can store (`file_exponents`). If the
plan has more than that, the component is run in fp32. The weights are then scaled and cast to fp16 tensor
by tensor from the stored format, and written with copies of the original configurations.

In a folder, a component that needs more than files can store (multiplies, fp32 layers, an fp32 residual
stream) keeps its weights, and its plan is added to its `config.json`.

A single file is rewritten row by row under its own tensor names. All output is written under a temporary
name and renamed at the end.

Not covered: programs that change eps, precision or attention by themselves.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from stopdown.argument_types import check_type
from stopdown.checkpoints.cards import list_entries, refuse_rescaled, word_card, write_card_beside
from stopdown.checkpoints.component_folders import (
    copy_descriptions,
    copy_weights,
    describe_component,
    describe_effect,
    describe_left,
    edit_config,
    fold_to_fp16,
    told_as_oserror,
    write_component,
    write_conversion,
    write_weights,
)
from stopdown.checkpoints.file_exponents import (
    EFFECT_LIMIT,
    FileExponents,
    express_component,
    find_eps_fields,
    rests_on_bounds,
)
from stopdown.checkpoints.output_places import Form, Target, check_place, choose_target
from stopdown.component_call_names import QUANT_METHOD
from stopdown.component_calls.components import find_components, find_kept_fp32, is_autoencoder
from stopdown.devices.device_choice import choose_device
from stopdown.devices.environment import read_version
from stopdown.errors import CaptureError, OptionError, ScalingError
from stopdown.files.outputs import written_beside
from stopdown.fold_names import (
    Folds,
    list_folds,
    name_exponents,
    spread_columns,
    spread_rows,
)
from stopdown.mapped_weights import choose_folder, map_copy
from stopdown.number_formats import FORMATS
from stopdown.pipelines.class_selection import select_class
from stopdown.pipelines.loader import complete_source, load_program, move_program
from stopdown.pipelines.requests import Request
from stopdown.pipelines.single_files import (
    spread_exponents,
    trace_columns,
    trace_rows,
    write_single_file,
)
from stopdown.plans.applier import apply_plan, check_source
from stopdown.plans.call_recorder import (
    STEPS,
    list_requests,
    play_calls,
    record_calls,
    record_run,
)
from stopdown.plans.dry_calls import draw_calls, shrink_run
from stopdown.plans.exponents import describe_unscaled
from stopdown.plans.plan_files import carry_plan, take_plan
from stopdown.records import (
    PLAN_IN_CONFIG,
    ComponentPlan,
    Conversion,
    ConvertedComponent,
    Plan,
    Scaling,
)
from stopdown.scaling import ComponentCall, cast_, read_headroom
from stopdown.sources.component_classes import find_class
from stopdown.sources.headers import read_rescaled
from stopdown.sources.hub import Progress
from stopdown.sources.library_messages import quiet_libraries
from stopdown.sources.single_file_names import (
    Piece,
    arrange,
    change_tensor,
    check_layouts,
    find_comfyui_folder,
    find_whole,
    lay_out,
    list_merged,
)
from stopdown.sources.source import Source, list_weight_files
from stopdown.sources.source_checks import verify_source
from stopdown.sources.sources import read_stored_dtypes, resolve_source


@dataclass
class _Work:
    """State of a conversion.

    Attributes:
        source: the completed source, with its class, its components and the folder of its configurations.
        pipe: the pipeline, with weights mapped in their stored format, or in fp32 once a component had to
            be run.
        leave: components that are written unchanged.
        form: form of the output: `diffusers`, `single` or `comfyui`.
        expressed: exponents in a form that files can store, by component.
        problems: reason why a component cannot be converted, by component.
        carried: reason why a component's plan is stored in its configuration, by component.
    """

    source: Source
    pipe: Any
    plan: Plan
    leave: tuple[str, ...]
    form: Form
    expressed: dict[str, FileExponents] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    carried: dict[str, str] = field(default_factory=dict)

    @property
    def has_config(self) -> bool:
        """Whether the output has configurations beside the weights."""
        return self.form == "diffusers"


def convert(
    source: str | Path | Source,
    output: str | Path | Target,
    plan: Plan | str | Path,
    *,
    leave: Sequence[str] = (),
    allow: Collection[Literal["eps", "overwrite"]] = (),
    device: str = "cpu",
    request: Request | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Write a checkpoint that programs without Stopdown run in fp16, with the exponents of its plan.

    Args:
        source: Hub id, Diffusers folder, single safetensors file, bundled model, or `Source`.
        output: a folder that does not exist or is empty, or a `.safetensors` file; a `Target` also states
            the form: a Diffusers folder, one file, or one file per component for ComfyUI.
        plan: plan of this checkpoint, or the path of its file.
        leave: components that are written unchanged.
        allow: `eps`: accept outputs that change by more than `EFFECT_LIMIT` because of eps that no
            configuration field sets. `overwrite`: replace an earlier output of `convert`: a folder that
            holds its files and nothing else, or a `.safetensors` file with its mark.
        device: device on which components are run if their exponents have to be computed again.
        request: sizes, picture or video of those runs; by default a small size and random pictures.
        progress: called with the stage, the item, the count done and the total.

    Raises:
        OptionError: components cannot be converted, with all reasons; or an option does not apply.
        OutputError: the output exists already or cannot be written.
        PlanError: the plan is damaged or belongs to another checkpoint.
        SourceError: the model is missing, damaged or refused.

    Cost: one component in fp16 in memory if the plan can be written as it is. Otherwise the pipeline in
    fp32, a run for each of a few prompts, and captures as for `measure_plan`.

    Examples:
        >>> from stopdown.testing import save_pipeline
        >>> folder = save_pipeline("sd", "model")  # a tiny Stable Diffusion
        >>> plan = stopdown.make_plan(folder, residual="native")  # an fp32 stream needs Stopdown
        >>> conversion = stopdown.convert(folder, "model-fp16", plan)
        >>> [component.component for component in conversion.components]
        ['text_encoder', 'unet', 'vae']
    """
    started = time.perf_counter()
    check_type(
        "convert(output)",
        output,
        (str, Path, Target),
        "It is the path of a folder or of a .safetensors file.",
        'Use convert(source, "out", plan).',
    )
    wanted = take_plan(plan)
    found = source if isinstance(source, Source) else resolve_source(source)
    verify_source(found)
    _refuse_rescaled(found, leave)
    place = choose_target(output, found)
    target = Path(place.path)
    path = None if isinstance(plan, Plan) else plan
    replaces = check_place(found, target, path, "overwrite" in allow)
    with quiet_libraries():
        work = _open(found, place, wanted, leave, device, request, progress)
        _express_all(work, "eps" in allow, request or Request(), progress)
        _refuse(work, "eps" in allow)
        if _is_laid_out(work):
            check_layouts(work.pipe, [entry.component for entry in work.plan.components])
        with written_beside(target, option="as OUT", replaces=replaces) as part, told_as_oserror():
            unread = _write(work, part, progress)
            record = _describe(work, target, unread, time.perf_counter() - started)
            if place.form != "single":
                record = write_conversion(part, record)
        if place.form == "single":
            write_card_beside(target, word_card(record, "The file's metadata says the same."))
    return record


def _refuse_rescaled(source: Source, leave: Sequence[str]) -> None:
    """Refuse a source whose weights, except components in `leave`, are already rescaled."""
    for name, files in list_weight_files(source).items():
        if name not in leave:
            copied = f' Or copy that component: leave="{name}".' if source.kind != "file" else ""
            refuse_rescaled(source.name, read_rescaled(*files), otherwise=copied)


def _open(
    source: Source,
    target: Target,
    plan: Plan,
    leave: Sequence[str],
    device: str,
    request: Request | None,
    progress: Progress | None,
) -> _Work:
    """Check that the plan and the options fit the source, and load its pipeline in the stored dtypes."""
    check_source(plan, source)
    source = select_class(complete_source(source), request)
    names = [entry.component for entry in plan.components]
    for name in leave:
        if name not in names:
            raise OptionError(
                f'leave="{name}" names no component of {source.name}.',
                expected=f"Its components are {', '.join(names)}.",
                remedy=f'Use leave="{names[0]}".',
            )

    where = choose_device(device)
    pipe = load_program(source, torch_dtypes=None, progress=progress)
    inert = [dataclasses.replace(entry, precision="as loaded") for entry in plan.components]
    apply_plan(pipe, dataclasses.replace(plan, components=tuple(inert)), cast=False)
    move_program(pipe, where)
    if not source.parts:
        pipe.set_progress_bar_config(disable=True)
    return _Work(source, pipe, plan, tuple(leave), target.form)


def _tell(progress: Progress | None, stage: str, what: str, done: int, total: int) -> None:
    if progress is not None:
        progress(stage, what, done, total)


def _is_left(work: _Work, entry: ComponentPlan) -> bool:
    names = (*work.leave, *work.carried)
    return entry.component in names or entry.precision == "as loaded"


def _express_all(work: _Work, allow_eps: bool, request: Request, progress: Progress | None) -> None:
    """Fill `work.expressed`, `problems` and `carried`: express each component's exponents for files."""

    @functools.cache
    def record() -> Mapping[str, Sequence[ComponentCall]]:
        _widen(work.pipe)
        if work.source.parts and request.arguments:
            return record_run(work.pipe, lambda: play_calls(work.pipe, [request.arguments]))
        if work.source.parts:
            return draw_calls(work.source, request)
        steps = request.steps or STEPS
        short = shrink_run(work.pipe, dataclasses.replace(request, steps=steps))
        return record_calls(work.pipe, list_requests(work.pipe, (), short), progress)

    for number, entry in enumerate(work.plan.components):
        name = entry.component
        _tell(progress, "measure", name, number, len(work.plan.components))
        if _is_left(work, entry):
            continue
        if entry.precision != "fp16":
            reasons = " ".join(entry.reasons)
            work.problems[name] = f"its plan runs it in {entry.precision}. {reasons}"
            continue
        try:
            found = express_component(
                getattr(work.pipe, name),
                entry,
                lambda name=name: record().get(name, ()),  # type: ignore[misc]
                has_config=work.has_config,
            )
        except (CaptureError, ScalingError) as error:
            told = work.carried if work.has_config else work.problems
            told[name] = describe_unscaled(error)
            continue
        work.expressed[name] = found
        if found.effect > EFFECT_LIMIT and not allow_eps:
            work.problems[name] = describe_effect(found)


def _widen(pipe: Any) -> None:
    """Cast all weights to fp32; on the CPU into mapped temporary files if memory would be scarce."""
    modules = find_components(pipe).values()
    tensors = [x for module in modules for x in module.state_dict(keep_vars=True).values()]
    narrow = {id(x): x for x in tensors if x.is_floating_point() and x.dtype != torch.float32}
    needed = sum(4 * x.numel() for x in narrow.values())
    folder = choose_folder(needed, choose_device("cpu").memory_bytes)
    for tensor in narrow.values():
        if folder is not None and tensor.device.type == "cpu":
            tensor.data = map_copy(tensor, folder, torch.float32)
        else:
            tensor.data = tensor.float()


def _refuse(work: _Work, allow_eps: bool) -> None:
    """Raise `OptionError` with all components that cannot be converted, if there are any."""
    if not work.problems:
        return
    parts = [f"{name}: {why}" for name, why in work.problems.items()]
    is_eps = not allow_eps and any(name in work.expressed for name in work.problems)
    leave = " ".join(f'leave="{name}"' for name in work.problems)
    ways = [f"Write unchanged what can't be converted: {leave}."]
    kept = [getattr(work.pipe, x) for x in work.problems if x in work.expressed]
    if is_eps and not work.has_config and any(map(find_eps_fields, kept)):
        ways.append('Or write a folder, whose config sets eps: to="diffusers".')
    if is_eps:
        ways.append('Or accept the difference: allow="eps".')
    ways.append(f"Or run the plan itself: stopdown generate {work.source.name} --precision PLAN.")
    raise OptionError(
        f"{work.source.name} can't be written in fp16 for programs without Stopdown. "
        f"{' '.join(parts)}",
        expected="Files can only contain weights and configs, but no multiplications, fp32 modules "
        "or casts.",
        remedy=" ".join(ways),
    )


def _write(work: _Work, part: Path, progress: Progress | None) -> tuple[str, ...]:
    """Write the output to `part`; return names of a single file's tensors that Diffusers does not read."""
    if _is_laid_out(work):
        _write_laid_out(work, part, progress)
        return ()
    if work.form == "single":
        return _write_file(work, part, progress)
    held = [one.name for one in work.source.parts]
    names = [name for name in work.source.components if (work.source.described / name).is_dir()]
    copy_descriptions(work.source.described, part, held or names, with_index=not held)
    for number, entry in enumerate(work.plan.components):
        name = entry.component
        _tell(progress, "write", name, number, len(work.plan.components))
        if not _is_left(work, entry):
            module = _fold(work, name)
            entries = _list_entries(work, [name], work.expressed[name].scaling.exponents)
            write_component(module, part / name, entries, _list_fields(work, name))
            del module  # its weights go before the next component's come
        elif work.source.kind != "file":
            copy_weights(work.source.path / name, part / name, work.source.variant)
        else:
            write_weights(_restore(work, name), part / name)
        if name in work.carried:
            alone = dataclasses.replace(work.plan, components=(entry,), fingerprint="")
            method = {"quant_method": QUANT_METHOD, "plan": carry_plan(alone)}
            edit_config(part / name / "config.json", {"quantization_config": method})
    _tell(progress, "write", "done", len(work.plan.components), len(work.plan.components))
    return ()


def _fold(work: _Work, name: str) -> Any:
    return fold_to_fp16(name, getattr(work.pipe, name), work.expressed[name])


def _list_entries(
    work: _Work, names: Collection[str], exponents: Mapping[str, int]
) -> dict[str, str]:
    """Return the metadata entries of a file with the components `names`.

    Args:
        exponents: exponents by the file's tensor names.
    """
    planned = [entry for entry in work.plan.components if entry.component in names]
    components = [_describe_component(work, entry) for entry in planned]
    return list_entries(work.plan.seal, components, exponents)


def _is_laid_out(work: _Work) -> bool:
    """Return whether tensors must be renamed to the names that single files have.

    If the source is a single file, its names are kept.
    """
    return work.form == "comfyui" or (work.form == "single" and work.source.kind != "file")


def _write_laid_out(work: _Work, part: Path, progress: Progress | None) -> None:
    """Write components with the tensor names of single files: one file each for ComfyUI, else one file."""
    table, whole = find_whole(work.source.pipeline_class), dict[str, torch.Tensor]()
    exponents: dict[str, int] = {}
    names = [entry.component for entry in work.plan.components]
    for number, entry in enumerate(work.plan.components):
        name = entry.component
        _tell(progress, "write", name, number, len(names))
        is_whole = work.form == "single" and len(names) > 1
        prefix = table.prefixes[name] if is_whole else ""
        layout = table.layouts.get(name, "") if is_whole else ""
        module = _restore(work, name) if _is_left(work, entry) else _fold(work, name)
        folds = work.expressed[name].scaling.exponents if name in work.expressed else {}
        placed = _place_exponents(module, folds, layout)
        if work.form == "single":
            whole |= {prefix + key: tensor for key, tensor in arrange(module, layout).items()}
            exponents |= {prefix + key: exponent for key, exponent in placed.items()}
            continue
        path = (
            part / find_comfyui_folder(name) / f"{Path(work.source.name).name}-{name}.safetensors"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(arrange(module), path, _list_entries(work, [name], placed))
    if work.form == "single":
        save_file(whole, part, _list_entries(work, names, exponents))
    _tell(progress, "write", "done", len(names), len(names))


def _place_exponents(
    module: torch.nn.Module, exponents: Mapping[str, int], table: str
) -> dict[str, int]:
    """Return the exponents of a component's tensors, by their names in the single file.

    Args:
        exponents: exponents by the model's tensor names.
        table: name of the table of tensor names; "" to choose it by the class.
    """
    folds, merged = list_folds(exponents), list_merged(module, table)
    rows, columns = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for target, pieces in lay_out(module, table).items():
        parts = [_read_piece(module, piece, folds, merged.get(piece.name)) for piece in pieces]
        rows[target], columns[target] = torch.cat([part for part, _ in parts]), parts[0][1]
        if not all(torch.equal(found, columns[target]) for _, found in parts):
            raise OptionError(
                f"{target} has no exponents by rows and columns alone: its parts have other columns.",
                expected="What a file has in one tensor reads one input.",
                remedy='Use to="diffusers".',
            )
    return name_exponents(rows, columns)


def _read_piece(
    module: torch.nn.Module, piece: Piece, folds: Mapping[str, Folds], after: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the exponents of the rows and of the columns of a component's tensor, as a file stores it.

    The exponent of an element is that of its row plus that of its column. The first column has 0.

    Args:
        piece: name of the tensor, and how the file changes it (transposed, halves swapped).
        after: name of the tensor of a later convolution that the file merges into this one; None without.
    """
    shape = module.state_dict()[piece.name].shape
    own = folds.get(piece.name, ())
    rows = spread_rows(own, shape[0] if shape else 1)
    columns = spread_columns(own, shape[1] if shape[1:] else 1)
    if after is not None:
        later = spread_rows(folds.get(after, ()), shape[0])
        is_bias = piece.name.endswith(".bias")  # that of the later one
        rows = later if is_bias else later + rows[:1]
    if piece.change == "T":
        rows, columns = columns, rows
    rows = change_tensor(rows, "swap") if piece.change == "swap" else rows
    return rows + columns[:1], columns - columns[:1]


def _restore(work: _Work, name: str) -> Any:
    """Cast a component that is not converted back to its stored dtype, and return it."""
    module = getattr(work.pipe, name)
    cast_(module, FORMATS[_find_stored(work, name)].torch_dtype, Scaling(kept_buffers=()))
    return module


def _list_fields(work: _Work, name: str) -> dict[str, Any]:
    """Return the fields of a converted component's `config.json` that change, with their new values."""
    module = getattr(work.pipe, name)
    fields: dict[str, Any] = dict(work.expressed[name].fields)
    if is_autoencoder(module) and getattr(module.config, "force_upcast", False):
        fields["force_upcast"] = False
    return fields


def _find_stored(work: _Work, name: str) -> str:
    """Return the dtype of most stored bytes of a component, out of fp16, bf16 and fp32."""
    stored = read_stored_dtypes(work.source)
    counts = stored.get(name, stored.get("checkpoint", {}))
    known = {dtype: size for dtype, size in counts.items() if dtype in ("fp16", "bf16", "fp32")}
    return max(known, key=lambda dtype: known[dtype], default="fp32")


def _write_file(work: _Work, part: Path, progress: Progress | None) -> tuple[str, ...]:
    left = [entry.component for entry in work.plan.components if _is_left(work, entry)]
    folds = {name: found.scaling.exponents for name, found in work.expressed.items()}
    _tell(progress, "write", "names", 0, 2)
    try:
        rows = trace_rows(work.source)
        spread = spread_exponents(rows, folds, left)
        columns = trace_columns(work.source, rows, folds)
        _tell(progress, "write", part.suffix, 1, 2)
        entries = _list_entries(work, list(folds), name_exponents(spread, columns))
        write_single_file(work.source.path, part, spread, entries, columns)
    except ScalingError as error:
        raise OptionError(
            f"{work.source.name} can't be written as a single file. {error.what}",
            expected="Each row of the file belongs to rows of parameters with one exponent.",
            remedy='Give a folder as OUT, or leave that component: leave="COMPONENT".',
        ) from error
    _tell(progress, "write", "done", 2, 2)
    return rows.find_unread()


def _describe(work: _Work, output: Path, unread: tuple[str, ...], elapsed_s: float) -> Conversion:
    components = tuple(_describe_component(work, entry) for entry in work.plan.components)
    return Conversion(
        source=work.source.name,
        output=str(output),
        plan=work.plan.seal,
        components=components,
        load=_describe_load(work, output),
        unread=unread,
        elapsed_s=round(elapsed_s, 3),
        version=read_version("stopdown") or "",
    )


def _describe_component(work: _Work, entry: ComponentPlan) -> ConvertedComponent:
    name = entry.component
    if name in work.carried:
        said = (f"{work.carried[name]}.".replace("..", "."), _CARRIED)
        return ConvertedComponent(name, PLAN_IN_CONFIG, reasons=said)
    if _is_left(work, entry):
        why = "Its weights are unchanged."
        if entry.precision == "as loaded":
            why = f"{why} {' '.join(entry.reasons)}"
        return ConvertedComponent(name, "as stored", reasons=(why,))
    found = work.expressed[name]
    return describe_component(
        name,
        getattr(work.pipe, name),
        found,
        _list_reasons(work, entry, found),
        fields=_list_fields(work, name) if work.has_config else {},
    )


_CARRIED = (
    "So its weights are those of the original, and its `config.json` contains the plan: after `import "
    "stopdown`, it is loaded in fp16 with the plan applied. Without Stopdown, Diffusers refuses it, and "
    "Transformers loads the original."
)


def _list_reasons(work: _Work, entry: ComponentPlan, found: FileExponents) -> Iterator[str]:
    if found.anew:
        yield "The plan's exponents can't all be stored in a weight file, so they were recomputed."
    if found.scaling.certified:
        yield (
            "Proven from its weights: every fp16 activation stays in range. "
            f"{found.scaling.range_note}"
        )
    elif rests_on_bounds(found.scaling):
        measured = "measured calls and on " if entry.calls else ""
        yield (
            f"The exponents are based on {measured}bounds computed from its weights. "
            f"{found.scaling.range_note}"
        )
    elif rests_on_bounds(entry.in_force):
        yield (
            "Its exponents were measured: those from bounds, stored in weights alone, would change its "
            "output."
        )
    if found.left:
        yield describe_left(found)
    else:
        yield "Apart from the rounding of its weights to fp16, it equals the original, bit for bit."
    if math.isfinite(read_headroom(found.scaling)) and not found.scaling.certified:
        yield (
            "In the measured calls, the largest activation of all, certified ones included, has "
            f"{read_headroom(found.scaling):.1f} bits of headroom."
        )
    if kept := find_kept_fp32(type(getattr(work.pipe, entry.component)), "fp16"):
        names = ", ".join(f"`{name}`" for name in kept)
        yield f"Transformers and Diffusers load {names} in fp32, even though the files store fp16."


def _describe_load(work: _Work, output: Path) -> str:
    """Return the code or command that loads the output in plain Diffusers or ComfyUI."""
    if work.form == "comfyui":
        folders = f"{output}/{{diffusion_models,text_encoders,vae}}"
        return f"copy its folders into those of ComfyUI/models: cp -R {folders} ComfyUI/models/"
    dtypes = {
        entry.component: FORMATS[_find_stored(work, entry.component)].torch_dtype
        for entry in work.plan.components
        if entry.component in work.leave
    }
    wanted = "torch.float16"
    if dtypes:
        listed = [f'"{name}": {dtype}' for name, dtype in dtypes.items()]
        wanted = f'{{{", ".join(listed)}, "default": torch.float16}}'
    first = "import stopdown; " if work.carried else ""
    method = "from_single_file" if work.form == "single" else "from_pretrained"
    if work.source.parts:
        return _describe_load_of_part(work, output, method)
    return f'{first}{work.source.pipeline_class}.{method}("{output}", dtype={wanted})'


def _describe_load_of_part(work: _Work, output: Path, method: str) -> str:
    """Return the code that loads the output if the source is a lone component and not a pipeline.

    Transformers' classes have no `from_single_file`.
    """
    name = work.source.parts[0].name
    library, class_name = work.source.components[name]
    options = f'subfolder="{name}", dtype=torch.float16'
    if work.form == "single" and library != "diffusers":
        return f'{class_name}.from_pretrained(None, config=..., state_dict=load_file("{output}"))'
    if work.form == "single" and not hasattr(find_class(library, class_name), "from_single_file"):
        config = f'{class_name}.load_config("{work.source.described / name}")'
        return (
            f"model = {class_name}.from_config({config}).half(); "
            f'model.load_state_dict(load_file("{output}"))'
        )
    if work.form == "single":
        options = f'config="{work.source.described}", {options}'
    return f'{class_name}.{method}("{output}", {options})'
