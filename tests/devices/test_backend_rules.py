"""Rules of the backends: those of the CPU against what torch does, and every row has its source.

Each operation that has rules for the CPU is called with every combination of fp16, bf16, fp32 and
fp64 for its operands; what is accepted must be what the rules say.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from stopdown.devices.backend_rules import (
    AttentionKernel,
    BackendRow,
    BackendRule,
    Gap,
    Place,
    VersionFault,
    find_backend_rule,
    judge_format,
    judge_operands,
    list_attention,
    list_version_faults,
    parse_operations,
    read_backend_rules,
)
from stopdown.devices.device_profiles import read_profiles
from stopdown.devices.maker_formats import read_onednn_formats
from stopdown.files.toml_files import read_rows
from stopdown.number_formats import FORMATS

NAMES = ("fp16", "bf16", "fp32", "fp64")
DTYPES = {name: FORMATS[name].torch_dtype for name in NAMES}
CPU = Place("cpu", onednn=read_onednn_formats())


def fill(*sizes: int) -> torch.Tensor:
    return torch.linspace(0.25, 1, torch.Size(sizes).numel()).reshape(sizes)


def norm(function: Callable[..., torch.Tensor], *settings: Any) -> Callable[..., torch.Tensor]:
    return lambda x, weight, bias: function(x, *settings, weight, bias)


X = fill(2, 4, 3)
C = fill(4)
V = fill(3, 4)
ATTENTION = fill(1, 2, 3, 4)
ROWS = torch.tensor([0, 1])
SQUARE = torch.eye(3)

PAIRS: dict[str, tuple[tuple[torch.Tensor, ...], Callable[..., Any]]] = {
    "linear": ((fill(3, 4), fill(5, 4), fill(5)), F.linear),
    "matmul": ((V, fill(4, 5)), torch.matmul),
    "mm": ((V, fill(4, 5)), torch.mm),
    "mv": ((V, C), torch.mv),
    "bmm": ((X, fill(2, 3, 5)), torch.bmm),
    "addmm": ((fill(5), V, fill(4, 5)), torch.addmm),
    "baddbmm": ((fill(2, 4, 5), X, fill(2, 3, 5)), torch.baddbmm),
    "einsum": ((X, fill(2, 3, 5)), lambda a, b: torch.einsum("bij,bjk->bik", a, b)),
    "dot": ((C, C), torch.dot),
    "conv1d": ((fill(1, 2, 5), fill(3, 2, 3), fill(3)), F.conv1d),
    "conv2d": ((fill(1, 2, 5, 5), fill(3, 2, 3, 3), fill(3)), F.conv2d),
    "conv3d": ((fill(1, 2, 3, 3, 3), fill(3, 2, 2, 2, 2), fill(3)), F.conv3d),
    "convolution": (
        (fill(2, 2, 5), fill(3, 2, 3), fill(3)),
        lambda x, w, b: torch.convolution(x, w, b, [1], [0], [1], False, [0], 1),
    ),
    "conv_transpose1d": ((fill(2, 2, 5), fill(2, 3, 3), fill(3)), F.conv_transpose1d),
    "conv_transpose2d": ((fill(2, 2, 5, 5), fill(2, 3, 3, 3), fill(3)), F.conv_transpose2d),
    "conv_transpose3d": ((fill(1, 2, 3, 3, 3), fill(2, 3, 2, 2, 2), fill(3)), F.conv_transpose3d),
    "scaled_dot_product_attention": (
        (ATTENTION, ATTENTION, ATTENTION, fill(1, 2, 3, 3)),
        F.scaled_dot_product_attention,
    ),
    "layer_norm": ((V, C, C), norm(F.layer_norm, (4,))),
    "group_norm": ((X, C, C), norm(F.group_norm, 2)),
    "rms_norm": ((V, C), lambda x, weight: F.rms_norm(x, (4,), weight)),
    "batch_norm": ((X, C, C, C, C), lambda x, w, b, mean, var: F.batch_norm(x, mean, var, w, b)),
    "instance_norm": ((X, C, C), lambda x, w, b: F.instance_norm(x, weight=w, bias=b)),
    "embedding": ((fill(5, 4),), lambda weight: F.embedding(ROWS, weight)),
    "cat": ((V, V), lambda a, b: torch.cat([a, b])),
    "stack": ((V, V), lambda a, b: torch.stack([a, b])),
    "add": ((V, V), torch.add),
    "sub": ((V, V), torch.sub),
    "mul": ((V, V), torch.mul),
    "div": ((V, V), torch.div),
    "where": ((V, V), lambda a, b: torch.where(V > 0.5, a, b)),
    "maximum": ((V, V), torch.maximum),
    "minimum": ((V, V), torch.minimum),
    "addcmul": ((V, V, V), torch.addcmul),
    "copy": ((V, V), lambda a, b: a.clone().copy_(b)),
    "lerp": ((V, V, V), torch.lerp),
    "prelu": ((V, C), F.prelu),
    "index_put": ((V, fill(2, 4)), lambda a, b: a.clone().index_put_((ROWS,), b)),
    "masked_scatter": ((V, V), lambda a, b: a.masked_scatter(V > 0.5, b)),
    "scatter": ((V, V), lambda a, b: a.scatter(0, torch.zeros(3, 4, dtype=torch.long), b)),
    "index_copy": ((V, fill(2, 4)), lambda a, b: a.index_copy(0, ROWS, b)),
    "meshgrid": ((C, C), lambda a, b: torch.meshgrid(a, b, indexing="ij")),
    "scatter_add": ((V, V), lambda a, b: a.scatter_add(0, torch.zeros(3, 4, dtype=torch.long), b)),
    "linalg_cross": ((fill(2, 3), fill(2, 3)), torch.linalg.cross),
    "pow": ((V, V), torch.pow),
    "outer": ((C, C), torch.outer),
    "masked_fill": ((V, torch.tensor(1.0)), lambda a, b: a.masked_fill(V > 0.5, b)),
    "slice_scatter": ((V, fill(1, 4)), lambda a, b: a.slice_scatter(b, 0, 0, 1)),
    "cross_entropy_loss": ((V, V), F.cross_entropy),
    "index_add": ((V, fill(2, 4)), lambda a, b: a.index_add(0, ROWS, b)),
    "grid_sampler": (
        (fill(1, 2, 3, 3), fill(1, 2, 2, 2)),
        lambda x, grid: F.grid_sample(x, grid, align_corners=False),
    ),
    "bilinear": ((V, V, fill(2, 4, 4)), F.bilinear),
    "cdist": ((V, V), torch.cdist),
}
"""Operands and a call, for each operation that compares operands, in the order of the rules.

