"""`stopdown run`: scripts as people write them, unedited; guarded, repaired, and nothing left behind."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import pytest
import torch

from models.bare_plans import write_bare_plan
from models.programs import FirstStage, make_program, overflow_
from stopdown.app.run_command import ScriptOptions, choose_code, run_script
from stopdown.errors import OptionError
from stopdown.records import ScriptRecord, from_json, to_json
from stopdown.runtime.fault_handler import FaultHandler
from stopdown.runtime.repair_cache import RepairCache
from stopdown.runtime.run_check import collect_videos

SaveTiny = Callable[..., Path]
Run = Callable[..., tuple[ScriptRecord, list[str]]]

PAINT = """
import sys
import torch
from diffusers import CogView3PlusPipeline

pipe = CogView3PlusPipeline.from_pretrained(sys.argv[1], dtype=getattr(torch, sys.argv[2]))
pipe.set_progress_bar_config(disable=True)

def paint(**more):
    size = dict(height=32, width=32, max_sequence_length=16, num_inference_steps=2)
    return pipe("a", generator=torch.Generator().manual_seed(0), **size, **more)
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A script's text, run with arguments: its record, and what was said."""

    def run_text(text: str, *arguments: object, **options: Any) -> tuple[ScriptRecord, list[str]]:
        script, said = tmp_path / "script.py", []
        script.write_text(text)
        given = ScriptOptions(str(script), tuple(map(str, arguments)), **options)
        gc.collect()  # exponents of earlier tests are put on calls of modules until they are gone
        before = take_classes()
        try:
            record = run_script(given, said.append)
        finally:
            assert take_classes() == before
        assert from_json(to_json(record), ScriptRecord) == record
        return record, said

    return run_text


def take_classes() -> list[Any]:
    """What a run changes for its time."""
    kinds = (diffusers.DiffusionPipeline, diffusers.CogView3PlusPipeline)
    methods = [dict(vars(kind)) for kind in kinds]
    names = ("to", "cuda", "__call__", "__init__")
    held = [vars(kind).get(name) for kind in (torch.Tensor, torch.nn.Module) for name in names]
    held += [vars(FirstStage).get(name) for name in ("encode", "decode")]
    return [
        *methods,
        *held,
        torch.Generator,
        list(sys.argv),
        list(sys.path),
        sys.modules["__main__"],
    ]


@pytest.mark.thorough
@pytest.mark.usefixtures("each_device")
def test_an_overflow_is_repaired_and_the_exit_code_kept(
    run: Run, save_tiny: SaveTiny, tmp_path: Path
) -> None:
    """A script that asks for fp16 where it overflows gets a picture near that of fp32."""
    folder = save_tiny("cogview3plus", overflow="vae")
    text = (
        PAINT
        + "import numpy as np\nnp.save(sys.argv[3], paint(output_type='np').images)\nsys.exit(7)"
    )
    record, said = run(text, folder, "float16", tmp_path / "half.npy")
    plain, _ = run(text, folder, "float32", tmp_path / "full.npy")
    assert (record.exit_code, choose_code(record)) == (7, 7)
    assert record.arguments[1] == "float16"
    (repair,) = record.runs[0].repairs
    assert (repair.component, repair.action) == ("vae.decode", "rescaled")
    assert any("Rescaled `vae.decode` by" in line for line in said)
    difference = np.load(tmp_path / "half.npy") - np.load(tmp_path / "full.npy")
    assert np.sqrt(np.mean(difference**2)) < 0.01
    assert (record.findings, plain.findings, plain.remarks) == ((), (), ())


def test_without_repair_the_picture_is_black_and_found(run: Run, save_tiny: SaveTiny) -> None:
    """Where nothing is guarded the script runs as ever: black, exit code 0, with `--strict` 1."""
    folder = save_tiny("cogview3plus", overflow="vae")
    with pytest.warns(RuntimeWarning, match="invalid value encountered in cast"):
        record, _ = run(PAINT + "paint()", folder, "float16", components="none")
    assert [finding.kind for finding in record.findings] == ["black-frames"]
    codes = choose_code(record), choose_code(record, strict=True)
    assert (record.exit_code, *codes) == (0, 0, 1)


