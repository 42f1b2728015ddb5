"""Find out, before a call, whether somebody changed or cast weights that exponents are folded into.

Loading other weights (`load_state_dict`) is refused before any is written.

**Catches** weights that were written into, replaced, cast to 8 bits, or cast from the fp32 that the
exponents need; gradients of folded weights.

**Does not catch** weights that are written through `.data` or in inference mode, and single values of a
matrix.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import forward_ad

from stopdown.errors import ScalingError
from stopdown.fold_names import RESCALED, find_folded_parts, split_fold_name
from stopdown.interception.arguments import count_writes
from stopdown.interception.module_paths import list_tensor_places
from stopdown.interception.patches import Patches, SameInCopies
from stopdown.module_calls.adapter_layers import unwrap_name
from stopdown.module_calls.outermost_calls import is_in_training, is_plain, is_transformed
from stopdown.number_formats import list_some, name_dtype
from stopdown.numerics import has_values
from stopdown.scaling.folding.adapters import AdapterFolds, refuse_gradient
from stopdown.scaling_records import Scaling


class FoldedWeights(SameInCopies):
    """Record of a module's scaled weights and fp32 tensors, by which later changes are found."""

    def __init__(
        self, module: torch.nn.Module, scaling: Scaling, name: str, *, casts: bool
    ) -> None:
        """Prepare to record a module's folded weights and fp32 tensors; `note` records their present
        values.

        Args:
            name: name of the component, for messages.
            casts: whether the module is cast, and keeps tensors in fp32 that would lose values in 16 bits.
        """
        self._module, self._scaling, self._name, self._casts = module, scaling, name, casts
        self._weights: list[_Weight] = []
        self._wide: list[tuple[str, dict[str, Any], str]] = []

    def note(self) -> None:
        """Record the module's present weights, and its fp32 tensors, as those that must not change."""
        self._weights = list(_list_weights(self._module, self._scaling))
        places = list_tensor_places(self._module) if self._casts else ()
        self._wide = [x for x in places if x[1][x[2]].dtype == torch.float32]

    @property
    def has_half(self) -> bool:
        """Whether any of the folded weights is in 16 bits."""
        return any(x.tensor.itemsize == 2 for x in self._weights)

    def refuse_gradients(self, patches: Patches) -> None:
        """Make backward passes that reach a scaled weight raise an error, until `patches` is undone.

        The gradient would be that of another weight.
        """
        for known in self._weights:
            known.refuse_gradient(self._name, patches)

    def refuse_loading(self, patches: Patches) -> None:
        """Refuse to load other weights in place of the scaled ones, until `patches` is undone.

        Undoing would divide them by exponents that they don't have.
        """
        paths = {part: path for path, part in self._module.named_modules()}
        for part in find_folded_parts(self._module, self._scaling.exponents):
            check = functools.partial(self._check_loading, paths[part])
            patches.defer(part.register_load_state_dict_pre_hook(check).remove)

    def _check_loading(
        self, path: str, part: torch.nn.Module, state: dict[str, Any], prefix: str, *_: object
    ) -> None:
        """Raise an error if a state dict has other values for scaled weights of a part, or of its copy.

        Cost: a host read for each scaled weight in the state dict.
        """
        known = {x.name: x for x in self._weights}
        others = []
        for name, *_rest in list_tensor_places(part):
            found = known.get(unwrap_name(f"{path}.{name}".removeprefix(".")))
            given = state.get(prefix + name)
            if found is not None and isinstance(given, torch.Tensor) and not found.is_like(given):
                others.append(found.name)
        if others:
            raise ScalingError(
                f"{len(others)} weights of {self._name} were to be loaded, which have exponents: "
                f"{list_some(others)}.",
                expected="Exponents are found for the weights that are there. Nothing was loaded.",
                remedy="Take the plan, guard or rescaling off first (`.undo()`, or leave the guard), load "
                "the weights, and make a plan of the result.",
            )

    def check(self) -> None:
        """Raise an error if scaled weights were rewritten, or tensors that must be fp32 were cast.

        Raise one as well if a caller gives other tensors in their place inside of a `torch.func` transform,
        or differentiates by them forward.

        Cost: three comparisons for each folded tensor; a host read only if something changed.
        """
        is_inside = is_transformed()
        given = [x.name for x in self._weights if x.has_tangent() or (is_inside and x.is_given())]
        if given:
            raise ScalingError(
                f"{len(given)} weights of {self._name} were given by a caller in a torch.func transform or "
                f"to differentiate by: {list_some(given)}.",
                expected="A caller's weights have no exponents, and the gradient of a scaled weight is "
                "that of another weight.",
                remedy="Take the plan, guard or rescaling off first (`.undo()`, or leave the guard).",
            )
        if is_in_training(self._module) or not is_plain():
            return
        found = [(name, holder.get(key)) for name, holder, key in self._wide]
        cast = [(name, x.dtype) for name, x in found if x is not None and x.dtype.itemsize < 4]
        if cast:
            raise ScalingError(
                f"{self._name} was cast since its exponents were folded in: {cast[0][0]} is "
                f"{name_dtype(cast[0][1])}, and was fp32{_count_others(cast)}.",
                expected="A plan or rescaling keeps in fp32 what would lose values in 16 bits.",
                remedy="Leave the cast out: what is planned or repaired is cast already.",
            )
        narrow = [(x.name, x.dtype) for x in self._weights if x.dtype.itemsize < 2]
        if narrow:
            raise ScalingError(
                f"{self._name} was cast since its exponents were folded in: {narrow[0][0]} is "
                f"{name_dtype(narrow[0][1])}{_count_others(narrow)}.",
                expected="Exponents are found for 16 bits. In 8 bits, which hold far fewer sizes, many "
                "weights would vanish.",
                remedy="Cast the model to 8 bits before the plan, guard or rescaling; take that off first "
                "(`.undo()`, or leave the guard), and load the pipeline again.",
            )
        if changed := self.list_changed():
            raise ScalingError(
                f"{len(changed)} weights of {self._name} were rewritten since its exponents were folded "
                f"in: {list_some(changed)}.",
                expected="Weights that were rewritten have no exponents, but the weights around them do.",
                remedy="Take the plan, guard or rescaling off first (`.undo()`, or leave the guard), load "
                "the pipeline again, write the weights, and make a plan of the result.",
            )

    def check_copy(self, copied: torch.nn.Module) -> None:
        """Raise an error if scaled weights of a deep copy were rewritten or cast since its first call, and
        make backward passes that reach them raise one.
        """
        folds: AdapterFolds = vars(copied)[RESCALED]
        if folds.copied_weights is None:
            name = f"a copy of {self._name}"
            folds.copied_weights = FoldedWeights(copied, self._scaling, name, casts=self._casts)
            folds.copied_weights.note()
        folds.copied_weights.check()
        folds.copied_weights.refuse_gradients(Patches())  # for good, as its exponents

    def list_changed(self) -> list[str]:
        """List the scaled weights that were rewritten, by others than adapters that were merged.

        Cost: as of `check`.
        """
        folds = vars(self._module).get(RESCALED)
        if isinstance(folds, AdapterFolds) and folds.merged:
            for one in self._weights:
                if one.name.rpartition(".")[0] in folds.merged:
                    one.note()
            folds.merged.clear()
        return [x.name for x in self._weights if x.has_moved() and not x.accept()]


