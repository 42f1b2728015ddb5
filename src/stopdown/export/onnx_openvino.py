"""Components with their exponents inside as ONNX or OpenVINO IR, by the exporters of those two.

A component gets its plan as it gets it for a run: folds, eps, multiplies, and for ONNX in fp16 its casts.
What the exporter then traces has all of it, so nothing of a plan is lost that a weight file could not
hold. The sizes are those of the call that is traced.

Not covered: what a runtime does with the graph: fused kernels, a precision of its own.
"""

from __future__ import annotations

import contextlib
import inspect
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from stopdown.component_calls.call import ComponentCall
from stopdown.devices.environment import require_package
from stopdown.errors import OptionError, ignoring_warnings, take_first_line
from stopdown.files.outputs import check_target, written_beside
from stopdown.interception.patches import Patches
from stopdown.numerics import iterate_tensors
from stopdown.pipelines.class_selection import select_class
from stopdown.pipelines.loader import complete_source, load_program
from stopdown.pipelines.requests import Request
from stopdown.plans.applier import apply_entry, check_source
from stopdown.plans.dry_calls import draw_calls
from stopdown.records import ComponentPlan, Plan
from stopdown.sources.hub import Progress
from stopdown.sources.sources import Source

Form = Literal["onnx", "openvino"]

ENDINGS: Mapping[Form, str] = {"onnx": ".onnx", "openvino": ".xml"}


class _TensorModule(torch.nn.Module):
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


def list_inputs(module: torch.nn.Module, call: ComponentCall) -> dict[str, torch.Tensor]:
    """The tensors of a call by the names that an exported graph gives them, in its order.

    An argument has its own name; of several tensors in one, each has its number behind it.
    """
    parameters = inspect.signature(call.callee.bind(module)).parameters
    named = [*zip(parameters, call.args, strict=False), *call.kwargs.items()]
    found = {}
    for name, value in named:
        tensors = [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]
        for number, tensor in enumerate(tensors):
            found[name if len(tensors) == 1 else f"{name}_{number}"] = tensor
    return found


def export_plan(
    source: Source,
    plan: Plan,
    output: Path,
    *,
    form: Form,
    components: Sequence[str] = (),
    request: Request | None = None,
    progress: Progress | None = None,
) -> list[Path]:
    """Write the components of a plan, one file for each call that its pipeline makes of them.

    Args:
        output: folder that does not exist or is empty.
        components: by name; none for all that run in fp16.
        request: sizes, which the graphs have; small ones where it has none.

    Raises:
        OptionError: a component is unknown, has no fp16 plan or cannot be exported.
        OutputError: the place is taken or cannot be written.
        PlanError: the plan belongs to another checkpoint.

    Cost: the pipeline in fp32 in memory, and a trace of each call.
    """
    check_source(plan, source)
    check_target(output, folder=True, option="as OUT")
    entries = {x.component: x for x in plan.components if x.precision == "fp16"}
    for name in components:
        if name not in entries:
            raise OptionError(
                f'component="{name}" names no component that the plan runs in fp16.',
                expected=f"Those are {', '.join(entries) or 'none'}.",
                remedy=f'Use component="{next(iter(entries), "NAME")}".',
            )
    source = select_class(complete_source(source), request)
    program = load_program(source, torch_dtypes=torch.float32)
    calls = draw_calls(source, request or Request())
    written = list[Path]()
    with written_beside(output, option="as OUT") as part:
        part.mkdir(exist_ok=True)
        for name in components or entries:
            own = [call for call in reversed(calls.get(name, ())) if not call.made_up]
            for call in {
                call.callee.name: call for call in own
            }.values():  # the first of each method
                if progress is not None:
                    progress("write", call.callee.name, len(written), 0)
                path = part / f"{call.callee.name}{ENDINGS[form]}"
                export_component(getattr(program, name), entries[name], call, path, form=form)
                written.append(output / path.name)
    return written


