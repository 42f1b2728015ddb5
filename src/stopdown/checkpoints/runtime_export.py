"""Components with their exponents inside as ONNX or OpenVINO IR, by the exporters of those two.

A component gets its plan as it gets it for a run: folds, eps, multiplies, and for ONNX in fp16 its casts.
What the exporter then traces has all of it, so nothing of a plan is lost that a weight file could not
hold. The sizes are those of the call that is traced.

**Catches** components without an fp16 plan, fp32 modules that OpenVINO's inference precision would
override, exporters that are not installed or refuse the code.
**Does not catch** what a runtime does with the graph: fused kernels, a precision of its own.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from stopdown.errors import OptionError, take_first_line
from stopdown.numerics import iterate_tensors
from stopdown.patches import Patches
from stopdown.plans.applier import apply_entry
from stopdown.plans.call_recorder import RecordedCall
from stopdown.plans.exponents import find_call, place_arguments
from stopdown.records import ComponentPlan

Form = Literal["onnx", "openvino"]

ENDINGS: Mapping[Form, str] = {"onnx": ".onnx", "openvino": ".xml"}


class _Traced(torch.nn.Module):
    """A call of a component as a module of tensors only: what else it was given is closed over."""

    def __init__(
        self, owner: torch.nn.Module, call: Callable[..., Any], leaves: Sequence[Any], spec: Any
    ) -> None:
        super().__init__()
        self.owner, self._call, self._leaves, self._spec = owner, call, leaves, spec

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = iter(tensors)
        leaves = [next(given) if isinstance(x, torch.Tensor) else x for x in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        made = self._call(*args, **kwargs)
        return tuple(x for x in iterate_tensors(made) if x.is_floating_point())


def list_inputs(call: RecordedCall) -> list[torch.Tensor]:
    """The tensors of a call in the order in which an exported graph takes them."""
    leaves, _ = pytree.tree_flatten((call.args, call.kwargs))
    return [x for x in leaves if isinstance(x, torch.Tensor)]


def export_component(
    module: torch.nn.Module,
    entry: ComponentPlan | None,
    call: RecordedCall,
    target: Path,
    *,
    form: Form,
    precision: Literal["fp16", "fp32"] = "fp16",
) -> None:
    """Write one call of a component with its exponents inside; the module is left as it was.

    Args:
        module: in fp32.
        entry: its plan; None exports it without exponents.
        call: whose sizes and plain arguments the graph has.
        target: `.onnx`, or `.xml` with a `.bin` beside it.
        precision: of an ONNX graph's weights and values. IR keeps fp32 values and takes its precision
            from the runtime, and its weights are stored in fp16 for `fp16`.

    Raises:
        OptionError: it has no fp16 plan, the exporter is missing or refuses the code, or the form cannot
            hold the plan.
    """
    _refuse(entry, form)
    is_cast = form == "onnx" and precision == "fp16"
    with Patches() as patches:
        _use_plain_attention(module, patches)
        if entry is not None:
            apply_entry(module, entry, patches, cast=is_cast)
        elif is_cast:
            apply_entry(module, ComponentPlan("", "", "", "fp16"), patches)
        args, kwargs = pytree.tree_map_only(
            torch.Tensor,
            lambda x: x.half() if is_cast and x.dtype == torch.float32 else x,
            place_arguments(module, call),
        )
        leaves, spec = pytree.tree_flatten((args, kwargs))
        traced = _Traced(module, find_call(module, call), leaves, spec).eval()
        given = tuple(x for x in leaves if isinstance(x, torch.Tensor))
        write = {"onnx": _write_onnx, "openvino": _write_openvino}[form]
        try:
            with torch.no_grad(), _quiet():
                write(traced, given, target, precision)
        except OptionError:
            raise
        except Exception as error:  # whatever an exporter raises for code that it does not know
            raise OptionError(
                f"{type(module).__name__} could not be exported to {form}: {take_first_line(error)}.",
                expected="The exporter traces the component's own code.",
                remedy="Try the other form: --to openvino or --to onnx.",
            ) from error


def _refuse(entry: ComponentPlan | None, form: Form) -> None:
    if entry is None:
        return
    if entry.precision != "fp16":
        raise OptionError(
            f"The plan runs {entry.component} in {entry.precision}. {' '.join(entry.reasons)}",
            expected="What is exported runs in fp16.",
            remedy="Name another component: --component NAME.",
        )
    scaling = entry.scaling
    if form == "openvino" and (scaling.fp32_modules or scaling.stream is not None):
        raise OptionError(
            f"The plan keeps parts of {entry.component} in fp32.",
            expected="OpenVINO runs all of an IR in the inference precision that it is compiled for.",
            remedy="Export it to ONNX, whose casts stand in the graph: --to onnx.",
        )


def _use_plain_attention(module: torch.nn.Module, patches: Patches) -> None:
    """Attention as products and a softmax: exporters stumble over the strides of fused kernels."""
    config = getattr(module, "config", None)
    if getattr(config, "_attn_implementation", None) not in (None, "eager"):
        patches.set_attribute(config, "_attn_implementation", "eager")


@contextlib.contextmanager
def _quiet() -> Any:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _require(name: str, extra: str) -> None:
    import importlib.util

    if importlib.util.find_spec(name) is None:
        raise OptionError(
            f"The package {name} is not installed.",
            expected="A component is exported by the runtime's own exporter.",
            remedy=f"Install it: pip install 'stopdown[{extra}]'",
        )


def _write_onnx(
    traced: torch.nn.Module, given: tuple[torch.Tensor, ...], target: Path, precision: str
) -> None:
    for name in ("onnx", "onnxscript"):
        _require(name, "onnx")
    torch.onnx.export(traced, given, target, dynamo=True, external_data=False, verbose=False)


def _write_openvino(
    traced: torch.nn.Module, given: tuple[torch.Tensor, ...], target: Path, precision: str
) -> None:
    _require("openvino", "openvino")
    import openvino

    made = openvino.convert_model(traced, example_input=given)
    openvino.save_model(made, target, compress_to_fp16=precision == "fp16")
