"""Skeletons: pipelines without weights, with their own code and configs, on fake parameters.

Each component has its real class, with fake tensors as parameters. Only configurations are read, so that a
checkpoint of any size is built in seconds and in little memory. `build_skeleton` builds one from a
Diffusers folder. `copy_skeleton` copies a pipeline in memory, with the dtype of each parameter, and
`copy_empty_module` and `copy_to_host` copy one module of any program. Schedulers, tokenizers and image
processors are real, or replaced by placeholders if their files are missing.

Casting a skeleton (`vae.to(torch.float32)`) works as on the original.

Not covered: weights that a quantiser stores in its own classes.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from stopdown.component_calls.components import build_module, find_components, find_kept_fp32
from stopdown.fake_tensors.fake_modules import (
    build_fake,
    convert_fakes_,
    mark_as_parameter,
    renew_fakes,
)
from stopdown.fold_names import name_parameters
from stopdown.interception.module_paths import OWN_ATTRIBUTES
from stopdown.interception.patches import Patches
from stopdown.module_calls.call_interception import copy_layers
from stopdown.module_calls.step_caches import drop_hooks, find_computing_dtypes, share_hooks
from stopdown.number_formats import name_dtype
from stopdown.scaling import Rank
from stopdown.sources.component_classes import describing_failures, find_class, limited_building
from stopdown.sources.descriptions import read_description
from stopdown.sources.library_messages import quiet_libraries
from stopdown.sources.source import Source

_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "tokenizer.model")
"""Vocabulary files, of which a working tokenizer has at least one."""


def build_skeleton(
    source: Source, torch_dtypes: Mapping[str, torch.dtype], *, keep_fp32: bool = True
) -> Any:
    """Build a source's pipeline without weights, each component as if loaded in its dtype.

    Args:
        source: source from `resolve_source`; only the configs in its folders are read.
        torch_dtypes: dtypes by component; fp32 for others.
        keep_fp32: whether modules that their authors keep in fp32 are; False if a plan rescales them.
    """
    with quiet_libraries():
        parts = {name: _build(source, name, torch_dtypes, keep_fp32) for name in source.components}
        return _join(source, parts)


def copy_skeleton(pipe: Any, torch_dtypes: Mapping[str, torch.dtype] | None = None) -> Any:
    """Copy a live pipeline without its weights; runs of the copy leave the original unchanged.

    Args:
        torch_dtypes: dtypes in which components are treated as loaded, by name; parameters of others keep
            their dtypes.
    """
    return _copy_pipe(pipe, _Memo(), torch_dtypes or {})


def _copy_pipe(pipe: Any, memo: _Memo, torch_dtypes: Mapping[str, torch.dtype]) -> Any:
    """Copy a live pipeline, and the pipelines that it runs, as Kandinsky's combined ones do."""
    skeleton = copy.copy(pipe)
    for name, module in find_components(pipe).items():
        plain = getattr(module, "_orig_mod", module)  # of torch.compile
        if id(plain) not in memo.copies:
            _copy_module(plain, memo, torch_dtypes.get(name))
        vars(skeleton)[name] = memo.copies[id(plain)]
    for name, part in vars(pipe).items():
        if isinstance(getattr(part, "components", None), Mapping):
            vars(skeleton)[name] = _copy_pipe(part, memo, {})
    vars(skeleton)["scheduler"] = copy.deepcopy(getattr(pipe, "scheduler", None))
    if "_internal_dict" in vars(pipe):
        vars(skeleton)["_internal_dict"] = copy.copy(vars(pipe)["_internal_dict"])
    return skeleton


def copy_empty_module(module: torch.nn.Module, dtype: torch.dtype | None = None) -> torch.nn.Module:
    """Copy a live module without its weights, on its device, with interception layers below a recorder.

    Args:
        dtype: dtype in which the copy is treated as loaded; None to keep each parameter's dtype.
    """
    return _copy_module(module, _Memo(below=Rank.RECORD, keeps_device=True), dtype)


def copy_to_host(module: torch.nn.Module) -> torch.nn.Module:
    """Copy a live module without its weights to the host, with the tensors in its plain attributes."""
    copied, patches = _copy_module(module, _Memo(), None), Patches()  # never undone
    for part, name, table in list_tables(copied):
        patches.set_attribute(
            part, name, pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, table)
        )
    return copied


