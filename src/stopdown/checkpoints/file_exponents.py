"""Exponents of a component in the form that files can store: folded weights, and eps in `config.json`.

Weight files cannot store multiplies, fp32 modules or casts, and a field of `config.json` sets the eps of
many norms at once, or of none. If a plan consists of folds alone and each eps has a field, its exponents
are written unchanged. Otherwise these are tried in order:

1. the plan's own folds, if the eps that cannot be written change no bit of an output, or little of the
   output of a certified component;
2. new folds for which the eps of one field change together and all others are unchanged, which is exact;
3. new folds that scale only those norms whose inputs are far larger than their eps;
4. the plan's own folds, or new folds with any eps, whichever change the output least.

If the plan was derived from bounds, new exponents are too, if some satisfy the bounds.

The change by 1, 3 and 4 is measured on recorded calls in fp32, with and without the eps that cannot be
written.

Which norms a field sets is found by trial: the component is built twice on fake tensors, once as configured
and once with the field doubled. The field sets the eps that doubled. Nested configurations, such as that of
a language model in a vision-language model, are searched too.

Not covered: eps that are literals in the code of a class; effects on calls that were not recorded.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from stopdown.errors import CaptureError, ScalingError
from stopdown.fake_tensors.fake_modules import build_fake
from stopdown.fold_names import read_clamp, split_fold_name
from stopdown.interception.patches import Patches
from stopdown.module_calls.answers import reads_values
from stopdown.module_calls.call_interception import bared
from stopdown.module_calls.kept_state import run_call
from stopdown.numerics import iterate_tensors
from stopdown.plans.exponents import group_calls, leave_out_failing
from stopdown.records import ComponentPlan, Scaling
from stopdown.scaling import ComponentCall, FoldsAlone, fold_scaling, has_more_than_folds
from stopdown.sources.single_file_names import read_layouts

EFFECT_LIMIT = 2.0**-11
"""Largest relative change of an output that is accepted: half a unit in the last place of fp16."""

INVISIBLE = (0.0, 2.0**-24, 2.0**-20, 2.0**-16)
"""Relative changes of a norm's output up to which its eps may stay unscaled, in the order of trials."""

_Freedom = Mapping[str, Any]
"""Arguments of `FoldsAlone.find`: which eps may change."""

Fields = Mapping[str, frozenset[str]]
"""Maps a configuration field to the eps attributes that it sets, as `module.path.attribute`."""


@dataclass(frozen=True)
class FileExponents:
    """Exponents of a component in the form that files can store.

    Attributes:
        scaling: exponents of weights, and of the eps of norms that configuration fields set.
        fields: new values of configuration fields.
        left: eps that no field sets and so stay unscaled, with the exponents that they should have.
        effect: relative L2 change of the outputs because of `left`, the largest of all calls.
        calls: number of calls on which it was measured; 0 if `left` is empty.
        anew: whether the exponents are new ones and not the plan's.
    """

    scaling: Scaling
    fields: Mapping[str, float] = field(default_factory=dict)
    left: Mapping[str, int] = field(default_factory=dict)
    effect: float = 0.0
    calls: int = 0
    anew: bool = False


