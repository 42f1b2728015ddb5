"""Changes to a pipeline besides its components: LoRAs, and a different scheduler.

LoRAs are loaded before anything is planned or cast, so that a plan includes them.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stopdown.devices.environment import require_package
from stopdown.errors import OptionError, SourceError, take_one_line
from stopdown.sources.descriptions import read_description
from stopdown.sources.headers import read_header, read_rescaled, refusing_damage
from stopdown.sources.hub import Progress
from stopdown.sources.library_classes import list_library_classes
from stopdown.sources.source import Source, list_weight_files
from stopdown.sources.source_checks import verify_descriptions, verify_source
from stopdown.sources.sources import resolve_source


def resolve_whole(
    name: Any, *, progress: Progress | None = None, with_weights: bool = True
) -> Source:
    """Resolve and verify the model in a command's or a batch's options, with LoRAs and scheduler."""
    loras = tuple(parse_lora(text) for text in name.lora)
    scheduler = find_scheduler(name.scheduler) if name.scheduler else ""
    found = resolve_source(
        name.source,
        revision=name.revision,
        config=name.config,
        variant=name.variant,
        progress=progress,
        with_weights=with_weights,
    )
    if with_weights:
        verify_source(found)
    elif found.kind != "file":
        verify_descriptions(found)
    _check_scales(found, [path for path, _ in loras])
    return dataclasses.replace(found, loras=loras, scheduler=scheduler)


def _check_scales(source: Source, loras: Sequence[str]) -> None:
    """Refuse an unconverted LoRA for converted weights, and a converted LoRA for original ones."""
    if not loras:
        return
    files = [path for paths in list_weight_files(source).values() for path in paths]
    said = [text for path in files if (text := read_rescaled(path))]
    names = {name for text in said for name in text.partition(":")[0].split(", ")} - {"vae"}
    for lora in loras:
        is_converted = bool(read_rescaled(Path(lora).expanduser()))
        if names and not is_converted:
            raise OptionError(
                f"The LoRA {lora} is for the original, and {source.name} was converted: the weights of its "
                f"{', '.join(sorted(names))} are multiplied by powers of two.",
                expected="A LoRA has to be scaled by the same powers of two as the weights that it "
                "is added to.",
                remedy=f"Convert it as well: stopdown convert {lora} OUT --plan {source.name}",
            )
        if is_converted and not names:
            raise OptionError(
                f"The LoRA {lora} was converted for rescaled weights, and those of {source.name} aren't.",
                expected="A LoRA has to be scaled by the same powers of two as the weights that it "
                "is added to.",
                remedy="Give the file that it was made from.",
            )


def parse_lora(text: str) -> tuple[str, float]:
    """Parse `style.safetensors:0.8` into path and weight, 1 by default; check that the file is readable."""
    path, sign, weight = text.rpartition(":")
    if not sign or not re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", weight):
        path, weight = text, "1"
    file = Path(path).expanduser()
    if file.suffix.lower() != ".safetensors" or not file.is_file():
        raise OptionError(
            f"There is no .safetensors file {path} for the LoRA.",
            expected="A LoRA is one file. For a weight other than 1, add it after a colon.",
            remedy='For example: lora="style.safetensors:0.8".',
        )
    with refusing_damage(f"The LoRA {path} is"):
        read_header(file)
    require_package("peft", "adapters", "A LoRA")
    return path, float(weight)


def find_scheduler(name: str) -> str:
    """Return the class name of a scheduler, given in any case and without endings that tell none apart.

    `Euler` is `EulerDiscreteScheduler`, and `UniPC` is `UniPCMultistepScheduler`.
    """
    known = list_library_classes("Scheduler")
    asked = name.strip().lower().removesuffix("scheduler")
    for endings in ("", "(discrete|multistep)"):
        named = re.compile(f"{re.escape(asked)}{endings}scheduler", re.IGNORECASE)
        if len(found := list(filter(named.fullmatch, known))) == 1:
            return found[0]
    short = {known_name.removesuffix("Scheduler"): known_name for known_name in known}
    lower = {key.lower(): key for key in short}
    near = [lower[x] for x in difflib.get_close_matches(asked, lower, n=5, cutoff=0.3)]
    near.sort(key=lambda found: not found.lower().startswith(asked[:2]))
    raise OptionError(
        f"Diffusers has no scheduler {name!r}.",
        expected=f"The nearest are {', '.join(near) or 'none'}.",
        remedy=f'Use scheduler="{near[0] if near else "EulerDiscrete"}".',
    )


def put_extras(pipe: Any, source: Source) -> None:
    """Load a source's LoRAs into a pipeline, and replace its scheduler if the source has one."""
    import diffusers

    put_loras(pipe, source.loras)
    name = source.scheduler
    if not name:
        return
    compatible = {x.__name__ for x in (*pipe.scheduler.compatibles, type(pipe.scheduler))}
    if name not in compatible:
        listed = ", ".join(sorted(compatible))
        raise OptionError(
            f"{name} doesn't fit {type(pipe).__name__}.",
            expected=f"Those that do are {listed}.",
            remedy=f'Use scheduler="{min(compatible)}".',
        )
    pipe.scheduler = getattr(diffusers, name).from_config(pipe.scheduler.config)


