"""Rules that turn the operations of a call into observations of dtype problems, with module paths.

A `Judge` receives every operation of a component call, and records problems as `Observation`; `findings`
words them. The operand at fault is one whose dtype differs from that of most of the component's weights.
The origin of its dtype shows the cause: an argument (components disagree), a parameter (a partial load,
fp32 that is not cast back), or the code in between.

**Catches** mixed operands, formats in which an operation is not implemented, positions that collapse in 16
bits, masks that hide a whole row, clamps at fp16's maximum, casts that autocast reverts.
**Does not catch** problems that depend on the values of weights; fp64 on MPS in a file that mentions MPS,
since its authors use fp32 there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from stopdown.component_call_names import name_module_path
from stopdown.devices.backend_rules import (
    BackendRule,
    Place,
    Ruling,
    find_backend_rule,
    judge_format,
    judge_operands,
)
from stopdown.dtype_rules.tracer import DtypeOrigin, Operand, Step, is_product, wants_one_dtype
from stopdown.number_formats import NEAR_FP16_END, name_dtype
from stopdown.numerics import HALVES

_MASKED = ("scaled_dot_product_attention", "add", "add_", "masked_fill", "masked_fill_", "where")


@dataclass(frozen=True)
class Observation:
    """A dtype problem of one operation.

    Attributes:
        kind: kind of the finding that it leads to.
        call: component call, such as `transformer` or `vae.decode`; `pipeline` for code outside them.
        component: name of the component.
        path: dotted path of the module in the component; "" for the component itself.
        operation: name of the operation.
        facts: values for the text of the finding.
    """

    kind: str
    call: str
    component: str
    path: str
    operation: str
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def module_path(self) -> str:
        """Module path `component:dotted.path`, without the component's method."""
        return name_module_path(self.component, self.path)


@dataclass(frozen=True)
class Case:
    """Facts about a component call that `Judge` needs.

    Attributes:
        call: name of the call.
        component: name of the component.
        main: dtype of most of its weights; None without weights.
        place: backend and versions whose rules apply.
        kept_fp32: names of parameters that its authors keep in fp32.
        is_rescaled: whether a plan has rescaled it.
        ambient: device types whose autocast was enabled around the call.
        mps_aware: paths of modules whose code uses fp32 instead of fp64 on MPS.
    """

    call: str
    component: str
    main: torch.dtype | None
    place: Place
    kept_fp32: frozenset[str] = frozenset()
    is_rescaled: bool = False
    ambient: tuple[str, ...] = ()
    mps_aware: frozenset[str] = frozenset()


