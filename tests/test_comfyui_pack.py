"""Tests that hold the ComfyUI node pack together without ComfyUI: its files name the same nodes."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

PACK = Path(__file__).parents[1] / "integrations" / "comfyui"
SOURCES = sorted(PACK.glob("*.py"))
LANGUAGES = ("en", "zh")


def read_schemas() -> dict[str, dict[str, Any]]:
    """Node id to its display name, description, inputs and number of outputs, read from the source."""
    tree = ast.parse((PACK / "nodes.py").read_text())
    functions = {x.name: x for x in tree.body if isinstance(x, ast.FunctionDef)}
    found = {}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "io.Schema":
            fields = {word.arg: word.value for word in call.keywords}
            calls = [x for x in _list_calls(fields["inputs"], functions) if _is_put(x, "Input")]
            outputs = [x for x in _list_calls(fields["outputs"], functions) if _is_put(x, "Output")]
            found[_read(fields["node_id"])] = {
                "display_name": _read(fields["display_name"]),
                "description": _read(fields["description"]),
                "inputs": {_read(x.args[0]): _read_tooltip(x) for x in calls},
                "outputs": len(outputs),
            }
    return found


def _read(value: ast.expr) -> Any:
    return ast.literal_eval(value)


def _read_tooltip(call: ast.Call) -> str:
    return next(_read(word.value) for word in call.keywords if word.arg == "tooltip")


def _is_put(call: ast.Call, kind: str) -> bool:
    return ast.unparse(call.func).endswith(f".{kind}")


def _list_calls(value: ast.AST, functions: dict[str, ast.FunctionDef]) -> list[ast.Call]:
    """Calls in an expression, and in the functions of the file that it calls."""
    calls = [x for x in ast.walk(value) if isinstance(x, ast.Call)]
    inner = [functions[x.func.id] for x in calls if isinstance(x.func, ast.Name)]
    return [*calls, *(x for function in inner for x in _list_calls(function, functions))]


SCHEMAS = read_schemas()


def test_the_ids_are_those_that_workflows_name() -> None:
    """An id is never changed: workflows that people saved name it."""
    assert list(SCHEMAS) == [
        "StopdownRunInFp16",
        "StopdownGuard",
        "StopdownCheckSums",
        "StopdownReport",
        "StopdownDoctor",
        "StopdownExplain",
        "StopdownSaveFp16",
    ]


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_language_names_every_node(language: str) -> None:
    """Nodes, inputs and outputs; in English they say what the source says."""
    known = json.loads((PACK / "locales" / language / "nodeDefs.json").read_text())
    assert list(known) == list(SCHEMAS)
    for name, schema in SCHEMAS.items():
        entry = known[name]
        assert set(entry["inputs"]) == set(schema["inputs"])
        assert list(entry["outputs"]) == [str(x) for x in range(schema["outputs"])]
        if language == "en":
            assert {key: entry[key] for key in ("display_name", "description")} == {
                key: schema[key] for key in ("display_name", "description")
            }
            assert {key: x["tooltip"] for key, x in entry["inputs"].items()} == schema["inputs"]


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_node_has_help(name: str) -> None:
    """ComfyUI shows the page of a node's id; in Chinese where that is the language."""
    for page in (f"{name}.md", f"{name}/zh.md"):
        text = (PACK / "web" / "docs" / page).read_text()
        assert text.startswith("# ")
        assert all(f"`{x}`" in text for x in SCHEMAS[name]["inputs"])


def test_the_package_says_what_the_registry_asks() -> None:
    """A publisher, a name and an icon that is there; Stopdown is what it depends on."""
    found = tomllib.loads((PACK / "pyproject.toml").read_text())
    assert found["project"]["dependencies"] == ["stopdown"]
    comfy = found["tool"]["comfy"]
    assert (comfy["PublisherId"], comfy["DisplayName"]) == ("stopdown", "Stopdown")
    assert (PACK / comfy["Icon"]).read_text().startswith("<svg")
    assert (PACK / found["project"]["readme"]).is_file()
    assert (PACK / found["project"]["license"]["file"]).is_file()


