"""Components certified beside each other, in processes that may fail."""

from __future__ import annotations

import dataclasses
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from stopdown.plans import certified as certified_module
from stopdown.plans import certifier
from stopdown.plans.certified import Scope, certify_plan
from stopdown.records import ComponentPlan, Plan
from stopdown.sources.source import Source
from stopdown.sources.sources import resolve_source


@pytest.fixture
def several(monkeypatch: Any, tmp_path: Path) -> Any:
    """Two threads, much memory and no plan that is kept: weights of any size are worth a process."""
    monkeypatch.setenv("STOPDOWN_CACHE", str(tmp_path))
    monkeypatch.setattr(certifier, "WORTH_BYTES", 0)
    monkeypatch.setattr(certifier, "find_host_bytes", lambda: 1 << 40)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _certify_here(folder: Path, monkeypatch: Any) -> tuple[Plan, dict[str, int]]:
    """Certify a model; return the plan, and each component that this process planned with its threads."""
    here, plan_component = dict[str, int](), certified_module._plan_component

    def note(context: Any, name: str, *args: Any, **kwargs: Any) -> ComponentPlan:
        here[name] = torch.get_num_threads()
        return plan_component(context, name, *args, **kwargs)

    monkeypatch.setattr(certified_module, "_plan_component", note)
    return certify_plan(folder, scope=Scope(keeps=True)), here


@pytest.mark.thorough
def test_components_are_planned_beside_each_other(
    certified: tuple[Path, Plan, list[tuple[str, str, int, int]]], several: None, monkeypatch: Any
) -> None:
    """The largest is planned here and the others in another process, each with half of the threads."""
    folder, plan, _ = certified
    made, here = _certify_here(folder, monkeypatch)
    sizes = {x.parent.name: x.stat().st_size for x in folder.glob("*/*.safetensors")}
    assert here == {max(sizes, key=sizes.__getitem__): 1}
    assert made.components == plan.components
    assert torch.get_num_threads() == 2


def test_a_process_begins_before_the_dry_run_and_is_not_waited_for_in_vain(
    save_tiny: Any, several: None, monkeypatch: Any
) -> None:
    """The imports of both take seconds; a process whose components turn out to be cached is left."""
    told, folder, dry_run = list[str](), save_tiny("sd"), certified_module.list_source_calls
    monkeypatch.setattr(certifier, "choose_others", lambda sizes: [])
    certify_plan(folder, scope=Scope(keeps=True))

    class Begun(certifier.Certifier):
        def __enter__(self) -> certifier.Certifier:
            told.append("begun")
            return self

        def wait(self, progress: Any) -> None:
            told.append("waited")

    def note(*given: Any) -> Any:
        told.append("dry run")
        return dry_run(*given)

    monkeypatch.setattr(certified_module, "list_source_calls", note)
    monkeypatch.setattr(certified_module, "Certifier", Begun)
    monkeypatch.setattr(certified_module, "choose_others", lambda sizes: sorted(sizes)[1:])
    certify_plan(folder, scope=Scope(keeps=True))
    assert told == ["begun", "dry run"]


@pytest.mark.thorough
def test_a_process_that_fails_costs_nothing_but_time(
    certified: tuple[Path, Plan, list[tuple[str, str, int, int]]], several: None, monkeypatch: Any
) -> None:
    """All components are planned here, with the same result."""
    folder, plan, _ = certified
    monkeypatch.setattr(certifier, "PROGRAM", "stopdown.no_program")
    made, here = _certify_here(folder, monkeypatch)
    assert here.keys() == {x.component for x in plan.components}
    assert made.components == plan.components
    assert torch.get_num_threads() == 2


