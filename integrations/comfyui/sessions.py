"""Guards around the calls that ComfyUI makes of a MODEL, a CLIP or a VAE.

ComfyUI loads weights, patches LoRA into them and moves them between devices as it likes. So
nothing of a guard stays on a model: it is put on when ComfyUI has loaded what it is about to run (the
sampler's wrapper, or a call of `encode` or `decode`), and comes off, to the last bit, before ComfyUI
goes on. What it found is kept by the session and put on again at the next run.

Weights that ComfyUI leaves in host memory and patches at each call (`--lowvram` with a LoRA) are
patched for the run, as ComfyUI does for weights that it loads: exponents can be folded into them then.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

KEY = "stopdown"
"""By which ComfyUI knows our wrappers."""

_CALLS = {
    "vae": ("decode", "encode", "decode_tiled", "encode_tiled"),
    "clip": ("encode_from_tokens", "encode_from_tokens_scheduled"),
}

_SESSIONS = "stopdown_sessions"
"""Attribute of a guarded CLIP or VAE."""

SUMS = ("sums-in-fp16", "sum-overflows", "sum-may-overflow", "product-overflows")
"""Findings about sums."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """What a node was asked for.

    Attributes:
        on_fault: `repair`, `raise` or `warn`.
        fp16: compute in fp16, whatever ComfyUI would choose, by a plan from the weights.
        sums: before the first run of a model, run it in fp32 and look at the sums inside of its products.
    """

    on_fault: str = "repair"
    fp16: bool = False
    sums: bool = False


@dataclass
class Session:
    """The runs of one node's models, and what was seen in them.

    Attributes:
        options: of the node.
        runs: name of the model and its guard's record, of each run since they were taken last.
        plans: by what is run: `model`, or the method as in `vae.decode`.
        calls: the first and the last call of each component in the MODEL's latest run, by component.
        sums: what was found about the sums of each, by the same names.
    """

    options: Options
    runs: list[tuple[str, Any]] = field(default_factory=list)
    plans: dict[str, Any] = field(default_factory=dict)
    calls: dict[str, list[Any]] = field(default_factory=dict)
    sums: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    _cache: Any = None

    @contextlib.contextmanager
    def guarding(
        self, name: str, program: Any, run: Callable[[], Any], method: str = ""
    ) -> Iterator[Any]:
        """Around one run of a model that ComfyUI has loaded.

        Args:
            name: `model`, `clip` or `vae`.
            program: the MODEL's patcher, the CLIP or the VAE.
            run: makes the same run once more. It is stopped where it first calls a component.
            method: of the CLIP or the VAE that is run; each has a plan for its own calls.
        """
        from stopdown.embedding import RepairCache
        from stopdown.scaling import Patches

        self._cache = self._cache or RepairCache()
        with Patches() as patches:
            apply_weight_functions(program, patches)
            key = f"{name}.{method}" if method else name
            self._check_sums(key, program, run)
            is_fp16 = self.options.fp16
            guard = self._put_on_plan(key, program, run) if is_fp16 else self._put_on(program)
            try:
                if is_fp16:
                    put_casts(program, patches)
                if name == "model":
                    self.calls = keep_calls(program, patches)
                yield guard
            finally:
                if (updated := guard.updated_plan()) is not None:
                    self.plans[key] = updated  # a repair holds for later runs
                guard.remove()
                findings = *guard.record.findings, *self.sums.get(key, ())
                self.runs.append((name, replace(guard.record, findings=findings)))

    def _put_on(self, program: Any, plan: Any = None) -> Any:
        from stopdown.embedding import Guard, GuardOptions

        options = GuardOptions(
            on_fault=self.options.on_fault,  # type: ignore[arg-type]
            announce=log.warning,
            plan=plan,
            repair_cache=None if plan else self._cache,
        )
        return Guard(program, options).put_on()

    def _put_on_plan(self, key: str, program: Any, run: Callable[[], Any]) -> Any:
        """Put on a guard with the plan of these weights: the last run's, if they are still the same.

        A LoRA loaded behind the node changes them, and so does the memory that ComfyUI has for a LoRA.

        Cost: the first time that these weights are met here, captures and one pass over them.
        """
        import stopdown
        from stopdown.errors import PlanError

        if key in self.plans:
            with contextlib.suppress(PlanError):
                return self._put_on(program, self.plans[key])
        log.info("Stopdown loads or computes exponents for the weights of the %s.", key)
        self.plans[key] = stopdown.make_plan(program, run=run)
        return self._put_on(program, self.plans[key])

    def _check_sums(self, key: str, program: Any, run: Callable[[], Any]) -> None:
        """What `stopdown check --sums` says of a model, once.

        Cost: a run in fp32, with a product for each group of 16 values.
        """
        import stopdown

        if self.options.sums and key not in self.sums:
            log.info(
                "Stopdown runs the %s in fp32 and measures the sums in its matrix products.", key
            )
            found = stopdown.check(program, precision="fp16", sums=True, run=run)
            self.sums[key] = tuple(x for x in found if x.kind in SUMS)

    def take_runs(self) -> list[tuple[str, Any]]:
        """The runs so far, which are forgotten here."""
        runs, self.runs = self.runs, []
        return runs


def clone_patcher(patcher: Any) -> Any:
    """A clone whose weights are where a run finds them, as ComfyUI's node for torch.compile makes it.

    Under DynamicVRAM weights are paged in at each call, and what is resident does not follow a change.
    """
    is_dynamic = getattr(patcher, "is_dynamic", None)
    if is_dynamic is not None and is_dynamic():
        return patcher.clone(disable_dynamic=True)
    return patcher.clone()


def guard_model(model: Any, session: Session) -> Any:
    """A clone of a MODEL whose sampling is guarded."""
    import torch
    from comfy.patcher_extension import WrappersMP

    clone = clone_patcher(model)
    if session.options.fp16:
        clone.set_model_compute_dtype(torch.float16)

    def sample(executor: Any, guider: Any, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(executor, guider, *args, **kwargs)
        with session.guarding("model", guider.inner_model.current_patcher, run):
            return run()

    clone.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, KEY, sample)
    return clone


def guard_clip(clip: Any, session: Session) -> Any:
    """A clone of a CLIP whose encoding is guarded, and so is that of its own clones."""
    clone = clip.clone()
    clone.patcher = clone_patcher(clip.patcher)
    clone.cond_stage_model = clone.patcher.model
    return _guard_calls(clone, "clip", (*_find_sessions(clip), session))


def guard_vae(vae: Any, session: Session) -> Any:
    """A copy of a VAE whose encoding and decoding is guarded."""
    import torch

    clone = copy.copy(vae)
    clone.patcher = clone_patcher(vae.patcher)
    clone.first_stage_model = clone.patcher.model
    if session.options.fp16:
        vars(clone.first_stage_model).setdefault(
            "manual_cast_dtype", None
        )  # 0.3 replaces only what is there
        clone.patcher.set_model_compute_dtype(torch.float16)
        clone.vae_dtype = torch.float16
    return _guard_calls(clone, "vae", (*_find_sessions(vae), session))


def _find_sessions(program: Any) -> tuple[Session, ...]:
    """The sessions of the nodes that a CLIP or a VAE came through, the first one first."""
    return vars(program).get(_SESSIONS, ())


def _guard_calls(program: Any, name: str, sessions: tuple[Session, ...]) -> Any:
    """The same object with guards around its calls, the outermost of which count."""
    running: list[str] = []
    if _find_sessions(program):  # a copy: these are the calls of another object
        for method in _CALLS[name]:
            vars(program).pop(method, None)

    def call(original: Callable[..., Any], method: str, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(original, *args, **kwargs)
        if running:
            return run()
        import comfy.model_management

        running.append(name)
        try:
            comfy.model_management.load_models_gpu([program.patcher])
            with contextlib.ExitStack() as stack:
                guards = [
                    stack.enter_context(session.guarding(name, program, run, method))
                    for session in sessions
                ]
                output = run()
                for guard in guards if method.startswith("decode") else ():
                    guard.check_frames((output,))  # `[B, H, W, 3]` floating in 0 to 1
                return output
        finally:
            running.pop()

    for method in _CALLS[name]:
        if callable(original := getattr(program, method, None)):
            setattr(program, method, functools.partial(call, original, method))
    if name == "clip":  # other nodes clone it, to set its last layer or add a LoRA

        def clone() -> Any:
            return _guard_calls(type(program).clone(program), name, sessions)

        program.clone = clone
    setattr(program, _SESSIONS, sessions)
    return program


def put_casts(program: Any, patches: Any) -> None:
    """Have text encoders computed in fp16: ComfyUI gives them fp32, and takes fp32 from them."""
    import torch

    from stopdown.embedding import find_callees
    from stopdown.scaling import put_cast

    if hasattr(program, "cond_stage_model"):
        for callee in find_callees(program):
            put_cast(callee, torch.float16, patches)


def apply_weight_functions(program: Any, patches: Any) -> None:
    """Apply what ComfyUI would do to a weight at each call, for one run.

    Cost: a copy of each weight that has such functions, in the memory where it waits.
    """
    import torch

    from stopdown.embedding import find_components

    plain = (torch.Tensor, torch.nn.Parameter)  # quantised weights are left alone
    for component in find_components(program).values():
        for module in component.modules():
            for name in ("weight", "bias"):
                functions = getattr(module, f"{name}_function", None)
                tensor: Any = getattr(module, name, None)
                if functions and type(tensor) in plain and tensor.element_size() > 1:
                    value = tensor.detach().to(torch.float32, copy=True)  # rounded once
                    for function in functions:
                        value = function(value)
                    before = tensor.data
                    patches.defer(functools.partial(setattr, tensor, "data", before))
                    tensor.data = value.to(before.dtype)
                    patches.set_attribute(module, f"{name}_function", [])


def keep_calls(program: Any, patches: Any) -> dict[str, list[Any]]:
    """The first and the last call of each component, by name; they fill in while the program runs."""
    from stopdown.embedding import find_callees
    from stopdown.scaling import ComponentCall, Rank, intercept

    kept: dict[str, list[Any]] = {}

    def keep(call: Any) -> Any:
        plain = {key: value for key, value in call.kwargs.items() if key != "transformer_options"}
        known = kept.setdefault(call.callee.name, [])
        known[1:] = [ComponentCall(call.callee, call.args, plain)]  # after the first one
        return call.proceed()

    for callee in find_callees(program):
        intercept(callee, keep, patches, Rank.RECORD)
    return kept
