"""Calls of tiny models with their optional arguments, drawn and compared with fp32.

What is optional is read from the signature of a class's `forward`: an argument whose default is None or
False, if a value that its name calls for runs; and `return_dict`. An IP-Adapter is loaded into classes that
take one while the exponents are on, and its pictures are given.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from models.rescaling_models import WAYS, make_example, scale_weights
from stopdown.errors import StopdownError, take_first_line
from stopdown.numerics import iterate_tensors, relative_l2
from stopdown.plans.applier import apply_plan
from stopdown.plans.calibrated import measure_plan
from stopdown.records import Plan
from stopdown.runtime.guard import guard

Arguments = dict[str, Any]

MODELS = (
    *("CogVideoX rotary", "CogVideoX image to video", "CogView3-Plus", "CogView4", "SVD UNet"),
    *("SD UNet", "SDXL UNet", "SD3", "Flux", "HunyuanVideo", "Wan", "LTX", "Mochi", "Qwen-Image"),
    *("Lumina 2", "PixArt", "AuraFlow", "Sana", "T5 gated", "UMT5", "CLIP text", "CLIP vision"),
    *("Llama", "Gemma 3"),
)
"""Models of `rescaling_models` that are called as modules."""

MODES = ("planned", "repaired", "planned and guarded", "two pipelines")
"""The last: a program is guarded with the plan, and another program of the same module beside it."""

SHARES = (80, 10, 5, 5)
"""Per cent of many drawn calls that are made in each mode: under a guard each signature takes seconds."""

_FEW = 20

LEAST_ERROR = 2e-3
"""What counts as right in any case: two units of fp16's last place."""


@dataclass(frozen=True)
class Outcome:
    """What one call gave.

    Attributes:
        error, bf16: relative 2-norm of the worst output, against fp32; None where it was refused.
        options: names of the optional arguments that it had.
        said: why it was refused.
    """

    error: float | None
    bf16: float
    options: tuple[str, ...]
    said: str = ""

    @property
    def is_right(self) -> bool:
        """Whether it is nearer to fp32 than bf16 is, or was refused with a reason."""
        return self.error is None or self.error <= max(self.bf16, LEAST_ERROR)


@dataclass
class Case:
    """A tiny model that overflows in fp16.

    Attributes:
        module: in fp32.
        first: arguments of the call that exponents are found for.
        options: name to what gives a value for a call of these arguments.
        changes: name to what changes the model, given these arguments, and returns those for it.
    """

    module: nn.Module
    first: Arguments
    options: Mapping[str, Callable[[Arguments, torch.Generator], Any]] = field(default_factory=dict)
    changes: Mapping[str, Callable[[nn.Module, Arguments], Arguments]] = field(default_factory=dict)