def express_component(
    module: torch.nn.Module,
    entry: ComponentPlan,
    record: Callable[[], Sequence[ComponentCall]],
    *,
    has_config: bool = True,
) -> FileExponents:
    """Express a component's exponents in a form that files can store, with the least effect on outputs.

    Args:
        module: the component in fp32, which is left unchanged.
        entry: its plan.
        record: returns the pipeline's calls of the component; only called if they are needed.
        has_config: whether the output has a configuration beside the weights.

    Raises:
        ScalingError: no form was found, or there are no calls to measure with.

    Cost: none if the plan can be written as it is; else a run of the pipeline, and a capture and two
    forward passes in fp32 for each kind of call. If the plan has bounds and new exponents are needed,
    also passes over the weights.
    """
    if entry.in_force.exponents and any(map(reads_values, entry.in_force.signatures)):
        raise ScalingError(
            "Its code reads values of its arguments, and its exponents hold only for the values it read: "
            "files can't compare them at each call."
        )
    fields = find_eps_fields(module) if has_config else {}
    layout = None if has_config else read_layouts().get(type(module).__name__)
    narrow = layout.narrow if layout else ()
    planned = None
    if _is_folds_alone(module, entry):
        planned = _write_eps(module, entry.in_force, fields)
        if not planned.left and not narrow:
            return planned
    calls = leave_out_failing(module, record())
    if not calls:
        raise ScalingError(
            f"Its plan has {describe_rest(entry)}, and no run of the pipeline calls it to measure what "
            "that changes."
        )
    search = _Search(module, calls, fields, narrow)
    with bared(module):
        best, freedom = search.find_best(planned, certified=bool(entry.in_force.certified))
        if best is not None and freedom is not None and rests_on_bounds(entry.in_force):
            ranges = "auto" if entry.calls and not entry.in_force.certified else "bound"
            best = search.certify(best, freedom, ranges)
    if best is None:
        raise ScalingError(
            "Powers of two in its weights alone don't keep its activations within fp16's range; its plan "
            f"has {describe_rest(entry)}."
        )
    return replace(best, scaling=replace(best.scaling, signatures=search.folds.signatures))


def describe_rest(entry: ComponentPlan) -> str:
    """Describe a plan's parts other than folds: `2 multiplies and the fp32 module patch_embed`."""
    parts, scaling = [], entry.in_force
    if count := len(scaling.multiplies):
        parts.append(f"{count} multipl{'y' if count == 1 else 'ies'}")
    if scaling.fp32_modules:
        parts.append(
            f"the fp32 module{'s' * (len(scaling.fp32_modules) > 1)} {', '.join(scaling.fp32_modules)}"
        )
    if scaling.outputs:
        parts.append("an output in fp32")
    if scaling.stream is not None:
        inside = ", ".join(scaling.stream.cast_output_down)
        parts.append(f"fp32 sums inside {inside}" if inside else "an fp32 residual stream")
    if scaling.operands:
        parts.append("casts of operands that its code mixes")
    return " and ".join(parts) or "eps that no configuration field sets"


def rests_on_bounds(scaling: Scaling) -> bool:
    """Return whether a scaling was derived from bounds on activations, and not on weights alone."""
    return bool(scaling.bounded and scaling.range_note)


def _is_folds_alone(module: torch.nn.Module, entry: ComponentPlan) -> bool:
    """Return whether a plan only scales tensors that files store, and possibly the eps of norms."""
    stored = module.state_dict().keys()
    are_stored = all(split_fold_name(name)[0] in stored for name in entry.in_force.exponents)
    return are_stored and not has_more_than_folds(entry.in_force)


