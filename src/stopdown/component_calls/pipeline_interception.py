"""Interception of the calls of one pipeline, or of all pipelines that a process creates from now on.

Each pipeline class has its own `__call__`. All pipelines register their components when they are created,
so `__call__` of a new class is wrapped at its first registration. `redirect_devices` lets a script that
was written for CUDA run without it.

Not covered: with `intercept_runs`, earlier pipelines; with `redirect_devices`, a script's use of
`torch.cuda`, and autocast on CUDA.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import safetensors.torch
import torch
from torch.utils._device import DeviceContext, _device_constructors

from stopdown.devices.device_choice import list_devices, require_kernels
from stopdown.interception.patches import Patches, SameInCopies
from stopdown.module_calls.call_interception import Layer, put_layer
from stopdown.module_calls.callee import Callee
from stopdown.scaling import ComponentCall, Rank


class _LayerHolder(SameInCopies):
    """Holder of a function that runs around a pipeline's calls.

    It is stored on the pipeline, so that it lives as long as the pipeline; copies ignore it.
    """

    def __init__(self, layer: Layer) -> None:
        self.layer = layer


def put_run_layer(pipe: Any, layer: Layer, patches: Patches) -> None:
    """Run a function around each call of one pipeline, until `patches` is undone or the pipeline is gone.

    Python looks `__call__` up in the class, so the class is patched; other pipelines of the class aren't
    affected. A pipeline without `__call__` is left alone.
    """
    owner = next((kind for kind in type(pipe).__mro__ if "__call__" in vars(kind)), None)
    if owner is None:
        return
    here, held, on_class = weakref.ref(pipe), _LayerHolder(layer), Patches()
    name = f"_stopdown_run_layer_{id(held)}"

    def lead(call: ComponentCall) -> Any:
        own = call.args[0]
        found = vars(own).get(name) if own is here() else None
        if found is None or call.below is None:
            return call.proceed()
        return found.layer(_bind(own, call.below, call.args[1:], call.kwargs))

    vars(pipe)[name] = held
    put_layer(owner, "__call__", lead, on_class, Rank.GUARD)
    leave = weakref.finalize(pipe, on_class.undo)
    leave.atexit = False
    patches.defer(functools.partial(_drop, here, name))
    patches.defer(leave)


def _drop(here: weakref.ref[Any], name: str) -> None:
    pipe = here()
    if pipe is not None:
        vars(pipe).pop(name, None)


_OFFLOADS = (
    "enable_model_cpu_offload",
    "enable_sequential_cpu_offload",
    "enable_group_offload",
)


def _bind(
    pipe: Any, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ComponentCall:
    callee = Callee("pipeline", pipe, "__call__", "call")
    return ComponentCall(callee, args, kwargs, functools.partial(method, pipe))


def intercept_runs(layer: Layer, patches: Patches) -> None:
    """Run a function around each call of every pipeline that is created from now on, until `patches` is
    undone.
    """
    from diffusers import DiffusionPipeline

    wrapped: set[type] = set()
    register = DiffusionPipeline.register_modules

    @functools.wraps(register)
    def register_and_wrap(self: Any, **modules: Any) -> None:
        register(self, **modules)
        owner = next((kind for kind in type(self).__mro__ if "__call__" in vars(kind)), None)
        if owner is not None and owner not in wrapped:
            wrapped.add(owner)
            _wrap_call(owner, layer, patches)

    patches.set_class_attribute(DiffusionPipeline, "register_modules", register_and_wrap)


def _wrap_call(owner: type, layer: Layer, patches: Patches) -> None:
    original = vars(owner)["__call__"]

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return layer(_bind(self, original, args, kwargs))

    patches.set_class_attribute(owner, "__call__", call)


def redirect_devices(target: str, announce: Callable[[str], None], patches: Patches) -> None:
    """Put what a script wants to put on CUDA (pipelines, modules, tensors, generators) on `target` instead.

    If the target is the CPU, the script's calls that enable offloading are ignored.

    Args:
        target: name of a device.
        announce: receives each message for the user once.
    """
    said: set[str] = set()

    def say_once(text: str) -> None:
        if text not in said:
            said.add(text)
            announce(text)

    def redirect(value: Any) -> Any:
        is_named = isinstance(value, (str, torch.device))
        if is_named and str(value).partition(":")[0] == "cuda" and str(value) != target:
            say_once(f"The script requests {value}; it gets {target}, because of --device.")
            return torch.device(target)
        return value

    for owner, name in _list_device_takers():
        _redirect_call(owner, name, redirect, patches)
    for owner, name in ((safetensors, "safe_open"), (safetensors.torch, "load_file")):
        _redirect_call(owner, name, lambda value: _name_device(redirect(value)), patches)
    for owner in (torch.nn.Module, torch.Tensor):
        patches.set_class_attribute(owner, "cuda", lambda self, *_, **__: self.to(redirect("cuda")))
    patches.set_attribute(torch, "Generator", _make_generator(redirect))
    if target == "cpu":
        for name in _OFFLOADS:
            _leave_out(name, say_once, patches)
    _drop_device_map(target, say_once, patches)


def _name_device(value: Any) -> Any:
    """Return a device's name, as safetensors takes it; other values as they are."""
    return str(value) if isinstance(value, torch.device) else value


