"""Models from a Hub on loopback, through the real client, in a process of its own each time."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hub_server import COMMIT, HubServer, make_environment
from safetensors.torch import save_file

import stopdown
from stopdown import testing
from stopdown.plans.plan_files import read_plan, seal_plan, write_plan
from stopdown.records import Plan

CLIENT = """
import json, sys, time
time.sleep = lambda seconds: None  # the client waits between its tries
from stopdown.errors import SourceError
from stopdown.sources.source_checks import verify_source
from stopdown.sources.sources import resolve_source
calls = []
try:
    source = resolve_source(
        sys.argv[1], revision=sys.argv[2] or None, progress=lambda *call: calls.append(call)
    )
    verify_source(source)
    answer = {"path": str(source.path), "kind": source.kind, "revision": source.revision,
              "pipeline_class": source.pipeline_class, "calls": calls}
except SourceError as error:
    answer = {"error": str(error)}
answer["torch"] = "torch" in sys.modules
print(json.dumps(answer))
"""
FORMS = (
    "SOURCE is a Hub id (owner/name), a Diffusers folder, a .safetensors file or a bundled model."
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny CogVideoX as a folder, with what a repository has besides."""
    folder = testing.save_pipeline("cogvideox", tmp_path_factory.mktemp("repo") / "tiny")
    (folder / "README.md").write_text("a card")
    (folder / "tiny.ckpt").write_bytes(b"a pickle")
    (folder / "whole.safetensors").write_bytes(b"a second copy of everything")
    (folder / "transformer" / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "transformer" / "modeling.py").write_text("raise SystemExit('was executed')")
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    shutil.copy(weights, weights.with_name("diffusion_pytorch_model.fp16.safetensors"))
    return folder


@pytest.fixture
def hub(saved: Path) -> Iterator[HubServer]:
    """A Hub that has the model `maker/tiny`."""
    with HubServer({"maker/tiny": saved}) as server:
        yield server


