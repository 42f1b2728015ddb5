"""What is wrong with a source is found before anything of it is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.damaged_folders import edit_json, read_error, verify
from stopdown import testing
from stopdown.pipelines.loader import load_pipeline
from stopdown.sources.headers import find_weights
from stopdown.sources.source_checks import verify_source
from stopdown.sources.sources import read_stored_dtypes, resolve_source

TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"
AGAIN = "Download or save the model again."


def test_a_damaged_index_is_named(folder: Path) -> None:
    """An index that is not JSON stops at once."""
    (folder / "model_index.json").write_text("{")
    assert read_error(lambda: resolve_source(folder)) == (
        f"{folder}/model_index.json can't be read as a JSON object: it isn't JSON at line 1, "
        "column 2: Expecting property name enclosed in double quotes. This file describes the model. "
        f"{AGAIN}"
    )


@pytest.mark.parametrize(
    ("file", "entries", "found"),
    [
        (
            "model_index.json",
            {"_class_name": ["my_pipeline", "MyPipeline"]},
            "model_index.json requires a pipeline class of its own, which is code that comes",
        ),
        (
            "model_index.json",
            {"trust_remote_code": True},
            "model_index.json requires a pipeline class of its own, which is code that comes",
        ),
        (
            "text_encoder/config.json",
            {"auto_map": {"AutoModel": "modeling.MyModel"}},
            "text_encoder/config.json requires classes of its own (auto_map), which is code",
        ),
        (
            "tokenizer/tokenizer_config.json",
            {"auto_map": {"AutoTokenizer": ["tokenization.MyTokenizer", None]}},
            "tokenizer/tokenizer_config.json requires classes of its own (auto_map), which is",
        ),
        (
            "transformer/config.json",
            {"trust_remote_code": True},
            "transformer/config.json requires classes of its own (trust_remote_code), which is",
        ),
    ],
)
def test_remote_code_is_refused(folder: Path, file: str, entries: Any, found: str) -> None:
    """Whatever asks for the model's own code is refused, and says where it asks."""
    edit_json(folder / file, **entries)
    message = read_error(lambda: verify(folder))
    assert found in message
    assert message.endswith(
        "which is code that comes with the model. Nothing that comes with a model is executed. "
        "Use a model whose classes are part of Diffusers or Transformers."
    )


def test_a_component_from_a_file_of_the_model_is_refused(folder: Path) -> None:
    """A library that is a Python file beside the weights is remote code."""
    (folder / "transformer" / "my_model.py").write_text("raise SystemExit('was executed')")
    edit_json(folder / "model_index.json", transformer=["my_model", "MyModel"])
    assert (
        f"{folder}/model_index.json asks for the component transformer from my_model.py, which is "
        "code that comes with the model."
    ) in read_error(lambda: verify(folder))


@pytest.mark.parametrize(
    ("library", "class_name"),
    [("os", "system"), ("diffusers", "OnnxRuntimeModel"), ("transformers", "FlaxCLIPTextModel")],
)
def test_a_foreign_library_is_refused(folder: Path, library: str, class_name: str) -> None:
    """Components come from Diffusers and Transformers for PyTorch; nothing else is imported."""
    edit_json(folder / "model_index.json", transformer=[library, class_name])
    assert (
        f"{folder}/model_index.json asks for the component transformer as {library}.{class_name}. "
        "Components come from Diffusers and Transformers, with weights for PyTorch;"
    ) in read_error(lambda: verify(folder))


def test_pickled_weights_are_refused_with_how_to_convert(folder: Path) -> None:
    """A component that has only a pickle is refused."""
    (folder / TRANSFORMER).rename(folder / "transformer" / "diffusion_pytorch_model.bin")
    assert read_error(lambda: verify(folder)) == (
        f"The weights transformer/diffusion_pytorch_model.bin of {folder} are stored as pickles. "
        "Only safetensors are read: loading a pickle can run any program in it. Ask its author "
        "for safetensors, or, if you trust the file, convert it once with plain Diffusers: "
        'python -c "from diffusers import DiffusionPipeline as P; '
        f"P.from_pretrained('{folder}', use_safetensors=False).save_pretrained('converted')\", "
        "and give the folder converted."
    )


