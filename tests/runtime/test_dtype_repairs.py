"""Tests of calls that refuse operands of two dtypes: repaired under the guard, or left with a note."""

from __future__ import annotations

import copy
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from models.mixed_dtype_models import make_partly_half
from models.snapshots import assert_untouched
from stopdown import testing
from stopdown.app.run_command import ScriptOptions, run_script
from stopdown.errors import StopdownWarning
from stopdown.interception.autocast import watched_autocast
from stopdown.numerics import relative_l2
from stopdown.runtime import repairs, watch
from stopdown.runtime.guard import guard

REFUSED = "should be the same|must have the same dtype|expect parameter to have scalar type"


def make_pipeline() -> Any:
    """A pipeline in fp16 whose autoencoder somebody cast to fp32."""
    pipe = testing.make_pipeline("sd", dtype=torch.float16)
    pipe.vae.float()
    return pipe


def draw(pipe: Any) -> Any:
    """Its pixels, through the autoencoder."""
    pipe.set_progress_bar_config(disable=True)
    made = {"height": 16, "width": 16, "num_inference_steps": 1, "output_type": "np"}
    return pipe("a ball", generator=torch.Generator().manual_seed(0), **made).images


class WideNorm(torch.nn.GroupNorm):
    """Widens its input beside parameters in fp16, as guided-diffusion's norms do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float()).type(x.dtype)


class Block(torch.nn.Module):
    """An embedding that is always fp32, a norm that widens itself, and a product at the end."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(8, 8)
        self.norm = WideNorm(2, 8)
        self.into = torch.nn.Linear(8, 8)
        self.out = torch.nn.Linear(8, 8)
        self.gain = gain

    def forward(self, x: torch.Tensor, time: float = 0.5) -> torch.Tensor:
        angles = time * torch.arange(8, dtype=torch.float32, device=x.device)
        x = x + self.embed(torch.cos(angles)).to(x.dtype)
        wide = self.into(self.norm(x.unsqueeze(-1)).squeeze(-1)) * self.gain
        y: torch.Tensor = self.out(wide / self.gain)
        return y


def make_block(gain: float = 1.0) -> Block:
    """In fp16; without a guard its first layer refuses. A large gain overflows between two layers."""
    torch.manual_seed(0)
    return Block(gain).half().eval().requires_grad_(False)


def test_a_component_cast_by_a_script_is_repaired() -> None:
    """The same pixels as with the cast that the script should have written, and every hook gone."""
    by_hand, pipe = make_pipeline(), make_pipeline()
    decode = by_hand.vae.decode
    by_hand.vae.decode = lambda latents, *args, **kwargs: decode(latents.float(), *args, **kwargs)
    told: list[str] = []
    with assert_untouched(pipe), guard(pipe, announce=told.append) as guarded:
        pixels = draw(pipe)
    assert (pixels == draw(by_hand)).all()
    (repair,) = guarded.repairs
    assert (repair.action, repair.kind) == ("cast-inputs", "dtypes")
    assert repair.module_path == "vae.decode:post_quant_conv"
    (text,) = told
    assert "post_quant_conv got an input whose dtype differs from that of its weight" in text
    with pytest.raises(RuntimeError, match=REFUSED):
        draw(pipe)


def test_a_layer_of_its_own_has_no_path() -> None:
    """The component itself refused the input, at its first call."""
    layer = torch.nn.Linear(4, 4).half().requires_grad_(False)
    told: list[str] = []
    with guard(layer, announce=told.append):
        layer(torch.ones(1, 4))
    (text,) = told
    assert "`Linear` stopped at call 1: " in text
    assert text.endswith(
        " It got an input whose dtype differs from that of its weight. Such inputs are now cast to the "
        "dtype of the weights. The call was retried."
    )