@pytest.mark.thorough
def test_threads_of_a_process_that_ended_are_taken(
    certified: tuple[Path, Plan, list[tuple[str, str, int, int]]], several: None, monkeypatch: Any
) -> None:
    """At the next weight that is loaded, and not only at the end."""
    monkeypatch.setattr(certifier, "PROGRAM", "stopdown.no_program")
    source = resolve_source(certified[0])
    with certifier.Certifier(source, ["vae"], "fp32", shares=True) as beside:
        load = beside.beside(lambda name: torch.ones(torch.get_num_threads()))
        assert torch.get_num_threads() == 1
        beside._process.wait(timeout=60)
        assert len(load("weight")) == 2


def _wait_for(source: Source, *, shares: bool) -> int | None:
    """Have a second process plan the autoencoder; return its exit status, None if it waits for ever."""
    with certifier.Certifier(source, ["vae"], "fp32", shares=shares) as beside:
        waiting = threading.Thread(target=beside.wait, args=(None,), daemon=True)
        waiting.start()
        waiting.join(timeout=120)
        return beside._process.poll()


@pytest.mark.thorough
@pytest.mark.parametrize("shares", [True, False])
def test_a_component_without_the_wanted_variant_is_planned(
    save_tiny: Any, several: None, tmp_path: Path, shares: bool
) -> None:
    """The process waited for a variant that never came, and the other one for the process."""
    folder = shutil.copytree(save_tiny("sd"), tmp_path / "sd")
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_name("diffusion_pytorch_model.fp16.safetensors"))
    assert _wait_for(resolve_source(folder, variant="fp16"), shares=shares) == 0


@pytest.mark.thorough
def test_a_model_in_a_cache_of_a_program_is_planned_there(
    save_tiny: Any, several: None, tmp_path: Path
) -> None:
    """The process looked for it in the Hub client's own cache."""
    folder = tmp_path / "models--maker--tiny" / "snapshots" / f"{1:040x}"
    shutil.copytree(save_tiny("sd"), folder)
    source = dataclasses.replace(
        resolve_source(folder), name="maker/tiny", kind="hub", revision=folder.name
    )
    assert _wait_for(source, shares=True) == 0


def test_a_task_may_be_longer_than_an_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names that no system takes as one argument all reach the process."""
    monkeypatch.chdir(Path(__file__).parents[1])
    monkeypatch.setattr(certifier, "PROGRAM", "processes.counted_task")
    names = [f"component_{number:05}" for number in range(20_000)]  # Linux takes 131,072 bytes
    with certifier.Certifier(Source("model", tmp_path, "folder"), names, "native") as beside:
        beside.wait(None)
    assert beside._told == ("counted", "components", 20_000, 20_000)


def test_what_a_library_prints_is_no_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that read it ended, the pipe was full, and both processes waited for ever."""
    monkeypatch.chdir(Path(__file__).parents[1])
    monkeypatch.setattr(certifier, "PROGRAM", "processes.chatty_task")
    with certifier.Certifier(Source("model", tmp_path, "folder"), ["vae"], "native") as beside:
        assert beside._process.wait(timeout=60) == 0
        beside.wait(None)
    assert beside._told == ("certify", "vae", 1, 2)


@pytest.mark.parametrize(
    ("threads", "free_bytes", "small_bytes", "expected"),
    [
        (2, 8 << 30, 2 << 30, ["b", "c"]),
        (1, 8 << 30, 2 << 30, []),
        (2, 2 << 30, 2 << 30, []),
        (2, 8 << 30, 1 << 20, []),
    ],
)
def test_another_process_needs_a_thread_and_memory_and_has_much_to_do(
    threads: int, free_bytes: int, small_bytes: int, expected: list[str], monkeypatch: Any
) -> None:
    """Without one of them all is planned here; the largest component always is."""
    monkeypatch.setattr(certifier, "find_host_bytes", lambda: free_bytes)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    sizes = {"c": small_bytes // 2, "a": 9 << 30, "b": small_bytes}
    assert certifier.choose_others(sizes) == expected
    assert certifier.choose_others({}) == certifier.choose_others({"a": 9 << 30}) == []