@dataclass(frozen=True)
class _Search:
    """Search for exponents of a module in the form that files can store.

    Attributes:
        calls: recorded calls on which effects are measured.
        narrow: module classes that Diffusers keeps in fp32 and other readers of the file run in fp16.
    """

    module: torch.nn.Module
    calls: Sequence[ComponentCall]
    fields: Fields
    narrow: Collection[str]

    @functools.cached_property
    def folds(self) -> FoldsAlone:
        """The search for exponents in weights alone, with every kind of call measured.

        Made-up calls that cannot be captured are left out.
        """
        found = FoldsAlone(self.module)
        for group in group_calls(self.calls):
            try:
                found.measure([call.place(self.module) for call in group])
            except (CaptureError, ScalingError):
                if not group[0].made_up:
                    raise
        return found

    def find_best(
        self, planned: FileExponents | None, *, certified: bool
    ) -> tuple[FileExponents | None, _Freedom | None]:
        """Find the exponents that change the outputs least, or the first that change them little enough.

        Returns:
            The exponents, or None; and which norms' eps were free to change, or None if the exponents are
            the plan's own.
        """
        best: FileExponents | None = None
        freedom: _Freedom | None = None
        if planned is not None and not self.narrow:
            best = self._measure(planned)
            if best.effect <= (EFFECT_LIMIT if certified else 0.0):
                return best, None
        for given, most in self._list_freedoms(planned):
            found = self.folds.find(**given)
            if found is None:
                continue
            tried = self._measure(_write_eps(self.module, found, self.fields, anew=True))
            if best is None or tried.effect < best.effect:
                best, freedom = tried, given
            if best.effect <= most:
                break
        if best is None and planned is not None:
            best = self._measure(planned)
        return best, freedom

    def certify(self, best: FileExponents, freedom: _Freedom, ranges: str) -> FileExponents:
        """Find exponents with proven bounds, as many as a small change of the outputs allows.

        Args:
            best: exponents without bounds, which are returned if none can be proven.
            freedom: which norms' eps may change, as for `best`.

        Cost: as for `FoldsAlone.find_bounded`, and after each solution a forward in fp32 for each call.
        """
        most = max(best.effect, EFFECT_LIMIT)

        def accepts(found: Scaling) -> bool:
            return self._measure(_write_eps(self.module, found, self.fields)).effect <= most

        try:
            scaling = self.folds.find_bounded(ranges, accepts, **freedom)
        except ScalingError:
            return best
        if not scaling.bounded:
            return best
        return self._measure(_write_eps(self.module, scaling, self.fields, anew=True))

    def _measure(self, candidate: FileExponents) -> FileExponents:
        measured = _measure_effect(self.module, candidate, self.calls, self._before)
        return replace(candidate, **measured)

    @functools.cached_property
    def _before(self) -> list[torch.Tensor]:
        return list(_run(self.module, self.calls))

    def _list_freedoms(self, planned: FileExponents | None) -> Iterator[tuple[_Freedom, float]]:
        """Yield which norms' eps may change, the fewest first, with the change of the outputs to accept."""
        groups = list(self.fields.values())
        for free, most in _list_free(self.module, planned, self.calls):
            yield {"groups": groups, "free": free, "narrow": self.narrow}, most
        if groups:
            yield {"free": None, "narrow": self.narrow}, EFFECT_LIMIT


def _list_free(
    module: torch.nn.Module, planned: FileExponents | None, calls: Sequence[ComponentCall]
) -> Iterator[tuple[Collection[str] | None, float]]:
    """Yield sets of norms' eps to scale though no configuration field sets them, the smallest set first.

    With each comes the change of the outputs to accept. None stands for all eps.
    """
    yield (), EFFECT_LIMIT
    effects = measure_norms(module, planned.left, calls) if planned is not None else {}
    known: set[str] = set()
    for most in INVISIBLE:
        free = {place for place, effect in effects.items() if effect <= most}
        if free != known:
            known = free
            yield free, most
    yield None, EFFECT_LIMIT


