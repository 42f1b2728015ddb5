"""Sources: what is found, what is refused, and what is wrong with a folder, by its message."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.damaged_folders import edit_json, read_error
from stopdown import testing
from stopdown.pipelines.loader import load_pipeline
from stopdown.sources import hub, sources
from stopdown.sources.headers import choose_weights
from stopdown.sources.hub import choose_files
from stopdown.sources.source_checks import verify_source
from stopdown.sources.sources import fingerprint, is_hub_id, read_stored_dtypes, resolve_source

FORMS = (
    "SOURCE is a Hub id (owner/name), a Diffusers folder, a single .safetensors or .gguf file, or a "
    "bundled model"
)
TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"


@pytest.mark.parametrize("name", testing.PIPELINE_NAMES)
def test_every_tiny_pipeline_passes_and_loads(name: str, tmp_path: Path) -> None:
    """A whole folder of each class raises nothing, and loads with a dtype for each component."""
    source = resolve_source(testing.save_pipeline(name, tmp_path / name))
    verify_source(source)
    pipe = load_pipeline(source, torch_dtypes={"vae": torch.float32, "default": torch.bfloat16})
    assert type(pipe).__name__ == source.pipeline_class
    assert pipe.vae.dtype == torch.float32
    denoiser = pipe.unet if hasattr(pipe, "unet") else pipe.transformer
    assert denoiser.dtype == torch.bfloat16
    assert not denoiser.training


def test_a_bundled_model_is_found_by_its_name(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of the package wins over one of the same name here, unless written as a path."""
    shutil.copytree(saved, tmp_path / "package" / "shapes")
    shutil.copytree(saved, tmp_path / "here" / "shapes")
    monkeypatch.setattr(sources, "BUNDLED_FOLDER", tmp_path / "package")
    monkeypatch.chdir(tmp_path / "here")
    assert resolve_source("shapes").kind == "bundled"
    assert resolve_source("./shapes").kind == "folder"
    assert resolve_source(Path("shapes")).kind == "folder"