@pytest.mark.usefixtures("each_device")
def test_code_that_mixes_dtypes_runs_under_the_guard() -> None:
    """An embedding in fp32 and a norm that widens its input: both at once, and off to the last bit."""
    block, x = make_block(), torch.ones(2, 8).half()
    with pytest.raises(RuntimeError, match=REFUSED):
        block(x)
    before = copy.deepcopy(block.state_dict())
    with guard(block, announce=lambda _: None) as guarded:
        y = block(x)
        assert torch.equal(y, block(x))  # once repaired, it stays so
    (repair,) = guarded.repairs
    assert "2 layers" in repair.reason
    wide = copy.deepcopy(block).float()
    torch.testing.assert_close(y.float(), wide(x.float()), rtol=0, atol=2e-3)
    after = block.state_dict()
    assert all(torch.equal(v, after[k]) and v.dtype == after[k].dtype for k, v in before.items())
    assert not any(m._forward_pre_hooks for m in block.modules())


def test_a_norm_that_gets_fp32_and_widens_it_is_found() -> None:
    """Cast at its input it would widen that again, beside parameters in fp16: they are fp32 instead."""
    block = make_block()
    with guard(block, announce=lambda _: None) as guarded:
        y = block(torch.ones(2, 8))  # the embedding's sum is fp32, and so is what the norm gets
    (repair,) = guarded.repairs
    assert "3 layers" in repair.reason
    wide = copy.deepcopy(block).float()
    torch.testing.assert_close(y.float(), wide(torch.ones(2, 8)), rtol=0, atol=2e-3)


@pytest.mark.usefixtures("each_device")
def test_an_overflow_behind_a_refusal_is_repaired_too() -> None:
    """First the dtypes, then the range: the casts stay in force under the exponents."""
    block, x = make_block(gain=2.0**17), torch.ones(2, 8).half()
    with guard(block, announce=lambda _: None) as guarded:
        y = block(x)
        block(x)
    assert [repair.action for repair in guarded.repairs] == ["cast-inputs", "rescaled"]
    assert y.isfinite().all()


@pytest.mark.default_rows(2)
@pytest.mark.parametrize(
    ("forgets", "is_whole"), [(False, False), (True, True), (True, False), (False, True)]
)
def test_mixed_dtypes_and_an_overflow_are_rescaled(forgets: bool, is_whole: bool) -> None:
    """A model of two dtypes that overflows is nearer to fp32 than bf16 is, its matrices in fp16."""
    x, t = (
        torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1)),
        torch.tensor([3.0, 7.0]),
    )
    wanted = make_partly_half(forgets=forgets)(x, t)
    bf16 = relative_l2(make_partly_half(forgets=False).cast_blocks(torch.bfloat16)(x, t), wanted)
    module = make_partly_half(forgets=forgets).cast_blocks(torch.float16)
    module = module.half() if is_whole else module
    with guard(module, announce=lambda _: None) as guarded:
        found = [module(x, t) for _ in range(2)]
        (state,) = guarded.session.components.values()
        (scaling,) = [one.scaling for one in state.applied if one.precision == "fp16"]
        assert scaling is not None
        assert "" not in scaling.fp32_modules
        assert module.blocks[0].down.weight.dtype == torch.float16
    assert guarded.repairs[-1].action == "rescaled"
    assert max(relative_l2(one, wanted) for one in found) < bf16 / 2


def test_without_the_repair_the_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switched off, the error is back."""
    monkeypatch.setattr(watch, "is_refusal", lambda _: False)
    block = make_block()
    with guard(block), pytest.raises(RuntimeError, match=REFUSED) as found:
        block(torch.ones(2, 8).half())
    assert not hasattr(found.value, "__notes__")


@pytest.mark.parametrize("on_fault", ["raise", "warn"])
def test_a_guard_that_may_not_repair_leaves_the_error_with_a_note(on_fault: Any) -> None:
    """The program's own exception, with what to type at its end."""
    block = make_block()
    with guard(block, on_fault=on_fault) as guarded, pytest.raises(RuntimeError) as found:
        block(torch.ones(2, 8).half())
    (note,) = found.value.__notes__
    assert note.startswith("Stopdown: Block:embed, whose weights are fp16, rejected")
    assert guarded.repairs == ()