def measure_norms(
    module: torch.nn.Module, eps: Mapping[str, int], calls: Sequence[ComponentCall]
) -> dict[str, float]:
    """Measure the change in each norm's output if its input is scaled but its eps is not.

    Args:
        eps: maps `module.path.attribute` to the exponent that it should have; limits of clamps in code
            are skipped.

    Returns:
        The largest relative change over all calls, by `module.path.attribute`.

    Cost: a forward pass in fp32 for each call, and two more of each such norm.
    """
    eps = {x: exponent for x, exponent in eps.items() if read_clamp(x.rpartition(".")[2]) is None}
    worst = dict.fromkeys(eps, 0.0)

    def compare(place: str, norm: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if place in busy:
            return
        busy.add(place)
        name = place.rpartition(".")[2]
        with Patches() as patches:
            patches.set_attribute(norm, name, math.ldexp(getattr(norm, name), -eps[place]))
            other = norm(*args, **kwargs)
        busy.discard(place)
        for old, new in zip(iterate_tensors(output), iterate_tensors(other), strict=True):
            worst[place] = max(worst[place], _compare(old, new))

    busy: set[str] = set()
    with Patches() as patches:
        for place in eps:
            norm = module.get_submodule(place.rpartition(".")[0])
            hook = functools.partial(compare, place)
            patches.defer(norm.register_forward_hook(hook, with_kwargs=True).remove)
        for _ in _run(module, calls):
            pass
    return worst


def _write_eps(
    module: torch.nn.Module, scaling: Scaling, fields: Fields, *, anew: bool = False
) -> FileExponents:
    """Assign the scaled eps of norms to configuration fields; list those that no field can set."""
    written: dict[str, int] = {}
    values: dict[str, float] = {}
    for name, places in fields.items():
        wanted = {scaling.eps.get(place, 0) for place in places}
        exponent = wanted.pop()
        value = math.ldexp(read_field(module, name), exponent)
        if not wanted and exponent and value >= torch.finfo(torch.float32).tiny:
            written |= dict.fromkeys(places, exponent)
            values[name] = value
    left = {place: exponent for place, exponent in scaling.eps.items() if place not in written}
    return FileExponents(replace(scaling, eps=written), values, left, anew=anew)


def _measure_effect(
    module: torch.nn.Module,
    expressed: FileExponents,
    calls: Sequence[ComponentCall],
    before: Sequence[torch.Tensor],
) -> dict[str, Any]:
    """Measure the largest relative L2 change in the outputs that unscaled eps cause; inf if not finite.

    Args:
        before: outputs of the unchanged module.
    """
    worst = 0.0
    rescaling = fold_scaling(module, expressed.scaling)
    try:
        for old, new in zip(before, _run(module, calls), strict=True):
            worst = max(worst, _compare(old, new))
    finally:
        rescaling.undo()
    return {"effect": worst, "calls": len(calls)}


def _run(module: torch.nn.Module, calls: Sequence[ComponentCall]) -> Iterator[torch.Tensor]:
    for call in calls:
        output, _ = run_call(module, *call.place(module))
        yield from (x.cpu() for x in iterate_tensors(output) if x.is_floating_point())


def _compare(old: torch.Tensor, new: torch.Tensor) -> float:
    if torch.equal(old, new):
        return 0.0
    size = float(old.double().norm()) or 1.0
    error = float((new.double() - old.double()).norm()) / size
    return error if math.isfinite(error) else math.inf


_LARGEST = 0.1
"""Attributes named eps with larger values are not eps of norms."""


def find_eps_fields(module: torch.nn.Module) -> dict[str, frozenset[str]]:
    """Map each configuration field that sets eps to the attributes it sets, `module.path.attribute`.

    A field of a nested configuration is written `text_config.rms_norm_eps`. Empty for a module without a
    configuration.

    Cost: builds the component once without weights, and once more for each field.
    """
    fields = dict(_iterate_fields(_read_config(module)))
    if not fields:
        return {}
    before = list_eps(_build(module, {}))
    found = {}
    for name, value in fields.items():
        after = list_eps(_build(module, {name: 2 * value}))
        found[name] = frozenset(x for x, eps in before.items() if after.get(x) == 2 * eps)
    return {name: places for name, places in found.items() if places}


def read_field(module: torch.nn.Module, name: str) -> float:
    value: Any = _read_config(module)
    for part in name.split("."):
        value = value[part]
    return float(value)


def list_eps(module: torch.nn.Module) -> dict[str, float]:
    """Return the value of every eps attribute of a module, by `module.path.attribute`."""
    return {
        ".".join(filter(None, (path, name))): held
        for path, owner in module.named_modules()
        for name, held in vars(owner).items()
        if _is_eps(name, held)
    }


def _is_eps(name: Any, held: Any) -> bool:
    return "eps" in str(name).lower() and type(held) is float and 0 < held < _LARGEST


def _read_config(module: torch.nn.Module) -> dict[str, Any]:
    config: Any = getattr(module, "config", None)
    if config is None:
        return {}
    return dict(config) if isinstance(config, Mapping) else config.to_dict()


def _iterate_fields(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, held in config.items():
        if isinstance(held, Mapping):
            yield from _iterate_fields(held, f"{prefix}{name}.")
        elif _is_eps(name, held):
            yield f"{prefix}{name}", held


def _build(module: torch.nn.Module, changes: Mapping[str, float]) -> torch.nn.Module:
    """Build the component on fake tensors from its configuration, with some fields changed."""
    kind: Any = type(module)
    if isinstance(module.config, Mapping):
        changed = {**module.config, **changes}
        changed.pop("_use_default_values", None)  # with it Diffusers would overrule the change
        return build_fake(lambda: kind.from_config(changed), torch.float32)
    config: Any = copy.deepcopy(module.config)
    for name, value in changes.items():
        *outer, last = name.split(".")
        owner = config
        for part in outer:
            owner = getattr(owner, part)
        setattr(owner, last, value)
    return build_fake(lambda: kind(config), torch.float32)
