"""Text encoders by themselves: converted, read by plain Transformers, right in fp16 where they were not."""

from __future__ import annotations

import copy
import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hub_server import HubServer, make_environment
from safetensors.torch import load_file, save_file

from models.rescaling_models import EXAMPLES, WAYS, make_example, scale_weights
from models.trained_models import unpack_minilm
from stopdown.checkpoints.text_encoders import convert_encoder, find_encoder
from stopdown.numerics import relative_l2
from stopdown.records import Conversion, read_record, to_json
from stopdown.sources.headers import EXPONENTS_ENTRY, RESCALED_ENTRY, read_metadata
from stopdown.testing import make_pipeline

SMALLEST = 2.0**-6
"""Weights below are 0 here, so that eight bits of the others outlive a fold in fp16."""

ENCODERS = ("T5 gated", "UMT5", "Gemma 2", "Gemma 3", "Qwen2.5-VL text", "CLIP text")
CASES = [
    pytest.param(
        name,
        way,
        certify,
        id=f"{name}, {way}, {'certified' if certify else 'measured'}",
        marks=() if (name, way) == ("T5 gated", "residual") else pytest.mark.slow,
    )
    for name in ENCODERS
    for way in ("residual", "last linear", "gated product")
    if way in EXAMPLES[name].ways
    for certify in (True, False)
]


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """A tiny encoder that is wrong in plain fp16, by its class and how."""

    @functools.cache
    def save_once(name: str, way: str) -> Path:
        folder = tmp_path_factory.mktemp("encoder") / name.replace(" ", "-")
        return save_example(name, way, folder)

    return save_once


def save_example(name: str, way: str, folder: Path) -> Path:
    """A tiny encoder whose values leave fp16 in some way, in weights that eight bits hold."""
    module, _ = make_example(name)
    while not overflows(module):
        scale_weights(module, WAYS[way], 1)
    scale_weights(module, WAYS[way], 1)
    for tensor in module.parameters():
        tensor.data = tensor.data.masked_fill(tensor.data.abs() < SMALLEST, 0).bfloat16().float()
    module.save_pretrained(folder)  # type: ignore[operator]
    return folder


def draw_tokens(rows: int = 24, size: int = 64) -> torch.Tensor:
    """Other tokens than those that exponents are measured on."""
    return torch.randint(3, size, (rows, 11), generator=torch.Generator().manual_seed(99))


def overflows(module: Any) -> bool:
    """Whether a plain fp16 copy gives NaN, or what is clamped on the way makes its output another."""
    tokens, low = draw_tokens(), copy.deepcopy(module).half()
    with torch.no_grad():
        wanted, found = (x(input_ids=tokens).last_hidden_state for x in (module, low))
    return not bool(found.isfinite().all()) or relative_l2(found, wanted) > 0.5


def run_encoder(folder: Path, dtype: torch.dtype, **options: Any) -> torch.Tensor:
    """What plain Transformers gives, from a folder, loaded in a dtype."""
    kind = json.loads((folder / "config.json").read_text())["architectures"][0]
    module = getattr(transformers, kind).from_pretrained(folder, dtype=dtype).eval()
    if options.pop("half", False):
        module.half()  # also what its class keeps in fp32
    for place, exponent in options.pop("eps", {}).items():
        path, _, name = place.rpartition(".")
        norm = module.get_submodule(path)
        setattr(norm, name, getattr(norm, name) * 2.0**exponent)
    with torch.no_grad():
        found: torch.Tensor = module(input_ids=draw_tokens(), **options).last_hidden_state
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "way", "certify"), CASES)
def test_plain_transformers_is_right_in_fp16(
    save: Any, tmp_path: Path, name: str, way: str, certify: bool
) -> None:
    """fp32 bit for bit; fp16 finite and nearer than bf16, with and without the class's fp32 modules."""
    folder, out = save(name, way), tmp_path / "out"
    encoder = find_encoder(folder)
    assert encoder is not None
    record = convert_encoder(encoder, out, certify=certify)
    (entry,) = record.components
    assert entry.folded > 0
    assert any(("Certified" in reason) == certify for reason in entry.reasons)
    reference = run_encoder(folder, torch.float32)
    same = relative_l2(run_encoder(out, torch.float32), reference)
    assert same <= (1e-6 if entry.eps_left else 0.0)
    assert torch.equal(run_encoder(out, torch.float32, eps=entry.eps_left), reference)
    brain = relative_l2(run_encoder(folder, torch.bfloat16), reference)
    plain = run_encoder(folder, torch.float32, half=True).float()
    assert not bool(plain.isfinite().all()) or relative_l2(plain, reference) > 10 * brain
    for half in (False, True):
        low = relative_l2(run_encoder(out, torch.float16, half=half), reference)
        print(f"{name}, {way}: {low:.5f}, bf16 {brain:.5f}, {brain / low:.1f} times")  # noqa: T201
        assert low < brain / 6
    assert all(x.dtype == torch.float16 for x in load_file(out / "model.safetensors").values())