def export_component(
    module: torch.nn.Module,
    entry: ComponentPlan | None,
    call: ComponentCall,
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
    """
    _refuse(entry, form)
    is_cast = form == "onnx" and precision == "fp16"
    with Patches() as patches:
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) not in (None, "eager"):
            # exporters stumble over the strides of fused kernels
            patches.set_attribute(config, "_attn_implementation", "eager")
        if entry is not None:
            apply_entry(module, entry, patches, cast=is_cast)
        elif is_cast:
            apply_entry(module, ComponentPlan("", "", "", "fp16"), patches)
        function, *given_to = call.place(module)
        leaves, spec = pytree.tree_flatten(tuple(given_to))
        if is_cast:
            leaves = [
                x.half() if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x
                for x in leaves
            ]
        traced = _TensorModule(module, function, leaves, spec).eval()
        given = tuple(x for x in leaves if isinstance(x, torch.Tensor))
        names = list(list_inputs(module, call))
        write = {"onnx": _write_onnx, "openvino": _write_openvino}[form]
        try:
            silent = contextlib.redirect_stdout(io.StringIO())
            with torch.no_grad(), ignoring_warnings(Warning), silent:
                write(traced, given, target, names, precision)
        except OptionError:
            raise
        except Exception as error:  # whatever an exporter raises for code that it does not know
            raise OptionError(
                f"{type(module).__name__} could not be exported to {form}: {take_first_line(error)}.",
                expected="The exporter traces the component's own code.",
                remedy='Try the other form: to="openvino" or to="onnx".',
            ) from error


def _refuse(entry: ComponentPlan | None, form: Form) -> None:
    if entry is None:
        return
    if entry.precision != "fp16":
        raise OptionError(
            f"The plan runs {entry.component} in {entry.precision}. {' '.join(entry.reasons)}",
            expected="What is exported runs in fp16.",
            remedy='Name another one: component="NAME".',
        )
    scaling = entry.in_force
    if form == "openvino" and (scaling.fp32_modules or scaling.stream is not None):
        raise OptionError(
            f"The plan keeps parts of {entry.component} in fp32.",
            expected="OpenVINO runs all of an IR in the inference precision that it is compiled for.",
            remedy='Export it to ONNX, where casts are part of the graph: to="onnx".',
        )


def _write_onnx(
    traced: torch.nn.Module,
    given: tuple[torch.Tensor, ...],
    target: Path,
    names: list[str],
    precision: str,
) -> None:
    for name in ("onnx", "onnxscript"):
        require_package(name, "onnx", "A component as ONNX")
    torch.onnx.export(
        traced, given, target, input_names=names, dynamo=True, external_data=False, verbose=False
    )


def _write_openvino(
    traced: torch.nn.Module,
    given: tuple[torch.Tensor, ...],
    target: Path,
    names: list[str],
    precision: str,
) -> None:
    require_package("openvino", "openvino", "A component for OpenVINO")
    import openvino
    from openvino._offline_transformations import compress_model_transformation

    made = openvino.convert_model(traced, example_input=given)
    for entry, name, value in zip(made.inputs, names, given, strict=True):
        entry.get_tensor().set_names({name})
        entry.get_node().set_partial_shape(openvino.PartialShape(list(value.shape)))
    frequencies = _keep_phases(made)
    made.validate_nodes_and_infer_types()
    if precision == "fp16":
        compress_model_transformation(made)
    for entry, values in frequencies:
        entry.replace_source_output(openvino.opset13.constant(values).output(0))
    openvino.save_model(made, target, compress_to_fp16=False)


def _keep_phases(made: Any) -> list[tuple[Any, Any]]:
    """Sines and cosines of timesteps times frequencies in fp64, which OpenVINO lowers to fp32 at most.

    Models compute them in fp32 whatever they run in, but what is traced in fp32 does not show it: compiled
    for f16, 999 times a frequency would be off by up to half a radian.

    Returns:
        each input that takes constants of these, and the constants, which fp16 must not hold either.
    """
    from openvino import opset13

    constants: list[tuple[Any, Any]] = []
    for node in made.get_ordered_ops():
        make = {"Sin": opset13.sin, "Cos": opset13.cos}.get(node.get_type_name())
        phase = None if make is None else _widen(node.input_value(0), constants)
        if make is not None and phase is not None:
            kept = opset13.convert(make(phase), "f32")
            for entry in node.output(0).get_target_inputs():
                entry.replace_source_output(kept.output(0))
    return constants


def _widen(value: Any, constants: list[tuple[Any, Any]]) -> Any:
    """An input times constants in fp64; None for anything else."""
    from openvino import opset13

    node = value.get_node()
    kind = node.get_type_name()
    if kind == "Parameter" or value.get_element_type().is_integral():
        return opset13.convert(value, "f64")
    if kind == "Convert":
        return _widen(node.input_value(0), constants)
    if kind not in ("Multiply", "Unsqueeze"):
        return None
    first, second = node.input_values()
    if kind == "Multiply" and first.get_node().get_type_name() == "Constant":
        first, second = second, first
    if second.get_node().get_type_name() != "Constant":
        return None
    inner = _widen(first, constants)
    if inner is None:
        return None
    if kind == "Unsqueeze":
        return opset13.unsqueeze(inner, second)
    values = second.get_node().data.astype("float64")
    product = opset13.multiply(inner, opset13.constant(values))
    constants.append((product.input(1), values))
    return product