def test_an_older_comfyui_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the V3 schema, loading it is one message, which has the version of pyproject.toml."""
    monkeypatch.setitem(sys.modules, "comfy_api", None)
    spec = importlib.util.spec_from_file_location("old_stopdown", PACK / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "old_stopdown", module)
    least = tomllib.loads((PACK / "pyproject.toml").read_text())["tool"]["comfy"][
        "requires-comfyui"
    ]
    needed = least.removeprefix(">=")
    with pytest.raises(ImportError, match=f"need ComfyUI {needed} or newer: .* Update ComfyUI."):
        spec.loader.exec_module(module)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_nothing_heavy_is_imported_at_the_start(path: Path) -> None:
    """ComfyUI starts as fast as without the pack: its files import the standard library and each other."""
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.level == 0:
            names = [statement.module or ""]
        else:
            continue
        for name in names:
            assert name == "comfy_api.latest" or name.partition(".")[0] in sys.stdlib_module_names


@pytest.mark.parametrize(
    "path", sorted(PACK.glob("example_workflows/*.json")), ids=lambda x: x.stem
)
def test_workflows_name_nodes_that_are_there(path: Path) -> None:
    """Each has one of ours, inputs and links that fit, and a picture beside it."""
    found = json.loads(path.read_text())
    nodes = {node["id"]: node for node in found["nodes"]}
    ours = [node for node in nodes.values() if node["type"].startswith("Stopdown")]
    assert {"StopdownRunInFp16", "StopdownReport"} <= {node["type"] for node in ours}
    for node in ours:
        assert {x["name"] for x in node["inputs"]} <= set(SCHEMAS[node["type"]]["inputs"])
        assert len(node["outputs"]) == SCHEMAS[node["type"]]["outputs"]
    for number, source, slot, target, place, kind in found["links"]:
        assert number in nodes[source]["outputs"][slot]["links"]
        assert nodes[target]["inputs"][place]["link"] == number
        assert nodes[source]["outputs"][slot]["type"] == kind
    picture = path.with_suffix(".jpg")
    assert 0 < picture.stat().st_size < 100_000


def load_module(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location(name, PACK / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def load_sessions(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load_module("sessions", monkeypatch)


@pytest.mark.parametrize(
    ("kind", "wanted"), [("dynamic", {"disable_dynamic": True}), ("plain", {})]
)
def test_weights_that_are_paged_in_are_not_changed(
    kind: str, wanted: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a patcher under DynamicVRAM a plain clone is taken; older ones know no such thing."""
    sessions = load_sessions(monkeypatch)
    patcher = SimpleNamespace(clone=lambda **given: given)
    if kind == "dynamic":
        patcher.is_dynamic = lambda: True
    assert sessions.clone_patcher(patcher) == wanted