class Judge:
    """Checker of the operations of one call, which records dtype problems.

    Attributes:
        found: the problems.
        operations: path of the module with the first use of each (operation, format).
        widening: paths of modules with fp32 parameters that cast their own input to fp32.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.found: list[Observation] = []
        self.operations: dict[tuple[str, str], str] = {}
        self.widening: set[str] = set()

    def __call__(self, step: Step) -> bool:
        """Check an operation before it runs; return True if its operands have incompatible dtypes."""
        refused = self._judge_operands(step)
        if not refused:
            self._judge_formats(step)
            if step.dtypes == {torch.float32} and _widens_itself(step):
                self.widening.add(step.path)
        self._judge_mask(step)
        self._judge_clamp(step)
        self._judge_autocast(step)
        return refused

    def watch(self, step: Step, given: Any, made: Any) -> None:
        """Find positions that become equal in 16 bits, in an output that doesn't depend on weights.

        Args:
            step: the operation; a cast, `arange` or `linspace` can make positions equal.
            given: values of the operation's first known argument.
            made: values of its output.
        """
        source = given if isinstance(given, torch.Tensor) else None
        if not isinstance(made, torch.Tensor) or made.dtype not in HALVES:
            return
        is_cast = step.name == "to" and source is not None
        if is_cast and source is not None and _is_counting(source):
            distinct, left = source.unique().numel(), made.unique().numel()
        elif step.name in ("arange", "linspace") and made.numel() > 1:
            distinct, left = made.numel(), made.unique().numel()
        else:
            return
        if left < distinct:
            facts = {"distinct": str(distinct), "left": str(left), "dtype": name_dtype(made.dtype)}
            facts["largest"] = f"{float((source if is_cast else made).abs().max()):.0f}"  # type: ignore[union-attr]
            self._observe("positions-collapse", step, **facts)

    def _observe(self, kind: str, step: Step, **facts: str) -> None:
        self.found.append(
            Observation(kind, self.case.call, self.case.component, step.path, step.name, facts)
        )

    def _judge_operands(self, step: Step) -> bool:
        is_autocast = bool(step.autocast) and is_product(step.name)
        if len(step.dtypes) < 2 or is_autocast:
            return False
        operation = find_backend_rule(step.name)
        if step.name == "einsum" and not _contracts(step):
            return False  # a product of values, which are brought to one dtype
        ruling = _rule(operation, step, self.case.place)
        if not ruling.accepted:
            odd = self._find_odd(step)
            facts = {"reason": ruling.reason, "source": ruling.source}
            facts["operands"] = list_operands(step)
            facts |= {"main": str(self.case.main), **_describe_origin(odd)}
            self._observe(self._classify(odd, step), step, **facts)
        return not ruling.accepted

    def _find_odd(self, step: Step) -> Operand:
        """Return the operand to blame: one without the component's main dtype, preferably an argument."""
        odd = [operand for operand in step.operands if operand.dtype != self.case.main]
        order = {"argument": 0, "parameter": 1}
        odd.sort(key=lambda operand: order.get(operand.origin.kind, 2))
        return odd[0] if odd else step.operands[0]

    def _classify(self, odd: Operand, step: Step) -> str:
        if odd.origin.kind == "argument":
            return "boundary"
        if odd.dtype == torch.float32 and _widens_itself(step):
            return "widens-itself"
        root = odd.origin.parameter
        if not root:
            return "mixed-operands"
        return "fp32-module-not-cast-back" if root in self.case.kept_fp32 else "mixed-parameters"

    def _judge_formats(self, step: Step) -> None:
        operation = find_backend_rule(step.name)
        formats = {name_dtype(dtype) for dtype in step.dtypes}
        for name in formats:
            self.operations.setdefault((step.name, name), step.path)
        if operation is None or self.case.main is None:
            return  # around the components constants of the scheduler stay on the CPU
        for name in sorted(formats):
            if name == "fp64" and step.path in self.case.mps_aware:
                continue
            ruling = judge_format(operation, self.case.place, name)
            if not ruling.accepted:
                source = f" ({ruling.source})" if ruling.source else ""
                facts = {"reason": ruling.reason, "source": source, "dtype": name}
                self._observe("not-implemented", step, **facts)

    def _judge_mask(self, step: Step) -> None:
        if step.name not in _MASKED or len(step.operands) < 1:
            return
        mask = _find_mask(step)
        if mask is None or mask.dim() < 2:
            return
        empty = count_empty(mask, is_hidden=step.name.startswith("masked_fill"))
        if empty:
            self._observe("mask-empty-row", step, items=str(empty), shape=str(list(mask.shape)))

    def _judge_clamp(self, step: Step) -> None:
        if step.name not in ("clamp", "nan_to_num") or self.case.is_rescaled:
            return
        if torch.float16 in step.dtypes and _is_end_of_range(step):
            self._observe("clamp-may-bite", step)

    def _judge_autocast(self, step: Step) -> None:
        if not self.case.ambient or not step.autocast or not is_product(step.name):
            return
        for operand in step.operands:
            is_kept = operand.origin.parameter in self.case.kept_fp32
            if operand.dtype == torch.float32 and (operand.origin.kind == "cast" or is_kept):
                said = f"a cast in {operand.origin.path or 'the code around it'}"
                said = f"the parameter {operand.origin.parameter}" if is_kept else said
                facts = {"operand": operand.name, "wide": said}
                self._observe("autocast-overrides", step, device=", ".join(step.autocast), **facts)
                return


def _contracts(step: Step) -> bool:
    """Return whether an einsum sums over an index of its operands, as a matrix product does."""
    equation = str(step.arguments.get("equation", ""))
    given, arrow, made = equation.partition("->")
    return not arrow or not set(given) - set(", .") <= set(made)


def _widens_itself(step: Step) -> bool:
    """Return whether a module itself casts a value to fp32 and combines it with its own parameters."""
    origins = [operand.origin for operand in step.operands]
    casts = any(
        operand.dtype == torch.float32
        and operand.origin.kind == "cast"
        and operand.origin.path == step.path
        for operand in step.operands
    )
    owners = [x.name.rpartition(".")[0] for x in origins if x.kind == "parameter"]
    return casts and step.path in owners


