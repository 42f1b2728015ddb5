"""One call of a transformer over several devices: Diffusers' context parallelism, put on and off.

Diffusers splits a transformer's tokens over the ranks of a process group, exchanges tokens for heads
around each attention (Ulysses), and gathers the result: from outside the call is the same on every rank.
Here it is put on with the plan that a class lacks, for lengths and numbers of heads that the ranks do not
divide, and on a CPU, where Diffusers finds no accelerator to count.

Diffusers 0.42 has no plan for CogVideoX and CogView3-Plus. The plans here say, in Diffusers' own terms,
which tensors are split and where they are gathered; the processor calls attention through Diffusers'
dispatch, which exchanges tokens for heads. Text and video tokens are both split, and each rank attends over
its own text and video tokens together. After the exchange the keys are in another order, so sums are added
in another order: in fp32 the result is that of one rank within rounding.

Not covered: attention backends that cannot be spread: Diffusers refuses them by name.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.attention_processor import (
    Attention,
    CogVideoXAttnProcessor2_0,
    FusedCogVideoXAttnProcessor2_0,
)
from diffusers.models.embeddings import apply_rotary_emb

from stopdown.component_calls.call import ComponentCall
from stopdown.component_calls.call_interception import Rank, put_layer
from stopdown.component_calls.step_caches import GATHERING, find_processors, iterate_hooks
from stopdown.errors import OptionError
from stopdown.interception.patches import Patches
from stopdown.sources.library_messages import quiet_libraries


def put_context_parallel(transformer: torch.nn.Module, patches: Patches) -> Any:
    """Spread each call of a transformer over the ranks, until `patches` is undone.

    Put it on before a guard, and take it off after that.

    Returns:
        Diffusers' configuration that is in force.
    """
    from diffusers import ContextParallelConfig

    ranks = torch.distributed.get_world_size()
    plan = find_plan(transformer)
    _check_ranks(transformer, ranks)
    config = ContextParallelConfig(ulysses_degree=ranks)
    _fit_lengths(transformer, config, plan, patches)
    _keep_modules(transformer, plan, patches)
    _put_processors(transformer, patches)
    with quiet_libraries(), Patches() as resolving:
        if torch.accelerator.device_count() == 0:
            resolve = functools.partial(_resolve_on_cpu, transformer)
            resolving.set_attribute(transformer, "_resolve_parallel_config", resolve)
        transformer.enable_parallelism(config=config, cp_plan=plan)  # type: ignore[operator]
    if torch.distributed.get_backend(config._flattened_mesh.get_group()) == "gloo":
        # gloo gathers parts of several sizes only if they are padded to one
        for hook in iterate_hooks(transformer):
            if type(hook).__name__ == GATHERING:
                gather = functools.partial(_gather, hook, hook.fn_ref.post_forward)
                patches.set_attribute(hook.fn_ref, "post_forward", gather)
    return config


def find_plan(transformer: torch.nn.Module) -> dict[str, Any]:
    """Return what of a transformer is split and gathered: by Diffusers' plan of its class, or by ours."""
    name = type(transformer).__name__
    plan = getattr(transformer, "_cp_plan", None) or PLANS.get(name)
    if plan is None:
        raise OptionError(
            f"{name} cannot be spread over several devices: neither Diffusers nor Stopdown has a "
            "context-parallel plan for it.",
            expected=f"Diffusers has plans for Wan, Flux, Qwen-Image and LTX; here are {', '.join(PLANS)}.",
            remedy="Run it in one process. For several prompts, run one process for each device: "
            "stopdown batch.",
        )
    return plan