@pytest.mark.thorough
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_an_eps_that_stays_is_all_that_changes(save: Any, tmp_path: Path, eps: float) -> None:
    """One field sets the eps of all norms of a Gemma: what keeping it changes is in the card, and all."""
    shutil.copytree(save("Gemma 2", "gated product"), folder := tmp_path / "gemma")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": eps}))
    encoder, out = find_encoder(folder), tmp_path / "out"
    assert encoder is not None
    (entry,) = convert_encoder(encoder, out, certify=True).components
    most = f"changes the output by at most {100 * entry.effect:.2g} %"
    said = most if eps == 1e-2 else "that changes no bit in"
    assert said in " ".join(entry.reasons)
    reference = run_encoder(folder, torch.float32)
    same = relative_l2(run_encoder(out, torch.float32), reference)
    assert (same > 1e-6) == (eps == 1e-2)
    if eps == 1e-2:  # a last bit of other tokens than those tried may differ, by processor
        assert same == pytest.approx(entry.effect, rel=0.5)
    assert torch.equal(run_encoder(out, torch.float32, eps=entry.eps_left), reference)


@pytest.mark.thorough
def test_hidden_states_are_kept_where_that_is_possible(save: Any, tmp_path: Path) -> None:
    """A gated product is brought into range between them; where they are scaled themselves, it is said."""
    folder = save("Gemma 2", "gated product")
    encoder = find_encoder(folder)
    assert encoder is not None
    record = convert_encoder(encoder, tmp_path / "kept")
    assert not any("hidden states" in reason for reason in record.components[0].reasons)
    wanted, found = (run_states(x, torch.float32) for x in (folder, tmp_path / "kept"))
    assert all(relative_l2(x, y) < 1e-6 for x, y in zip(found, wanted, strict=True))
    encoder = find_encoder(save("CLIP text", "residual"))
    assert encoder is not None
    record = convert_encoder(encoder, tmp_path / "scaled")
    assert "Hidden states between its layers are multiplied by powers of two" in " ".join(
        record.components[0].reasons
    )
    wanted, found = (run_states(x, torch.float32) for x in (encoder.folder, tmp_path / "scaled"))
    assert any(relative_l2(x, y) > 0.1 for x, y in zip(found, wanted, strict=True))