def test_a_missing_component_is_named(folder: Path) -> None:
    """A folder that the index names and that is absent."""
    shutil.rmtree(folder / "vae")
    assert read_error(lambda: verify(folder)) == (
        f"The folder of the component vae is missing from {folder}. model_index.json names it, as "
        f"AutoencoderKLCogVideoX. {AGAIN}"
    )


def test_a_component_that_a_pipeline_makes_itself_needs_no_folder(folder: Path) -> None:
    """LongCat's index names a scheduler that the pipeline makes, and `save_pretrained` writes none."""
    index = folder / "model_index.json"
    said = json.loads(index.read_text()) | {"_class_name": "LongCatAudioDiTPipeline"}
    index.write_text(json.dumps(said))
    shutil.rmtree(folder / "scheduler")
    verify(folder)
    shutil.rmtree(folder / "vae")
    assert "The folder of the component vae is missing" in read_error(lambda: verify(folder))


def test_a_picture_encoder_is_missing_where_the_class_needs_one(tmp_path: Path) -> None:
    """Stable Video Diffusion was loaded without it, and ended in an AttributeError."""
    folder = testing.save_pipeline("svd", tmp_path / "svd")
    shutil.rmtree(folder / "image_encoder")
    assert read_error(lambda: verify(folder)) == (
        f"The folder of the component image_encoder is missing from {folder}. model_index.json names "
        f"it, as CLIPVisionModelWithProjection. {AGAIN}"
    )


@pytest.mark.parametrize(
    ("file", "class_name"),
    [
        ("transformer/config.json", "CogVideoXTransformer3DModel"),
        ("scheduler/scheduler_config.json", "CogVideoXDDIMScheduler"),
    ],
)
def test_a_missing_configuration_is_named(folder: Path, file: str, class_name: str) -> None:
    """Each component has its configuration."""
    path = folder / file
    path.unlink()
    assert read_error(lambda: verify(folder)) == (
        f"{path.parent} has no {path.name}. {class_name} is built from it. {AGAIN}"
    )


def test_a_tokenizer_without_files_is_named(folder: Path) -> None:
    """A tokenizer has one of several files; none of them is an error."""
    for path in (folder / "tokenizer").iterdir():
        path.unlink()
    assert f"{folder}/tokenizer has no tokenizer_config.json." in read_error(lambda: verify(folder))


def test_a_damaged_configuration_is_named(folder: Path) -> None:
    """A configuration that is cut off."""
    path = folder / "vae" / "config.json"
    path.write_text(path.read_text()[:50])
    assert read_error(lambda: verify(folder)) == (
        f"{path} can't be read as a JSON object: it isn't JSON at line 3, column 3: Unterminated "
        f"string starting at. It describes the component. {AGAIN}"
    )


def test_missing_weights_are_named(folder: Path) -> None:
    """A component with a configuration and no weights at all."""
    (folder / TRANSFORMER).unlink()
    assert read_error(lambda: verify(folder)) == (
        f"{folder}/transformer has no safetensors weights. A component has its weights in "
        f"model.safetensors, or in diffusion_pytorch_model.safetensors. {AGAIN}"
    )


def cut_values(content: bytes) -> bytes:
    return content[:-100]


def test_damaged_weights_are_found_before_loading(folder: Path) -> None:
    """What the checks of headers find is named with its file, and what to do."""
    path = folder / TRANSFORMER
    path.write_bytes(cut_values(path.read_bytes()))
    message = read_error(lambda: verify(folder))
    assert message.startswith(f"The weights {path} are damaged or cut off: ")
    assert " are there" in message
    assert message.endswith(
        "A safetensors file begins with a header that describes every byte of the component. "
        f"Delete {path} and download or save it again."
    )