def test_an_unknown_model_suggests_the_nearest(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bare word that is no model says what a SOURCE is, and guesses."""
    shutil.copytree(saved, tmp_path / "shapes")
    monkeypatch.setattr(sources, "BUNDLED_FOLDER", tmp_path)
    assert read_error(lambda: resolve_source("shape")) == (
        f"The model 'shape' is unknown. {FORMS} (shapes). Did you mean shapes?"
    )
    assert read_error(lambda: resolve_source("qwerty")) == (
        f"The model 'qwerty' is unknown. {FORMS} (shapes). For example: owner/name or ./folder."
    )


@pytest.mark.parametrize("text", ["./nowhere", "/no/where/at/all", "model.safetensors", "a/b/c"])
def test_a_missing_path_is_named(text: str) -> None:
    """What looks like a path is not sent to the Hub."""
    assert read_error(lambda: resolve_source(text)) == (
        f"There is no file or folder {text}. {FORMS}. Check the spelling and the current folder."
    )


def test_a_folder_without_an_index_says_what_it_may_be(folder: Path, tmp_path: Path) -> None:
    """One component, the folder above the model, a folder of files, and an empty one differ."""
    expected = "A Diffusers folder has one, with a folder for each component."
    assert read_error(lambda: resolve_source(folder / "vae")) == (
        f"The folder {folder / 'vae'} has no model_index.json. {expected} "
        f"This looks like one component of a pipeline. Did you mean {folder}?"
    )
    assert read_error(lambda: resolve_source(tmp_path)).endswith(f"Did you mean {folder}?")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert read_error(lambda: resolve_source(empty)).endswith(
        "Save a pipeline there with pipe.save_pretrained(folder), or give another folder."
    )
    (empty / "some.safetensors").touch()
    assert read_error(lambda: resolve_source(empty)).endswith(
        f"For a single file write {empty / 'some.safetensors'}."
    )


def test_a_repository_in_the_cache_of_the_hub_says_which_folder_is_the_model(
    saved: Path, tmp_path: Path
) -> None:
    """The model lies two folders below; of several snapshots the newest is named."""
    snapshots = tmp_path / "models--maker--tiny" / "snapshots"
    for name, time in (("b", 3), ("a", 9), ("c", 6)):
        index = Path(shutil.copytree(saved, snapshots / name)) / "model_index.json"
        os.utime(index, (time, time))
    message = read_error(lambda: resolve_source(snapshots.parent))
    assert message.endswith(f"Did you mean {snapshots / 'a'}?")


@pytest.mark.parametrize("end", ["", "/", "/tree/main/transformer", "?library=diffusers"])
def test_the_address_of_a_page_names_its_id(end: str) -> None:
    """What a browser shows is often pasted."""
    address = f"https://huggingface.co/maker/tiny-1.5{end}"
    message = read_error(lambda: resolve_source(address))
    assert message.startswith(f"The model {address!r} is unknown. {FORMS} (")
    assert message.endswith("). Did you mean maker/tiny-1.5?")


@pytest.mark.parametrize("suffix", [".ckpt", ".pt", ".bin", ".pth", ".pkl"])
def test_a_single_pickle_is_refused(tmp_path: Path, suffix: str) -> None:
    """A pickle as SOURCE is refused without being opened."""
    path = tmp_path / f"model{suffix}"
    path.write_bytes(b"\x80\x04.")
    assert read_error(lambda: resolve_source(path)).startswith(
        f"The weights {path} of SOURCE are stored as pickles. Only safetensors are read: loading"
    )


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    """A file that is no safetensors by its name is refused."""
    path = tmp_path / "model.onnx"
    path.touch()
    assert read_error(lambda: resolve_source(path)) == (
        f"The file {path} isn't a .safetensors or .gguf file. {FORMS}. Give a .safetensors file, or the "
        "folder that contains model_index.json. For a Python script, use the run command."
    )


def test_stored_dtypes_are_read_from_the_headers(folder: Path) -> None:
    """Bytes by dtype, also where dtypes are mixed."""
    path = folder / TRANSFORMER
    tensors = load_file(path)
    tensors["proj_out.bias"] = tensors["proj_out.bias"].float()
    tensors["counter"] = torch.zeros(3, dtype=torch.int64)
    save_file(tensors, path)
    stored = read_stored_dtypes(resolve_source(folder))
    assert stored["text_encoder"] == {"bf16": 46272}
    assert stored["transformer"] == {"bf16": 85472 - 32, "fp32": 64, "int64": 24}
    assert stored.keys() == {"text_encoder", "transformer", "vae"}


def test_the_fingerprint_belongs_to_the_checkpoint(saved: Path, folder: Path) -> None:
    """A copy has the same, other values of equal shapes have another."""
    before = fingerprint(resolve_source(folder))
    assert before == fingerprint(resolve_source(saved))
    path = folder / TRANSFORMER
    tensors = load_file(path)
    save_file({name: tensor * 2 for name, tensor in tensors.items()}, path)
    assert fingerprint(resolve_source(folder)) != before
    assert len(before) == 64


def test_the_fingerprint_sees_a_change_of_any_one_tensor(folder: Path) -> None:
    """A checkpoint that was fine-tuned in one kind of layer gets no plan of the original's."""
    path = folder / TRANSFORMER
    tensors = {f"{i}": torch.full((4096,), i + 1.0) for i in range(64)}
    save_file(tensors, path)
    before = fingerprint(resolve_source(folder))
    for name, tensor in tensors.items():
        save_file({**tensors, name: tensor * 2}, path)
        assert fingerprint(resolve_source(folder)) != before, name


def test_a_variant_is_taken_when_there_is_nothing_else(folder: Path) -> None:
    """`diffusion_pytorch_model.fp16.safetensors` alone is verified and loaded."""
    path = folder / TRANSFORMER
    path.rename(path.with_name("diffusion_pytorch_model.fp16.safetensors"))
    source = resolve_source(folder)
    verify_source(source)
    assert load_pipeline(source, torch_dtypes=torch.float32).transformer.dtype == torch.float32


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["model.fp16.safetensors"], ("fp16", ["model.fp16.safetensors"])),
        (
            ["model.fp16-00001-of-00002.safetensors", "model.fp16-00002-of-00002.safetensors"],
            (
                "fp16",
                ["model.fp16-00001-of-00002.safetensors", "model.fp16-00002-of-00002.safetensors"],
            ),
        ),
    ],
)
def test_weights_are_chosen_by_name(names: list[str], chosen: tuple[str, list[str]]) -> None:
    """A variant alone is taken, in one file or in several."""
    assert choose_weights(names) == chosen


