"""Weights that lie in files: the same bits as in memory, through loading, casting, planning and waiting."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from models.measured_plans import measure_pipeline
from stopdown import mapped_weights
from stopdown.component_calls.components import find_components
from stopdown.devices.device_choice import choose_device
from stopdown.errors import OutputError, StopdownWarning
from stopdown.fold_names import name_parameters
from stopdown.interception.patches import Patches
from stopdown.mapped_weights import (
    StoredWeight,
    cast_additions_,
    cast_tensor,
    cast_tensor_,
    choose_folder,
    find_disk_folder,
    is_mapped,
    map_copy,
    wait_,
)
from stopdown.memory.weight_stores import WeightStore
from stopdown.pipelines import loader
from stopdown.pipelines.loader import load_pipeline, move_program
from stopdown.pipelines.requests import Request
from stopdown.plans.applier import apply_plan
from stopdown.plans.planned_loader import load_plan
from stopdown.plans.weight_fingerprints import sample_weights
from stopdown.records import MemoryPlan, Plan
from stopdown.sources.source import Source
from stopdown.sources.sources import resolve_source

pytestmark = pytest.mark.skipif(
    os.name != "posix", reason="a file that is mapped stays where it is"
)

SMALL = Request(frames=9, height=16, width=16, steps=1)


@pytest.fixture(scope="module")
def planned(save_tiny: Callable[..., Path]) -> tuple[Source, Plan]:
    """A tiny CogVideoX beyond fp16, and a plan that was measured on weights in memory."""
    source = resolve_source(save_tiny("cogvideox", overflow="transformer"))
    return source, measure_pipeline(source, request=SMALL, prompts=("a",))


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


def test_a_file_that_cannot_be_removed_while_it_is_mapped_is_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows: by the next copy, of whichever process, and by a store that is closed."""
    busy, unlink = set[str](), os.unlink

    def refuse(path: str) -> None:
        if path in busy:
            raise PermissionError(13, "The process cannot access the file", path)
        unlink(path)

    reserve = mapped_weights._reserve

    def open_there(path: Path, size: int) -> None:
        busy.add(str(path))
        reserve(path, size)

    monkeypatch.setattr(mapped_weights, "_KEEPS_MAPPED", True)
    monkeypatch.setattr(mapped_weights, "_reserve", open_there)
    monkeypatch.setattr(mapped_weights.os, "unlink", refuse)
    values = torch.randn(300)
    first = map_copy(values, tmp_path)
    assert torch.equal(first, values)
    (path,) = map(str, tmp_path.iterdir())
    (other := tmp_path / "stopdown-weights-of-another.bin").write_bytes(b"left")
    (tmp_path / "of-the-user.bin").write_bytes(b"kept")
    second = map_copy(values, tmp_path)
    assert Path(path).exists()  # mapped still
    assert not other.exists()
    busy.clear()
    store = WeightStore("cpu", tmp_path)
    store.store(torch.nn.Parameter(torch.randn(30), requires_grad=False))
    busy.clear()
    store.close()
    assert [x.name for x in tmp_path.iterdir()] == ["of-the-user.bin"]
    assert torch.equal(second, values)


def test_only_weights_that_are_large_are_mapped() -> None:
    """A quarter of the machine's memory is large."""
    assert choose_folder(2**20, 2**23) is None
    assert choose_folder(2**22, 2**23) is not None