def _rule(operation: BackendRule | None, step: Step, place: Place) -> Ruling:
    """Apply the backend's rule to an operation's operands; without one, decide by its kind."""
    if operation is not None and place.backend in operation.rows:
        return judge_operands(operation, place, _name_formats(operation, step))
    accepted = not wants_one_dtype(step.name) or step.name == "rms_norm"
    reason = f"{step.name} takes operands of one dtype, and got {list_operands(step)}."
    return Ruling(accepted, reason)


def _name_formats(operation: BackendRule, step: Step) -> dict[str, list[str]]:
    """Map the operand names of a backend rule to formats; match by position if the names differ."""
    named: dict[str, list[str]] = {}
    for operand in step.operands:
        named.setdefault(operand.name, []).append(name_dtype(operand.dtype))
    if set(named) <= set(operation.operands):
        return named
    if len(operation.operands) == 1:
        return {operation.operands[0]: [fmt for formats in named.values() for fmt in formats]}
    return dict(zip(operation.operands, named.values(), strict=False))


def list_operands(step: Step) -> str:
    """List an operation's operands with their formats: `input fp32, weight fp16`."""
    return ", ".join(f"{o.name} {name_dtype(o.dtype)}" for o in step.operands)


def _describe_origin(odd: Operand) -> dict[str, str]:
    origin: DtypeOrigin = odd.origin
    facts = {"odd": odd.name, "odd_dtype": name_dtype(odd.dtype), "origin": str(origin)}
    if origin.kind == "argument":
        facts["argument"] = origin.name
        facts["came"] = f" (it comes from {origin.before})" if origin.before else ""
    if origin.parameter:
        facts["parameter"] = origin.parameter
    return facts


def _is_counting(values: torch.Tensor) -> bool:
    """Return whether a tensor has at least two values, all integers, as positions are."""
    if values.numel() < 2 or values.dtype == torch.bool or values.dtype in HALVES:
        return False
    wide = values.double()
    finite = torch.isfinite(wide).all() and bool((wide == wide.round()).all())
    return bool(finite) and bool(wide.abs().max() < 2**40)


def _find_mask(step: Step) -> torch.Tensor | None:
    if step.name == "scaled_dot_product_attention":
        return step.known.get("attn_mask")
    if step.name.startswith("masked_fill"):
        value = step.arguments.get("value")
        return step.known.get("mask") if _is_lowest(value) else None
    if step.name == "where":
        condition = step.known.get("condition")
        other = step.arguments.get("other")
        hides = _is_lowest(step.known.get("other") if isinstance(other, torch.Tensor) else other)
        return condition if hides and "self" not in step.known else None
    if len(step.known) == len(step.operands):
        return None  # a mask that is being built, not used
    return next((x for x in step.known.values() if x.is_floating_point()), None)


def _is_lowest(value: Any) -> bool:
    """Return whether a number stands for minus infinity in attention scores."""
    if isinstance(value, torch.Tensor):
        value = float(value) if value.numel() == 1 else 0.0
    return isinstance(value, (int, float)) and value < -1e4


def count_empty(mask: torch.Tensor, *, is_hidden: bool = False) -> int:
    """Count the items of a batch in which a mask hides every key from every query.

    Single rows that hide all keys, as for the padding of left-padded prompts, are harmless and not counted.

    Args:
        mask: `[..., queries, keys]` boolean (True keeps a score) or floating (added to scores).
        is_hidden: whether True in a boolean mask hides a score instead.
    """
    if mask.dtype == torch.bool:
        hidden = mask if is_hidden else ~mask
    elif mask.is_floating_point():
        hidden = mask <= 0.9 * torch.finfo(mask.dtype).min
    else:
        return 0
    return int(hidden.flatten(-2).all(dim=-1).sum()) if hidden.numel() else 0


def _is_end_of_range(step: Step) -> bool:
    bounds = {k: v for k, v in step.arguments.items() if k not in ("self", "input")}
    for name, bound in bounds.items():
        if isinstance(bound, torch.Tensor) and name in step.known:
            bound = float(step.known[name].abs().amax()) if bound.numel() else 0.0
        if isinstance(bound, torch.Tensor):
            return True  # as T5 chooses it, by finfo
        if isinstance(bound, (int, float)) and abs(bound) >= NEAR_FP16_END:
            return True
    return step.name == "nan_to_num"