@dataclass
class _Weight:
    """A tensor with a folded exponent, as recorded, to be compared with the module's tensor later.

    Attributes:
        name: its name in the module.
        holder, key: dict of the module that holds it, and its key there.
        shape: its shape; tokens may be added to a table of embeddings.
        version: count of its writes; None if unknown.
        sample: some of its values on the host; None if it has none here.
        refusal: refuses its gradients. Its hook is on `refused`.
    """

    name: str
    holder: dict[str, Any]
    key: str
    tensor: torch.Tensor
    shape: torch.Size
    version: int | None
    sample: torch.Tensor | None
    refusal: Patches = field(default_factory=Patches)
    refused: weakref.ref[torch.Tensor] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the module's tensor has now."""
        tensor = self.holder.get(self.key)
        return self.tensor.dtype if tensor is None else tensor.dtype

    def has_moved(self) -> bool:
        """Return whether the tensor has been replaced or modified in place since it was recorded."""
        tensor = self.holder.get(self.key)
        if tensor is not self.tensor or tensor.shape != self.shape:
            return True
        return count_writes(tensor) != self.version

    def refuse_gradient(self, owner: str, patches: Patches) -> None:
        """Make backward passes that reach the tensor raise an error, until `patches` is undone.

        Args:
            owner: name of the component, for the error.
        """
        is_refused = self.refused is not None and self.refused() is self.tensor
        if self.tensor.requires_grad and not is_refused:
            if self.refused is None:
                patches.defer(self.refusal.undo)
            self.refusal.undo()
            self.refused = weakref.ref(self.tensor)
            refuse_gradient(self.tensor, f"{self.name} of {owner}", self.refusal)

    def has_tangent(self) -> bool:
        """Return whether a caller has given a tensor to differentiate by forward in the tensor's place."""
        tensor = self.holder.get(self.key)
        if tensor is None or tensor is self.tensor:
            return False
        return forward_ad.unpack_dual(tensor).tangent is not None

    def is_given(self) -> bool:
        """Return whether a caller has given another tensor, or one to differentiate by, in the tensor's
        place, as `torch.func.functional_call` does.
        """
        tensor = self.holder.get(self.key)
        if tensor is None or tensor is self.tensor:
            return False
        if tensor.requires_grad:
            return True
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        return tensor.data_ptr() != self.tensor.data_ptr()

    def accept(self) -> bool:
        """Record the module's present tensor if its values are unchanged, or if it's offloaded.

        Return whether it was recorded.

        Cost: a host read.
        """
        tensor = self.holder.get(self.key)
        if tensor is None:
            return False
        if has_values(tensor):
            if not self.is_like(tensor):
                return False
            self.note()
        self.tensor = tensor
        return True

    def note(self) -> None:
        """Record the values that the module's tensor has now. Cost: a host read."""
        tensor = self.holder[self.key]
        if has_values(tensor):
            self.sample, self.version = _sample(tensor), count_writes(tensor)
            self.shape = tensor.shape

    def is_like(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has the recorded values, both rounded to the narrower of their dtypes,
        or can't be compared with them.

        Cost: a host read.
        """
        if self.sample is None or not has_values(tensor):
            return True
        before, now = self.sample, _sample(tensor)
        narrow = min(before.dtype, now.dtype, key=lambda x: x.itemsize)
        return torch.equal(before.to(narrow), now.to(narrow))


def _list_weights(module: torch.nn.Module, scaling: Scaling) -> Iterator[_Weight]:
    names = {split_fold_name(name)[0] for name in scaling.exponents}
    for full, holder, key in list_tensor_places(module):
        if (name := unwrap_name(full)) in names:
            tensor = holder[key]
            sample = _sample(tensor) if has_values(tensor) else None
            yield _Weight(name, holder, key, tensor, tensor.shape, count_writes(tensor), sample)


def _count_others(found: list[Any]) -> str:
    return "" if len(found) == 1 else f", as were {len(found) - 1} more"


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Copy at least one element from each row and each column of a weight to the host, to compare it later.

    Cost: an operation and a host read.
    """
    rows = tensor.detach().reshape(len(tensor) if tensor.dim() else 1, -1)
    numbers = torch.arange(max(rows.shape), device=rows.device)
    return rows[numbers % rows.shape[0], numbers % rows.shape[1]].cpu()