Two rows in a batch: of one row oneDNN does not take a small convolution in fp32, as it takes real ones.
"""

SINGLES: dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], Any]]] = {
    "softmax": (V, lambda x: x.softmax(-1)),
    "gelu": (V, F.gelu),
    "silu": (V, F.silu),
    "exp": (V, torch.exp),
    "sin": (V, torch.sin),
    "rsqrt": (V, torch.rsqrt),
    "upsample_nearest2d": (fill(1, 2, 2, 2), lambda x: F.interpolate(x, scale_factor=2)),
    "upsample_nearest3d": (fill(1, 2, 2, 2, 2), lambda x: F.interpolate(x, scale_factor=2)),
    "upsample_linear1d": (fill(1, 2, 4), lambda x: F.interpolate(x, 8, mode="linear")),
    "upsample_bilinear2d": (fill(1, 2, 2, 2), lambda x: F.interpolate(x, 4, mode="bilinear")),
    "upsample_bicubic2d": (fill(1, 2, 2, 2), lambda x: F.interpolate(x, 4, mode="bicubic")),
    "upsample_trilinear3d": (fill(1, 2, 2, 2, 2), lambda x: F.interpolate(x, 4, mode="trilinear")),
    "upsample_bilinear2d_aa": (
        fill(1, 2, 4, 4),
        lambda x: F.interpolate(x, 2, mode="bilinear", antialias=True),
    ),
    "avg_pool1d": (fill(1, 2, 4), lambda x: F.avg_pool1d(x, 2)),
    "avg_pool2d": (fill(1, 2, 4, 4), lambda x: F.avg_pool2d(x, 2)),
    "avg_pool3d": (fill(1, 2, 2, 2, 2), lambda x: F.avg_pool3d(x, 2)),
    "max_pool1d": (fill(1, 2, 4), lambda x: F.max_pool1d(x, 2)),
    "max_pool2d": (fill(1, 2, 4, 4), lambda x: F.max_pool2d(x, 2)),
    "max_pool3d": (fill(1, 2, 2, 2, 2), lambda x: F.max_pool3d(x, 2)),
    "adaptive_avg_pool2d": (fill(1, 2, 4, 4), lambda x: F.adaptive_avg_pool2d(x, 2)),
    "adaptive_avg_pool3d": (fill(1, 2, 2, 2, 2), lambda x: F.adaptive_avg_pool3d(x, 1)),
    "cumsum": (V, lambda x: x.cumsum(0)),
    "cumprod": (V, lambda x: x.cumprod(0)),
    "sort": (V, torch.sort),
    "argsort": (V, torch.argsort),
    "topk": (V, lambda x: x.topk(2)),
    "median": (V, torch.median),
    "unique": (V, torch.unique),
    "multinomial": (C, lambda x: torch.multinomial(x, 1)),
    "arange": (C, lambda x: torch.arange(4, dtype=x.dtype)),
    "linspace": (C, lambda x: torch.linspace(0, 1, 4, dtype=x.dtype)),
    "randn": (C, lambda x: torch.randn(4, dtype=x.dtype)),
    "reflection_pad1d": (fill(1, 2, 4), lambda x: F.pad(x, (1, 1), mode="reflect")),
    "replication_pad3d": (
        fill(1, 2, 2, 2, 2),
        lambda x: F.pad(x, (1, 1, 1, 1, 1, 1), mode="replicate"),
    ),
    "erfinv": (V * 0.5, torch.erfinv),
    "logsumexp": (V, lambda x: x.logsumexp(0)),
    "var": (V, torch.var),
    "pixel_shuffle": (fill(1, 4, 2, 2), lambda x: F.pixel_shuffle(x, 2)),
    "searchsorted": (C, lambda x: torch.searchsorted(x, x)),
    "fft": (C, torch.fft.fft),
    "rfft": (C, torch.fft.rfft),
    "stft": (
        fill(8),
        lambda x: torch.stft(x, 4, window=torch.ones(4).to(x.dtype), return_complex=True),
    ),
    "quantile": (C, lambda x: torch.quantile(x, 0.5)),
    "complex": (C, lambda x: torch.complex(x, x)),
    "polar": (C, lambda x: torch.polar(x, x)),
    "view_as_complex": (fill(4, 2), torch.view_as_complex),
    "linalg_inv": (SQUARE, torch.linalg.inv),
    "linalg_svd": (SQUARE, torch.linalg.svd),
    "linalg_qr": (SQUARE, torch.linalg.qr),
    "linalg_det": (SQUARE, torch.linalg.det),
    "linalg_solve": (SQUARE, lambda x: torch.linalg.solve(x, x)),
    "linalg_cholesky": (SQUARE, torch.linalg.cholesky),
    "linalg_eigh": (SQUARE, torch.linalg.eigh),
}
"""An operand and a call, for each operation that compares none."""


def iterate_calls(operation: BackendRule) -> Iterator[tuple[tuple[str, ...], Callable[[], Any]]]:
    """Every combination of formats, and the call that tries it."""
    tensors, function = PAIRS.get(operation.name) or _as_pair(SINGLES[operation.name])
    for formats in itertools.product(NAMES, repeat=len(tensors)):
        cast = [t.to(DTYPES[name]) for t, name in zip(tensors, formats, strict=True)]
        yield formats, lambda cast=cast: function(*cast)  # type: ignore[misc]


def _as_pair(single: tuple[torch.Tensor, Callable[..., Any]]) -> tuple[Any, Callable[..., Any]]:
    return (single[0],), single[1]


def predict(operation: BackendRule, formats: tuple[str, ...]) -> bool:
    """Whether the rules say that the CPU takes these formats."""
    operands: Mapping[str, Any]
    if len(operation.operands) == 1 and len(formats) > 1:
        operands = {operation.operands[0]: formats}
    else:
        operands = {n: (f,) for n, f in zip(operation.operands, formats, strict=False)}
    pairing = judge_operands(operation, CPU, operands)
    return pairing.accepted and all(judge_format(operation, CPU, f).accepted for f in formats)


def try_call(call: Callable[[], Any]) -> str:
    """What torch says against a call, "" when it runs."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except (RuntimeError, NotImplementedError) as error:
        return str(error).splitlines()[0]
    return ""


