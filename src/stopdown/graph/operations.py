"""What is known of each ATen operation: one table, which exponents, bounds and graph readers share.

A row gives operations that are alike in every column:

- *kind*: what it does to values. Code asks for kinds, never for names.
- *exponent*: the rule in `scaling.exponent_rules` for inputs and result, with its arguments:
  `product self vec2` adds the exponents of two arguments, `+bias` is added to the result.
- *bound*: the rule in `bounds.rule_table` for the largest magnitude of its result; `-` for none.
- *traits*: `rearranges`: each element of the result is one of an input, up to its sign. `unrounded`: that,
  or a number. `alias`: the result may share the input's storage. `saturates`: the result is bounded
  whatever the input. `unmasks`: the sentinels of a mask end here. `slope=k`: the Lipschitz constant.

Which dtypes an operation takes together, by backend, is in `knowledge/rules/backend_dtypes.toml`. A new
operation is one word in a row here; an operation that is in no row is pinned, has no bound, and is
reported by name.

**Catches** the in-place form of an operation, which is found under its own name without the underscore.
**Does not catch** overloads that differ in meaning: the rules look at the arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

_TABLE = """
identity    | same | same | rearranges alias | alias contiguous detach detach_ dropout feature_dropout
identity    | same | same | rearranges alias | positive resolve_conj
identity    | same | same | rearranges       | clone lift_fresh_copy
cast        | cast | same | alias            | to type_as
cast        | cast | same |                  | _to_copy
sign        | same | same | rearranges       | neg abs
sign        | same | same |                  | conj
reshape     | same | reshape | rearranges alias | view reshape flatten unflatten squeeze squeeze_
reshape     | same | reshape | rearranges alias | unsqueeze _unsafe_view view_as ravel
permutation | same | permute | rearranges alias | permute transpose t numpy_T mT movedim moveaxis
permutation | same | permute | rearranges alias | swapaxes swapdims
expansion   | same | expand | rearranges alias | expand expand_as broadcast_to
slice       | same | slice | rearranges alias | slice narrow
select      | same | select | rearranges alias | select
split       | parts | - | rearranges alias | chunk split split_with_sizes unsafe_split unsafe_chunk
split       | parts | - | rearranges alias | tensor_split
unbind      | parts | - | rearranges alias | unbind
part        | pick | part | unrounded alias | getitem
join        | alike | cat | rearranges | cat concat
alike       | alike | - | | concatenate hstack vstack block_diag
stack       | alike | stack | rearranges | stack
repetition  | same | repeat | rearranges | repeat repeat_interleave tile
index       | same | tokens | rearranges | index
index       | same | tokens | unrounded | index_select
order       | same | any | rearranges | roll
order       | same | any | unrounded | flip gather
order       | parts | - | rearranges | meshgrid
order       | parts | - | | broadcast_tensors topk sort cummax cummin median aminmax
view        | same | - | alias | as_strided diagonal unfold real imag adjoint mH matrix_H
view        | same | complex | alias | view_as_complex
view        | same | real | unrounded alias | view_as_real
same        | same | - | | channel_shuffle col2im cumsum diag diag_embed diff im2col masked_select
same        | same | - | | nonzero norm pixel_shuffle pixel_unshuffle rot90 std take_along_dim trace
same        | same | - | | tril triu reflection_pad1d reflection_pad2d reflection_pad3d
same        | same | - | | replication_pad1d replication_pad2d replication_pad3d upsample_bicubic2d
same        | same | - | | _upsample_bilinear2d_aa _upsample_bicubic2d_aa adaptive_max_pool2d
same        | same | - | | adaptive_avg_pool3d max_pool1d max_pool3d
vector_norm | same | - | | linalg_vector_norm
same        | same | any | | amax amin max_pool2d
same        | same | places | | adaptive_avg_pool1d adaptive_avg_pool2d avg_pool1d avg_pool2d
same        | same | places | | avg_pool3d upsample_bilinear2d upsample_linear1d upsample_trilinear3d
same        | same | places | unrounded | upsample_nearest1d upsample_nearest2d upsample_nearest3d
same        | same | places | unrounded | _upsample_nearest_exact1d _upsample_nearest_exact2d
same        | same | places | unrounded | _upsample_nearest_exact3d
sum         | same | total | | sum
mean        | same | mean | | mean
table       | same | embedding | unrounded | embedding
same        | same | shrink | | leaky_relu
same        | same | shrink | unrounded slope=1 | relu
extremum    | extremum | - | | max min
maximum     | alike | - | | maximum
minimum     | alike | - | | minimum
alike       | alike | - | | complex index_add index_copy index_put scatter_add
scatter     | scatter | - | | scatter
alike       | alike | - | | select_scatter slice_scatter
copy        | alike | - | unrounded | copy copy_
padding     | pad | pad | unrounded | pad constant_pad_nd
padding     | pad | - | | _pad_enum
padding     | pad_all | any | | pad_sequence
choice      | choose | choose | unrounded | where masked_fill
choice      | choose | - | | masked_scatter
clamp       | clamp | clamp | unrounded | clamp clip
clamp       | clamp | - | | clamp_min clamp_max
add         | add | add | | add
subtract    | add | add | | sub
subtract_from | subtract_from | subtract_from | | rsub
multiply    | product self other | multiply | | mul multiply
divide      | quotient | divide | | div true_divide
power       | power | power | | pow
square      | halves 4 | - | | square
sqrt        | halves 1 | root | | sqrt
rsqrt       | halves -1 | - | | rsqrt
reciprocal  | halves -2 | - | | reciprocal
variance    | halves 4 | - | | var
variance_mean | free | - | | var_mean
deviation_mean | free | - | | std_mean
factors     | free | - | | linalg_qr
fused_add   | product tensor1 tensor2 +self | - | | addcmul
blend       | interpolate | - | | lerp
polar       | polar | polar | | polar
linear      | product input weight +bias | linear | | linear
convolution | product input weight +bias | convolve | | conv1d conv2d conv3d
any_convolution | product input weight +bias | - | | convolution
transposed_convolution | product input weight +bias | transposed | | conv_transpose1d conv_transpose2d
transposed_convolution | product input weight +bias | transposed | | conv_transpose3d
matrix      | product self other | matmul | | matmul
matrix      | product self mat2 | matmul | | mm bmm
matrix      | product mat1 mat2 +self | - | | addmm
matrix      | product batch1 batch2 +self | - | | baddbmm addbmm
matrix      | product mat vec +self | - | | addmv
matrix      | product self vec | - | | mv
matrix      | product self tensor | - | | dot
einsum      | multiply_all | einsum | | einsum
bilinear    | product input1 input2 weight +bias | - | | bilinear
outer       | product self vec2 | outer | | outer
rotation    | rotate | - | | apply_rope1 apply_rope_split_half1
rotations   | free | - | | apply_rope apply_rope_split_half
attention_kernel | kernel_attention | - | | _flash_attn_forward flash_fwd
attention   | attention | attention | unmasks | scaled_dot_product_attention
row_norm    | norm | normalise | | layer_norm rms_norm _fused_rms_norm
group_norm  | norm | normalise_groups | | group_norm
batch_norm  | batch_norm | - | | batch_norm instance_norm
softmax     | pinned | softmax | unmasks | softmax _softmax
pointwise   | pinned | saturate 1 | saturates unmasks slope=0.25 | sigmoid
pointwise   | pinned | shrink 1 | saturates slope=1 | tanh
pointwise   | pinned | shrink 1 | saturates | erf
pointwise   | pinned | shrink 1 | slope=1 | sin
pointwise   | pinned | saturate 1 | slope=1 | cos
pointwise   | pinned | saturate 1 | | sign
pointwise   | pinned | shrink | slope=1.13 | silu gelu
pointwise   | pinned | shrink | | hardswish mish
exponential | pinned | exponential | unmasks | exp
pointwise   | pinned | - | | silu_ gelu_ log_softmax exp2 log log2 log10 log1p expm1 tan softplus
pointwise   | pinned | - | | hardsigmoid hardtanh elu selu celu logsumexp floor ceil round trunc frac fmod
pointwise   | pinned | - | | remainder sgn sinc atan2 asin acos atan sinh cosh asinh acosh atanh
pointwise   | pinned | - | | floor_divide bucketize logit glu log_sigmoid cumprod prod bernoulli
pointwise   | pinned | - | | relu6 sign_ angle multinomial histc erfinv
prelu       | pinned | - | | prelu
nan_to_num  | clamp_infinities | - | | nan_to_num
comparison  | compare | - | | gt lt ge le eq ne
blank       | free | zeros | | empty new_empty
blank       | free | zeros | unrounded | empty_like
blank       | free | - | | empty_strided new_empty_strided empty_permuted
constant    | free | zeros | unrounded | zeros zeros_like new_zeros
zero        | free | - | | zero
constant    | source | ones | unrounded | ones ones_like new_ones
filled      | source | fill | | full full_like new_full scalar_tensor
fill        | fill | fill | | fill
counting    | source | - | | arange
constant    | source | - | | eye linspace logspace tril_indices
random      | source | - | | rand rand_like randint randn randn_like normal
source      | source | - | | hann_window one_hot tensor
size        | free | - | | size sym_size sym_numel sym_stride sym_storage_offset
question    | free | - | | isinf isnan isfinite isneginf isposinf any all logical_not
question    | free | - | | logical_and logical_or logical_xor
question    | free | - | | nonzero_static argmax argmin argsort unique_consecutive is_floating_point
assertion   | free | - | | _assert_tensor_metadata _assert_async _assert_scalar
assertion   | free | - | | sym_constrain_range sym_constrain_range_for_size
"""


CONVOLUTIONS = ("convolution", "any_convolution", "transposed_convolution")
PRODUCTS = ("linear", *CONVOLUTIONS, "matrix", "attention")
"""Kinds of what does nearly all of the arithmetic."""

NORMS = ("row_norm", "group_norm", "batch_norm")
ONE_DTYPE = (*PRODUCTS, "einsum", "bilinear", *NORMS, "blend", "prelu")
"""Kinds of what takes operands of one dtype, where no rule of a backend says otherwise."""


@dataclass(frozen=True)
class Operation:
    """One row's columns, for one of its operations.

    Attributes:
        name: without overload: `layer_norm`.
        kind, exponent, bound: as the head of this module says; `bound` is "" for none.
        traits: those without a value.
        slope: no input moves the result by more than this times itself; None where that is unknown.
    """

    name: str
    kind: str
    exponent: str
    bound: str
    traits: frozenset[str]
    slope: float | None = None


@functools.cache
def read_operations() -> Mapping[str, Operation]:
    """Every operation of the table by its name."""
    found: dict[str, Operation] = {}
    for line in _TABLE.strip().splitlines():
        kind, exponent, bound, traits, names = (cell.strip() for cell in line.split("|"))
        slopes = [float(x.partition("=")[2]) for x in traits.split() if x.startswith("slope=")]
        plain = {x for x in traits.split() if "=" not in x}
        plain |= {"unrounded"} if "rearranges" in plain else set()
        for name in names.split():
            assert name not in found, f"{name} stands in two rows"
            found[name] = Operation(
                name, kind, exponent, bound.strip("-"), frozenset(plain), next(iter(slopes), None)
            )
    return found


def find_operation(name: str) -> Operation | None:
    """The row of an operation or of its in-place form; None when it is in no row."""
    table = read_operations()
    if name in table or not name.endswith("_") or name.startswith("__"):
        return table.get(name)
    return table.get(name.rstrip("_"))


def kind_of(name: str) -> str:
    """The kind of an operation by its own name; "" for an in-place form, and when it is in no row."""
    found = read_operations().get(name)
    return found.kind if found else ""


@functools.cache
def list_with(trait: str) -> frozenset[str]:
    """The names of the operations that have a trait."""
    return frozenset(name for name, row in read_operations().items() if trait in row.traits)


@functools.cache
def list_kinds(*kinds: str) -> frozenset[str]:
    """The names of the operations of some kinds."""
    return frozenset(name for name, row in read_operations().items() if row.kind in kinds)