@pytest.mark.parametrize(("size", "word"), [(1.0, "safe"), (3000.0, "not safe")])
def test_sums_in_fp16_are_judged_once_before_the_run(
    size: float, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report has the sentence of `check --sums`; the run is as it was."""
    import torch

    sessions = load_sessions(monkeypatch)
    net = torch.nn.Linear(64, 64, bias=False).requires_grad_(False)
    net.weight.data.fill_(size)
    program, given = (
        SimpleNamespace(net=net, patcher=SimpleNamespace(patches={})),
        torch.ones(1, 64),
    )
    for sums in (True, False):
        session = sessions.Session(sessions.Options("warn", sums=sums))
        for _ in range(2):
            with session.guarding("model", program, run=lambda: net(given)), torch.inference_mode():
                assert net(given).max() == 64 * size
        (_, first), (_, second) = session.take_runs()
        said = [x.evidence for x in first.findings if x.kind == "sums-in-fp16"]
        if sums:
            assert said[0].startswith(f"In this run fp16 accumulation is {word}: linear layers ")
        else:
            assert said == []
        assert first.findings == second.findings


class Patcher:
    """As ComfyUI's: of a model whose weights are loaded."""

    def __init__(self, model: Any) -> None:
        self.model, self.patches_uuid = model, object()

    def clone(self) -> Patcher:
        return Patcher(self.model)

    def set_model_compute_dtype(self, dtype: Any) -> None:
        """Weights are cast by the plan."""


class Clip:
    """As ComfyUI's, with one text encoder."""

    def __init__(self, model: Any) -> None:
        self.cond_stage_model, self.patcher, self.layer_idx = model, Patcher(model), None

    def clone(self) -> Clip:
        return Clip(self.cond_stage_model)

    def encode_from_tokens(self, tokens: Any) -> Any:
        return self.cond_stage_model.t5.transformer(tokens)


class Vae:
    """As ComfyUI's."""

    def __init__(self, model: Any) -> None:
        self.first_stage_model, self.patcher = model, Patcher(model)

    def encode(self, pixels: Any) -> Any:
        return self.first_stage_model.encode(pixels)

    def decode(self, latents: Any) -> Any:
        return self.first_stage_model.decode(latents)


def make_net(size: float = 6e4) -> Any:
    """A module whose activations are beyond fp16's range, and whose output isn't."""
    import torch

    net = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.LayerNorm(8))
    net[0].weight.data.copy_(size * torch.eye(8))
    return net.requires_grad_(False)


def make_clip() -> Clip:
    import torch

    model = torch.nn.Module()
    model.t5 = torch.nn.Module()
    model.t5.transformer = make_net()
    return Clip(model)


def make_vae() -> Vae:
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = make_net(), make_net(3e4)

        def encode(self, x: Any) -> Any:
            return self.first(x)

        def decode(self, x: Any) -> Any:
            return self.second(x)

    return Vae(Model())


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The pack's sessions, beside a ComfyUI that has loaded everything."""
    management = SimpleNamespace(load_models_gpu=lambda models: None)
    monkeypatch.setitem(sys.modules, "comfy", SimpleNamespace(model_management=management))
    monkeypatch.setitem(sys.modules, "comfy.model_management", management)
    return load_sessions(monkeypatch)


def list_precisions(session: Any) -> list[str]:
    return [call.precisions[0] for _, record in session.take_runs() for call in record.calls]


def make_row(*values: float) -> Any:
    import torch

    return torch.tensor([[*values, *([0.5] * (8 - len(values)))]])


def test_a_lora_behind_the_node_gets_a_plan_of_its_own(sessions: Any) -> None:
    """Weights that other nodes change between two runs of a session are planned anew."""
    net = make_net()
    program = SimpleNamespace(model=SimpleNamespace(diffusion_model=net), patches_uuid=1)
    session = sessions.Session(sessions.Options(fp16=True))
    for size in (6e4, 1e5, 6e4):
        net[0].weight.data.fill_(1.0)
        net[0].weight.data.diagonal().fill_(size)
        run = functools.partial(net, make_row(1, 2, 3))
        right = run()
        with session.guarding("model", program, run):
            assert (net(make_row(1, 2, 3).half()) - right).abs().max() < 1e-2
    assert list_precisions(session) == ["fp16"] * 3


def test_a_repair_holds_for_later_runs(sessions: Any) -> None:
    """What a run repaired is in the plan of the next one, which repairs nothing."""
    net = make_net(1e3)
    program = SimpleNamespace(model=SimpleNamespace(diffusion_model=net), patches_uuid=1)
    session = sessions.Session(sessions.Options(fp16=True))
    for _ in range(2):
        with session.guarding("model", program, lambda: net(make_row(1))):
            assert net(make_row(6e4).half()).isfinite().all()
    first, second = (record.repairs for _, record in session.take_runs())
    assert [x.action for x in first] == ["rescaled"]
    assert second == ()