def make_case(name: str) -> Case | None:
    """A model of `MODELS` that overflows; None if no scaling of its weights makes it."""
    for exponent in range(4, 21, 2):
        module, [(_, _, first)] = make_example(name)
        scale_weights(module, WAYS["residual"], exponent)
        scale_weights(module, WAYS["gated product"], exponent // 2)
        first = {k: x for k, x in first.items() if k != "return_dict"}
        if any(x.abs().max() > 3e4 for x in module.parameters() if x.numel()):
            return None
        wanted = call(module, first)
        if not is_finite(wanted):
            return None
        low = call(copy.deepcopy(module).half(), first, torch.float16)
        if measure_error(low, wanted) > 0.1:  # T5 clamps what overflows
            takes_pictures = type(module).__name__ in _TAKE_PICTURES
            changes = {"IP-Adapter": add_ip_adapter} if takes_pictures else {}
            return Case(module, first, dict(_list_options(module, first)), changes)
    return None


def call(module: nn.Module, given: Arguments, dtype: torch.dtype = torch.float32) -> Any:
    """What a call returns, its floating arguments of two dimensions or more in a dtype."""

    def cast(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype) if value.is_floating_point() and value.dim() > 1 else value.clone()

    with torch.no_grad():
        return module(**pytree.tree_map_only(torch.Tensor, cast, given))


def is_finite(output: Any) -> bool:
    return all(bool(x.isfinite().all()) for x in _list_floats(output))


def _list_floats(output: Any) -> list[torch.Tensor]:
    found = {id(x): x for x in iterate_tensors(output)}
    return [x for x in found.values() if x.is_floating_point()]


def measure_error(output: Any, wanted: Any) -> float:
    """Relative 2-norm of the worst output; infinite where there are other ones, or NaN."""
    pairs = _list_floats(output), _list_floats(wanted)
    if [x.shape for x in pairs[0]] != [x.shape for x in pairs[1]]:
        return math.inf
    errors = [relative_l2(a.float(), b.float()) for a, b in zip(*pairs, strict=True) if b.any()]
    return max((x if math.isfinite(x) else math.inf for x in errors), default=0.0)


# Optional arguments


def _list_options(
    module: nn.Module, first: Arguments
) -> Iterator[tuple[str, Callable[[Arguments, torch.Generator], Any]]]:
    """Those that the class takes, with what draws a value; each was tried."""
    found = inspect.signature(type(module).forward).parameters
    takes = {k: x.default for k, x in found.items() if x.default is None or x.default is False}
    if any(x.kind is x.VAR_KEYWORD for x in found.values()):  # flags that Transformers reads there
        takes |= {"output_hidden_states": False, "output_attentions": False}
    for name, default in takes.items():
        if name in first or name == "return_dict":
            continue
        for draw in _list_draws(module, name, default):
            try:
                given = draw(first, torch.Generator().manual_seed(0))
                call(module, {**first, name: given})
            except Exception:  # the class takes something else under this name
                continue
            yield name, draw
            break
    for name in [x for x in first if "mask" in x]:
        yield f"no {name}", lambda given, generator: None
    with contextlib.suppress(Exception):  # not every class has it
        call(module, {**first, "return_dict": False})
        yield "return_dict", lambda given, generator: False


def _list_draws(
    module: nn.Module, name: str, default: Any
) -> Iterator[Callable[[Arguments, Any], Any]]:
    if default is False or name.startswith("output_"):
        yield lambda given, generator: True
    elif "residual" in name or "controlnet" in name:
        yield lambda given, generator: _draw_like(module, given, generator, _is_block, 1.0)
        yield lambda given, generator: _draw_like(module, given, generator, _is_down, 1.0)
        yield lambda given, generator: _draw_like(module, given, generator, _is_middle, 1.0)[0]
    if "mask" in name:
        for size in (16, 8, 7, 6, 5, 4):
            yield lambda given, generator, size=size: torch.ones(1, size).bool()
            yield lambda given, generator, size=size: torch.ones(1, size)
    if "guidance" in name:
        yield lambda given, generator: torch.tensor([3.5])


def _is_block(path: str) -> bool:
    return path.rpartition(".")[0] in ("transformer_blocks", "blocks", "single_transformer_blocks")


def _is_down(path: str) -> bool:
    return path == "conv_in" or path.rpartition(".")[0] == "down_blocks"


def _is_middle(path: str) -> bool:
    return path == "mid_block"


def _draw_like(
    module: nn.Module,
    given: Arguments,
    generator: torch.Generator,
    is_meant: Callable[[str], bool],
    share: float,
) -> tuple[torch.Tensor, ...]:
    """Values as large as those that some modules return in a call, one for each."""
    found: list[torch.Tensor] = []

    def note(part: Any, args: Any, output: Any) -> None:
        output = output[-1] if isinstance(output, tuple) else output
        found.extend([output] if isinstance(output, torch.Tensor) else output)

    plain = copy.deepcopy(module).float()
    for path, part in plain.named_modules():
        if is_meant(path):
            part.register_forward_hook(note)
    call(plain, given)
    draws = (torch.rand(x.shape, generator=generator) * 2 - 1 for x in found)
    sizes = (min(float(x.float().square().mean().sqrt()), 3e4) for x in found)
    return tuple(x * size * share for x, size in zip(draws, sizes, strict=True))


_TAKE_PICTURES = ("UNet2DConditionModel", "FluxTransformer2DModel")
_PICTURE = 8


def draw_ip_adapter(module: Any) -> dict[str, dict[str, torch.Tensor]]:
    """An IP-Adapter with random weights for a model, as Diffusers reads it from a file."""
    draw = torch.Generator().manual_seed(7)
    config = module.config
    width = getattr(config, "cross_attention_dim", 0) or config.joint_attention_dim
    is_unet, weights = hasattr(config, "cross_attention_dim"), {}
    names = [x for x in module.attn_processors if "attn1" not in x and "single" not in x]
    for number, name in enumerate(names):
        heads = module.get_submodule(name.removesuffix(".processor")).to_k.weight.shape[0]
        key = 2 * number + 1 if is_unet else number
        for part in ("to_k_ip", "to_v_ip"):
            drawn = torch.randn(heads, width, generator=draw) * width**-0.5
            weights[f"{key}.{part}.weight"] = drawn
            if not is_unet:
                weights[f"{key}.{part}.bias"] = torch.zeros(heads)
    picture = {
        "proj.weight": torch.randn(4 * width, _PICTURE, generator=draw) * _PICTURE**-0.5,
        "proj.bias": torch.zeros(4 * width),
        "norm.weight": torch.ones(width),
        "norm.bias": torch.zeros(width),
    }
    return {"image_proj": picture, "ip_adapter": weights}


def draw_picture(count: int = 1) -> torch.Tensor:
    """The embeddings of pictures for such an IP-Adapter."""
    return torch.randn(count, 1, _PICTURE, generator=torch.Generator().manual_seed(8))


def add_ip_adapter(module: Any, first: Arguments) -> Arguments:
    """Load an IP-Adapter, as a pipeline does; arguments of a call with a picture."""
    module._load_ip_adapter_weights([draw_ip_adapter(module)], low_cpu_mem_usage=False)
    module.requires_grad_(False)
    shown = [draw_picture()]
    if hasattr(module.config, "cross_attention_dim"):
        return {"added_cond_kwargs": {**first.get("added_cond_kwargs", {}), "image_embeds": shown}}
    return {"joint_attention_kwargs": {"ip_adapter_image_embeds": shown}}


# Calls under exponents


@contextmanager
def put(case: Case, mode: str, plan: Plan | None, said: list[str]) -> Iterator[nn.Module]:
    """A copy of the model with a plan, a repair or both on it."""
    module = copy.deepcopy(case.module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if mode == "planned":
            assert plan is not None
            with apply_plan({"part": module}, plan):
                yield module
        else:
            program: Any = module.half() if mode == "repaired" else {"part": module}
            with ExitStack() as stack:
                used = plan if mode != "repaired" else None
                stack.enter_context(guard(program, used, announce=said.append))
                if mode == "two pipelines":
                    stack.enter_context(guard({"shared": module}, announce=said.append))
                call(module, case.first, torch.float16)
                yield module
        said += [str(x.message) for x in caught]


def plan_case(case: Case) -> Plan | None:
    """A plan of the first call alone; None if it has no exponents."""
    module = copy.deepcopy(case.module)
    plan = measure_plan({"part": module}, run=lambda: call(module, case.first))
    return plan if plan.components[0].in_force.exponents else None


def draw_call(
    case: Case, rng: random.Random, sizes: bool = True
) -> tuple[Arguments, tuple[str, ...]]:
    """Arguments with some of what is optional, another batch, other sizes and other values."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    names = [name for name in case.options if rng.random() < 0.4]
    given = dict(case.first)
    for name in names:
        value = case.options[name](case.first, generator)
        if name.startswith("no "):
            given.pop(name.removeprefix("no "))
        else:
            given[name] = value
    batch = rng.choice((1, 1, 2, 3)) if sizes else 1

    def change(value: torch.Tensor) -> torch.Tensor:
        if value.is_floating_point() and value.dim() > 2:
            value = value * rng.choice((1.0, 0.5, -1.0))
        return value

    given = pytree.tree_map_only(torch.Tensor, change, given)
    if batch > 1:
        more = {k: _repeat(x, batch) for k, x in given.items()}
        if _runs(case.module, more):
            given = more
    if sizes and rng.random() < 0.5 and _runs(case.module, more := _resize(given, rng)):
        given = more
    return given, tuple(names)


def _resize(given: Arguments, rng: random.Random) -> Arguments:
    """Twice or half of one size of an argument, wherever that size is; few models take it everywhere."""
    tensors = [x for x in pytree.tree_leaves(given) if isinstance(x, torch.Tensor) and x.dim() > 1]
    size = rng.choice([n for x in tensors for n in x.shape[1:] if n > 1] or [0])
    doubles = rng.random() < 0.5

    def change(value: torch.Tensor) -> torch.Tensor:
        for place in [i for i, n in enumerate(value.shape) if size and n == size]:
            value = (
                torch.cat([value, value], place) if doubles else value.narrow(place, 0, size // 2)
            )
        return value

    return pytree.tree_map_only(torch.Tensor, change, given)


def _repeat(value: Any, batch: int) -> Any:
    def repeat(x: torch.Tensor) -> torch.Tensor:
        is_batched = (x.dim() > 1 and x.shape[0] == 1) or (x.dim() == 1 and x.shape == (1,))
        return x.repeat(batch, *[1] * (x.dim() - 1)) if is_batched else x

    return pytree.tree_map_only(torch.Tensor, repeat, value)


def _runs(module: nn.Module, given: Arguments) -> bool:
    try:
        return is_finite(call(module, given))
    except Exception:
        return False


def compare(
    case: Case,
    module: nn.Module,
    given: Arguments,
    names: tuple[str, ...],
    dtype: torch.dtype,
    *,
    with_bf16: bool = False,
) -> Outcome:
    """A call under exponents beside the same in fp32; in bf16 if that is asked for, or decides."""
    wanted = call(case.module, given)
    try:
        error = measure_error(call(module, given, dtype), wanted)
    except StopdownError as refusal:
        return Outcome(None, 0.0, names, take_first_line(refusal))
    if error <= LEAST_ERROR and not with_bf16:
        return Outcome(error, 0.0, names)
    low = copy.deepcopy(case.module).bfloat16()
    return Outcome(error, measure_error(call(low, given, torch.bfloat16), wanted), names)


def run_table(name: str) -> dict[str, Any] | None:
    """Each optional argument of a model by itself in each mode: errors, and what was said."""
    case = make_case(name)
    if case is None or (plan := plan_case(case)) is None:
        return None
    rows: dict[str, Any] = {}
    for mode in MODES:
        said: list[str] = []
        generator = torch.Generator().manual_seed(0)
        with put(case, mode, plan, said) as module:
            for option in ("", *case.options):
                given = dict(case.first)
                if option.startswith("no "):
                    given.pop(option.removeprefix("no "))
                elif option:
                    given[option] = case.options[option](case.first, generator)
                if not _runs(case.module, given):
                    continue
                found = compare(case, module, given, (option,), torch.float16, with_bf16=True)
                _note(rows, option or "as measured", mode, found)
            for name, change in case.changes.items():
                _note(rows, name, mode, _compare_changed(case, module, name, change))
        if said:
            rows.setdefault("said", {})[mode] = sorted({take_first_line(x)[:160] for x in said})
    return rows


def _compare_changed(
    case: Case, module: nn.Module, name: str, change: Callable[[nn.Module, Arguments], Arguments]
) -> Outcome:
    """The call after a change to the model, beside a plain model with the same change."""
    plain = copy.deepcopy(case.module)
    given = {**case.first, **change(plain, case.first)}
    try:
        change(module, case.first)
    except StopdownError as refusal:
        return Outcome(None, 0.0, (name,), take_first_line(refusal))
    changed = Case(plain, case.first)
    return compare(changed, module, given, (name,), torch.float16, with_bf16=True)


def _note(rows: dict[str, Any], name: str, mode: str, found: Outcome) -> None:
    row = rows.setdefault(name, {"bf16": found.bf16})
    row["bf16"] = max(row["bf16"], found.bf16)
    row[mode] = found.said if found.error is None else found.error
    if not found.is_right:
        row.setdefault("wrong", []).append(mode)


def fuzz(name: str, count: int, seed: int = 0) -> tuple[Counter[str], list[str]]:
    """Counts of right, refused and wrong calls among drawn ones, and the wrong ones in words."""
    case = make_case(name)
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    if case is None or (plan := plan_case(case)) is None:
        return counts, wrong
    rng = random.Random(f"{name} {seed}")
    for number, mode in enumerate(MODES):
        said: list[str] = []
        mine = (
            len(range(number, count, len(MODES))) if count < _FEW else count * SHARES[number] // 100
        )
        with put(case, mode, plan, said) as module:
            for _ in range(mine):
                given, names = draw_call(case, rng)
                if not _runs(case.module, given):
                    counts["not run in fp32"] += 1
                    continue
                dtype = rng.choice((torch.float16, torch.float16, torch.float32))
                found = compare(case, module, given, names, dtype)
                kind = "refused" if found.error is None else "right" if found.is_right else "wrong"
                counts[kind] += 1
                if kind == "wrong":
                    wrong.append(f"{name}, {mode}, {names}: {found.error} (bf16 {found.bf16})")
    return counts, wrong