def _check_ranks(transformer: torch.nn.Module, ranks: int) -> None:
    """Refuse what Diffusers would refuse in the middle of a call: heads that the ranks cannot share."""
    if ranks < 2:
        raise OptionError(
            f"A call cannot be spread over {ranks} rank.", remedy="Start two ranks or more."
        )
    heads = _count_heads(transformer)
    share = -(-heads // ranks)
    if heads and share * ranks - heads >= share > 0 and heads % ranks:
        fitting = [n for n in range(2, heads + 1) if -(-heads // n) * n - heads < -(-heads // n)]
        raise OptionError(
            f"{heads} attention heads cannot be shared by {ranks} ranks: each would have {share}, and "
            "at least one rank none.",
            remedy=f"Start {max((n for n in fitting if n < ranks), default=2)} ranks.",
        )


def _count_heads(transformer: torch.nn.Module) -> int:
    found = (vars(child).get("heads") for child in transformer.modules())
    return next((heads for heads in found if isinstance(heads, int)), 0)


def _keep_modules(transformer: torch.nn.Module, plan: dict[str, Any], patches: Patches) -> None:
    """Have undoing take Diffusers' hooks off and bring back what they and the configuration replace."""
    from diffusers.hooks.context_parallel import remove_context_parallel

    kept = [
        (child, {name: vars(child)[name] for name in _REPLACED if name in vars(child)})
        for child in transformer.modules()
    ]

    def restore() -> None:
        remove_context_parallel(transformer, plan)
        for child, values in kept:
            for name in _REPLACED:
                vars(child).pop(name, None)
            vars(child).update(values)

    processors = find_processors(transformer)
    for processor in processors:
        if hasattr(processor, "_parallel_config"):
            patches.set_attribute(processor, "_parallel_config", None)
    patches.defer(restore)


_REPLACED = ("forward", "_diffusers_hook", "_parallel_config")


def _put_processors(transformer: torch.nn.Module, patches: Patches) -> None:
    """Give each attention that Diffusers calls directly the processor that can be spread."""
    for child in transformer.modules():
        if isinstance(vars(child).get("processor"), REPLACED):
            patches.set_attribute(child, "processor", CogVideoXAttnProcessor())


def _resolve_on_cpu(transformer: torch.nn.Module, config: Any) -> Any:
    """What `enable_parallelism` makes of a configuration, without an accelerator to count."""
    from diffusers import ParallelConfig

    whole = ParallelConfig(context_parallel_config=config)
    mesh = torch.distributed.init_device_mesh(
        "cpu", config.mesh_shape, mesh_dim_names=config.mesh_dim_names
    )
    ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    whole.setup(*ranks, torch.device("cpu"), mesh=mesh)
    transformer._parallel_config = whole
    return whole


def _fit_lengths(
    transformer: torch.nn.Module, config: Any, plan: dict[str, Any], patches: Patches
) -> None:
    """Split lengths and heads that the ranks do not divide, from the first such call on.

    Diffusers has a way for these (`ulysses_anything`) that asks all ranks for their
    sizes before each exchange; where all is divisible it is not taken. Diffusers' hooks come later and
    lie around these layers: so inputs are looked at by a hook of the module, outputs beneath.
    """
    if _count_heads(transformer) % config.ulysses_degree:
        config.ulysses_anything = True
    for path, splits in plan.items():
        for child in _find_modules(transformer, path) if isinstance(splits, dict) else ():
            hook = functools.partial(_look_at_inputs, config, splits)
            patches.defer(child.register_forward_pre_hook(hook, with_kwargs=True).remove)
            if any(isinstance(index, int) for index in splits):
                layer = functools.partial(_look_at_outputs, config, splits)
                put_layer(child, "forward", layer, patches, Rank.MEMORY)


def _look_at_inputs(
    config: Any, splits: dict[Any, Any], child: torch.nn.Module, args: Any, kwargs: Any
) -> None:
    names = list(inspect.signature(type(child).forward).parameters)[1:]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    for name in set(splits) & set(given):
        _look(config, given[name], splits[name])


def _look_at_outputs(config: Any, splits: dict[Any, Any], call: ComponentCall) -> Any:
    output = call.proceed()
    for index in filter(lambda key: isinstance(key, int), splits):
        is_one = isinstance(output, torch.Tensor)
        _look(config, output if is_one else output[index], splits[index])
    return output


def _look(config: Any, given: Any, split: Any) -> None:
    """Whether one tensor, or each of several, can be split into equal parts."""
    pairs = zip(given or (), split, strict=False) if isinstance(split, (list, tuple)) else None
    for tensor, one in [(given, split)] if pairs is None else pairs:
        is_split = isinstance(tensor, torch.Tensor) and tensor.dim() == one.expected_dims
        if is_split and tensor.shape[one.split_dim] % config.ulysses_degree:
            config.ulysses_anything = True


def _gather(hook: Any, gather_equal: Any, module: torch.nn.Module, output: Any) -> Any:
    if not hook.parallel_config.ulysses_anything:
        return gather_equal(module, output)
    group, dim = hook.parallel_config._flattened_mesh.get_group(), hook.metadata[0].gather_dim
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    torch.distributed.all_gather(sizes, torch.tensor([output.shape[dim]]), group=group)
    most = max(int(size) for size in sizes)
    padding = output.new_zeros(
        *output.shape[:dim], most - output.shape[dim], *output.shape[dim + 1 :]
    )
    mine = torch.cat([output, padding], dim=dim)
    parts = [torch.empty_like(mine) for _ in sizes]
    torch.distributed.all_gather(parts, mine, group=group)
    pairs = zip(parts, sizes, strict=True)
    return torch.cat([part.narrow(dim, 0, int(size)) for part, size in pairs], dim=dim)


def _find_modules(transformer: torch.nn.Module, path: str) -> list[torch.nn.Module]:
    before, star, after = path.partition("*")
    if not star:
        return [transformer.get_submodule(path)]
    children = transformer.get_submodule(before.rstrip(".")).children()
    return [child.get_submodule(after.lstrip(".")) for child in children]


_TOKENS = ContextParallelInput(split_dim=1, expected_dims=3)
_ROTARY = ContextParallelInput(split_dim=0, expected_dims=2)
_RESULT = ContextParallelOutput(gather_dim=1, expected_dims=3)

PLANS: dict[str, dict[str, Any]] = {
    "CogVideoXTransformer3DModel": {
        "transformer_blocks.0": {"hidden_states": _TOKENS, "encoder_hidden_states": _TOKENS},
        "transformer_blocks.*": {"image_rotary_emb": [_ROTARY, _ROTARY]},
        "proj_out": _RESULT,
    },
    "CogView3PlusTransformer2DModel": {
        "transformer_blocks.0": {"hidden_states": _TOKENS, "encoder_hidden_states": _TOKENS},
        "proj_out": _RESULT,
    },
}
"""`_cp_plan` of a class of transformers. Text tokens leave the last block unused and are not gathered."""

REPLACED = (CogVideoXAttnProcessor2_0, FusedCogVideoXAttnProcessor2_0)
"""Processors that call attention directly, which `CogVideoXAttnProcessor` replaces."""


class CogVideoXAttnProcessor:
    """Joint attention over text and video tokens, through Diffusers' dispatch of attention backends."""

    _attention_backend = None
    _parallel_config = None

    def __call__(
        self,
        attn: Attention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        text_length = encoder_hidden_states.size(1)
        tokens = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        if attn.fused_projections:
            projected = attn.to_qkv(tokens).chunk(3, dim=-1)
        else:
            projected = attn.to_q(tokens), attn.to_k(tokens), attn.to_v(tokens)
        query, key, value = (x.unflatten(2, (attn.heads, -1)) for x in projected)
        if attn.norm_q is not None:
            query = attn.norm_q(query)
        if attn.norm_k is not None:
            key = attn.norm_k(key)
        if image_rotary_emb is not None:
            query = _rotate(query, text_length, image_rotary_emb)
            if not attn.is_cross_attention:
                key = _rotate(key, text_length, image_rotary_emb)
        tokens = dispatch_attention_fn(
            query,
            key,
            value,
            attn_mask=attention_mask,
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
        )
        tokens = tokens.flatten(2, 3).type_as(query)
        tokens = attn.to_out[1](attn.to_out[0](tokens))
        text, video = tokens.split([text_length, tokens.size(1) - text_length], dim=1)
        return video, text


def _rotate(
    x: torch.Tensor, text_length: int, rotary: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Rotary embeddings on the video tokens of `[B, S, H, D]`; text tokens have none."""
    video = apply_rotary_emb(x[:, text_length:], rotary, sequence_dim=1)
    return torch.cat([x[:, :text_length], video], dim=1)