def list_tables(module: torch.nn.Module) -> list[tuple[torch.nn.Module, str, Any]]:
    """List submodules' plain attributes that contain tensors, such as Qwen-Image's rotary tables.

    Returns:
        The submodule, the name of the attribute, and its value.
    """
    return [
        (part, name, value)
        for part in module.modules()
        for name, value in vars(part).items()
        if name not in OWN_ATTRIBUTES
        and any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(value))
    ]


def _build(
    source: Source, name: str, torch_dtypes: Mapping[str, torch.dtype], keep_fp32: bool
) -> Any:
    """Build one component of a skeleton; None if its folder is missing."""
    library, class_name = source.components[name]
    folder = source.described / name
    if not folder.is_dir():
        return None
    if not source.has_weights(name):
        return _build_side(folder, find_class(library, class_name), class_name)
    dtype = torch_dtypes.get(name, torch.float32)
    module = build_empty_component(source, name, dtype, keep_fp32)
    _teach_casts(module)
    return module


def _build_side(folder: Path, kind: Any, class_name: str) -> Any:
    """Build a scheduler, tokenizer or processor, or a placeholder if its files are missing."""
    if class_name.endswith("Scheduler"):
        with describing_failures(folder, class_name, has_weights=False):
            return kind.from_config(read_description(folder / "scheduler_config.json"))
    is_tokenizer = class_name.endswith(("Tokenizer", "TokenizerFast", "Backend"))
    if is_tokenizer and not any((folder / name).is_file() for name in _VOCABULARIES):
        return Tokens()
    try:
        return kind.from_pretrained(folder, local_files_only=True)
    except Exception:  # whatever an absent or foreign file makes it raise
        return Tokens() if is_tokenizer else kind()


class Tokens:
    """Placeholder for a tokenizer; every prompt is two tokens, padded to the requested length."""

    model_max_length = 77
    pad_token_id = 0
    eos_token_id = 1
    bos_token_id = 1
    padding_side = "right"

    def __call__(self, text: Any, **options: Any) -> Any:
        count = len(text) if isinstance(text, (list, tuple)) else 1
        is_padded = options.get("padding") == "max_length"
        length = int(options.get("max_length") or self.model_max_length) if is_padded else 2
        mask = torch.zeros(count, length, dtype=torch.int64)
        mask[:, :2] = 1
        return _Encoding(input_ids=mask.clone(), attention_mask=mask)

    def encode(self, text: str, **options: Any) -> list[int]:
        return [self.bos_token_id, self.eos_token_id]

    def batch_decode(self, ids: Any, **options: Any) -> list[str]:
        return [""] * len(ids)

    decode = batch_decode


class _Encoding(SimpleNamespace):
    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def to(self, *_: Any) -> _Encoding:
        return self


def _join(source: Source, components: dict[str, Any]) -> Any:
    import diffusers

    kind = getattr(diffusers, source.pipeline_class)
    taken = inspect.signature(kind.__init__).parameters
    index = read_description(source.described / "model_index.json")
    options = {k: v for k, v in index.items() if k in taken and k not in components}
    if "add_watermarker" in taken:
        options["add_watermarker"] = False
    absent = {
        name: None
        for name, parameter in taken.items()
        if parameter.default is inspect.Parameter.empty and name not in ("self", "args", "kwargs")
    }
    if components.get("safety_checker") is None and "requires_safety_checker" in taken:
        options["requires_safety_checker"] = False
    known = {name: part for name, part in components.items() if name in taken}
    pipe = kind(**{**absent, **_drop_pairs(options), **known})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _drop_pairs(options: dict[str, Any]) -> dict[str, Any]:
    """Return a model index's options with its components, which are [library, class] pairs, set to None."""
    return {
        name: None if isinstance(value, list) and len(value) == 2 else value
        for name, value in options.items()
    }


def _choose_loaded(
    kind: type, dtype: torch.dtype, name: str, tensor: torch.Tensor, is_weight: bool
) -> torch.dtype:
    """Return the dtype that a tensor would have if its component of class `kind` were loaded in `dtype`.

    That is fp32 for weights of modules kept in fp32; buffers outside the state dict keep their dtype.
    """
    if not tensor.is_floating_point() or not is_weight:
        return tensor.dtype
    kept = find_kept_fp32(kind, name_dtype(dtype))
    return torch.float32 if any(part in kept for part in name.split(".")) else dtype


