"""Random numbers that formats share."""

from __future__ import annotations

import pytest
import torch

from stopdown.interception.randomness import same_noise, seeded_generators


@pytest.mark.parametrize("size", [(3, 20), (2, 64)])
def test_one_seed_is_one_noise(size: tuple[int, ...]) -> None:
    """What is drawn in fp16 and bf16 is what is drawn in fp32, rounded; other formats are left alone."""
    before = torch.randn

    def draw(dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(size, generator=torch.Generator().manual_seed(7), dtype=dtype)

    expected = draw(torch.float32)
    with same_noise():
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            assert torch.equal(draw(dtype), expected.to(dtype))
        assert torch.randn(2, dtype=torch.float64).dtype == torch.float64
    assert torch.randn is before


def test_generators_of_pytorch_are_seeded_for_a_block() -> None:
    """A pipeline that draws without its generator draws the same; what comes behind is as without it."""
    torch.manual_seed(1)
    after = torch.randn(4)
    torch.manual_seed(1)
    with seeded_generators(7):
        drawn = torch.randn(4)
    assert torch.equal(torch.randn(4), after)
    assert torch.equal(drawn, torch.randn(4, generator=torch.Generator().manual_seed(7)))