@pytest.mark.parametrize(
    ("mounts", "temporary", "wanted"),
    [
        ("/dev/sda / ext4 rw\ntmpfs /tmp tmpfs rw\n", "/tmp", "/var/tmp"),
        ("/dev/sda / ext4 rw\n", "/tmp", "/tmp"),
        ("tmpfs / tmpfs rw\n", "/tmp", "/tmp"),
        ("tmpfs /tmp tmpfs rw\n/dev/sdb /tmp xfs rw\n", "/tmp", "/tmp"),
        ("/dev/sda / ext4 rw\ntmpfs /dev/shm tmpfs rw\n", "/dev/shm", "/dev/shm"),
    ],
)
@pytest.mark.skipif(os.name != "posix", reason="Windows keeps temporary files on a disk")
def test_weights_are_kept_on_a_disk_and_not_in_memory(
    mounts: str, temporary: str, wanted: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Many systems hold `/tmp` in memory; a folder that a user chose is taken."""
    (tmp_path / "mounts").write_text(mounts)
    monkeypatch.setattr(mapped_weights, "_MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(mapped_weights.tempfile, "gettempdir", lambda: temporary)
    assert find_disk_folder() == Path(wanted)
    if temporary == "/tmp":
        assert choose_folder(2**22, 2**23) == Path(wanted)


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that the disk has no room for go into memory, and the user hears of it."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20))
    with pytest.warns(StopdownWarning, match=r"0\.0 GB free.*TMPDIR"):
        assert choose_folder(2**32, 2**30) is None


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("cogvideox", torch.float32),
        ("cogvideox", torch.bfloat16),
        ("cogvideox", torch.float16),
        ("svd", torch.float16),
        ("flux", torch.float32),
    ],
)
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


@pytest.mark.slow  # two measured plans
@pytest.mark.usefixtures("few_bytes")
def test_a_plan_of_a_mapped_model_is_the_plan_of_the_model(planned: tuple[Source, Plan]) -> None:
    """Exponents, headroom and trial are the same; folding and casting leave every weight in a file."""
    source, plain = planned
    mapped = measure_pipeline(source, request=SMALL, prompts=("a",))
    pipe = load_pipeline(source, torch_dtypes=torch.float32)
    with apply_plan(pipe, mapped):
        weights = [x for m in find_components(pipe).values() for x in m.parameters()]
        assert {x.dtype for x in weights} == {torch.float16}
        assert all(map(is_mapped, weights))
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


def test_a_weight_that_has_come_is_a_plain_parameter() -> None:
    """Code that makes new parameters of a component's, as Stable unCLIP's `to` does, runs."""
    module = torch.nn.Linear(3, 2, bias=False)
    values = module.weight.detach().clone()
    wait_(module.weight, StoredWeight(values, torch.float32))
    move_program(module, choose_device("cpu"))
    assert torch.equal(torch.nn.Parameter(module.weight), values)


ROWS, COLUMNS = (slice(0, 3),), (slice(None), slice(2, 4))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "folds",
    [
        [],
        [((), -14)],
        [(ROWS, -30), ((slice(3, 5),), 6)],
        [(COLUMNS, -9)],
        [((), 3), (ROWS, -5)],
        [(ROWS, -4), (COLUMNS, 7)],
    ],
)
def test_a_stored_weight_is_rounded_once(
    stored: torch.dtype, folds: list[tuple[tuple[slice, ...], int]]
) -> None:
    """From the file to fp16 each value is that of exact arithmetic, rounded, wherever exponents meet."""
    spread = torch.exp2(torch.randint(-18, 4, (6, 8)).double())
    values = (torch.randn(6, 8, dtype=torch.float64) * spread).to(stored)
    exact = values.double()
    for place, exponent in folds:
        exact[place] *= 2.0**exponent
    made = StoredWeight(values, torch.float16, folds).read()
    assert made.dtype == torch.float16
    assert torch.equal(made, exact.to(torch.float16))


@pytest.mark.parametrize(
    "folds", [[((), 14)], [((), -14)], [(ROWS, 14)], [(ROWS, -4), (COLUMNS, 9)]]
)
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16])
def test_a_weight_in_fp16_is_scaled_in_a_format_that_holds_it(
    wide: torch.dtype, folds: list[tuple[tuple[slice, ...], int]]
) -> None:
    """What a plan keeps in fp32, or is saved without exponents, was Inf or had a few bits left."""
    values = (torch.randn(6, 8, dtype=torch.float64) * torch.logspace(-4, 3, 8)).half()
    exact = values.double()
    for place, exponent in folds:
        exact[place] *= 2.0**exponent
    assert torch.equal(StoredWeight(values, wide, folds).read(), exact.to(wide))


def test_a_stored_weight_that_stays_as_it_is_takes_no_memory() -> None:
    """Without exponents and in its own dtype the file's values are the weight."""
    values = torch.randn(5)
    assert StoredWeight(values, torch.float32).read().data_ptr() == values.data_ptr()


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["cogvideox", pytest.param("sd", marks=pytest.mark.slow)])
def test_loading_by_a_plan_is_folding_and_casting_in_fp32(
    planned: tuple[Source, Plan], save_tiny: Callable[..., Path], name: str
) -> None:
    """Tensor by tensor from the stored bits, at once or from a store: every weight has the same bits."""
    source, plan = planned
    if name == "sd":
        source = resolve_source(save_tiny("sd", overflow="unet"))
        size = dataclasses.replace(SMALL, frames=None)
        plan = measure_pipeline(source, request=size, prompts=("a",))
    cpu = choose_device("cpu")
    plain = load_pipeline(source, torch_dtypes=torch.float32)
    with apply_plan(plain, plan):
        right = {part: name_parameters(x) for part, x in find_components(plain).items()}
        loaded = find_components(load_plan(source, plan, cpu).pipe)
        waiting = find_components(
            load_plan(source, dataclasses.replace(plan, memory=MemoryPlan()), cpu).pipe
        )
        store = WeightStore("cpu", None)
        for part, tensors in right.items():
            found, later = name_parameters(loaded[part]), name_parameters(waiting[part])
            for key, tensor in tensors.items():
                assert found[key].dtype == later[key].dtype == tensor.dtype
                assert torch.equal(found[key], tensor)
                if isinstance(later[key], torch.nn.Parameter):
                    assert later[key].untyped_storage().nbytes() == 0
                    store.store(later[key])
                    store.load(later[key])
                assert torch.equal(later[key], tensor)


