"""A model's JSON files, drawn: whatever they say there is one exception."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stopdown.errors import InputError
from stopdown.pipelines.allowed_sizes import find_grid, read_configs
from stopdown.sources.descriptions import find_excess, find_kernels, list_custom_code
from stopdown.sources.source_checks import verify_descriptions, verify_source
from stopdown.sources.sources import fingerprint, read_stored_dtypes, resolve_source

FILES = (
    "model_index.json",
    "transformer/config.json",
    "vae/config.json",
    "scheduler/scheduler_config.json",
    "tokenizer/tokenizer_config.json",
    "transformer/diffusion_pytorch_model.safetensors.index.json",
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(
        ["", "diffusers", "../x", "/etc/passwd", "\0", "x" * 5000, "owner/kernel", 10**30]
    )
    | st.text(max_size=5)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
KEYS = st.sampled_from(
    [
        *("_class_name", "transformer", "vae", "weight_map", "metadata", "auto_map", "num_layers"),
        *(
            "patch_size",
            "block_out_channels",
            "sample_height",
            "temporal_compression_ratio",
            "dim_mult",
        ),
        *("scaling_factor", "extra_ids", "attn_implementation", "trust_remote_code", "", "../x"),
        *("use_learned_positional_embeddings", "pos_embed_max_size", "scale_factor_spatial"),
    ]
)
CHANGES = st.dictionaries(KEYS, VALUES, min_size=1, max_size=4)


def read_all(folder: Path) -> None:
    """Everything that is read of a model before anything is built."""
    source = resolve_source(folder)
    for check in (verify_descriptions, verify_source, fingerprint, read_stored_dtypes):
        with contextlib.suppress(InputError):
            check(source)
    find_grid(read_configs(folder))


def draw_and_read(saved: Path, file: str, changes: dict[str, Any] | str) -> None:
    with tempfile.TemporaryDirectory() as root:
        folder = Path(shutil.copytree(saved, Path(root) / "model"))
        path = folder / file
        before = json.loads(path.read_text()) if path.exists() else {}
        text = changes if isinstance(changes, str) else json.dumps({**before, **changes})
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        with contextlib.suppress(InputError):
            read_all(folder)


DRAWN = st.sampled_from(FILES), CHANGES | st.text('[]{}",:0129.eE-NaInfity', max_size=40)


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(*DRAWN)
def test_whatever_the_files_say_there_is_one_exception(
    saved: Path, file: str, changes: dict[str, Any] | str
) -> None:
    """Found, verified and marked, a model raises nothing but ours."""
    draw_and_read(saved, file, changes)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=10_000, deadline=None)
@given(*DRAWN)
def test_ten_thousand_files(saved: Path, file: str, changes: dict[str, Any] | str) -> None:
    """The same, ten thousand times."""
    draw_and_read(saved, file, changes)


@pytest.mark.parametrize("outer", [["text_config"], ["a", "b", "c"], []])
def test_what_is_nested_is_found(outer: list[str]) -> None:
    """In tables and in lists of tables, by its path."""

    def nest(field: dict[str, Any]) -> dict[str, Any]:
        for name in reversed(outer):
            field = {name: [field]}
        return field

    def path(name: str) -> str:
        return ".".join([*(part for name in outer for part in (name, "0")), name])

    assert list(list_custom_code(nest({"auto_map": {}}))) == [path("auto_map")]
    assert list(
        find_kernels(nest({"_attn_implementation": {"vision": "o/k", "text": "sdpa"}}))
    ) == [f"{path('_attn_implementation')} = 'o/k'"]
    assert find_excess(nest({"num_layers": 10**9})) == [
        (f"{path('num_layers')} = 1e+09", "between 0 and 1000")
    ]


def test_what_published_models_say_is_no_excess() -> None:
    """Sentinels, infinite bounds, implementations that are built in, and large vocabularies pass."""
    content = {
        "model_max_length": 1000000000000000019884624838656,
        "lambda_min_clipped": -float("inf"),
        "attn_implementation": "sdpa",
        "_attn_implementation_autoset": True,
        "trust_remote_code": False,
        "vocab_size": 256384,
        "max_position_embeddings": 10485760,
        "num_layers": 0,
        "num_train_timesteps": 1000,
        "sample_size": None,
        "pos_embed_max_size": 384,
        "layers_per_block": [2, 2, 2],
        "rope_theta": 1e10,
        "mask_value": -3.4e38,
    }
    assert [*list_custom_code(content), *find_kernels(content), *find_excess(content)] == []