def list_disagreements(operation: BackendRule) -> list[str]:
    """Combinations of formats that torch treats otherwise than the rules say."""
    found = []
    for formats, call in iterate_calls(operation):
        message = try_call(call)
        if predict(operation, formats) != (message == ""):
            found.append(f"{operation.name} {', '.join(formats)}: {message or 'accepted'}")
    return found


ON_CPU = [operation for operation in read_backend_rules() if "cpu" in operation.rows]


@pytest.mark.parametrize("operation", ON_CPU, ids=lambda operation: operation.name)
def test_the_cpu_does_what_the_rules_say(operation: BackendRule) -> None:
    """Each combination of fp16, bf16, fp32 and fp64 is accepted or refused as the rules say."""
    assert list_disagreements(operation) == []


def change(name: str, **changes: Any) -> BackendRule:
    """An operation with another row for the CPU."""
    operation = find_backend_rule(name)
    assert operation is not None
    row = msgspec.structs.replace(operation.rows["cpu"], **changes)
    return msgspec.structs.replace(operation, rows={**operation.rows, "cpu": row})


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        (change("layer_norm", also=()), "layer_norm fp16, fp32, fp32: accepted"),
        (change("linear", accepts="promoted"), "linear fp16, fp16, bf16: self and mat2 must"),
        (change("add", accepts="same"), "add fp16, bf16: accepted"),
        (change("avg_pool3d", gaps=()), 'avg_pool3d fp16: "avg_pool3d_out_frame" not impl'),
        (
            change("silu", gaps=(Gap(("fp16",), "missing", "nowhere"),)),
            "silu fp16: accepted",
        ),
    ],
)
def test_a_wrong_rule_is_found(wrong: BackendRule, where: str) -> None:
    """A rule that was changed disagrees with torch, and the combination is named."""
    assert any(line.startswith(where) for line in list_disagreements(wrong))