def test_a_single_damaged_file_is_found(tmp_path: Path) -> None:
    """The same checks hold for a single file."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"1234")
    assert read_error(lambda: verify(path)).startswith(
        f"The weights {path} are damaged or cut off: it has 4 bytes"
    )


@pytest.fixture
def sharded(folder: Path) -> Path:
    """The copy with the weights of its transformer in several files."""
    pipe = load_pipeline(resolve_source(folder), torch_dtypes=torch.bfloat16)
    shutil.rmtree(folder / "transformer")
    pipe.transformer.save_pretrained(folder / "transformer", max_shard_size="40KB")
    return folder


def test_shards_are_verified_and_loaded(sharded: Path) -> None:
    """Weights in several files pass, load, and count as the same bytes."""
    source = resolve_source(sharded)
    verify_source(source)
    assert len(find_weights(sharded / "transformer")[1]) > 1
    assert read_stored_dtypes(source)["transformer"] == {"bf16": 85472}
    load_pipeline(source, torch_dtypes=torch.bfloat16)


def test_shards_without_their_index_are_counted_and_loaded(sharded: Path) -> None:
    """Who downloads by hand forgets the index: the files have their count in their names, and load."""
    transformer = sharded / "transformer"
    (transformer / "diffusion_pytorch_model.safetensors.index.json").unlink()
    expected = {
        name: x for path in find_weights(transformer)[1] for name, x in load_file(path).items()
    }
    verify(sharded)
    for dtype in (torch.float32, None):
        pipe = load_pipeline(resolve_source(sharded), torch_dtypes=dtype)
        state = pipe.transformer.state_dict()
        assert {x.dtype for x in state.values()} == {dtype or torch.bfloat16}
        assert all(torch.equal(state[name], x.to(dtype)) for name, x in expected.items())
    first, lost, *_ = find_weights(transformer)[1]
    lost.unlink()
    assert read_error(lambda: verify(sharded)) == (
        f"{transformer} lacks {lost.name}. The name of {first.name} names it. {AGAIN}"
    )


def test_the_index_of_another_variant_needs_no_shards(sharded: Path) -> None:
    """A download takes the configurations of all variants, as of Stable Diffusion 3, and one's shards."""
    transformer = sharded / "transformer"
    plain = transformer / "diffusion_pytorch_model.safetensors.index.json"
    other = transformer / "diffusion_pytorch_model.safetensors.index.fp16.json"
    other.write_text(plain.read_text().replace("_model-", "_model.fp16-"))
    verify(sharded)
    for path in find_weights(transformer)[1]:
        path.rename(transformer / path.name.replace("_model-", "_model.fp16-"))
    verify(sharded)
    lost = find_weights(transformer)[1][0]
    lost.unlink()
    assert f"lacks {lost.name}. {other.name} names it." in read_error(lambda: verify(sharded))


def test_files_of_macos_beside_configurations_are_no_configurations(folder: Path) -> None:
    """On a disk that isn't its own, macOS puts `._config.json` with its attributes beside each file."""
    for name in ("config.json", "diffusion_pytorch_model.safetensors.index.json"):
        (folder / "transformer" / f"._{name}").write_bytes(b"\x00\x05\x16\x07\x00\xff")
    verify(folder)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    """A file that the index names and that is absent."""
    shard = find_weights(sharded / "transformer")[1][1]
    shard.unlink()
    assert read_error(lambda: verify(sharded)) == (
        f"{sharded}/transformer lacks {shard.name}. "
        f"diffusion_pytorch_model.safetensors.index.json names it. {AGAIN}"
    )


def test_a_shard_that_lacks_a_tensor_is_named(sharded: Path) -> None:
    """A shard that is whole, but of another model."""
    shard = find_weights(sharded / "transformer")[1][0]
    tensors = load_file(shard)
    lost = sorted(tensors)[0]
    del tensors[lost]
    save_file(tensors, shard)
    assert f"lacks the tensor '{lost}' of {shard.name}. " in read_error(lambda: verify(sharded))


def test_a_damaged_index_of_shards_is_named(sharded: Path) -> None:
    """An index of shards that is not JSON."""
    index = sharded / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text("[]")
    assert (
        f"{index} is damaged: it can't be read as an index of shards: it holds a list"
        in read_error(lambda: verify(sharded))
    )


def test_all_problems_come_at_once_worst_first(folder: Path) -> None:
    """One message has every problem, remote code before pickles before missing before damaged."""
    (folder / TRANSFORMER).write_bytes(b"")
    shutil.rmtree(folder / "scheduler")
    weights = folder / "vae" / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))
    edit_json(folder / "text_encoder" / "config.json", auto_map={})
    message = read_error(lambda: verify(folder))
    assert message.startswith(
        f"The model {folder} has 4 problems. (1) {folder}/text_encoder/config"
    )
    order = [
        "(1)",
        "auto_map",
        "(2)",
        "as pickles",
        "(3)",
        "scheduler is missing",
        "(4)",
        "cut off",
    ]
    places = [message.index(part) for part in order]
    assert places == sorted(places)
    assert message.endswith(f"Delete {folder / TRANSFORMER} and download or save it again.")