class Product(torch.nn.Module):
    """Multiplies two values of different dtypes: no layer's input can be cast."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return y @ y.T.float()


def test_a_product_of_two_values_keeps_its_error() -> None:
    """What no cast of a layer's input repairs stays the program's own error."""
    product = Product().half().eval().requires_grad_(False)
    with guard(product) as guarded, pytest.raises(RuntimeError, match="same dtype") as found:
        product(torch.ones(2, 4).half())
    assert len(found.value.__notes__) == 1
    assert guarded.repairs == ()
    assert not any(m._forward_pre_hooks for m in product.modules())


def test_other_errors_pass_as_they_are() -> None:
    """A wrong shape is nothing of ours."""
    block = make_block()
    with guard(block), pytest.raises(RuntimeError, match="shape") as found:
        block.out(torch.ones(2, 5).half())
    assert not hasattr(found.value, "__notes__")


def test_gradients_are_left_alone() -> None:
    """A call whose parameters an optimizer has is not changed under its program."""
    block = make_block().requires_grad_(True)
    optimizer = torch.optim.SGD(block.parameters(), 0.1)
    with guard(block) as guarded, pytest.raises(RuntimeError, match=REFUSED):
        block(torch.ones(2, 8).half())
    assert guarded.repairs == ()
    del optimizer


def test_a_script_runs_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`explain` tells people with this error to use `stopdown run`: it has to help."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from stopdown.testing import make_pipeline\n"
        "pipe = make_pipeline('sd', dtype=torch.float16)\n"
        "pipe.vae.float()\n"
        "found = pipe('a ball', num_inference_steps=2, height=16, width=16, output_type='np').images\n"
        "assert found.dtype.kind == 'f'\n"
    )
    monkeypatch.setattr(sys, "argv", ["stopdown"])
    told: list[str] = []
    record = run_script(ScriptOptions(script=str(script)), told.append)
    assert record.exit_code == 0, told
    assert [repair.action for repair in record.runs[0].repairs] == ["cast-inputs"]


class Writer(torch.nn.Module):
    """Counts its calls somewhere before it refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.register_buffer("state", torch.zeros(1))
        self.count = 0

    def forward(self, x: torch.Tensor, where: str, kept: Any = None) -> torch.Tensor:
        if where == "buffer":
            self.state += 1
        elif where == "attribute":
            self.count += 1
        elif where == "list":
            kept.append(x)
        elif where == "tensor":
            kept += 1
        y: torch.Tensor = self.inner(x)
        return y


class Cache:
    """Keeps values between calls, as language models' caches do."""


def test_a_list_that_a_refused_call_filled_is_put_back() -> None:
    """The call is made again on what the list held, so it holds each value once."""
    writer, kept = Writer().half().eval().requires_grad_(False), list[torch.Tensor]()
    with guard(writer) as guarded, pytest.warns(StopdownWarning, match="Such inputs are now cast"):
        writer(torch.ones(2, 4), "list", kept)
    assert len(kept) == 1
    assert len(guarded.repairs) == 1


@pytest.mark.parametrize("where", ["buffer", "tensor", "cache"])
def test_a_call_that_writes_is_not_made_again(where: str) -> None:
    """It would write twice: the error is the program's own, and buffers and tensors are as it left them."""
    writer = Writer().half().eval().requires_grad_(False)
    kept: Any = {"tensor": torch.zeros(1), "cache": Cache()}.get(where)
    with guard(writer) as guarded, pytest.raises(RuntimeError, match=REFUSED) as found:
        writer(torch.ones(2, 4), where, kept)
    assert len(found.value.__notes__) == 1
    assert guarded.repairs == ()
    assert writer.state == (where == "buffer")
    if where == "tensor":
        assert kept == 1


def test_an_attribute_that_a_call_sets_is_put_back_before_it_is_made_again() -> None:
    """The module has counted one call, not two."""
    writer = Writer().half().eval().requires_grad_(False)
    with guard(writer, announce=lambda text: None) as guarded:
        found = writer(torch.ones(2, 4), "attribute")
    assert [repair.action for repair in guarded.repairs] == ["cast-inputs"]
    assert torch.isfinite(found).all()
    assert writer.count == 1