def test_no_rule_of_the_cpu_goes_untried() -> None:
    """A new operation needs its call here, and a call its operation."""
    assert {operation.name for operation in ON_CPU} == {*PAIRS, *SINGLES}


def test_operands_are_arguments_of_aten() -> None:
    """Targets exist in ATen, and operands are names of their arguments, as a captured graph has them."""
    for operation in read_backend_rules():
        for target in operation.targets:
            packet = getattr(torch.ops.aten, target.removeprefix("aten."))
            schemas = [getattr(packet, name)._schema for name in packet.overloads()]
            names = [{argument.name for argument in schema.arguments} for schema in schemas]
            known = any(set(operation.operands[:1]) <= arguments for arguments in names)
            assert known, f"{target} has no {operation.operands}"


@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn", "math"])
def test_the_cpu_has_the_attention_kernels_of_the_rules(name: str) -> None:
    """Each kernel of attention runs on the CPU in the formats that the rules give it."""
    kernel = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
    }[name]
    works = []
    for format_name in NAMES:
        x = ATTENTION.to(DTYPES[format_name])
        with sdpa_kernel([kernel]):
            if not try_call(lambda x=x: F.scaled_dot_product_attention(x, x, x)):  # type: ignore[misc]
                works.append(format_name)
    assert set(works) == set(list_attention("cpu", None).get(name, ()))


