"""Several processes of `torch.distributed`: a plan works there, and a guard repairs nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import stopdown
from docs.documentation import read_blocks
from models.injected_faults import inject
from models.pipeline_calls import call_pipeline, quiet
from processes.several_ranks import gather_results, run_ranks
from stopdown import testing
from stopdown.errors import InputError, NonFiniteError
from stopdown.plans.plan_files import write_plan
from stopdown.runtime.guard import guard

PAGE = Path(__file__).parents[2] / "docs" / "parallel.md"
TWO = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SAID = (
    "This is one of 2 processes. The guard repairs nothing there, because the others wouldn't run the "
    "call again. Make a plan first: stopdown plan SOURCE -o plan.json, and load the model with "
    'precision="plan.json".'
)


def run_script(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(text)
    command = [*TWO, "script.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)


def read_script(source: Path, precision: str, name: str) -> str:
    """The page's script for a CPU, where Diffusers finds no accelerator to count; it keeps values."""
    (block,) = read_blocks(PAGE.read_text(encoding="utf-8"), "python")
    text = block.text
    for before, after in {
        '"Wan-AI/Wan2.1-T2V-14B-Diffusers"': repr(str(source)),
        '"plan.json"': repr(precision),
        'f"cuda:{rank}"': '"cpu"',
        '"cpu:gloo,cuda:nccl"': '"gloo"',
        'pipe("a red ball", ': 'pipe("a red ball", num_inference_steps=2, height=32, width=32, '
        'num_frames=9, max_sequence_length=16, output_type="pt", ',
        'export_to_video(frames, "ball.mp4")': f"torch.save(frames, {name!r})",
    }.items():
        assert before in text
        text = text.replace(before, after)
    return f"import torch\n\ntorch.accelerator.device_count = lambda: 1\n{text}"


def run_alone(source: Path, precision: str) -> torch.Tensor:
    pipe = stopdown.load(str(source), precision=precision, device="cpu")
    frames: torch.Tensor = pipe(
        "a red ball",
        num_inference_steps=2,
        height=32,
        width=32,
        num_frames=9,
        max_sequence_length=16,
        output_type="pt",
        generator=torch.Generator().manual_seed(0),
    ).frames[0]
    return frames


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_script_of_the_page_gives_what_one_process_gives(tmp_path: Path) -> None:
    """Diffusers' context parallelism over two processes: the bits of one in fp32, and nearly by a plan."""
    source = testing.save_pipeline("wan", tmp_path / "model", overflow="transformer")
    plan = write_plan(stopdown.make_plan(str(source)), tmp_path / "own.json")
    wide = run_alone(source, "fp32")
    for precision, most in (("fp32", 0.0), (str(plan), 0.01)):
        done = run_script(read_script(source, precision, "frames.pt"), tmp_path)
        assert done.returncode == 0, done.stderr
        assert "StopdownWarning" not in done.stderr  # nothing was repaired
        frames = torch.load(tmp_path / "frames.pt")
        error = (frames - run_alone(source, precision)).abs().max()
        assert error <= most
        assert (frames - wide).abs().max() < 0.1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_without_a_plan_every_process_ends(tmp_path: Path) -> None:
    """The message of the guard, and no process that waits for another one."""
    source = testing.save_pipeline("wan", tmp_path / "model", overflow="transformer")
    done = run_script(read_script(source, "fp16-plain", "frames.pt"), tmp_path)
    assert done.returncode == 1
    assert SAID in done.stderr
    assert not (tmp_path / "frames.pt").exists()


def overflow_on_one(rank: int, on_fault: Any) -> dict[str, Any]:
    """What each process gets of its own pipeline, whose text encoder gives NaN on rank 1 alone."""
    pipe, said = testing.make_pipeline("sd"), ""
    kept = {name: x.clone() for name, x in pipe.unet.state_dict().items()}
    with (
        inject(pipe, "text_encoder", step=0 if rank else 99),
        guard(pipe, on_fault=on_fault, announce=quiet) as handle,
    ):
        try:
            call_pipeline(pipe, "sd", steps=1)
        except NonFiniteError as error:
            said = str(error)
    same = all(torch.equal(x, kept[name]) for name, x in pipe.unet.state_dict().items())
    actions = [(x.component, x.action, x.replays) for x in handle.repairs]
    return {"said": said, "actions": actions, "same": same}


@pytest.mark.thorough
def test_one_of_several_processes_repairs_nothing() -> None:
    """The process that has the fault ends with the way out, and the other one goes on."""
    first, second = gather_results(run_ranks(overflow_on_one, 2, "repair"))
    assert first == {"said": "", "actions": [], "same": True}
    assert second["said"].startswith("`text_encoder` returned ")
    assert second["said"].endswith(SAID)
    assert second["actions"] == []
    assert second["same"]


@pytest.fixture
def two_processes() -> Any:
    """A process group of two, of which this is one and the other is not there."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("two_processes")
def test_warn_goes_on_among_several_processes() -> None:
    """The value is passed on, and the call is not run again."""
    pipe = testing.make_pipeline("sd", overflow="vae", dtype=torch.float16)
    with guard(pipe, on_fault="warn", announce=quiet, frames=False) as handle:
        call_pipeline(pipe, "sd", steps=1)
    assert [(x.component, x.action, x.replays) for x in handle.repairs] == [
        ("vae.decode", "none", 0)
    ]


@pytest.mark.usefixtures("two_processes")
def test_a_journal_is_refused_among_several_processes(tmp_path: Path) -> None:
    """A journal contains the calls of one process."""
    with pytest.raises(InputError, match="A journal was requested for 2 processes"):
        guard(testing.make_pipeline("sd"), journal=tmp_path)


def test_generate_is_refused_in_several_processes(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process would make the same output."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, said = run("generate", "shapes", "a")
    assert code == 2
    assert (
        "`stopdown generate` was started in 2 processes. It makes one output in one process" in said
    )
    assert "stopdown batch shapes --prompts FILE" in said