@dataclass
class _Memo:
    """State shared by the copies of one pipeline's modules.

    Attributes:
        below: only interception layers below this rank are copied. By default this excludes the layer of
            exponents, which would change the original's weights for a call that they are not valid for.
        keeps_device: whether fake parameters are on the device of the real ones, and not on the CPU.
        mode: fake mode of all copies.
        copies: memo of `copy.deepcopy`.
    """

    below: Rank = Rank.EXPONENTS
    keeps_device: bool = False
    mode: FakeTensorMode = field(default_factory=lambda: FakeTensorMode(allow_non_fake_inputs=True))
    copies: dict[int, Any] = field(default_factory=dict)

    def make_fake(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        is_moved = tensor.is_meta or not self.keeps_device
        device = torch.device("cpu") if is_moved else tensor.device
        with self.mode:
            return torch.empty_strided(
                tuple(tensor.shape), tensor.stride(), dtype=dtype, device=device
            )


def _copy_module(
    module: torch.nn.Module, memo: _Memo, dtype: torch.dtype | None
) -> torch.nn.Module:
    weights = set(module.state_dict(keep_vars=True))
    memo.copies.update(renew_fakes(module, memo.mode) | share_hooks(module))
    computing = find_computing_dtypes(module)
    for name, tensor in name_parameters(module).items():
        wanted = computing.get(id(tensor), tensor.dtype)
        if dtype is not None:
            wanted = _choose_loaded(type(module), dtype, name, tensor, name in weights)
        made = memo.make_fake(tensor, wanted)
        memo.copies[id(tensor)] = mark_as_parameter(made) if _is_parameter(tensor) else made
    shadow = copy.deepcopy(module, memo.copies)
    drop_hooks(shadow, Patches())  # never undone: the copy is thrown away
    for part in shadow.modules():
        _strip_offload(part)
    _teach_casts(shadow)
    for part, copied in zip(module.modules(), shadow.modules(), strict=True):
        copy_layers(part, copied, memo.below)
    return shadow


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


def _strip_offload(module: torch.nn.Module) -> None:
    """Remove the offload hooks of a copy, which has no weights to move."""
    patches = Patches()  # never undone: the copy is thrown away
    if "_old_forward" in vars(module):
        for name in ("forward", "_old_forward", "_hf_hook"):
            patches.remove_attribute(module, name)


def _teach_casts(module: torch.nn.Module) -> None:
    """Patch a skeleton so that `.to()`, `.half()` and so on work; PyTorch cannot swap fake parameters."""
    patches = Patches()  # never undone: the skeleton is ours
    for part in module.modules():
        patches.set_attribute(part, "_apply", functools.partial(convert_fakes_, part))


def build_empty_component(
    source: Source, name: str, dtype: torch.dtype, keep_fp32: bool = True
) -> torch.nn.Module:
    """Build one component of a source on fake tensors, as if loaded in `dtype`.

    Args:
        keep_fp32: whether modules that their authors keep in fp32 are in fp32.
    """
    library, class_name = source.components[name]
    module_class = find_class(library, class_name)
    factory = functools.partial(build_module, module_class, source.described / name)
    failures = describing_failures(source.described / name, class_name, has_weights=False)
    with failures, limited_building():
        module = build_fake(factory, dtype)
    if keep_fp32:
        kept = find_kept_fp32(module_class, name_dtype(dtype))
        _widen(module, kept)
    return module


def build_component(source: Source, name: str) -> torch.nn.Module:
    """Build one component of a source from its configuration, under the current torch mode."""
    library, class_name = source.components[name]
    return build_module(find_class(library, class_name), source.described / name)


def _widen(module: torch.nn.Module, kept: tuple[str, ...]) -> None:
    """Replace parameters under modules with these names by fp32 ones; nothing else uses the module yet."""
    for name, parameter in list(module.named_parameters()):
        if parameter.is_floating_point() and any(part in kept for part in name.split(".")):
            path, _, leaf = name.rpartition(".")
            wide = torch.nn.Parameter(parameter.detach().to(torch.float32), requires_grad=False)
            module.get_submodule(path).register_parameter(leaf, wide)
