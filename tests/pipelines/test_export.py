"""`stopdown export --scales`: a plan's exponents by layer, as others write them into their source."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from stopdown import rescale_
from stopdown.errors import StopdownWarning
from stopdown.export.scale_table import list_scales, write_table
from stopdown.plans.plan_files import seal_plan, write_plan
from stopdown.records import ComponentPlan, Plan, Scaling
from stopdown.testing import make_pipeline

Run = Callable[..., tuple[int, str, str]]
Values = dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

LAYERS = (torch.nn.Linear, torch.nn.Conv2d, torch.nn.Conv3d)


def make_call(transformer: torch.nn.Module) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "hidden_states": torch.randn(1, 2, 4, 4, 4, generator=draw),
        "encoder_hidden_states": torch.randn(
            1, 8, transformer.config.text_embed_dim, generator=draw
        ),
        "timestep": torch.tensor([500]),
    }


def watch(module: torch.nn.Module, call: Mapping[str, torch.Tensor]) -> Values:
    """Input, weight and output of every layer in one call."""
    found: Values = {}

    def note(layer: torch.nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        found[names[layer]] = (args[0].clone(), layer.weight.detach().clone(), output.clone())

    names = {part: name for name, part in module.named_modules() if isinstance(part, LAYERS)}
    handles = [part.register_forward_hook(note) for part in names]
    with torch.no_grad():
        module(**call)
    for handle in handles:
        handle.remove()
    return found


@pytest.fixture(scope="module")
def scaled() -> tuple[Values, Values, Scaling]:
    """What the layers of a transformer that overflows get and give, before and after rescaling."""
    transformer = make_pipeline("cogvideox", overflow="transformer").transformer
    call = make_call(transformer)
    before = watch(transformer, call)
    rescaling = rescale_(transformer, (), call)
    with pytest.warns(StopdownWarning, match="Forward hooks were put on"):
        after = watch(transformer, call)
    return before, after, rescaling.scaling


@pytest.fixture(scope="module")
def plan(scaled: tuple[Values, Values, Scaling]) -> Plan:
    entry = ComponentPlan("transformer", "CogVideoXTransformer3DModel", "0" * 64, "fp16", scaled[2])
    rest = {"prompts": ("a cat",), "steps": 2, "device": "cpu", "elapsed_s": 1.0}
    return seal_plan(Plan("model", "0" * 64, "CogVideoXPipeline", "fp16", {}, (entry,), **rest))


def test_the_table_is_what_the_layers_really_get(scaled: tuple[Values, Values, Scaling]) -> None:
    """Input, weight and output of each layer are the original's times 2**exponent, bit for bit."""
    before, after, scaling = scaled
    rows = {row.layer: row for row in list_scales(scaling)}
    seen = 0
    for layer, values in before.items():
        row = rows.get(layer)
        blocks = [x for name, x in rows.items() if name.startswith(f"{layer}[")]
        if blocks:
            for block in blocks:
                start, stop = map(int, block.layer[len(layer) + 1 : -1].split(":"))
                ends = values[2][..., start:stop], after[layer][2][..., start:stop]
                assert torch.equal(torch.ldexp(ends[0], torch.tensor(block.output)), ends[1])
            continue
        exponents = (row.input, row.weight, row.output) if row else (0, 0, 0)
        for old, new, exponent in zip(values, after[layer], exponents, strict=True):
            assert torch.equal(torch.ldexp(old, torch.tensor(exponent)), new), layer
        seen += row is not None
    assert seen > 5
    assert any(row.output for row in rows.values())


def test_one_factor_a_layer_keeps_unscaled_weights_in_range(
    scaled: tuple[Values, Values, Scaling],
) -> None:
    """As stable-diffusion.cpp uses it: input times scale, product in fp16, over scale in fp32."""
    before, _, scaling = scaled
    overflowed = 0
    for row in list_scales(scaling):
        if row.layer not in before or row.input or before[row.layer][1].dim() != 2:
            continue
        source, weight, wanted = before[row.layer]
        wanted = torch.nn.functional.linear(source, weight)
        plain = torch.nn.functional.linear(source.half(), weight.half())
        scaled_down = torch.nn.functional.linear((source * row.scale).half(), weight.half())
        found = scaled_down.float() / row.scale
        assert torch.allclose(found, wanted, rtol=0.02, atol=0.02 * float(wanted.abs().max()))
        overflowed += not bool(plain.isfinite().all())
    assert overflowed, "without the factor some of them overflow"