def put_loras(pipe: Any, loras: Sequence[tuple[str, float]]) -> None:
    """Load LoRAs into a pipeline, each with its weight; without any, do nothing."""
    if not loras:
        return
    if not hasattr(pipe, "load_lora_weights"):
        raise SourceError(
            f"{type(pipe).__name__} takes no LoRA.", remedy="Leave lora out, or merge it first."
        )
    names = [f"lora_{number}" for number in range(len(loras))]
    for name, (path, _) in zip(names, loras, strict=True):
        try:
            pipe.load_lora_weights(str(Path(path).expanduser()), adapter_name=name)
        except Exception as error:  # whatever its keys make Diffusers and peft raise
            raise _refuse_lora(pipe, path, take_one_line(error, 300)) from error
    on = {one for parts in pipe.get_list_adapters().values() for one in parts}
    for name, (path, _) in zip(names, loras, strict=True):
        if name not in on:
            raise _refuse_lora(pipe, path, "none of its tensors has a place in it")
    pipe.set_adapters(names, [weight for _, weight in loras])


def name_lora_as_diffusers(folder: Path, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the tensors of a LoRA to Diffusers' names, with the converter of a pipeline's class.

    Args:
        folder: folder of the pipeline, for its class and the configuration of its UNet.
        tensors: tensors under another program's names.

    Returns:
        The tensors renamed, split or joined as the class loads them; empty if it does not know the names.
    """
    import diffusers

    index = read_description(folder / "model_index.json")
    kind: Any = getattr(diffusers, str(index.get("_class_name")), None)
    if not hasattr(kind, "lora_state_dict"):
        return {}
    config = folder / "unet" / "config.json"
    more = {"unet_config": SimpleNamespace(**read_description(config))} if config.is_file() else {}
    try:
        found = kind.lora_state_dict(dict(tensors), **more)
    except Exception:  # whatever its keys make Diffusers raise: they are not of this model
        return {}
    named, alphas = (*found, {})[:2] if isinstance(found, tuple) else (found, {})
    if not alphas:
        return dict(named)
    stems = {"unet": "lora_unet_", "text_encoder": "lora_te_", "text_encoder_2": "lora_te2_"}

    def flatten(name: str) -> str:
        part, _, path = name.partition(".")
        return f"{stems[part]}{path.replace('.', '_')}"

    sides = {".lora.down.weight": ".lora_down.weight", ".lora.up.weight": ".lora_up.weight"}
    sides |= {".lora_A.weight": ".lora_down.weight", ".lora_B.weight": ".lora_up.weight"}
    kept = {f"{flatten(key.removesuffix('.alpha'))}.alpha": x for key, x in alphas.items()}
    for name, tensor in named.items():
        old = next((side for side in sides if name.endswith(side)), "")
        kept[f"{flatten(name.removesuffix(old))}{sides.get(old, '')}"] = tensor
    return kept


def _refuse_lora(pipe: Any, path: str, why: str) -> SourceError:
    return SourceError(
        f"The LoRA {path} doesn't fit {type(pipe).__name__}: {why}.",
        expected="A LoRA is trained for one architecture, and named as Diffusers names its layers.",
        remedy="Look at which model it is for, or leave lora out.",
    )