# Questions


def test_mixed_operands_are_refused_with_the_reason() -> None:
    """The ruling names what was given, what would do, and where that is said."""
    operation = find_backend_rule("aten.layer_norm.default")
    assert operation is not None
    given = {"input": ["fp16"], "weight": ["bf16"]}
    ruling = judge_operands(operation, CPU, given)
    assert ruling.reason == (
        "layer_norm on cpu takes operands of one dtype (or input fp16, weight fp32, bias fp32; or "
        "input bf16, weight fp32, bias fp32), and got input fp16, weight bf16."
    )
    assert ruling.source == "held against torch 2.13.0 by tests/devices/test_backend_rules.py"


def test_cuda_refuses_what_the_cpu_takes() -> None:
    """fp32 weights of a norm beside fp16 values run on the CPU and fail on CUDA."""
    operation = find_backend_rule(torch.ops.aten.group_norm.default)
    assert operation is not None
    given = {"input": ["fp16"], "weight": ["fp32"], "bias": ["fp32"]}
    assert judge_operands(operation, CPU, given).accepted
    assert not judge_operands(operation, Place("cuda"), given).accepted


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("cpu-amx", {"fp32", "bf16", "fp16"}),
        ("cpu-avx512", {"fp32", "bf16"}),
        ("cpu-generic", {"fp32"}),
    ],
)
def test_a_convolution_depends_on_the_instruction_sets(name: str, refused: set[str]) -> None:
    """What oneDNN takes wants a bias of its own dtype; what it leaves to PyTorch takes any."""
    place = Place("cpu", onednn=read_profiles()[name].onednn_formats)
    operation = find_backend_rule("conv_transpose2d")
    assert operation is not None
    for main, bias in itertools.permutations(NAMES, 2):
        given = {"input": [main], "weight": [main], "bias": [bias]}
        assert judge_operands(operation, place, given).accepted is (main not in refused), main
        given["weight"] = [bias]
        assert not judge_operands(operation, place, given).accepted


def test_a_cpu_of_which_nothing_is_known_is_judged_as_the_strictest() -> None:
    """Without instruction sets only what holds on every CPU is accepted."""
    operation = find_backend_rule("convolution")
    assert operation is not None
    for name in ("fp32", "bf16", "fp16"):
        given = {"input": [name], "weight": [name], "bias": ["fp64"]}
        ruling = judge_operands(operation, Place("cpu"), given)
        assert ruling.reason == (
            "convolution on cpu takes operands of one dtype (or input fp64, weight fp64, bias *), "
            f"and got input {name}, weight {name}, bias fp64."
        )


def test_a_backend_without_a_row_is_not_judged() -> None:
    """Nothing is refused where nothing is known."""
    operation = BackendRule("x", ("aten.x",), ("a", "b"), {"cpu": BackendRow("same", "here")})
    assert judge_operands(operation, Place("mps"), {"a": ["fp16"], "b": ["fp32"]}).accepted
    assert judge_format(operation, Place("mps"), "fp16").accepted
    assert find_backend_rule("aten.unheard_of.default") is None