def test_files_are_chosen_by_component() -> None:
    """Only what the index names, only what can be read without running it."""
    files = [
        "model_index.json",
        "v1-5.safetensors",
        "unet/config.json",
        "unet/diffusion_pytorch_model.safetensors",
        "unet/diffusion_pytorch_model.fp16.safetensors",
        "unet/diffusion_pytorch_model.bin",
        "unet/modeling.py",
        "tokenizer/merges.txt",
        "tokenizer/spiece.model",
        "vae/config.json",
    ]
    folders = {"unet": True, "tokenizer": False}
    assert choose_files(files, folders, repo="a/b") == [
        "model_index.json",
        "unet/config.json",
        "unet/diffusion_pytorch_model.safetensors",
        "tokenizer/merges.txt",
        "tokenizer/spiece.model",
    ]


def test_a_single_file_that_is_no_known_checkpoint(folder: Path) -> None:
    """A component's own file is not taken for Stable Diffusion."""
    source = resolve_source(folder / TRANSFORMER)
    verify_source(source)
    assert (source.kind, source.pipeline_class) == ("file", "")
    assert read_stored_dtypes(source) == {"checkpoint": {"bf16": 85472}}
    message = read_error(lambda: load_pipeline(source, torch_dtypes=torch.float32))
    assert message.startswith(f"Diffusers doesn't know what model {folder / TRANSFORMER} is; its")


def test_a_single_file_for_a_class_that_has_no_such_form(folder: Path) -> None:
    """With the configuration of CogVideoX, the message says that a folder is needed."""
    source = resolve_source(folder / TRANSFORMER, config=folder)
    assert read_error(lambda: load_pipeline(source, torch_dtypes=torch.float32)).startswith(
        "Diffusers can't make a CogVideoXPipeline from a single file."
    )


def test_the_fingerprint_holds_what_configs_say(folder: Path) -> None:
    """A config that says something else is another checkpoint; another version that saved it is not."""
    before = fingerprint(resolve_source(folder))
    edit_json(folder / "vae" / "config.json", _diffusers_version="0.99", torch_dtype="float16")
    assert fingerprint(resolve_source(folder)) == before
    edit_json(folder / "vae" / "config.json", scaling_factor=0.8)
    assert fingerprint(resolve_source(folder)) != before


def test_a_cached_file_is_known_by_either_of_its_hashes(tmp_path: Path) -> None:
    """SHA-256 for what is stored large, git's own hash for the rest, and none where no hash is the name."""
    git = "e965047ad7c57865823c7d992b1d046ea66edf78"  # printf 'Hello\\n' | git hash-object --stdin
    sha = hashlib.sha256(b"Hello\n").hexdigest()
    for name, expected in {git: git, sha: sha, "0" * 64: sha, "config.json": None}.items():
        (tmp_path / name).write_bytes(b"Hello\n")
        assert hub._compute_hash(tmp_path / name) == expected


@pytest.mark.parametrize(
    ("text", "is_repository"),
    [
        ("owner/name", True),
        ("models/missing.gguf", False),
        ("models/missing.safetensors", False),
        ("./missing", False),
        ("name", False),
    ],
)
def test_a_missing_file_is_no_repository(text: str, is_repository: bool) -> None:
    """The Hub is asked only for what can be a repository."""
    assert is_hub_id(text) == is_repository


def test_libraries_that_load_no_checkpoint_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package may be installed without them, or beside older ones: the message names the extra."""
    here = {"diffusers": "0.42.0", "transformers": "4.57.1", "huggingface-hub": "0.36.0"}
    monkeypatch.setattr(sources, "read_version", here.get)
    assert read_error(lambda: resolve_source("shapes")) == (
        "Checkpoints can't be loaded in this environment: transformers is 4.57.1, accelerate is missing, "
        "huggingface-hub is 0.36.0. Loading needs at least diffusers 0.42, transformers 5.0, accelerate "
        "1.0, huggingface-hub 1.0. The guard, rescale_ and the nodes for ComfyUI don't. Install them, in "
        "the folder of Stopdown's repository: pip install '.[pipelines]'"
    )


def test_a_hub_that_could_not_be_asked_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers that came are kept for the process; that none could come is not."""
    listed: list[dict[str, Any] | None] = [None, {"vae/model.safetensors": None}]
    monkeypatch.setattr(hub, "_list_files", lambda repo, commit: listed.pop(0))
    monkeypatch.setattr(
        "huggingface_hub.HfApi.parse_safetensors_file_metadata", lambda self, *_, **__: "header"
    )
    asked = "maker/tiny", "0" * 40, ("vae",)
    assert not hub.fetch_headers(*asked)
    assert hub.fetch_headers(*asked) == [("vae", "header")]
    assert hub.fetch_headers(*asked) == [("vae", "header")]
