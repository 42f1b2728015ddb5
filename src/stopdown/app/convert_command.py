"""Implementation of `stopdown convert`: write an fp16 copy of a model, and print a summary."""

from __future__ import annotations

import dataclasses
import functools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from stopdown.app.display import Display, load_libraries
from stopdown.app.flags import ConfigOption, ConvertRunOptions, RevisionOption, SourceArgument
from stopdown.app.request_options import find_named_source
from stopdown.errors import OptionError
from stopdown.number_formats import list_all, list_some
from stopdown.plans.plan_files import read_plan
from stopdown.records import PLAN_IN_CONFIG, Conversion, ConvertedComponent
from stopdown.sources.lora_names import is_lora_file
from stopdown.sources.sources import is_hub_id, refuse_ignored

if TYPE_CHECKING:
    from rich.console import Console

    from stopdown.checkpoints.text_encoders import Encoder


@dataclass(frozen=True)
class ConvertOptions(ConvertRunOptions):
    """Write an fp16 copy of a model that runs without Stopdown.

    The plan is computed from the weights, unless you give one. To convert a LoRA for a converted model,
    give that model, or its plan, as --plan. To convert a text encoder alone, give a Transformers folder,
    or a model and --component.

    Examples:
      stopdown convert shapes shapes-fp16
      stopdown convert style.safetensors style-fp16.safetensors --plan shapes-fp16
      stopdown convert FOLDER encoder-fp16 --component text_encoder --certify
    """

    source: SourceArgument
    output: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="New folder or .safetensors file to write."),
    ]
    plan: Annotated[
        Path | None,
        typer.Option(
            help="Plan to write into the weights, plan.json. By default one is computed from the "
            "weights. For a LoRA: the converted model."
        ),
    ] = None
    to: Annotated[
        Literal["diffusers", "single", "comfyui"] | None,
        typer.Option(
            help="diffusers: a folder. single: one .safetensors file. comfyui: a folder with "
            "diffusion_models, text_encoders and vae. By default the name of OUT decides."
        ),
    ] = None
    component: Annotated[
        str | None,
        typer.Option(help="Convert only this text encoder, such as text_encoder."),
    ] = None
    certify: Annotated[
        bool,
        typer.Option(
            "--certify",
            help="For a text encoder: compute bounds that hold for every text, instead of measuring calls.",
        ),
    ] = False
    leave: Annotated[
        tuple[str, ...],
        typer.Option(help="Component to write unchanged. Repeat for several."),
    ] = ()
    allow_eps: Annotated[
        bool,
        typer.Option(
            "--allow-eps",
            help="Convert even if a norm's eps can't be rescaled and the output changes slightly.",
        ),
    ] = False
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if convert wrote it.")] = False
    revision: RevisionOption = None
    config: ConfigOption = None


def run_convert_command(options: ConvertOptions) -> int:
    from stopdown.app.progress import open_display, print_result

    began = time.perf_counter()
    with open_display(options) as display:
        made = convert_model(options, display)
    elapsed_s = round(time.perf_counter() - began, 3)
    made = dataclasses.replace(made, elapsed_s=elapsed_s)
    draw = functools.partial(print_conversion, made, is_whole=options.verbose)
    print_result(options, made, draw, name=made.output)
    return 0


def convert_model(options: ConvertOptions, display: Display) -> Conversion:
    """Write an fp16 copy of a model, LoRA or text encoder that runs without Stopdown.

    A model is converted by its plan, which is computed from the weights if none is given.
    """
    is_lora = is_lora_file(Path(options.source).expanduser())
    refuse_ignored(options.source, options.revision, options.config)
    if options.plan is None and not is_lora:
        encoder = _find_encoder(options, display)
        if encoder is not None:
            from stopdown.checkpoints.text_encoders import convert_encoder

            display.progress("measure", encoder.name, 0, 1)
            allow = _list_allowed(options)
            return convert_encoder(encoder, options.output, certify=options.certify, allow=allow)
    _check_plan(options)
    if is_lora:
        load_libraries(display, has_pipelines=False)
        from stopdown.checkpoints.lora_files import convert_lora

        lora = Path(options.source).expanduser()
        return convert_lora(lora, options.output, str(options.plan), overwrite=options.force)
    plan = read_plan(options.plan) if options.plan is not None else None

    source = find_named_source(options, display)
    load_libraries(display)
    from stopdown.checkpoints import convert as convert_module
    from stopdown.checkpoints.output_places import Target, choose_target
    from stopdown.plans.certified import certify_plan
    from stopdown.sources.library_messages import quiet_libraries

    place = options.output if options.to is None else Target(options.output, options.to)
    choose_target(place, source)  # refused before a plan is computed
    if plan is None:
        with quiet_libraries():  # a file cannot hold an fp32 residual stream
            plan = certify_plan(source, residual="native", progress=display.progress)

    return convert_module.convert(
        source,
        place,
        plan,
        leave=options.leave,
        allow=_list_allowed(options),
        progress=display.progress,
    )