def test_a_healthy_script_gives_the_same_bits(
    run: Run, save_tiny: SaveTiny, tmp_path: Path
) -> None:
    """Two calls of a pipeline are guarded one by one; pixels and saved weights are as without."""
    folder = save_tiny("cogview3plus")
    text = PAINT + (
        "import numpy as np\nfirst, second = (paint(output_type='np').images for _ in range(2))\n"
        "assert (first == second).all()\nnp.save(sys.argv[3], first)\n"
        "assert not any(callable(x) for x in vars(pipe.transformer).values())\n"
    )
    record, said = run(text, folder, "bfloat16", tmp_path / "guarded.npy")
    assert (record.exit_code, len(record.runs), said) == (0, 2, [])
    words = ["script", str(folder), "bfloat16", str(tmp_path / "plain.npy")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        exec(compile(text, "script", "exec"), {"__name__": "__main__"})  # our own text
    np.testing.assert_array_equal(
        np.load(tmp_path / "guarded.npy"), np.load(tmp_path / "plain.npy")
    )


def test_between_calls_a_script_has_its_own_weights(
    run: Run, save_tiny: SaveTiny, tmp_path: Path
) -> None:
    """What a script saves after a repaired call are the weights that it loaded."""
    folder = save_tiny("cogview3plus", overflow="vae")
    text = PAINT + (
        "before = {k: v.clone() for k, v in pipe.vae.state_dict().items()}\npaint()\n"
        "after = pipe.vae.state_dict()\n"
        "assert all(torch.equal(v, after[k]) and v.dtype == after[k].dtype for k, v in before.items())"
    )
    record, _ = run(text, folder, "float16")
    assert record.exit_code == 0
    assert len(record.runs[0].repairs) == 1


def test_its_exceptions_are_its_own(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """A traceback begins in the script; the exit code is 1."""
    record, said = run("def fail():\n    raise ValueError('my own')\nfail()")
    error = capsys.readouterr().err
    assert (record.exit_code, said) == (1, [])
    assert error.splitlines()[1].endswith('script.py", line 3, in <module>')
    assert error.endswith("ValueError: my own\n")


def test_it_leaves_with_a_text_as_python_does(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """`sys.exit("text")` is the text on standard error and exit code 1; without a code it is 0."""
    record, _ = run("import sys; sys.exit('no such file')")
    assert (record.exit_code, capsys.readouterr().err) == (1, "no such file\n")
    assert run("import sys; sys.exit()")[0].exit_code == 0


def test_it_sees_itself_as_main_beside_its_neighbours(run: Run, tmp_path: Path) -> None:
    """`__name__`, `__file__`, `sys.argv` and imports from its own folder are as under Python."""
    (tmp_path / "neighbour.py").write_text("word = 'here'")
    text = (
        "import sys, neighbour\nassert __name__ == '__main__' and neighbour.word == 'here'\n"
        "assert sys.argv == [__file__, '--dtype', 'float16'], sys.argv\n"
    )
    assert run(text, "--dtype", "float16")[0].exit_code == 0


def test_a_module_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`-m MODULE` finds it in the folder that the command is given in."""
    (tmp_path / "painting_module.py").write_text("import sys; sys.exit(len(sys.argv))")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    options = ScriptOptions(arguments=("a", "b"), module="painting_module")
    assert run_script(options, print).exit_code == 3


def test_what_cannot_be_run_is_refused() -> None:
    """A mistake of the user is one message, before anything is loaded."""
    with pytest.raises(OptionError) as caught:
        run_script(ScriptOptions(script=__file__, precision="vae=fp16"), print)
    assert str(caught.value) == (
        "--precision vae=fp16 was given for a script. A script takes a plan, or a single precision for "
        "all that it loads in 16 bits. Use --precision fp16 or --precision plan.json. To guard "
        "only some components, use --components."
    )


MIXED = """
import torch

class UNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.time_embed, self.out = torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.nn.Linear(4, 4)

    def forward(self, x, t):
        return self.out(x + self.time_embed(t[:, None].float().expand(1, 4)))

unet = UNet().eval().half()
with torch.no_grad():
    print(unet(torch.ones(1, 4).half(), torch.tensor([5.0])).dtype)
"""
"""Code that mixes dtypes in fp16, as imaginAIry's does without CUDA."""


def test_an_error_of_dtypes_is_repaired(run: Run, capsys: Any) -> None:
    """The layer that refused its input gets it cast, and the script goes on to its end."""
    record, said = run(MIXED)
    assert record.exit_code == 0
    assert not record.unrepaired
    assert len(said) == 1
    assert '"mat1 and mat2 must have the same dtype, but got Float and Half".' in said[0]
    assert "time_embed.0 got an input whose dtype differs from that of its weight." in said[0]
    assert capsys.readouterr().out == "torch.float16\n"


def test_an_error_of_dtypes_is_named(run: Run, capsys: Any) -> None:
    """Not repaired: the layer that refused its input, its format and what helps; the exit code is kept."""
    count = "self.calls = [*vars(self).get('calls', ()), t]"
    text = MIXED.replace("        return", f"        {count}\n        return")
    record, said = run(text)  # which cannot be made again
    assert record.exit_code == 1
    assert not record.unrepaired
    assert said == []
    assert (
        "Stopdown: UNet:time_embed.0, whose weights are fp16, rejected operands of different dtypes. If "
        "you run a script, use stopdown run --precision fp32" in capsys.readouterr().err
    )
    assert record.modules is not None
    assert record.modules.unwatched == ("A call of UNet ended with RuntimeError.",)


def test_what_mixes_dtypes_runs_in_one(run: Run, capsys: Any) -> None:
    """With `--precision fp32` the same script ends well, and gets its results in its own format."""
    record, said = run(MIXED, precision="fp32")
    assert record.exit_code == 0
    assert said == ["UNet was in fp16, and runs in fp32."]
    assert capsys.readouterr().out == "torch.float16\n"


# ---------------------------------------------------------------------------------------------
# Scripts written for CUDA


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is CUDA, and the script would run there"
)
def test_without_a_device_the_script_is_told_of_the_option(run: Run, capsys: Any) -> None:
    """Where there is no CUDA the script fails as ever, with a word about `--device`."""
    record, said = run("import torch\ntorch.ones(1).to('cuda')")
    assert record.exit_code == 1
    assert said == [
        "This machine has no such device. `stopdown run --device cpu SCRIPT` uses another "
        "one. Options of Stopdown go before the script."
    ]


def test_a_device_takes_what_goes_to_cuda(run: Run, save_tiny: SaveTiny) -> None:
    """Pipelines, modules, tensors, generators, device maps and offloading, each said once."""
    text = PAINT.replace("sys.argv[1],", "sys.argv[1], device_map='cuda',") + (
        "pipe.to('cuda')\npipe.vae.cuda()\nassert torch.ones(1).cuda().device.type == 'cpu'\n"
        "assert torch.Generator(device='cuda').device.type == 'cpu'\n"
        "assert torch.zeros(1, device='cuda').device == torch.tensor(1, device='cuda').device\n"
        "assert isinstance(torch.Generator('cuda:0'), torch.Generator)\n"
        "pipe.enable_model_cpu_offload()\npipe.enable_sequential_cpu_offload()\n"
        "assert pipe.device.type == 'cpu'\npaint(output_type='latent')\n"
    )
    record, said = run(text, save_tiny("cogview3plus"), "float32", device="cpu")
    assert (record.exit_code, len(record.runs)) == (0, 1)
    assert said == [
        "The script requests a device_map; --device overrides it.",
        "The script requests cuda; it gets cpu, because of --device.",
        "The script requests cuda:0; it gets cpu, because of --device.",
        *(
            f"The script calls {name}(), which needs an accelerator; on the CPU it is left out."
            for name in ("enable_model_cpu_offload", "enable_sequential_cpu_offload")
        ),
    ]


def test_a_default_device_is_taken_as_well(run: Run, tmp_path: Path) -> None:
    """A default for all tensors, one for a block, windows, new tensors, files: wherever a script asks."""
    torch.save(torch.ones(1), tmp_path / "ones.pt")
    text = (
        "import sys\nimport torch\n"
        "def check(x):\n    assert x.device.type == 'cpu'\n"
        "check(torch.hann_window(4, device='cuda'))\n"
        "check(torch.fft.fftfreq(4, device='cuda'))\n"
        "check(torch.signal.windows.hann(4, device='cuda'))\n"
        "check(torch.ones(1).new_zeros(2, device='cuda'))\n"
        "check(torch.load(sys.argv[1], map_location='cuda'))\n"
        "check(torch.nn.Linear(1, 1, device='meta').to_empty(device='cuda').weight)\n"
        "with torch.device('cuda'):\n    check(torch.ones(1))\n"
        "torch.set_default_device('cuda')\n"
        "check(torch.nn.Linear(1, 1).weight)\n"
        "check(torch.hann_window(4))\n"
        "assert torch.get_default_device().type == 'cpu'\n"
        "torch.set_default_device(None)\n"
    )
    record, said = run(text, str(tmp_path / "ones.pt"), device="cpu")
    assert record.exit_code == 0
    assert said == ["The script requests cuda; it gets cpu, because of --device."]


@pytest.mark.parametrize(
    ("output", "shapes"),
    [
        ({"frames": [[np.zeros((4, 5, 3), np.uint8)] * 2]}, [(2, 4, 5, 3)]),
        ({"frames": np.zeros((1, 2, 4, 5, 3), np.float32)}, [(2, 4, 5, 3)]),
        ({"images": [np.zeros((4, 5, 3), np.uint8)] * 2}, [(1, 4, 5, 3)] * 2),
        ({"images": np.full((1, 4, 5, 3), np.nan, np.float16)}, [(1, 4, 5, 3)]),
        ({"images": torch.zeros(1, 4, 8, 8)}, []),
        ({"frames": []}, []),
        ({}, []),
    ],
)
def test_frames_of_every_form(output: dict[str, Any], shapes: list[tuple[int, ...]]) -> None:
    """Pictures, videos, arrays and lists are looked at; latents and other things are not."""
    found = collect_videos(type("Output", (), output)())
    assert [video.shape for video in found] == shapes
    assert all(video.dtype == np.uint8 for video in found)


# ---------------------------------------------------------------------------------------------
# From one call of a pipeline to the next


@pytest.mark.thorough
def test_a_repair_holds_for_the_next_call(
    run: Run, save_tiny: SaveTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second call finds no fault and gives the pixels of the first; with nothing carried it faults."""
    folder = save_tiny("cogview3plus", overflow="vae")
    text = PAINT + (
        "import numpy as np\nfirst, second = (paint(output_type='np').images for _ in range(2))\n"
        "assert (first == second).all() and np.isfinite(first).all()\n"
    )
    record, said = run(text, folder, "float16")
    assert record.exit_code == 0
    assert [len(one.repairs) for one in record.runs] == [1, 0]
    assert [one.reused for one in record.runs] == [(), ("vae: rescaled (fp16)",)]
    assert len(said) == 1
    monkeypatch.setattr(RepairCache, "put_on", lambda *_: ())
    record, _ = run(text, folder, "float16")
    assert [len(one.repairs) for one in record.runs] == [1, 1]


@pytest.mark.thorough
def test_other_weights_begin_anew(run: Run, save_tiny: SaveTiny) -> None:
    """A repair is not put on weights that were changed after it was found; that is said."""
    text = PAINT + "paint()\npipe.vae.decoder.conv_in.weight.data.mul_(0.5)\npaint()"
    record, said = run(text, save_tiny("cogview3plus", overflow="vae"), "float16")
    assert [len(one.repairs) for one in record.runs] == [1, 1]
    assert record.runs[1].reused == ()
    assert (
        "The weights or the code of AutoencoderKL were changed since an earlier call repaired it; that "
        "repair is left out." in said
    )


@pytest.mark.thorough
def test_what_was_carried_does_not_keep_a_pipeline_alive(run: Run, save_tiny: SaveTiny) -> None:
    """A script that drops a repaired pipeline to make room for another gets its memory back."""
    text = PAINT + (
        "import gc, weakref\npaint()\nvae = weakref.ref(pipe.vae)\ndel pipe\ngc.collect()\n"
        "assert vae() is None"
    )
    record, _ = run(text, save_tiny("cogview3plus", overflow="vae"), "float16")
    assert (record.exit_code, len(record.runs[0].repairs)) == (0, 1)


@pytest.mark.thorough
def test_repairs_go_into_a_plan(run: Run, save_tiny: SaveTiny, tmp_path: Path) -> None:
    """Under a plan the repair is kept for the next call, and with --keep-repairs for the next run."""
    folder = save_tiny("cogview3plus", overflow="vae")
    path = tmp_path / "plan.json"
    write_bare_plan(folder, path)
    bare = path.read_bytes()
    text = PAINT + "paint()\npaint()"
    record, said = run(text, folder, "bfloat16", precision=str(path))
    assert [len(one.repairs) for one in record.runs] == [1, 0]
    assert said[-1] == f"The repair only lasts for this run; --keep-repairs writes it into {path}."
    assert path.read_bytes() == bare
    _, said = run(text, folder, "bfloat16", precision=str(path), keep_repairs=True)
    assert said[-1] == f"The repair was written into {path}, for the next run."
    record, said = run(text, folder, "bfloat16", precision=str(path))
    assert ([len(one.repairs) for one in record.runs], said) == ([0, 0], [])


def test_a_plan_of_another_model_is_left_away(
    run: Run, save_tiny: SaveTiny, tmp_path: Path
) -> None:
    """The script runs without it, and is told why, once."""
    path = tmp_path / "plan.json"
    write_bare_plan(save_tiny("cogview3plus"), path)
    folder = save_tiny("cogview3plus", overflow="vae")
    record, said = run(PAINT + "paint()\npaint()", folder, "bfloat16", precision=str(path))
    assert (record.exit_code, len(said)) == (0, 1)
    assert said[0].startswith("CogView3PlusPipeline runs without the plan. ")
    assert "vae has weights other than those" in said[0]


def test_repairs_are_not_kept_without_a_plan() -> None:
    """There is no file to write to; the message says how to get one."""
    with pytest.raises(OptionError) as caught:
        run_script(ScriptOptions(__file__, keep_repairs=True), print)
    assert str(caught.value) == (
        "--keep-repairs was given without a plan. Repairs are saved in the file of a plan. Without "
        "one they only last until the script "
        "ends. Make a plan: stopdown plan SOURCE -o plan.json, and add "
        "--precision plan.json."
    )


# ---------------------------------------------------------------------------------------------
# What a newcomer types


@pytest.mark.parametrize(
    ("text", "arguments", "named"),
    [
        ("", ("--keep-repairs",), "--keep-repairs"),
        ("import sys; sys.exit(2)", ("--strict", "--json"), "--strict, --json"),
    ],
)
def test_options_behind_the_script_are_hinted_at(
    run: Run, text: str, arguments: tuple[str, ...], named: str
) -> None:
    """Ours, which the script got: said with where they belong."""
    (said,) = run(text, *arguments)[1]
    first = named.partition(",")[0]
    verb = "were" if "," in named else "was"
    assert said.startswith(
        f"{named} {verb} passed to the script, because options after the script's name "
    )
    assert f"stopdown run {first} … " in said


def test_options_that_the_script_took_are_its_own(run: Run) -> None:
    """Many scripts have a `--device`; where it ends well nothing is said."""
    assert run("", "--device", "cpu", "--json")[1] == []


def test_casts_of_the_script_say_no_empty_remarks(
    run: Run, save_tiny: SaveTiny, capfd: pytest.CaptureFixture[str]
) -> None:
    """Diffusers' warning that a component keeps nothing in fp32 is left out."""
    run(PAINT + "pipe.vae.to(torch.float32)", save_tiny("cogview3plus"), "float32")
    assert "kept in float32: []" not in capfd.readouterr().err


def test_a_profile_runs_nothing(run: Run) -> None:
    """A card that is not here cannot take what the script sends to CUDA."""
    with pytest.raises(
        OptionError, match=r"^--device t4 is a profile of the NVIDIA T4 for forecasts"
    ):
        run("", device="t4")


SAMPLE = """
import copy, sys
import torch
from models.programs import make_program, overflow_

program = make_program(sys.argv[1], getattr(torch, sys.argv[2]))
if sys.argv[3] == "overflows":
    overflow_(program.unet.blocks[1])
"""


def test_a_script_without_a_pipeline_is_guarded(run: Run, tmp_path: Path) -> None:
    """Outermost calls of modules are found, named by class and order, and give the same bits."""
    text = SAMPLE + "torch.save(program.run(), sys.argv[4])"
    record, said = run(text, "engine", "float16", "fits", tmp_path / "found.pt")
    assert torch.equal(
        torch.load(tmp_path / "found.pt"), make_program("engine", torch.float16).run()
    )
    assert record.modules is not None
    calls = {x.component: (x.stage, x.calls, x.precisions) for x in record.modules.calls}
    assert calls == {
        "Wrapper": ("call", 3, ("fp16",)),
        "FirstStage.decode": ("decode", 1, ("fp16",)),
    }
    assert record.modules.host_reads == 4
    assert (record.runs, record.modules.repairs, choose_code(record), said) == ((), (), 0, [])


def test_an_overflow_without_a_pipeline_is_repaired(run: Run, tmp_path: Path) -> None:
    """It is named, repaired and said once; the next calls begin with the repair."""
    text = SAMPLE + "program.run()\ntorch.save(program.run(), sys.argv[4])"
    record, said = run(text, "engine", "float16", "overflows", tmp_path / "found.pt")
    wide = make_program("engine")
    overflow_(wide.unet.blocks[1])  # type: ignore[arg-type]
    found = torch.load(tmp_path / "found.pt")
    torch.testing.assert_close(found.float(), wide.run(), rtol=0.02, atol=0.02)
    assert record.modules is not None
    (repair,) = record.modules.repairs
    assert repair.module_path == "Wrapper:diffusion_model.blocks.1.wide"
    assert (repair.action, repair.replays, choose_code(record)) == ("rescaled", 1, 0)
    assert record.modules.reused == ("Wrapper: rescaled (fp16)",)
    assert " in fp16 at call 1. " in repair.evidence
    assert len(said) == 1
    assert f"The fault begins at `{repair.module_path}`. Rescaled `Wrapper` " in said[0]


def test_a_precision_for_what_a_script_pins(run: Run, tmp_path: Path) -> None:
    """What is bf16 in a script runs in fp16, nearer to fp32, an overflow repaired; outputs stay bf16."""
    text = SAMPLE + "torch.save(program.run(), sys.argv[4])"
    wide = make_program("engine")
    overflow_(wide.unet.blocks[1])  # type: ignore[arg-type]
    right, found = wide.run(), {}
    for precision in ("auto", "fp16"):
        path = tmp_path / f"{precision}.pt"
        record, said = run(text, "engine", "bfloat16", "overflows", path, precision=precision)
        found[precision] = torch.load(path)
        assert record.modules is not None
        assert {x.component: x.precisions[0] for x in record.modules.calls} == dict.fromkeys(
            ("Wrapper", "FirstStage.decode"), "bf16" if precision == "auto" else "fp16"
        )
    assert said[0] == "Wrapper was in bf16, and runs in fp16."
    assert "FirstStage was in bf16, and runs in fp16." in said
    assert [x.action for x in record.modules.repairs] == ["rescaled"]
    assert found["fp16"].isfinite().all()
    assert found["auto"].dtype == torch.bfloat16
    errors = {name: float((x.float() - right).abs().max()) for name, x in found.items()}
    assert errors["fp16"] < errors["auto"]


def test_a_precision_for_a_pipeline_in_a_script(run: Run, save_tiny: SaveTiny) -> None:
    """A pipeline that is loaded in bf16 runs in fp16, its authors' fp32 parts as they are loaded so."""
    folder = save_tiny("cogview3plus")
    record, said = run(PAINT + "paint()\n", folder, "bfloat16", precision="fp16")
    (guarded,) = record.runs
    assert {x.component: x.precisions[0] for x in guarded.calls}["transformer"] == "fp16"
    assert "transformer was in bf16, and runs in fp16." in said
    assert choose_code(record) == 0


def test_between_calls_a_repaired_model_is_the_scripts_own(run: Run) -> None:
    """What is copied or saved there has the weights that were loaded, and no trace of a guard."""
    text = SAMPLE + (
        "before = copy.deepcopy(program.unet.state_dict())\n"
        "program.run()\n"
        "after = copy.deepcopy(program.unet)\n"
        "same = all(torch.equal(x, before[n]) for n, x in after.state_dict().items())\n"
        "hooks = sum(len(x._forward_hooks) for x in after.modules())\n"
        "sys.exit(0 if same and not hooks and 'forward' not in vars(after) else 3)"
    )
    record, _ = run(text, "patcher", "float16", "overflows")
    assert record.modules is not None
    assert len(record.modules.repairs) == 1
    assert record.exit_code == 0


DAMAGED = (
    SAMPLE
    + """
program.unet.blocks[1].wide.weight.data[0, 0] = float("nan")
draws = torch.nn.Dropout(0.5)  # draws the numbers that the next call begins with
program.unet.register_forward_hook(lambda module, args, output: output + draws(torch.ones_like(output)))
for _ in range(3):
    found = program.run()
torch.save((found, torch.rand(4)), sys.argv[4])
"""
)


def test_what_cannot_be_repaired_is_handed_back(run: Run, tmp_path: Path) -> None:
    """Bits and random numbers are those of the script alone; it is said once, and looked at once a kind."""
    path = tmp_path / "found.pt"
    given = ("module", "float16", "fits", path)
    torch.manual_seed(0)
    with mock.patch.object(sys, "argv", ["script", *map(str, given)]):
        exec(DAMAGED, {"__name__": "__main__"})  # our own text
    plain = torch.load(path)
    torch.manual_seed(0)
    find = FaultHandler._find_culprit
    with mock.patch.object(
        FaultHandler, "_find_culprit", side_effect=find, autospec=True
    ) as looked:
        record, said = run(DAMAGED, *given)
    for mine, its in zip(torch.load(path), plain, strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=0, equal_nan=True)
    assert not plain[0].isfinite().all()
    assert looked.call_count == 2  # of 9 calls: of finite values, and of the NaN that they gave
    assert record.unrepaired
    assert (choose_code(record), choose_code(record, strict=True)) == (0, 1)
    (text,) = said
    assert text.startswith("`UNet` returned ")
    assert text.endswith(
        "The weight UNet:blocks.1.wide.weight isn't finite. It wasn't repaired. No repair produced a "
        "finite result. The script receives it unchanged."
    )


def test_what_pipelines_cannot_repair_is_said_once(
    run: Run, save_tiny: SaveTiny, tmp_path: Path
) -> None:
    """Two calls of a damaged pipeline hand back NaN, and each fault is said once."""
    text = PAINT + (
        "pipe.transformer.proj_out.weight.data[0, 0] = float('nan')\n"
        "for _ in range(2):\n    found = paint(output_type='latent').images\n"
        "sys.exit(0 if found.isnan().any() else 3)"
    )
    record, said = run(text, save_tiny("cogview3plus"), "float32")
    assert (record.exit_code, len(record.runs)) == (0, 2)
    assert len(said) == len(set(said)) == 1
    assert "`transformer` returned " in said[0]


def test_training_is_not_disturbed(run: Run, tmp_path: Path) -> None:
    """A step of training changes the weights as without a guard; the report says that it was left."""
    step = (
        "engine = program.given.train()\n"
        "optimizer = torch.optim.SGD(engine.model.parameters(), 0.1)\n"
        "for _ in range(2):\n"
        "    engine(torch.ones(2, 4, 8)).backward()\n"
        "    optimizer.step()\n"
        "torch.save(engine.state_dict(), sys.argv[4])"
    )
    record, said = run(SAMPLE + step, "engine", "float32", "fits", tmp_path / "guarded.pt")
    names = {"program": make_program("engine"), "torch": torch, "sys": sys}
    sys.argv, before = ["", "", "", "", str(tmp_path / "plain.pt")], sys.argv
    try:
        exec(step, names)
    finally:
        sys.argv = before
    plain, guarded = (torch.load(tmp_path / f"{name}.pt") for name in ("plain", "guarded"))
    assert all(torch.equal(plain[name], guarded[name]) for name in plain)
    assert record.modules is not None
    assert record.modules.calls == ()
    assert record.modules.unwatched == ("DiffusionEngine: 2 calls in training, left alone.",)
    assert (said, choose_code(record)) == ([], 0)


def test_components_can_be_chosen(run: Run) -> None:
    """A pattern of names or classes limits what is guarded; one that fits nothing is said."""
    given = (SAMPLE + "program.run()", "engine", "float16", "fits")
    record, said = run(*given, components="*.decode,Nobody")
    assert record.modules is not None
    assert [call.component for call in record.modules.calls] == ["FirstStage.decode"]
    assert said == []
    record, said = run(*given, components="unet")
    assert record.modules is None
    assert said == [
        "No component named unet was called, so nothing was guarded. The script called "
        "FirstStage.decode, Wrapper."
    ]


FEATURES = """
import sys, torch
from transformers import CLIPConfig, CLIPModel

torch.manual_seed(0)
small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
text = {**small, "vocab_size": 32, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
vision = {**small, "image_size": 8, "patch_size": 4}
clip = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).eval().half()
clip.text_projection.weight.data[0, :8] = 6e4
with torch.no_grad():
    found = clip.get_text_features(torch.tensor([[0, 5, 6, 1]]))
"""


def test_a_method_is_a_component_where_a_pattern_names_it(run: Run) -> None:
    """By themselves the modules that it calls are components; named, it is one, and repaired as one."""
    record, _ = run(FEATURES)
    assert record.modules is not None
    assert [call.component for call in record.modules.calls] == ["CLIPTextModel", "Linear"]
    record, _ = run(FEATURES, components="*,*.get_text_features")
    assert record.modules is not None
    (call,) = record.modules.calls
    assert (call.component, call.stage) == ("CLIPModel.get_text_features", "call")
    assert [repair.module_path for repair in record.modules.repairs] == [
        "CLIPModel.get_text_features:text_projection"
    ]


DECODER = """
import torch

class Decoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(4, 4).half()

    def decode(self, x):
        return self.out(x)

with torch.no_grad():
    found = Decoder().eval().decode(torch.ones(1, 4).half())
"""


def test_a_decoder_without_an_encoder_is_one_where_a_pattern_names_it(run: Run) -> None:
    """By itself `decode` counts where a class has `encode`, too; a pattern is enough."""
    for components, called in ((None, "Linear"), ("*.decode", "Decoder.decode")):
        record, _ = run(DECODER, **({"components": components} if components else {}))
        assert record.modules is not None
        assert [call.component for call in record.modules.calls] == [called]


def test_code_that_is_traced_is_left_alone(run: Run) -> None:
    """torch.jit, torch.func and torch.export get the modules as they are."""
    text = SAMPLE + (
        "unet, x, t = program.unet, torch.randn(2, 4, 8), torch.ones(2)\n"
        "with torch.no_grad():\n"
        "    plain = unet(x, t)\n"
        "    traced = torch.jit.trace(unet, (x, t))\n"
        "    mapped = torch.func.vmap(lambda y: unet(y[None], t[:1])[0])(x)\n"
        "    exported = torch.export.export(unet, (x, t)).module()(x, t)\n"
        "    meta = copy.deepcopy(unet).to('meta')(x.to('meta'), t.to('meta'))\n"
        "for other in (traced(x, t), mapped, exported):\n"
        "    torch.testing.assert_close(other, plain)\n"
        "assert meta.is_meta"
    )
    record, said = run(text, "module", "float32", "fits")
    assert (record.exit_code, said) == (0, [])
    assert record.modules is not None
    assert record.modules.unwatched == ("TopLevelTracedModule: 1 call of TorchScript, left alone.",)


COMPILED = """
import sys, torch

torch.manual_seed(0)
made = []

def count(graph, inputs):
    made.append(1)
    return graph.forward

class Net(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.up, self.norm, self.down = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)
        self.up.weight.data.mul_(scale)

    def forward(self, x):
        return self.down(self.norm(self.up(x)))

x, wide, twin = torch.arange(8.0)[None] * 5, Net(1e5).eval(), Net(1.0).eval().half()
with torch.no_grad():
    right, plain = wide(x), twin(x.half())
    wide = torch.compile(wide.half(), backend=count)
    twin = torch.compile(twin, backend=count)
    counts = []
    for _ in range(4):
        assert (wide(x.half()).float() - right).abs().max() < 2e-3
        assert torch.equal(twin(x.half()), plain)
        counts.append(len(made))
torch.save(counts, sys.argv[1])
"""


@pytest.mark.thorough
def test_compiled_code_of_what_is_repaired_is_kept(run: Run, tmp_path: Path) -> None:
    """From the second call on nothing is compiled, of a twin neither; all calls are guarded, and right."""
    before = torch._dynamo.config.skip_nnmodule_hook_guards
    record, said = run(COMPILED, tmp_path / "counts.pt")
    counts = torch.load(tmp_path / "counts.pt")
    assert counts[1:] == [counts[1]] * 3
    assert counts[1] - counts[0] <= 1
    assert (record.exit_code, len(said)) == (0, 1)
    assert record.modules is not None
    assert {x.component: x.calls for x in record.modules.calls} == {
        **{"Net": 1, "Net_2": 1},  # before they were compiled
        **{"Net_3": 4, "Net_4": 4},
    }
    assert torch._dynamo.config.skip_nnmodule_hook_guards == before


HOOKED = COMPILED.replace(
    "return self.down(self.norm(self.up(x)))",
    "return self.down(self.norm(self.up(x) + 0 * x.float()))",
).replace("Net(1e5)", "Net(1.0)")
"""Repaired by hooks alone, which the compiler does not look at by itself."""


@pytest.mark.thorough
def test_compiled_code_is_told_hooks_apart(run: Run, tmp_path: Path) -> None:
    """A repair that only puts hooks on, and is gone between the calls, is in force at each of them."""
    record, _ = run(
        HOOKED.replace("Net(1.0).eval().half()", "Net(1.0).eval()").replace(
            "twin(x.half())", "twin(x)"
        ),
        tmp_path / "counts.pt",
    )
    counts = torch.load(tmp_path / "counts.pt")
    assert record.exit_code == 0
    assert counts[1:] == [counts[1]] * 3
    assert record.modules is not None
    assert [x.action for x in record.modules.repairs] == ["cast-inputs"]