@pytest.fixture
def client(tmp_path: Path) -> Any:
    """A function that resolves and verifies a source in a fresh process."""

    def resolve(endpoint: str, source: str, revision: str = "", **settings: str) -> dict[str, Any]:
        environment = make_environment(endpoint, tmp_path, **settings)
        done = subprocess.run(
            [sys.executable, "-c", CLIENT, source, revision],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    return resolve


@pytest.mark.thorough
def test_a_model_comes_with_what_it_needs_and_nothing_else(hub: HubServer, client: Any) -> None:
    """No pickle, no Python, no second precision and no checkpoint beside the folders comes."""
    answer = client(hub.endpoint, "maker/tiny")
    assert answer["kind"] == "hub"
    assert answer["pipeline_class"] == "CogVideoXPipeline"
    assert answer["revision"] == COMMIT
    assert hub.downloaded() == {
        "model_index.json",
        "scheduler/scheduler_config.json",
        "text_encoder/config.json",
        "text_encoder/model.safetensors",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
        "transformer/config.json",
        "transformer/diffusion_pytorch_model.safetensors",
        "vae/config.json",
        "vae/diffusion_pytorch_model.safetensors",
    }


@pytest.mark.thorough
def test_neither_torch_nor_a_network_is_needed_twice(hub: HubServer, client: Any) -> None:
    """Torch stays unloaded, and a second run answers from the cache, also with the Hub gone."""
    first = client(hub.endpoint, "maker/tiny")
    hub.stop()
    second = client(hub.endpoint, "maker/tiny")
    offline = client(hub.endpoint, "maker/tiny", HF_HUB_OFFLINE="1")
    assert first["path"] == second["path"] == offline["path"]
    assert not first["torch"]


def test_progress_counts_the_bytes(hub: HubServer, client: Any) -> None:
    """The last report says that all bytes are there, and no report goes beyond the total."""
    calls = client(hub.endpoint, "maker/tiny")["calls"]
    assert calls[-1][:2] == ["download", "downloading"]
    assert calls[-1][2] == calls[-1][3] > 200_000
    assert all(done <= total for *_, done, total in calls)


@pytest.mark.thorough
def test_a_file_that_is_cut_off_is_resumed(
    hub: HubServer, client: Any, saved: Path, tmp_path: Path
) -> None:
    """The second request for the file asks for the rest of it only, and the file is whole."""
    folder, name = tmp_path / "large", "vae/diffusion_pytorch_model.safetensors"
    shutil.copytree(saved, folder)
    # The client writes in pieces of 10 MB; of a smaller file nothing would be there to resume.
    save_file({"padding": torch.arange(6 * 2**20)}, folder / name)
    hub.repos["maker/large"], size = folder, (folder / name).stat().st_size
    hub.cut_once.add(name)
    answer = client(hub.endpoint, "maker/large")
    [resumed] = [asked for _, path, asked in hub.requests if path.endswith(name) and asked]
    assert 0 < int(resumed.removeprefix("bytes=").removesuffix("-")) <= size // 2
    assert (Path(answer["path"]) / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.thorough
def test_a_second_run_fetches_only_what_the_first_lacks(hub: HubServer, client: Any) -> None:
    """A download that failed half way says so, and the next one completes it."""
    name = "vae/diffusion_pytorch_model.safetensors"
    hub.withheld.add(name)
    message = client(hub.endpoint, "maker/tiny")["error"]
    assert message.startswith(f"The model maker/tiny couldn't be downloaded from {hub.endpoint}: ")
    hub.withheld.clear()
    hub.requests.clear()
    assert client(hub.endpoint, "maker/tiny")["kind"] == "hub"
    assert hub.downloaded() == {name}


def test_a_downloaded_model_loads_and_runs(hub: HubServer, client: Any) -> None:
    """What was downloaded is the pipeline that was saved."""
    from stopdown.pipelines.loader import load_pipeline
    from stopdown.sources.sources import resolve_source

    source = resolve_source(Path(client(hub.endpoint, "maker/tiny")["path"]))
    pipe = load_pipeline(source, torch_dtypes=torch.bfloat16)
    made = testing.make_pipeline("cogvideox", dtype=torch.bfloat16)
    for name, tensor in made.transformer.state_dict().items():
        assert torch.equal(pipe.transformer.state_dict()[name], tensor)


LOAD = """
import json, sys, warnings
import torch
from diffusers import CogVideoXTransformer3DModel, DiffusionPipeline
import stopdown
from stopdown.plans import plan_choice
certified, certify = [], plan_choice.certify_plan
plan_choice.certify_plan = lambda *x, **y: certified.append(1) or certify(*x, **y)
for name in sys.argv[1:]:
    certified.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = stopdown.quantization(name)
        known = len(certified)
        options = {"dtype": torch.float16, "quantization_config": config}
        pipe = DiffusionPipeline.from_pretrained(name, **options)
        options["quantization_config"] = stopdown.StopdownConfig()
        alone = CogVideoXTransformer3DModel.from_pretrained(
            name, subfolder="transformer", **options
        )
    said = sorted({str(x.message) for x in caught if "stopdown.json" in str(x.message)})
    sources = [x.hf_quantizer.applied_plan.source for x in (pipe.transformer, pipe.vae, alone)]
    print(json.dumps([sources, known, said]))
"""


LOAD_FROM = """
import torch
from diffusers import CogVideoXTransformer3DModel, DiffusionPipeline
import stopdown
named = {"cache_dir": "models", "dtype": torch.float16}
config = stopdown.StopdownConfig()
CogVideoXTransformer3DModel.from_pretrained(
    "maker/tiny", subfolder="transformer", quantization_config=config, **named
)
config = stopdown.quantization("maker/tiny", cache_dir="models")
DiffusionPipeline.from_pretrained("maker/tiny", quantization_config=config, **named)
"""

LOAD_BESIDE = """
import sys
import torch
from diffusers import AutoencoderKLCogVideoX, DiffusionPipeline
import stopdown
own = AutoencoderKLCogVideoX.from_pretrained(sys.argv[1], subfolder="vae", dtype=torch.float16)
for _ in range(2):
    config = stopdown.quantization("maker/tiny", leave=["vae"])
    assert sorted(config.quant_mapping) == ["text_encoder", "transformer"]
    pipe = DiffusionPipeline.from_pretrained(
        "maker/tiny", dtype=torch.float16, vae=own, quantization_config=config
    )
    assert pipe.vae is own
    (entry,) = pipe.transformer.hf_quantizer.applied_plan.components
    assert entry.precision == "fp16"
"""


@pytest.mark.thorough
def test_a_component_that_a_program_brings_is_not_downloaded(
    hub: HubServer, saved: Path, tmp_path: Path
) -> None:
    """A GGUF transformer beside a pipeline of the Hub had the original's 24 GB come, too."""
    environment = make_environment(hub.endpoint, tmp_path)
    run = [sys.executable, "-c", LOAD_BESIDE, str(saved)]
    subprocess.run(run, env=environment, cwd=tmp_path, check=True, timeout=200)
    assert "vae/config.json" in hub.downloaded()
    assert "vae/diffusion_pytorch_model.safetensors" not in hub.downloaded()


@pytest.mark.thorough
def test_a_cache_that_a_program_names_has_all_of_a_model(hub: HubServer, tmp_path: Path) -> None:
    """The pipeline around one model came into another cache than its weights, and they were missing."""
    environment = make_environment(hub.endpoint, tmp_path)
    run = [sys.executable, "-c", LOAD_FROM]
    subprocess.run(run, env=environment, cwd=tmp_path, check=True, timeout=120)
    asked = [path for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path]
    assert len(asked) == len({*asked}), "each file came once"
    assert list((tmp_path / "models").glob("models--*"))
    assert not list((tmp_path / "home").rglob("*.safetensors"))


@pytest.fixture(scope="module")
def published(saved: Path) -> Plan:
    """A plan for the model, as its publisher makes it."""
    return dataclasses.replace(stopdown.make_plan(saved), source="published")


@pytest.mark.thorough
def test_a_plan_in_a_repository_is_found(saved: Path, published: Plan, tmp_path: Path) -> None:
    """`stopdown.json` beside the model is taken, and nothing is certified, if the weights are its own.

    One that was made for other weights is named and not used, neither for a pipeline nor for one model.
    """
    repos = {name: shutil.copytree(saved, tmp_path / name) for name in ("own", "other")}
    other = dataclasses.replace(published, fingerprint="0" * 64)
    for name, plan in (("own", published), ("other", other)):
        write_plan(seal_plan(plan), repos[name] / "stopdown.json")
    with HubServer({f"maker/{name}": repo for name, repo in repos.items()}) as server:
        environment = make_environment(server.endpoint, tmp_path)
        command = [sys.executable, "-c", LOAD, "maker/own", "maker/other"]
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "stopdown.json" in server.downloaded()
    own, made = map(json.loads, done.stdout.splitlines()[-2:])
    assert own == [["published"] * 3, 0, []]
    sources, certified, said = made
    assert certified == 1
    assert "published" not in sources
    assert said
    assert all("isn't used, and a plan is made instead" in x and "fingerprint" in x for x in said)


@pytest.mark.thorough
def test_a_revision_is_followed(hub: HubServer, client: Any) -> None:
    """A commit is taken as it is, and an unknown revision is named."""
    assert client(hub.endpoint, "maker/tiny", COMMIT)["revision"] == COMMIT
    assert client(hub.endpoint, "maker/tiny", "v9")["error"] == (
        "The model maker/tiny has no revision 'v9'. A revision is a branch, a tag or a commit. "
        f"See {hub.endpoint}/maker/tiny/tree/main for those it has."
    )


def test_an_unknown_model_is_one_sentence_of_each_part(hub: HubServer, client: Any) -> None:
    """A model that the Hub does not have is named, with where was looked and what to do."""
    assert client(hub.endpoint, "maker/typo")["error"] == (
        f"The Hub at {hub.endpoint} has no model maker/typo, or it is private. No folder here has "
        f"this name either. {FORMS} Check the spelling; for a private model set HF_TOKEN, or "
        "run: hf auth login"
    )


def test_a_gated_model_says_where_to_agree(hub: HubServer, client: Any) -> None:
    """A gated model is told apart from one that is absent."""
    hub.gated.add("maker/tiny")
    assert client(hub.endpoint, "maker/tiny")["error"] == (
        "The model maker/tiny is gated, and you don't have access yet. Its author asks for "
        f"an agreement first. Agree at {hub.endpoint}/maker/tiny, then set HF_TOKEN to your token, "
        "or run: hf auth login"
    )


@pytest.mark.thorough
def test_the_token_of_the_environment_is_used(hub: HubServer, client: Any) -> None:
    """HF_TOKEN opens what is closed without it."""
    hub.token = "secret"
    assert "HF_TOKEN" in client(hub.endpoint, "maker/tiny")["error"]
    assert client(hub.endpoint, "maker/tiny", HF_TOKEN="secret")["kind"] == "hub"


def test_a_hub_that_is_down_is_named(hub: HubServer, client: Any) -> None:
    """A refused connection ends in one message with the address and the cause, and nothing beside it.

    The client by itself tries six times, over half a minute, with a line for each.
    """
    hub.stop()
    answer = client(hub.endpoint, "maker/tiny")
    message = answer["error"]
    assert message.startswith(f"The model maker/tiny couldn't be downloaded from {hub.endpoint}: ")
    assert "refused" in message
    assert message.endswith(
        "Check the connection, or set HF_ENDPOINT to a mirror, and run the command again: complete "
        "files are kept."
    )


def test_a_hub_that_fails_is_named(hub: HubServer, client: Any) -> None:
    """A server error ends in one message with its status."""
    hub.broken = True
    message = client(hub.endpoint, "maker/tiny")["error"]
    assert message.startswith(f"The model maker/tiny couldn't be downloaded from {hub.endpoint}: ")
    assert "500" in message


def test_offline_without_a_copy_says_so(hub: HubServer, client: Any) -> None:
    """HF_HUB_OFFLINE and an empty cache: the variable is named."""
    assert client(hub.endpoint, "maker/tiny", HF_HUB_OFFLINE="1")["error"] == (
        "The model maker/tiny isn't complete on this computer, and the Hub client is offline. "
        "HF_HUB_OFFLINE is set, so only what was downloaded before can be used. "
        "Unset HF_HUB_OFFLINE and run the command again."
    )
    assert hub.requests == []


def test_a_repository_without_an_index_is_named(
    hub: HubServer, client: Any, tmp_path: Path
) -> None:
    """A repository that is no Diffusers pipeline says what is missing."""
    hub.repos["maker/other"] = tmp_path
    assert client(hub.endpoint, "maker/other")["error"] == (
        "The model maker/other has no model_index.json. A Diffusers pipeline on the Hub has one, "
        "with a folder for each component. Look for a repository of the same model whose name ends "
        "with -diffusers."
    )


def test_pickles_on_the_hub_are_refused_before_any_weight_comes(
    hub: HubServer, client: Any, saved: Path, tmp_path: Path
) -> None:
    """Pickle-only weights are refused with how to convert, and only the index was fetched."""
    folder = tmp_path / "pickled"
    shutil.copytree(saved, folder)
    for path in folder.glob("vae/*.safetensors"):
        path.rename(path.with_suffix(".bin"))
    hub.repos["maker/pickled"] = folder
    message = client(hub.endpoint, "maker/pickled")["error"]
    assert message.startswith(
        "The weights vae/diffusion_pytorch_model.bin of maker/pickled are stored as pickles. Only "
        "safetensors are read: loading a pickle can run any program in it."
    )
    assert "P.from_pretrained('maker/pickled', use_safetensors=False)" in message
    assert hub.downloaded() == {"model_index.json"}


def test_remote_code_on_the_hub_is_refused_before_any_weight_comes(
    hub: HubServer, client: Any, saved: Path, tmp_path: Path
) -> None:
    """A pipeline class of its own is refused, and nothing but the index was fetched."""
    folder = tmp_path / "custom"
    shutil.copytree(saved, folder)
    index = json.loads((folder / "model_index.json").read_text())
    index["_class_name"] = ["pipeline", "MyPipeline"]
    (folder / "model_index.json").write_text(json.dumps(index))
    hub.repos["maker/custom"] = folder
    message = client(hub.endpoint, "maker/custom")["error"]
    assert "requires a pipeline class of its own, which is code that comes with" in message
    assert hub.downloaded() == {"model_index.json"}


RUN = """
import json, shutil, sys
from pathlib import Path
from types import SimpleNamespace
from stopdown.app.display import Display
from stopdown.app.fit_command import FitOptions, fit
from stopdown.app.generate_command import GenerateOptions, generate
from stopdown.errors import StopdownError
home, given, free = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
if free:
    shutil.disk_usage = lambda path: SimpleNamespace(total=free, used=0, free=free)
list_here = lambda: sorted(path.name for path in home.rglob("*.safetensors"))
shown = []
class Recorder(Display):
    def inform(self, text):
        shown.append([text, list_here()])
try:
    if "prompt" in given:
        made = generate(GenerateOptions(**given), Recorder()).forecast
    else:
        made = fit(FitOptions(**given), Recorder())
    answer = {"answer": made.answer, "download": made.download_bytes, "peak": made.peak_bytes,
              "precisions": made.precisions, "reasons": [x.reason for x in made.decisions]}
except StopdownError as error:
    answer = {"error": str(error)}
print(json.dumps(answer | {"shown": shown, "here": list_here()}))
"""


@pytest.fixture
def run(hub: HubServer, tmp_path: Path) -> Any:
    """A function that gives options to `generate`, or to `fit` without a prompt, in a fresh process."""

    def start(free: int = 0, **given: Any) -> dict[str, Any]:
        home = tmp_path / "home"
        environment = make_environment(hub.endpoint, tmp_path, HF_HOME=str(home))
        command = [sys.executable, "-c", RUN, str(home), json.dumps(given), str(free)]
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer

    return start


ASKED = {"source": "maker/tiny", "prompt": "a cat", "steps": 1, "frames": 9, "device": "cpu"}


def _list_weight_requests(hub: HubServer) -> list[str | None]:
    """The Range of each request for a file of weights, in order."""
    return [ranged for _, path, ranged in hub.requests if path.endswith(".safetensors")]


def _count_weights(saved: Path) -> int:
    names = (
        "text_encoder/model",
        *(f"{x}/diffusion_pytorch_model" for x in ("transformer", "vae")),
    )
    return sum((saved / f"{name}.safetensors").stat().st_size for name in names)


@pytest.mark.thorough
def test_the_card_comes_before_the_weights(hub: HubServer, run: Any, saved: Path) -> None:
    """`generate` says what runs how, and what it takes, while of the weights only headers were asked for.

    The record keeps it. What comes next is the download and the run.
    """
    made = run(**ASKED)
    [(text, here)] = made["shown"]
    assert here == []
    assert len(made["here"]) == 3
    answer, *choices = text.splitlines()
    assert answer == made["answer"]
    assert answer.startswith("Yes, it fits: ")
    assert " to download" in answer
    assert made["download"] == _count_weights(saved)
    assert choices
    assert all(choice.startswith("- ") for choice in choices)
    assert any("The weights are stored in bf16" in choice for choice in choices)
    ranges = _list_weight_requests(hub)
    first = ranges.index(None)
    assert first == 3
    assert all(x and x.startswith("bytes=0-") and not x.endswith("-") for x in ranges[:first])


@pytest.mark.thorough
def test_what_cannot_fit_is_refused_without_its_weights(hub: HubServer, run: Any) -> None:
    """No strategy stays within 100 KiB: nothing but headers of the weights was asked for."""
    made = run(**ASKED, memory="100KiB")
    assert made["error"].startswith("maker/tiny doesn't fit on ")
    assert "and its weights weren't downloaded. The smallest strategy, " in made["error"]
    assert made["here"] == []
    ranges = _list_weight_requests(hub)
    assert len(ranges) == 3
    assert all(x and x.startswith("bytes=0-") and not x.endswith("-") for x in ranges)


@pytest.mark.thorough
def test_without_a_limit_nothing_is_refused(run: Any) -> None:
    """With `--memory none` the card says what the run takes, and the run is made."""
    made = run(**ASKED, memory="none")
    [(text, here)] = made["shown"]
    assert text.startswith("Without a limit of memory: ")
    assert here == []
    assert len(made["here"]) == 3


@pytest.mark.thorough
def test_a_full_disk_is_told_before_the_download(hub: HubServer, run: Any, saved: Path) -> None:
    """One byte less than the weights is too little, and none of them is asked for."""
    made = run(**ASKED, free=_count_weights(saved) - 1)
    assert made["error"].startswith("The download of maker/tiny needs ")
    assert made["error"].endswith("set HF_HOME to a folder on a larger disk.")
    assert made["here"] == []
    assert None not in _list_weight_requests(hub)
    assert run(**ASKED, free=2**40)["download"] == _count_weights(saved)


@pytest.mark.thorough
def test_a_forecast_of_a_hub_id_is_that_of_its_folder(
    hub: HubServer, run: Any, saved: Path
) -> None:
    """On a T4 both run rescaled in fp16, since headers say bf16 wherever they are read."""
    there = run(source="maker/tiny", device="t4")
    here = run(source=str(saved), device="t4")
    assert {*there["precisions"].values()} == {"fp16"}
    for name in ("precisions", "peak", "reasons"):
        assert there[name] == here[name]
    assert there["download"] == _count_weights(saved)
    assert here["download"] == 0
    assert None not in _list_weight_requests(hub)


ARRIVAL = """
import os, psutil, signal, sys
from stopdown.devices.device_choice import choose_device
from stopdown.plans import plan_choice
from stopdown.sources.sources import resolve_source
plan_choice.WORTH_BYTES = 0
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
described = resolve_source("maker/tiny", with_weights=False)
with plan_choice.certified_on_arrival(described, "fp16", choose_device("cpu")):
    print([x.pid for x in psutil.Process().children()], flush=True)
    if len(sys.argv) > 1:
        os.kill(os.getpid(), int(sys.argv[1]))
    resolve_source("maker/tiny")
"""


def _run_arrival(hub: HubServer, folder: Path, *given: str) -> subprocess.CompletedProcess[str]:
    environment = make_environment(hub.endpoint, folder, HF_HUB_DOWNLOAD_TIMEOUT="300")
    return subprocess.run(
        [sys.executable, "-c", ARRIVAL, *given],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.thorough
def test_components_are_certified_while_others_are_downloaded(
    hub: HubServer, tmp_path: Path
) -> None:
    """The last file is sent once two components are planned; at the end of the block all three are."""
    last, plans = "vae/diffusion_pytorch_model.safetensors", tmp_path / "cache" / "plans"
    hub.held_until[last] = lambda: plans.is_dir() and len(list(plans.glob("*.json"))) == 2
    done = _run_arrival(hub, tmp_path)
    assert done.returncode == 0, done.stderr
    kept = [read_plan(path) for path in plans.glob("*.json")]
    assert all(len(x.components) == 1 and x.components[0].scaling for x in kept)
    names = sorted(x.components[0].component for x in kept)
    assert names == ["text_encoder", "transformer", "vae"]


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_process_that_certifies_ends_with_the_download(
    hub: HubServer, tmp_path: Path, number: signal.Signals
) -> None:
    """Killed or interrupted, a download leaves no process behind that writes plans."""
    done = _run_arrival(hub, tmp_path, str(int(number)))
    assert done.returncode != 0
    [child] = json.loads(done.stdout)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(child).wait(timeout=60)
