"""Which weights of a component Diffusers stores in 8 bits, by its own lists.

Diffusers' layerwise casting knows layers whose weights it may keep in a smaller format between calls,
and patterns of what its authors found too sensitive: norms, patch and position embeddings, and what
each class adds. The same layers are taken here, of Transformers' encoders too.

**Does not catch** adapters: their layers are small and stay as they are.
"""

from __future__ import annotations

import re

import torch

from stopdown.pipelines.components import is_autoencoder, read_precisions


def find_storable(module: torch.nn.Module) -> dict[str, dict[str, torch.nn.Parameter]]:
    """Path of a layer → the weights in it that can wait in 8 bits, by their own names.

    Biases, what is not in the format of most of the component (fp32 modules), and autoencoders, which
    are small and draw the picture themselves, are left out.
    """
    if is_autoencoder(module):
        return {}
    main = next(iter(read_precisions(module)), None)
    kinds, skipped = _read_lists(module)
    found: dict[str, dict[str, torch.nn.Parameter]] = {}
    for path, part in module.named_modules():
        if not isinstance(part, kinds) or any(pattern.search(path) for pattern in skipped):
            continue
        weights = {n: x for n, x in part.named_parameters(recurse=False) if x.dim() > 1}
        taken = {n: x for n, x in weights.items() if x.dtype == main and x.element_size() > 1}
        if taken:
            found[path] = taken
    return found


def _read_lists(
    module: torch.nn.Module,
) -> tuple[tuple[type[torch.nn.Module], ...], tuple[re.Pattern[str], ...]]:
    from diffusers.hooks._common import _GO_LC_SUPPORTED_PYTORCH_LAYERS
    from diffusers.hooks.layerwise_casting import DEFAULT_SKIP_MODULES_PATTERN

    own = getattr(module, "_skip_layerwise_casting_patterns", None) or ()
    kept = getattr(module, "_keep_in_fp32_modules", None) or ()
    patterns = dict.fromkeys([*DEFAULT_SKIP_MODULES_PATTERN, *own, *kept, "lora"])
    return _GO_LC_SUPPORTED_PYTORCH_LAYERS, tuple(re.compile(text) for text in patterns)