def stop_without_kernels(patches: Patches) -> None:
    """Stop a script at its first use of CUDA if this build of PyTorch has no kernels for its cards.

    The check isn't made earlier, because a script may select cards by environment variables until then.
    """
    start, was_asked = torch.cuda._lazy_init, False

    def ask() -> None:
        nonlocal was_asked
        start()
        if not was_asked:
            was_asked = True
            cards = [device for device in list_devices() if device.type == "cuda"]
            if all(card.missing for card in cards):
                require_kernels(*cards[:1])

    patches.set_attribute(torch.cuda, "_lazy_init", ask)


def _list_device_takers() -> list[tuple[Any, str]]:
    """List (owner, name) of the functions that take a device, to be redirected: they move, load or
    create tensors.

    Those that create tensors are from PyTorch's own list, which it caches at the first use. The cache is
    cleared here before any function is replaced, because Transformers may have replaced `torch.linspace`
    when the list was cached (5.23.0).
    """
    from diffusers import DiffusionPipeline

    _device_constructors.cache_clear()
    makers = {id(function) for function in _device_constructors()}
    return [
        (DiffusionPipeline, "to"),
        *((torch.nn.Module, name) for name in ("to", "to_empty")),
        *((torch.Tensor, name) for name in ("to", *_NEW)),
        *((torch, name) for name in ("load", "normal")),
        (DeviceContext, "__init__"),  # of torch.set_default_device and `with torch.device("cuda")`
        *((torch, name) for name in vars(torch) if name.endswith("_like") and name[0] != "_"),
        *(
            (owner, name)
            for owner in (torch, torch.fft, torch.nested)
            for name, value in vars(owner).items()
            if id(value) in makers
        ),
    ]


_NEW = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")


def _redirect_call(owner: Any, name: str, redirect: Callable[[Any], Any], patches: Patches) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return original(*map(redirect, args), **{k: redirect(x) for k, x in kwargs.items()})

    put = patches.set_class_attribute if isinstance(owner, type) else patches.set_attribute
    put(owner, name, call)


def _make_generator(redirect: Callable[[Any], Any]) -> type:
    class Generator(torch.Generator):
        def __new__(cls, device: Any = "cpu") -> Any:
            return super().__new__(cls, redirect(device))  # type: ignore[call-arg]  # it takes one

    return Generator


def _leave_out(name: str, say: Callable[[str], None], patches: Patches) -> None:
    from diffusers import DiffusionPipeline

    @functools.wraps(getattr(DiffusionPipeline, name))
    def leave_out(self: Any, *_: Any, **__: Any) -> None:
        say(f"The script calls {name}(), which needs an accelerator; on the CPU it is left out.")

    patches.set_class_attribute(DiffusionPipeline, name, leave_out)


def _drop_device_map(target: str, say: Callable[[str], None], patches: Patches) -> None:
    """Have pipelines and models that a script loads with a `device_map` put on the target as a whole."""
    from diffusers import DiffusionPipeline, ModelMixin

    owners: list[Any] = [DiffusionPipeline, ModelMixin]
    if find_spec("transformers") is not None:
        from transformers import PreTrainedModel

        owners.append(PreTrainedModel)
    for owner in owners:
        original = vars(owner)["from_pretrained"].__func__
        load = classmethod(functools.wraps(original)(_load_on(target, original, say)))
        patches.set_class_attribute(owner, "from_pretrained", load)


def _load_on(
    target: str, original: Callable[..., Any], say: Callable[[str], None]
) -> Callable[..., Any]:
    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
        device_map = kwargs.get("device_map")
        places = device_map.values() if isinstance(device_map, dict) else (device_map,)
        is_mapped = any(str(x) not in ("None", "cpu") for x in places)
        if is_mapped:
            del kwargs["device_map"]
        made = original(cls, *args, **kwargs)
        if is_mapped:
            say("The script requests a device_map; --device overrides it.")
            (made[0] if isinstance(made, tuple) else made).to(target)
        return made

    return from_pretrained