def test_clones_of_a_clip_stay_guarded(sessions: Any) -> None:
    """A node behind ours, such as the one that sets the last layer, works on a clone; so does ours."""
    session, other = (
        sessions.Session(sessions.Options(fp16=True)),
        sessions.Session(sessions.Options()),
    )
    guarded = sessions.guard_clip(make_clip(), session)
    guarded.clone().encode_from_tokens(make_row(1, 2))
    assert list_precisions(session) == ["fp16"]
    sessions.guard_clip(guarded, other).encode_from_tokens(make_row(1, 2))
    assert list_precisions(session) == list_precisions(other) == ["fp16"]


@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_two_nodes_guard_one_vae(sessions: Any, order: tuple[bool, bool]) -> None:
    """The second node guards its own copy, and not the one that the first one made."""
    vae, found = make_vae(), []
    for fp16 in order:
        found.append(sessions.Session(sessions.Options(fp16=fp16)))
        vae = sessions.guard_vae(vae, found[-1])
    vae.decode(make_row(1, 2))
    assert [list_precisions(x) for x in found] == [["fp16"], ["fp16"]]
    assert vae.decode.args[0].__self__ is vae


def test_both_directions_of_a_vae_are_planned(sessions: Any) -> None:
    """Decoding has exponents of its own where encoding came first, and its pixels aren't kept."""
    session = sessions.Session(sessions.Options(fp16=True))
    vae = sessions.guard_vae(make_vae(), session)
    vae.encode(make_row(1, 2))
    vae.decode(make_row(1, 2))
    assert [record.repairs for _, record in session.take_runs()] == [(), ()]
    assert session.calls == {}


def test_patches_of_waiting_weights_are_rounded_once(sessions: Any) -> None:
    """Several small ones add up in bf16 weights that wait in host memory."""
    import torch

    from stopdown.scaling import Patches

    net = torch.nn.Linear(8, 8, bias=False).bfloat16().requires_grad_(False)
    net.weight.data.fill_(1.0)
    net.weight_function = [lambda x: x + 2.0**-9] * 4
    program = SimpleNamespace(model=SimpleNamespace(diffusion_model=net), patches_uuid=1)
    with Patches() as patches:
        sessions.apply_weight_functions(program, patches)
        assert bool((net.weight == 1 + 2.0**-7).all())
        assert net.weight.dtype == torch.bfloat16
    assert bool((net.weight == 1).all())


def test_sums_of_both_directions_of_a_vae_are_judged(sessions: Any) -> None:
    """Decoding is measured where encoding came first."""
    session = sessions.Session(sessions.Options("warn", sums=True))
    vae = sessions.guard_vae(make_vae(), session)
    vae.encode(make_row(1, 2))
    vae.decode(make_row(1, 2))
    for _, record in session.take_runs():
        assert [x.kind for x in record.findings if x.kind == "sums-in-fp16"]


def test_a_model_is_saved_from_a_copy_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weight is copied where it lies, as the device may have no room for it."""
    import torch

    files = load_module("files", monkeypatch)
    net = torch.nn.BatchNorm1d(4).bfloat16()
    net.tied, before = net.weight, net.weight.clone()
    with monkeypatch.context() as refused:
        refused.setattr(torch.nn.Parameter, "__deepcopy__", None)
        made = files.copy_to_host(net)
    assert made.weight.dtype == made.running_mean.dtype == torch.float32
    assert made.num_batches_tracked.dtype == torch.int64
    assert made.tied is made.weight
    made.weight.data.zero_()
    assert torch.equal(net.weight, before)


def test_a_fault_of_many_frames_is_explained_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A black clip has one cause, with the number of frames that have it."""
    import torch

    reports = load_module("reports", monkeypatch)
    clip = torch.zeros(6, 32, 32, 3)
    clip[0] = torch.rand(32, 32, 3, generator=torch.Generator().manual_seed(0))
    text = reports.write_causes("", clip)
    assert text.count("black") < 2 * reports.write_causes("", clip[1:2]).count("black")
    assert "5 of 6 images, number 2 is the first:" in text
    assert "images" not in reports.write_causes("", clip[1:2]).partition("\n")[0]
    assert reports.write_causes(" ", None) == "Connect a message, a log or images."
