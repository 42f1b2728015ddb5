"""What scales one component, as plain data: exponents, casts, an fp32 stream, and what a trial showed.

Records of the core. `stopdown.records` has them too, beside those of plans and runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stopdown.record_display import Displayed


@dataclass(frozen=True, repr=False)
class ResidualStream(Displayed):
    """Where a component's residual stream becomes fp32, and where it becomes fp16 again.

    Attributes:
        cast_output_up: paths of the modules whose output is cast to fp32: they write the stream.
        cast_input_down: paths of the modules that cast what reaches them in fp32 to fp16: they multiply.
        cast_input_up: paths of the modules that cast what reaches them in fp16 to fp32.
        kept: parameters and buffers that stay in fp32.
        returns: True when the component casts what it returns in fp32 back to fp16.
        cast_output_down: paths of the modules that cast what they return in fp32 back to fp16; where
            there are some, the stream is fp32 inside them alone.
    """

    cast_output_up: tuple[str, ...]
    cast_input_down: tuple[str, ...]
    cast_input_up: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    returns: bool = True
    cast_output_down: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class Operands(Displayed):
    """What makes the operands of a component's layers one where its code mixes dtypes.

    Attributes:
        cast_inputs: paths of the layers that cast what reaches them to the dtype of their weight.
        fp32_parameters: parameters that stay in fp32, of layers whose own code widens their input.
    """

    cast_inputs: tuple[str, ...] = ()
    fp32_parameters: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.cast_inputs or self.fp32_parameters)


@dataclass(frozen=True, repr=False)
class Trial(Displayed):
    """What a component gave when it was run once in its precision, exponents and casts in place.

    Attributes:
        calls: how many were run; 0 when none was, and `note` says why.
        rel_err: largest relative L2 difference of an output from fp32's; None where none was compared.
        bf16_rel_err: the same of the component cast to bf16; None where that does not run.
        note: what was not run or not compared, and why; "" when everything was.
    """

    calls: int = 0
    rel_err: float | None = None
    bf16_rel_err: float | None = None
    note: str = ""


@dataclass(frozen=True, repr=False)
class Scaling(Displayed):
    """Exponents of one component as plain data: what is stored is the value times `2**exponent`.

    Attributes:
        exponents: parameter or buffer name to the exponent; `name[0:64]` for rows, `name[:,0:64]`
            for columns.
        eps: `module.path.attribute` of a norm's eps to the exponent it is multiplied with.
        multiplies: module path to the exponent that its output is multiplied with.
        fp32_modules: paths of the modules that stay in fp32; "" is the component itself.
        headroom_bits: bits between the largest 16-bit value seen and the format's maximum; None
            where nothing was measured.
        tightest: the value with the least headroom.
        certified: True when the ranges are bounds; False when they were measured.
        pinned: operation without a rule to the places where it is.
        fp32_flops: share of the matmul FLOPs that is done in fp32 modules.
        kept_buffers: buffers that keep their dtype when the component is cast; None for those
            that `find_kept_buffers` names.
        outputs: number of an output that the module returns in fp32, because fp16 cannot hold it, to
            the exponent that is taken off there.
        stream: where the residual stream is fp32 when the component is cast; None for nowhere.
        operands: what is cast, or stays fp32, because the component's code mixes dtypes.
        values: how many fp16 values and weights there are; 0 where bounds were not asked for.
        bounded: how many of them rest on bounds.
        uncertain: places of those that no bound keeps in range, so that they rest on what was measured.
        measured_bits: bits between the largest that was measured of those and the format's maximum; None
            where there are none, or nothing was measured.
        limits: `method.argument` to the magnitude up to which bounds hold; empty without bounds.
        sizes: `method.argument` to the sizes, the batch left out, up to which bounds hold: one of them
            has to be as large in every dimension.
        range_note: what the ranges rest on, and for which inputs; "" for measurements alone.
        note: why it is not fp32 although it was asked for; "" when there is nothing to say.
        trial: what the module gave when it was run once with all that; None if it was not tried.
        layers: path of a module that multiplies by a weight, `path[0:64]` for a block of its outputs,
            `path[:,0:64]` of its inputs, to the exponents of its input and its output; without those that
            have none.
        signatures: of the calls that they were found for, as `call_signatures` writes them.
        shapes: signature to the sizes of those calls, as `call_signatures.list_sizes` has them.
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