class Noisy(torch.nn.Module):
    """Draws a number before its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x + torch.randn(4))
        return y


def test_a_repaired_call_draws_its_own_numbers() -> None:
    """The result is that of the cast by hand with the same seed, and so is the next number."""
    noisy = Noisy().half().eval().requires_grad_(False)
    torch.manual_seed(3)
    wanted, follows = noisy.inner((torch.ones(2, 4) + torch.randn(4)).half()), torch.randn(1)
    torch.manual_seed(3)
    with guard(noisy, announce=lambda _: None):
        assert torch.equal(noisy(torch.ones(2, 4)), wanted)
    assert torch.equal(torch.randn(1), follows)


def test_an_error_leaves_random_numbers_as_without_a_guard() -> None:
    """What is looked at and not repaired draws nothing that the program would miss."""

    class Both(Noisy):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y @ torch.randn(4, 4)

    both, numbers = Both().half().eval().requires_grad_(False), []
    for on_fault in ("raise", "repair"):
        torch.manual_seed(3)
        with guard(both, on_fault=on_fault), pytest.raises(RuntimeError, match=REFUSED):
            both(torch.ones(2, 4))
        numbers.append(torch.randn(1))
    assert torch.equal(*numbers)


def test_formats_for_storage_are_no_operands() -> None:
    """A cast to 8 bits would lose the value: the error is the program's own."""
    stored = torch.nn.Linear(16, 16, bias=False).eval().requires_grad_(False)
    stored.weight.data = stored.weight.data.to(torch.float8_e4m3fn)
    with guard(stored) as guarded, pytest.raises(RuntimeError):
        stored(torch.ones(2, 16))
    assert guarded.repairs == ()


class Scaled(torch.nn.Module):
    """Its first parameter has another dtype than its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(4))
        self.weight = torch.nn.Parameter(torch.randn(4, 4).half())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight) * self.scale


def test_inputs_get_the_dtype_of_the_weight() -> None:
    """Not that of whichever parameter comes first."""
    scaled = Scaled().eval().requires_grad_(False)
    with guard(scaled, announce=lambda _: None) as guarded:
        assert scaled(torch.ones(2, 4)).isfinite().all()
    assert len(guarded.repairs) == 1


def test_threads_that_are_refused_together_all_go_on() -> None:
    """One repairs the module, the others repeat their call."""
    block = make_block()
    together, began = threading.Barrier(3), set[int]()

    def wait(*_: Any) -> None:
        if threading.get_ident() not in began:
            began.add(threading.get_ident())
            together.wait(60)

    block.embed.register_forward_pre_hook(wait)
    found: list[Any] = []

    def call() -> None:
        try:
            found.append(block(torch.ones(2, 8).half()))
        except Exception as error:
            found.append(error)

    with guard(block, announce=lambda _: None) as guarded:
        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(isinstance(x, torch.Tensor) for x in found), found
    assert len(guarded.repairs) == 1


def test_a_repair_that_cannot_be_put_on_leaves_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script gets its own error, and what was in force before stays so."""

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(repairs, "cast_to_weights", fail)
    block = make_block()
    with guard(block) as guarded, pytest.raises(RuntimeError, match=REFUSED):
        block(torch.ones(2, 8).half())
    assert guarded.repairs == ()


def test_threads_that_watch_autocast_leave_it_as_it_was() -> None:
    """Whoever leaves first: the class is restored by the last, and each sees its own thread alone."""
    original = torch.autocast.__enter__
    entered, left = threading.Event(), threading.Event()

    def watch() -> None:
        with watched_autocast(is_off=True) as seen:
            entered.set()
            left.wait(60)
        assert seen == []

    with watched_autocast() as own:
        thread = threading.Thread(target=watch)
        thread.start()
        entered.wait(60)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.is_autocast_enabled("cpu")
    assert own == [torch.bfloat16]
    left.set()
    thread.join()
    assert torch.autocast.__enter__ is original