@pytest.mark.parametrize(
    ("place", "format_name", "accepted"),
    [
        (Place("cuda", (7, 0)), "bf16", False),
        (Place("cuda", (8, 0)), "bf16", True),
        (Place("cuda", (7, 0)), "fp16", True),
        (Place("cuda"), "bf16", True),
        (Place("mps", macos=(13, 6)), "bf16", False),
        (Place("mps", macos=(14, 1)), "bf16", True),
        (Place("mps", macos=(15, 0)), "fp64", False),
        (Place("mps", macos=(13, 1)), "fp32", False),
    ],
)
def test_a_gap_holds_within_its_limits(place: Place, format_name: str, accepted: bool) -> None:
    """A 3D convolution lacks bf16 before 8.0 and before macOS 14, and fp64 on MPS always."""
    operation = find_backend_rule("conv3d")
    assert operation is not None
    ruling = judge_format(operation, place, format_name)
    assert ruling.accepted is accepted
    assert bool(ruling.reason) is not accepted


def test_a_gap_says_its_limits() -> None:
    """The reason names operation, format, backend, the limit, and what happens."""
    operation = find_backend_rule("conv3d")
    assert operation is not None
    assert judge_format(operation, Place("cuda", (7, 0)), "bf16").reason == (
        "conv3d isn't implemented in bf16 on cuda before compute capability 8.0: cuDNN has no bf16 "
        "convolutions there; a 3D one fails with a CUDA error."
    )


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((7, 0), {"efficient": {"fp32", "fp16"}, "math": {*NAMES}}),
        (
            (8, 0),
            {
                "flash": {"fp16", "bf16"},
                "efficient": {"fp32", "fp16", "bf16"},
                "cudnn": {"fp16", "bf16"},
                "math": {*NAMES},
            },
        ),
    ],
)
def test_attention_by_capability(
    capability: tuple[int, int], expected: dict[str, set[str]]
) -> None:
    """A V100 has memory-efficient attention in fp16 only; flash begins with 8.0."""
    found = list_attention("cuda", capability)
    assert {name: set(formats) for name, formats in found.items()} == expected


def test_faults_of_versions() -> None:
    """A version with a known fault is found on its backend, and not on another or a newer one."""
    old = list_version_faults({"torch": "2.0.1", "diffusers": None}, "cuda")
    assert any("bf16" in fault.formats for fault in old)
    assert all(fault.package == "torch" for fault in old)
    assert list_version_faults({"torch": "99.0"}) == []


@pytest.mark.parametrize(
    ("capability", "named"), [((7, 5), set()), ((9, 0), {"H100"}), ((10, 0), {"B200"})]
)
def test_faults_of_versions_are_those_of_the_card(
    capability: tuple[int, int], named: set[str]
) -> None:
    """What torch 2.13 does wrong on a Hopper or a B200 is not told of a T4."""
    found = list_version_faults({"torch": "2.13.0"}, "cuda", capability)
    assert {word for word in ("H100", "B200") for x in found if word in x.what} == named
    assert len(list_version_faults({"torch": "2.13.0"}, "cuda")) > len(found)


def test_a_row_for_all_stands_for_each_backend() -> None:
    """What is said once of all backends holds for each that has no row of its own."""
    row = {"accepts": "same", "source": "here"}
    own = {"accepts": "promoted", "source": "there"}
    entry = {"name": "x", "targets": [], "operands": ["a"], "rows": {"all": row, "mps": own}}
    (operation,) = parse_operations({"operation": [entry]})
    assert {name: r.accepts for name, r in operation.rows.items()} == {
        "cpu": "same",
        "cuda": "same",
        "mps": "promoted",
    }


def test_every_fact_has_a_source() -> None:
    """No row, gap, kernel or fault stands without one."""
    facts: list[BackendRow | Gap | AttentionKernel | VersionFault] = []
    for operation in read_backend_rules():
        for row in operation.rows.values():
            facts += [row, *row.gaps]
    facts += read_rows("attention", "kernel", AttentionKernel)
    facts += read_rows("versions", "fault", VersionFault)
    assert [fact for fact in facts if len(fact.source.strip()) < 5] == []


def test_names_are_not_given_twice() -> None:
    """Each operation and each target is there once."""
    names = [operation.name for operation in read_backend_rules()]
    targets = [target for operation in read_backend_rules() for target in operation.targets]
    assert len(names) == len(set(names))
    assert len(targets) == len(set(targets))
