"""Muon (Jordan et al. 2024): momentum whose matrix is replaced by the nearest orthogonal one.

In trials on the autoencoder it reached in 100 steps half the error of AdamW. `torch.optim.Muon` takes
matrices only; here a convolution's weight counts as a matrix of output channels by everything else.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalize(
    matrix: torch.Tensor, steps: int = 5, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """About `U @ V.T` of the singular value decomposition, `[R, C]`, by Newton-Schulz steps in `dtype`."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = ((matrix.T if tall else matrix) / (matrix.norm() + 1e-7)).to(dtype)
    a, b, c = _NEWTON_SCHULZ
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum, for weights of two or more dimensions.

    Args:
        params: weights `[out, ...]`.
        lr: size of a step; every singular value of an update is about this large.
        momentum: of the gradient.
        dtype: of the products; bf16 is fast where a processor has matrix units.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        lr: float = 0.02,
        momentum: float = 0.95,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._dtype = dtype
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum"] = torch.zeros_like(weight)
                average = state["momentum"].mul_(group["momentum"]).add_(weight.grad)
                update = weight.grad.add(average, alpha=group["momentum"]).flatten(1)
                stretch = max(1.0, update.shape[0] / update.shape[1]) ** 0.5
                update = orthogonalize(update, dtype=self._dtype).reshape(weight.shape)
                weight.add_(update, alpha=-group["lr"] * stretch)
