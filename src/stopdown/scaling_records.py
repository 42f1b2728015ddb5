"""Records of one component's scaling, as plain data: exponents, casts, an fp32 stream, a trial's results.

Records of the core, and sentences about them. `stopdown.records` has the records too, beside those of plans
and runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from stopdown.number_formats import format_figure
from stopdown.record_display import Displayed


@dataclass(frozen=True, repr=False)
class ResidualStream(Displayed):
    """Casts that keep a component's residual stream in fp32.

    The stream is the running sum that blocks add to. Paths are those of `module.named_modules()`.

    Attributes:
        cast_output_up: paths of the modules whose output is cast to fp32: they write to the stream.
        cast_input_down: paths of the modules that cast their fp32 inputs to fp16: they multiply.
        cast_input_up: paths of the modules that cast their fp16 inputs to fp32.
        kept: parameters and buffers that stay in fp32.
        returns: True if the component casts its fp32 outputs back to fp16.
        cast_output_down: paths of the modules that cast their fp32 outputs back to fp16. If there are
            any, the stream is fp32 only inside these.

    Examples:
        >>> stream = ResidualStream(cast_output_up=("embed", "mlp"), cast_input_down=("mlp", "out"))
        >>> stream.returns  # the component still returns fp16
        True
    """

    cast_output_up: tuple[str, ...]
    cast_input_down: tuple[str, ...]
    cast_input_up: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    returns: bool = True
    cast_output_down: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class Operands(Displayed):
    """Casts and fp32 parameters that give operations one dtype where a component's code mixes dtypes.

    Attributes:
        cast_inputs: paths of the layers that cast their inputs to the dtype of their weight.
        fp32_parameters: parameters that stay in fp32, of layers whose own code casts their input to
            fp32.

    Examples:
        >>> operands = Operands(cast_inputs=("proj_in",), fp32_parameters=("norm.weight",))
        >>> bool(operands), bool(Operands())
        (True, False)
    """

    cast_inputs: tuple[str, ...] = ()
    fp32_parameters: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.cast_inputs or self.fp32_parameters)


@dataclass(frozen=True, repr=False)
class Trial(Displayed):
    """Result of running a component once in its precision, with exponents and casts applied.

    Attributes:
        calls: number of calls that were run; if 0, `note` has the reason.
        rel_err: largest relative L2 difference of an output from fp32's; None if none was compared.
        bf16_rel_err: the same for the component cast to bf16; None if that doesn't run.
        note: what was not run or not compared, and why; "" if everything was.

    Examples:
        >>> trial = Trial(calls=1, rel_err=0.0006, bf16_rel_err=0.0024)
        >>> round(trial.bf16_rel_err / trial.rel_err)  # times closer to fp32 than bf16 is
        4
    """

    calls: int = 0
    rel_err: float | None = None
    bf16_rel_err: float | None = None
    note: str = ""


@dataclass(frozen=True, repr=False)
class Scaling(Displayed):
    """Exponents of one component as plain data: each value is stored multiplied by `2**exponent`.

    Attributes:
        exponents: maps each parameter or buffer name to the exponent; `name[0:64]` for rows,
            `name[:,0:64]` for columns.
        eps: maps `module.path.attribute` of a norm's eps to the exponent e of its factor 2**e.
        multiplies: maps each module path to the exponent e of the factor 2**e on its output.
        fp32_modules: paths of the modules that stay in fp32; "" is the component itself.
        headroom_bits: bits between the largest 16-bit value seen and the format's maximum; None if
            nothing was measured.
        tightest: place of the value with the least headroom.
        certified: True if the ranges are bounds; False if they were measured.
        pinned: maps each operation without a rule to the places where it is called.
        fp32_flops: share of the matmul FLOPs that is done in fp32 modules.
        kept_buffers: buffers that keep their dtype when the component is cast; None for those that
            `find_kept_buffers` returns.
        outputs: maps the index of an output that the module returns in fp32, as fp16 can't represent
            it, to the exponent that is removed there.
        stream: casts of the fp32 residual stream; None if there is none.
        operands: casts and fp32 parameters that are needed because the component's code mixes dtypes.
        values: number of fp16 values and weights; 0 if bounds were not requested.
        bounded: number of these that bounds keep in range.
        uncertain: places of those that no bound keeps in range, so that they rest on measurements.
        measured_bits: bits between the largest measured magnitude of these and the format's maximum;
            None if there are none, or nothing was measured.
        limits: maps `method.argument` to the magnitude up to which bounds hold; empty without bounds.
        sizes: maps `method.argument` to the sizes, without the batch, up to which bounds hold: one of
            them has to be as large in every dimension.
        range_note: what the ranges rest on, and for which inputs; "" for measurements alone.
        note: why the residual stream is not fp32 although that was requested; "" otherwise.
        trial: result of running the module once with this scaling; None if it was not run.
        layers: maps the path of a module that multiplies by a weight, `path[0:64]` for a block of its
            outputs, `path[:,0:64]` of its inputs, to the exponents of its input and output; layers
            without exponents are left out.
        signatures: signatures of the calls that the exponents were solved for, in the format of
            `call_signatures`.
        shapes: maps each signature to the sizes of those calls, as in `list_argument_sizes`.

    Examples:
        >>> import msgspec
        >>> scaling = Scaling(exponents={"0.weight": -7}, eps={"1.eps": -14})
        >>> msgspec.json.decode(msgspec.json.encode(scaling), type=Scaling) == scaling
        True
    """

    exponents: Mapping[str, int] = field(default_factory=dict)
    eps: Mapping[str, int] = field(default_factory=dict)
    multiplies: Mapping[str, int] = field(default_factory=dict)
    fp32_modules: tuple[str, ...] = ()
    headroom_bits: float | None = None
    tightest: str = ""
    certified: bool = False
    pinned: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fp32_flops: float = 0.0
    kept_buffers: tuple[str, ...] | None = None
    outputs: Mapping[int, int] = field(default_factory=dict)
    stream: ResidualStream | None = None
    operands: Operands = field(default_factory=Operands)
    values: int = 0
    bounded: int = 0
    uncertain: tuple[str, ...] = ()
    measured_bits: float | None = None
    limits: Mapping[str, float] = field(default_factory=dict)
    sizes: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    range_note: str = ""
    note: str = ""
    trial: Trial | None = None
    layers: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    signatures: tuple[str, ...] = ()
    shapes: Mapping[str, tuple[tuple[tuple[int, ...], ...], ...]] = field(default_factory=dict)


def describe_trial(trial: Trial | None) -> str:
    """Describe a trial: `run once in fp16 (1 call): 0.042 % from fp32, bf16 0.34 %`, or its absence."""
    if trial is None or not trial.calls:
        return "not tried in fp16"
    ran = f"run once in fp16 ({trial.calls} call{'s' * (trial.calls != 1)})"
    if trial.rel_err is None:
        return f"{ran}: finite"
    beside = (
        "" if trial.bf16_rel_err is None else f", bf16 {format_figure(100 * trial.bf16_rel_err)} %"
    )
    return f"{ran}: {format_figure(100 * trial.rel_err)} % from fp32{beside}"


def describe_least(bits: float) -> str:
    """Describe headroom, rounded down: `at least 1.3 bits of headroom`."""
    return f"at least {math.floor(10 * bits) / 10:g} bits of headroom"


def describe_count(values: int, bounded: int) -> str:
    """Describe the share of activations with a bound, rounded down: `97.6 % of 423 activations`."""
    return f"{math.floor(1000 * bounded / values) / 10:g} % of {values} activations"