def run_states(folder: Path, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """The hidden states that plain Transformers gives."""
    kind = json.loads((folder / "config.json").read_text())["architectures"][0]
    module = getattr(transformers, kind).from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        found: tuple[torch.Tensor, ...] = module(
            input_ids=draw_tokens(), output_hidden_states=True
        ).hidden_states
    return found


@pytest.mark.thorough
def test_the_files_say_what_was_done(save: Any, tmp_path: Path, run: Any) -> None:
    """Every file that describes the model is there, and the record, the card, metadata, eps."""
    folder = tmp_path / "model"
    shutil.copytree(save("T5 gated", "residual"), folder)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    code, out, err = run("convert", folder, tmp_path / "out", "--certify", "--json")
    assert code == 0, err
    record = read_record(tmp_path / "out" / "stopdown.json", Conversion)
    assert json.loads(out)["components"] == json.loads(to_json(record))["components"]
    files = {
        str(x.relative_to(tmp_path / "out")) for x in (tmp_path / "out").rglob("*") if x.is_file()
    }
    before = {str(x.relative_to(folder)) for x in folder.rglob("*") if x.is_file()}
    assert files == before | {"README.md", "stopdown.json"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    old = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == "float16"
    assert 0 < config["layer_norm_epsilon"] < old["layer_norm_epsilon"]
    metadata = read_metadata(tmp_path / "out" / "model.safetensors")
    assert metadata[RESCALED_ENTRY].startswith("model: weights are multiplied by powers of two")
    exponents = json.loads(metadata[EXPONENTS_ENTRY])
    assert {name.partition("[")[0] for name in exponents} <= dict(module_names(folder)).keys()
    assert "no text overflows fp16" in (tmp_path / "out" / "README.md").read_text()
    code, _, err = run("convert", folder, tmp_path / "out")
    assert (code, "--force" in err) == (2, True)
    assert run("convert", folder, tmp_path / "out", "--force")[0] == 0


def module_names(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder's weights; of tied ones also the other names."""
    return load_file(folder / "model.safetensors") | {"encoder.embed_tokens.weight": torch.ones(1)}


@pytest.mark.thorough
def test_a_component_of_a_pipeline(tmp_path: Path, run: Any) -> None:
    """`--component text_encoder` of a Diffusers folder; the rest of it is not read."""
    make_pipeline("cogvideox", overflow="text_encoder").text_encoder.save_pretrained(
        tmp_path / "model" / "text_encoder"
    )
    index = {"_class_name": "CogVideoXPipeline", "text_encoder": ["transformers", "T5EncoderModel"]}
    (tmp_path / "model" / "model_index.json").write_text(json.dumps(index))
    given = (
        "convert",
        tmp_path / "model",
        tmp_path / "out",
        "--component",
        "text_encoder",
        "--certify",
    )
    code, out, err = run(*given)
    assert code == 0, err
    assert 'T5EncoderModel.from_pretrained("' in out
    code, _, err = run(*given[:-2], "vae")
    assert code == 2
    assert "has no vae of Transformers" in err


def test_a_whole_t5_gives_its_encoder(tmp_path: Path) -> None:
    """Published T5 v1.1 is a whole model, and diffusion models use the encoder alone."""
    config = transformers.T5Config(
        d_model=16, d_ff=24, d_kv=8, num_heads=2, num_layers=1, vocab_size=64,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    encoder = find_encoder(tmp_path / "t5")
    assert encoder is not None
    assert encoder.class_name == "T5EncoderModel"
    convert_encoder(encoder, tmp_path / "out", certify=True)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [
        "T5EncoderModel"
    ]
    assert not any(
        name.startswith("decoder") for name in load_file(tmp_path / "out" / "model.safetensors")
    )
    assert bool(run_encoder(tmp_path / "out", torch.float16).isfinite().all())


@pytest.mark.slow
def test_an_encoder_of_the_hub(save: Any, tmp_path: Path) -> None:
    """`owner/name` of a plain Transformers repository: downloaded, converted, named after it."""
    with HubServer({"owner/encoder": save("T5 gated", "residual")}) as hub:
        environment = make_environment(hub.endpoint, tmp_path)
        command = [sys.executable, "-m", "stopdown.app.cli", "convert", "owner/encoder"]
        done = subprocess.run(
            [*command, str(tmp_path / "out"), "--certify", "--json"],
            env=environment,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads(done.stdout)["components"]
    assert entry["component"] == "encoder"
    assert bool(run_encoder(tmp_path / "out", torch.float16).isfinite().all())


def list_mistakes(save: Any, folder: Path) -> dict[str, tuple[Path, str]]:
    """Folders that are no text encoder, or none that can be written, and what is said."""
    good = save("T5 gated", "residual")

    def change(name: str, **fields: Any) -> Path:
        shutil.copytree(good, folder / name)
        config = json.loads((good / "config.json").read_text())
        (folder / name / "config.json").write_text(json.dumps({**config, **fields}))
        return folder / name

    half, bare = change("half"), change("bare")
    (half / "model.safetensors").write_bytes((good / "model.safetensors").read_bytes()[:-50])
    (bare / "model.safetensors").rename(bare / "pytorch_model.bin")
    twice = change("twice")
    tensors = load_file(good / "model.safetensors")
    said = {RESCALED_ENTRY: "model: weights are multiplied by powers of two"}
    save_file(tensors, twice / "model.safetensors", metadata=said)
    lacking = change("lacking")
    save_file(
        dict(list(tensors.items())[:-2]), lacking / "model.safetensors", metadata={"format": "pt"}
    )
    beyond = change("beyond")
    huge = {k: x * 2.0**60 if "wo" in k else x for k, x in tensors.items()}
    save_file(huge, beyond / "model.safetensors", metadata={"format": "pt"})
    return {
        "half a file": (half, "damaged or cut off"),
        "a pickle": (bare, "has no weights in model.safetensors"),
        "rescaled already": (
            twice,
            "is already rescaled. Model: weights are multiplied by powers of two",
        ),
        "tensors that lack": (lacking, "lack"),
        "code of its own": (
            change("code", auto_map={"AutoModel": "x.Y"}),
            "requires code of its own",
        ),
        "no class": (change("nothing", architectures=[]), "names no class"),
        "weights beyond all": (beyond, "can't be written in fp16 for plain Transformers"),
        "another class": (change("other", architectures=["NoSuchModel"]), "NoSuchModel"),
        "no folder": (folder / "absent", "There is no file or folder"),
    }


@pytest.mark.thorough
def test_mistakes_are_one_message(save: Any, tmp_path: Path, run: Any) -> None:
    """Exit code 2, nothing written, nothing changed."""
    for name, (folder, text) in list_mistakes(save, tmp_path).items():
        before = {x: x.read_bytes() for x in folder.rglob("*") if x.is_file()}
        code, out, err = run("convert", folder, tmp_path / "new")
        assert (code, out) == (2, ""), (name, err)
        assert text in " ".join(err.split()), (name, err)
        assert "Traceback" not in err
        assert not (tmp_path / "new").exists(), name
        assert before == {x: x.read_bytes() for x in folder.rglob("*") if x.is_file()}


def test_an_encoder_takes_no_plan(save: Any, tmp_path: Path, run: Any) -> None:
    """Beside --plan, --component and --certify are refused."""
    folder = save("T5 gated", "residual")
    for option in (("--component", "text_encoder"), ("--certify",)):
        code, _, err = run("convert", folder, tmp_path / "new", "--plan", "plan.json", *option)
        assert code == 2
        assert f"{option[0]} was given beside --plan" in err


# ---------------------------------------------------------------------------------------------
# A trained model


SENTENCES = (
    "A red train crosses a bridge over a river at sunset.",
    "Close-up of a cat that yawns in front of a window.",
    "ein Ball rollt über die Straße",
    "!!!",
    "the quick brown fox jumps over the lazy dog " * 12,
)


@pytest.mark.trained
@pytest.mark.parametrize(
    "spread", [pytest.param(0, id="as published"), pytest.param(16, id="beyond fp16")]
)
def test_a_trained_encoder(tmp_path: Path, spread: int) -> None:
    """all-MiniLM-L6-v2: near to fp32 as it is published, and with an inner layer beyond fp16.

    There the products of a head's values and outputs are moved by a power of two from one to the other,
    which changes no bit in fp32 and makes fp16 overflow.
    """
    folder = unpack_minilm()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(list(SENTENCES), padding=True, truncation=True, return_tensors="pt")
    if spread:
        folder = widen(folder, tmp_path / "wide", spread)
    encoder = find_encoder(folder)
    assert encoder is not None
    record = convert_encoder(encoder, tmp_path / "out")
    assert (record.components[0].folded > 0) or not spread

    def embed(place: Path, dtype: torch.dtype) -> torch.Tensor:
        module = transformers.BertModel.from_pretrained(place, dtype=dtype).eval()
        with torch.no_grad():
            return module(**tokens).last_hidden_state.float()[tokens["attention_mask"].bool()]

    reference = embed(folder, torch.float32)
    errors = {
        "bf16": relative_l2(embed(folder, torch.bfloat16), reference),
        "converted": relative_l2(embed(tmp_path / "out", torch.float16), reference),
    }
    print(errors)  # noqa: T201
    assert errors["converted"] < errors["bf16"] / 6
    assert bool(embed(folder, torch.float16).isfinite().all()) == (not spread)
    code = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert code("a train")["input_ids"] == tokenizer("a train")["input_ids"]


def widen(folder: Path, target: Path, spread: int) -> Path:
    """A copy whose attention values are `2**spread` times larger, and what reads them smaller by that."""
    shutil.copytree(folder, target)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "attention.self.value" in name:
            tensor *= 2.0**spread
        elif name.endswith("attention.output.dense.weight"):
            tensor *= 2.0**-spread
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_an_encoder_is_named_after_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From inside, the folder is `.`, and its name is still in the record and on the card."""
    make_pipeline("sd").text_encoder.save_pretrained(tmp_path / "clip")
    (tmp_path / "clip" / "inside").mkdir()
    for inside, source in (("clip", "."), ("clip/inside", "..")):
        monkeypatch.chdir(tmp_path / inside)
        encoder = find_encoder(source)
        assert encoder is not None
        assert encoder.name == "clip"
