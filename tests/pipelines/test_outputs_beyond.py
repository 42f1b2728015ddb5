"""Outputs beyond fp16's largest value: each way in hands them over as fp32 does, at once."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import T5EncoderModel

import stopdown
from models.pipeline_calls import quiet
from models.ways_in import REPAIR_SPREAD
from stopdown import testing
from stopdown.interception.patches import Patches
from stopdown.module_calls.call import bring_back
from stopdown.numerics import ROUNDED_ONCE, iterate_tensors, measure_error
from stopdown.runtime.guard import guard
from stopdown.runtime.scripts import ScriptGuard

ENDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a tensor": lambda y: y,
    "a tuple": lambda y: (y, y[:, :2]),
    "a dict": lambda y: {"first": y, "second": y[:, 2:]},
    "a list": lambda y: [y, y.T],
    "halves": lambda y: y.chunk(2, -1),
    "its mean": lambda y: (y, y.mean()),
    "a small multiple": lambda y: (y, y * 1e-6),
    "its relu": lambda y: (y, y.relu()),
    "its softmax": lambda y: (y, y.softmax(-1)),
    "places": lambda y: (y, y.argmax(-1)),
    "widened": lambda y: y.float(),
    "widened and divided": lambda y: y.float() / 255,
}


class Net(nn.Module):
    """Two linears, whose result reaches 90,300."""

    def __init__(self, end: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.end = nn.Linear(16, 32), nn.Linear(32, 8), end
        for tensor in self.second.parameters():
            tensor.data.mul_(3 * 2**16)

    def forward(self, x: torch.Tensor) -> Any:
        return ENDS[self.end](self.second(nn.functional.silu(self.first(x))))


@contextlib.contextmanager
def guard_it(net: Net, x: torch.Tensor) -> Iterator[Net]:
    with guard(net.half(), announce=quiet):
        yield net


@contextlib.contextmanager
def guard_with_plan(net: Net, x: torch.Tensor) -> Iterator[Net]:
    plan = stopdown.make_plan(net, run=lambda: net(x / 1000))  # of calls that stay in range
    with guard(net, plan, announce=quiet):
        yield net


@contextlib.contextmanager
def bring_to_fp16(net: Net, x: torch.Tensor) -> Iterator[Net]:
    put = stopdown.fp16(net, x)
    yield net
    put.remove()


@contextlib.contextmanager
def run_script(net: Net, x: torch.Tensor) -> Iterator[Net]:
    with Patches() as patches:
        ScriptGuard(quiet).put_on(patches)
        yield net.half()


WAYS = {
    "guard": guard_it,
    "guard with a plan": guard_with_plan,
    "fp16": bring_to_fp16,
    "run": run_script,
}


@pytest.mark.default_rows(8)
@pytest.mark.filterwarnings("ignore::stopdown.errors.StopdownWarning")
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("way", WAYS)
def test_the_first_call_gives_what_the_second_does(way: str, end: str) -> None:
    """Gives the same bits and dtypes twice, no further from fp32 than bf16 is, whatever holds them."""
    net = Net(end).eval()
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        right = net(x)
        assert float(net.second(nn.functional.silu(net.first(x))).abs().max()) > 65504
        bf16 = measure_error(copy.deepcopy(net).bfloat16()(x.bfloat16()), right)
        with WAYS[way](net, x) as prepared:
            first, second = prepared(x.half()), prepared(x.half())
    assert type(first) is type(right)
    pairs = zip(iterate_tensors(first), iterate_tensors(second), strict=True)
    assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)
    spread = REPAIR_SPREAD if way in ("guard", "run") else 1
    assert measure_error(first, right) <= max(bf16 * spread, ROUNDED_ONCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_fits_comes_back_in_the_dtype_of_the_arguments(dtype: torch.dtype) -> None:
    """Narrows each tensor by itself; Inf and NaN that were there before keep nothing wide."""
    large, small, meant = (
        torch.tensor(x, dtype=dtype) for x in ([1e5, 1], [2, 3], [-torch.inf, 1])
    )
    found = bring_back({"a": large, "b": [small, meant]}, dtype, torch.float16)
    assert [x.dtype for x in iterate_tensors(found)] == [torch.float32] + 2 * [torch.float16]
    assert torch.equal(found["a"], large.float())


def test_what_code_widens_stays_wide() -> None:
    """Leaves fp32 that was computed in 16 bits, and what is told to be wide."""
    own, other = torch.ones(2), torch.ones(2, dtype=torch.bfloat16)
    found = bring_back((own, other), torch.bfloat16, torch.float16)
    assert [x.dtype for x in found] == [torch.float32, torch.float16]
    found = bring_back((own, own + 1), torch.float32, torch.float16, {1})
    assert [x.dtype for x in found] == [torch.float16, torch.float32]


TOKENS = torch.tensor([[5, 6, 7, 1]])


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A T5 whose hidden states pass 65504, as Transformers saves it."""
    folder = tmp_path_factory.mktemp("models") / "t5"
    encoder = testing.make_pipeline("cogvideox").text_encoder
    testing.overflow_(encoder)
    encoder.to(torch.bfloat16).save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOPDOWN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield folder


def load_encoder(folder: Path, **options: Any) -> Any:
    return T5EncoderModel.from_pretrained(folder, **options).eval()


@contextlib.contextmanager
def load_with_config(folder: Path) -> Iterator[Any]:
    config = stopdown.StopdownConfig()
    yield load_encoder(folder, dtype=torch.float16, quantization_config=config)


@contextlib.contextmanager
def load_guarded(folder: Path) -> Iterator[Any]:
    config = stopdown.StopdownConfig(guard=True)
    encoder = load_encoder(folder, dtype=torch.float16, quantization_config=config)
    yield encoder
    encoder.stopdown_guard.remove()


@contextlib.contextmanager
def load_and_bring_to_fp16(folder: Path) -> Iterator[Any]:
    encoder = load_encoder(folder, dtype=torch.float32)
    put = stopdown.fp16(encoder, TOKENS)
    yield encoder
    put.remove()


@contextlib.contextmanager
def load_under_run(folder: Path) -> Iterator[Any]:
    with Patches() as patches:
        ScriptGuard(quiet).put_on(patches)
        yield load_encoder(folder, dtype=torch.float16)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::stopdown.errors.StopdownWarning")
@pytest.mark.parametrize(
    ("way", "asks"),
    [
        (load_with_config, True),
        (load_with_config, False),
        (load_guarded, True),
        (load_guarded, False),
        (load_and_bring_to_fp16, True),
        (load_and_bring_to_fp16, False),
        (load_under_run, True),
        (load_under_run, False),
    ],
)
def test_hidden_states_beyond_the_largest_value(
    encoder_folder: Path, way: Callable[[Path], Any], asks: bool
) -> None:
    """Gives those of fp32, in an object or a tuple, twice the same, also where none were measured."""
    with torch.no_grad():
        right = load_encoder(encoder_folder).float()(TOKENS, output_hidden_states=asks)
        near = load_encoder(encoder_folder)(TOKENS, output_hidden_states=asks)
        with way(encoder_folder) as encoder:
            for in_object in (True, False):
                call = functools.partial(encoder, output_hidden_states=asks, return_dict=in_object)
                first, second = call(TOKENS), call(TOKENS)
                assert isinstance(first, tuple) is not in_object
                pairs = zip(iterate_tensors(first), iterate_tensors(second), strict=True)
                assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)
                assert measure_error(first, right) <= measure_error(near, right)