@pytest.mark.thorough
def test_a_plan_that_was_loaded_comes_off_in_fp32(planned: tuple[Source, Plan]) -> None:
    """Its exponents are gone then, and values that fp16 held are those that were stored."""
    source, plan = planned
    loaded = load_plan(source, plan, choose_device("cpu"))
    loaded.entries["transformer"].undo()
    plain = load_pipeline(source, torch_dtypes=torch.float32).transformer
    for key, tensor in name_parameters(loaded.pipe.transformer).items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, name_parameters(plain)[key], rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("folds", [[], [((), -3)], [(ROWS, -4), (COLUMNS, 7)]])
def test_a_few_values_of_a_stored_weight(folds: list[tuple[tuple[slice, ...], int]]) -> None:
    """They are those of the whole weight, without reading it."""
    stored = StoredWeight(torch.randn(6, 8).bfloat16(), torch.float16, folds)
    places = torch.tensor([0, 5, 17, 30, 47])
    assert torch.equal(stored.take(places), stored.read().reshape(-1)[places])


@pytest.mark.thorough
def test_weights_are_known_wherever_they_wait(planned: tuple[Source, Plan]) -> None:
    """A component in its file, on a store and in memory has one digest under a plan."""
    (source, plan), cpu = planned, choose_device("cpu")
    there = load_plan(source, plan, cpu).pipe.transformer
    waiting = load_plan(
        source, dataclasses.replace(plan, memory=MemoryPlan()), cpu
    ).pipe.transformer
    assert sample_weights(waiting) == sample_weights(there)
    store = WeightStore("cpu", None)
    with Patches() as patches:
        store.serve(waiting, patches)
        for weight in waiting.parameters():
            store.store(weight)
        assert sample_weights(waiting) == sample_weights(there)


def test_where_no_room_can_be_reserved_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On macOS a full disk is an error before the mapping, and no SIGBUS in it."""
    monkeypatch.delattr(os, "posix_fallocate")
    path, size = tmp_path / "weights.bin", mapped_weights._ZEROS + 3
    mapped_weights._reserve(path, size)
    assert path.stat().st_size == size
    with pytest.raises(OutputError, match="No space left on device"):
        mapped_weights._reserve(Path("/dev/full"), size)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_cast_is_undone_to_the_bit(dtype: torch.dtype) -> None:
    """Also of NaN, and of a change that was made and taken back in the cast's precision."""
    weight = torch.nn.Parameter(torch.randn(64, 64), requires_grad=False)
    weight[0, 0] = torch.nan
    table = torch.nn.Parameter(torch.randn(64, 64), requires_grad=False)
    before, added = (weight.data.clone(), table.data.clone()), torch.randn(64, 64).to(dtype)
    with Patches() as patches:
        cast_tensor_(weight, dtype, patches)
        cast_tensor_(table, dtype, patches)
        table.data += added
        table.data -= added
        assert weight.dtype == table.dtype == dtype
        assert not torch.equal(table.float(), before[1].to(dtype).float())
    assert torch.equal(weight.view(torch.int32), before[0].view(torch.int32))
    assert torch.equal(table, before[1])


def test_what_was_written_into_a_cast_tensor_stays() -> None:
    """As by a LoRA that is fused, or by other weights: they were lost as the cast was undone."""
    weight = torch.nn.Parameter(torch.randn(64, 64), requires_grad=False)
    patches, wanted = Patches(), weight.data * 1.01
    cast_tensor_(weight, torch.float16, patches)
    weight.data.copy_(wanted)
    patches.undo()
    assert weight.dtype == torch.float32
    assert torch.equal(weight, wanted.half().float())


def test_a_table_that_was_resized_while_cast_stays() -> None:
    """As by a textual inversion: the new token was lost, and its number was beyond the table."""
    table = torch.nn.Parameter(torch.randn(8, 4), requires_grad=False)
    patches = Patches()
    cast_tensor_(table, torch.float16, patches)
    table.data = torch.cat([table.data, torch.ones(1, 4).half()])
    patches.undo()
    assert (table.dtype, tuple(table.shape)) == (torch.float32, (9, 4))


def test_what_is_added_to_a_cast_module_is_cast_back() -> None:
    """To the dtype of most weights; what is in another dtype than the cast's stays."""
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8).half())
    with Patches() as patches:
        cast_additions_(module, torch.bfloat16, patches)
        module.bfloat16()
        module.append(torch.nn.Linear(2, 2, dtype=torch.bfloat16))
        module.append(torch.nn.Linear(2, 2, dtype=torch.float64))
    found = [part.weight.dtype for part in module]
    assert found == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float64]