def _check_plan(options: ConvertOptions) -> None:
    """Refuse `--component` and `--certify`, which are for lone text encoders, and a LoRA without a plan."""
    for name, given in {"--component": options.component, "--certify": options.certify}.items():
        if given:
            beside = "beside --plan" if options.plan is not None else f"for {options.source}"
            raise OptionError(
                f"{name} was given {beside}.",
                expected="It is for a text encoder that is converted alone, without a plan.",
                remedy="Leave it out, or give a Diffusers folder or a text encoder's folder.",
            )
    if options.plan is None and is_lora_file(Path(options.source).expanduser()):
        raise OptionError(
            f"The LoRA {options.source} was given without --plan.",
            expected="A LoRA needs the exponents of the model that it is used with.",
            remedy="Give the converted model: --plan CONVERTED.",
        )


def _list_allowed(options: ConvertOptions) -> list[Literal["eps", "overwrite"]]:
    allowed: dict[Literal["eps", "overwrite"], bool] = {
        "eps": options.allow_eps,
        "overwrite": options.force,
    }
    return [name for name, given in allowed.items() if given]


def _find_encoder(options: ConvertOptions, display: Display) -> Encoder | None:
    """Return the text encoder at SOURCE, or the one that `--component` names; None for a whole model."""
    root = Path(options.source).expanduser()
    is_model = root.is_file() or (root / "model_index.json").is_file()
    if options.component is None and (is_model or not (root.exists() or is_hub_id(options.source))):
        return None
    load_libraries(display, has_pipelines=False)
    from stopdown.checkpoints.text_encoders import find_encoder

    return find_encoder(options.source, options.component or "", revision=options.revision)


def print_conversion(made: Conversion, console: Console, *, is_whole: bool = False) -> None:
    """Print what is proven of the copy, its contents, and the code that loads it.

    Args:
        is_whole: also print the reasons for each component's precision, as with -v.
    """
    from rich.text import Text

    from stopdown.app.progress import make_table

    said = f"Wrote {made.output} in {made.elapsed_s:.1f} s: {_describe_safety(made)}"
    console.print(said, style="bold", soft_wrap=True, highlight=False, markup=False)
    console.print(f"→ {made.load}\n", soft_wrap=True, highlight=False, markup=False)
    headings = ("component", "written in", "tensors scaled", "config changes")
    table = make_table(*headings, overflow="fold")
    for entry in made.components:
        table.add_row(*_describe_row(entry))
    console.print(table)
    carried = [x.component for x in made.components if x.precision == PLAN_IN_CONFIG]
    if carried:
        line = f"\nStopdown applies the plan in config.json when it loads: {', '.join(carried)}."
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    for entry in made.components if is_whole else ():
        reasons = " ".join(entry.reasons)
        console.print(Text.assemble((f"\n{entry.component}", "bold"), f": {reasons}"))
    if made.unread:
        line = (
            f"\nCopied unchanged, because Diffusers doesn't read them: {list_some(made.unread, 5)}."
        )
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _describe_safety(made: Conversion) -> str:
    """Describe in a sentence how many fp16 activations are not proven to stay in range."""
    narrow = [x for x in made.components if x.precision == "fp16"]
    if not narrow:
        return "nothing was converted to fp16; -v shows why."
    left = [x for x in narrow if x.unproven or not x.values]
    if not left:
        return "proven not to overflow in fp16."
    counts = (f"{x.unproven} of {x.values}" if x.values else "the" for x in left)
    said = [f"{count} activations in {x.component}" for count, x in zip(counts, left, strict=True)]
    return f"{list_all(said)} aren't proven to stay in range, and without Stopdown nothing watches them."


def _shorten(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _describe_row(entry: ConvertedComponent) -> tuple[str, ...]:
    return (
        entry.component,
        entry.precision,
        "" if entry.precision.startswith("as stored") else str(entry.folded),
        ", ".join(f"{name}={_shorten(value)}" for name, value in entry.fields.items()),
    )