def test_each_format_says_the_same(plan: Plan) -> None:
    """Text, JSON and Python hold the same rows."""
    rows = list_scales(plan.components[0].scaling)
    table = json.loads(write_table(plan, "json"))["components"]["transformer"]["layers"]
    assert [(x["layer"], x["input"], x["weight"], x["output"]) for x in table] == [
        (x.layer, x.input, x.weight, x.output) for x in rows
    ]
    names: dict[str, dict[str, tuple[int, ...]]] = {}
    exec(write_table(plan, "py"), names)
    assert names["TRANSFORMER"] == {x.layer: (x.input, x.weight, x.output) for x in rows}
    text = write_table(plan, "txt")
    assert all(x.layer in text for x in rows)


@pytest.mark.parametrize("ending", ["txt", "json", "h", "py"])
def test_a_component_without_rows_is_in_the_table(plan: Plan, ending: str) -> None:
    """One with the exponent of a bias alone has no layer to list, and is told of all the same."""
    bare = ComponentPlan("vae", "AutoencoderKL", "0" * 64, "fp16", Scaling(exponents={"a.bias": 2}))
    both = dataclasses.replace(plan, components=(*plan.components, bare))
    table = write_table(both, ending)
    assert "vae" in table.lower()
    assert "a.bias" in table


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_header_compiles(plan: Plan, tmp_path: Path) -> None:
    """A C program that includes it prints the table."""
    (tmp_path / "scales.h").write_text(write_table(plan, "h"))
    (tmp_path / "main.c").write_text(
        '#include "scales.h"\n#include <stdio.h>\nint main(void) {\n'
        "  for (unsigned i = 0; i < sizeof STOPDOWN_TRANSFORMER / sizeof *STOPDOWN_TRANSFORMER; i++)\n"
        '    printf("%s %d %a\\n", STOPDOWN_TRANSFORMER[i].layer, STOPDOWN_TRANSFORMER[i].weight,'
        " STOPDOWN_TRANSFORMER[i].scale);\n  return 0;\n}\n"
    )
    subprocess.run(["cc", "-Wall", "-Werror", "main.c", "-o", "main"], cwd=tmp_path, check=True)
    out = subprocess.run([tmp_path / "main"], capture_output=True, text=True, check=True).stdout
    printed = [line.split() for line in out.splitlines()]
    assert [(name, int(weight), float.fromhex(scale)) for name, weight, scale in printed] == [
        (x.layer, x.weight, x.scale) for x in list_scales(plan.components[0].scaling)
    ]


def test_the_command_prints_and_writes(plan: Plan, tmp_path: Path, run: Run) -> None:
    """To a terminal as text, to a file by its ending; what is there stays without --force."""
    path = write_plan(plan, tmp_path / "plan.json")
    code, out, _ = run("export", path, "--scales")
    assert code == 0
    assert out.startswith("Powers of two by layer, of the plan ")
    code, out, _ = run("export", path, "--scales", tmp_path / "scales.h")
    assert (code, out) == (0, f"{tmp_path / 'scales.h'}\n")
    assert "STOPDOWN_TRANSFORMER" in (tmp_path / "scales.h").read_text()
    code, _, err = run("export", path, "--scales", tmp_path / "scales.h")
    assert code == 2
    assert "--force" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "Neither --scales nor --to was given. Write: stopdown export {plan} --scales"),
        (("--scales", "scales.xml"), "OUT scales.xml ends in no known format."),
    ],
)
def test_what_cannot_be_exported_is_one_message(
    plan: Plan, tmp_path: Path, run: Run, words: tuple[str, ...], message: str
) -> None:
    """Exit 2, with what to type."""
    path = write_plan(plan, tmp_path / "plan.json")
    code, _, err = run("export", path, *words)
    assert code == 2
    assert message.format(plan=path) in err


def test_a_plan_without_exponents_of_layers_says_so(plan: Plan, tmp_path: Path, run: Run) -> None:
    """Older plans have none, and plans of models that need none have none."""
    (entry,) = plan.components
    for scaling, words in (
        (dataclasses.replace(entry.scaling, layers={}), "Make it again: stopdown plan model"),
        (Scaling(), "The plan for model has no exponents."),
    ):
        older = dataclasses.replace(plan, components=(dataclasses.replace(entry, scaling=scaling),))
        path = write_plan(seal_plan(older), tmp_path / "older.json")
        code, _, err = run("export", path, "--scales")
        assert code == 2
        assert words in err
