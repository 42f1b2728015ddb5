"""Weights that lie in files: the same bits as in memory, through loading, casting, planning and waiting."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from stopdown import mapped_weights
from stopdown.errors import StopdownWarning
from stopdown.graph.capture import name_parameters
from stopdown.mapped_weights import cast_tensor, choose_folder, is_mapped, map_copy
from stopdown.memory.weight_stores import WeightStore
from stopdown.pipelines import loader
from stopdown.pipelines.components import find_components
from stopdown.pipelines.loader import load_pipeline
from stopdown.pipelines.requests import Request
from stopdown.pipelines.sources import resolve_source
from stopdown.plans.applier import apply_plan
from stopdown.plans.calibrated import make_plan

pytestmark = pytest.mark.skipif(
    os.name != "posix", reason="a file that is mapped stays where it is"
)

SMALL = Request(frames=9, height=16, width=16, steps=1)


@pytest.fixture
def few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine beside whose memory every model is large."""
    monkeypatch.setattr(mapped_weights, "SHARE", 0.0)


def test_a_mapped_copy_has_the_same_bits_and_leaves_no_file(tmp_path: Path) -> None:
    """Its file has no name any more; what is cast from it is mapped, what is cast from memory is not."""
    plain = torch.randn(4, 6).to(torch.bfloat16)
    mapped = map_copy(plain, tmp_path, torch.float32)
    assert is_mapped(mapped)
    assert torch.equal(mapped, plain.float())
    assert is_mapped(cast_tensor(mapped, torch.float16))
    assert cast_tensor(mapped, torch.float32) is mapped
    assert not is_mapped(cast_tensor(plain, torch.float16))
    assert list(tmp_path.iterdir()) == []


def test_only_weights_that_are_large_are_mapped() -> None:
    """A quarter of the machine's memory is large."""
    assert choose_folder(2**20, 2**23) is None
    assert choose_folder(2**22, 2**23) is not None


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that the disk has no room for go into memory, and the user hears of it."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20))
    with pytest.warns(StopdownWarning, match=r"0\.0 GB free.*TMPDIR"):
        assert choose_folder(2**32, 2**30) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["cogvideox", "svd", "flux"])
def test_a_mapped_pipeline_is_the_one_that_its_classes_load(
    save_tiny: Callable[..., Path], tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    """Every weight and buffer has the same name, dtype and bits; every weight lies in a file."""
    source = resolve_source(save_tiny(name))
    plain = load_pipeline(source, torch_dtypes=dtype)
    mapped = load_pipeline(source, torch_dtypes=dtype, mapped=tmp_path)
    for part, module in find_components(plain).items():
        right, found = name_parameters(module), name_parameters(find_components(mapped)[part])
        assert right.keys() == found.keys()
        for key, tensor in right.items():
            assert (tensor.dtype, tensor.requires_grad) == (
                found[key].dtype,
                found[key].requires_grad,
            )
            assert torch.equal(tensor, found[key])
            assert is_mapped(found[key]) or key not in module.state_dict()
        assert not find_components(mapped)[part].training


def test_tied_weights_are_one_tensor_when_they_are_mapped(
    save_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """T5's embedding has two names and one file."""
    encoder = load_pipeline(
        resolve_source(save_tiny("cogvideox")), torch_dtypes=torch.float32, mapped=tmp_path
    ).text_encoder
    assert encoder.shared.weight is encoder.encoder.embed_tokens.weight


@pytest.mark.usefixtures("few_bytes")
def test_a_plan_of_a_mapped_model_is_the_plan_of_the_model(
    save_tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exponents, headroom and trial are the same; folding and casting leave every weight in a file."""
    folder = save_tiny("cogvideox", overflow="transformer")
    mapped = make_plan(folder, request=SMALL, prompts=("a",), device="cpu")
    pipe = load_pipeline(resolve_source(folder), torch_dtypes=torch.float32)
    with apply_plan(pipe, mapped):
        weights = [x for m in find_components(pipe).values() for x in m.parameters()]
        assert {x.dtype for x in weights} == {torch.float16}
        assert all(map(is_mapped, weights))
    monkeypatch.setattr(mapped_weights, "SHARE", 1.0)
    plain = make_plan(folder, request=SMALL, prompts=("a",), device="cpu")
    assert mapped.components == plain.components


@pytest.mark.usefixtures("few_bytes")
def test_weights_that_are_stored_as_they_are_loaded_are_not_copied(
    save_tiny: Callable[..., Path],
) -> None:
    """Their class maps the file itself; what is cast is mapped here."""
    source = resolve_source(save_tiny("cogvideox"))
    plain = load_pipeline(source, torch_dtypes=torch.bfloat16)
    assert not any(map(is_mapped, plain.transformer.parameters()))
    cast = load_pipeline(source, torch_dtypes=torch.float32)
    assert all(map(is_mapped, cast.transformer.parameters()))


def test_weights_that_do_not_fit_their_class_are_loaded_by_it(
    save_tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that the class does not have: it loads them itself, or says what is wrong."""
    source = resolve_source(save_tiny("cogvideox"))
    read = loader.read_header

    def rename(path: Path) -> dict[str, object]:
        return {f"old.{name}": entry for name, entry in read(path).items()}

    with monkeypatch.context() as patch:
        patch.setattr(loader, "read_header", rename)
        patch.setattr(loader, "_check_stored_dtypes", lambda *_: None)
        pipe = load_pipeline(source, torch_dtypes=torch.float32, mapped=tmp_path)
    assert not any(map(is_mapped, pipe.transformer.parameters()))


def test_mapped_weights_wait_without_another_copy(tmp_path: Path) -> None:
    """What lies in a file already waits there, and comes back with its bits."""
    weight = torch.nn.Parameter(map_copy(torch.randn(300), tmp_path), requires_grad=False)
    before, place = weight.detach().clone(), weight.untyped_storage().filename
    store = WeightStore("cpu", tmp_path)
    store.store(weight)
    assert weight.untyped_storage().nbytes() == 0
    store.load(weight)
    assert torch.equal(weight, before)
    store.close()
    assert weight.untyped_storage().filename == place
    assert torch.equal(weight, before)
