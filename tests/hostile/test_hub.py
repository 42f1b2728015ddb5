"""A Hub that lies, or says nothing: what a command says, and that nothing wrong is kept."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hostile.runner import Attack, copy_tiny, run_attack
from pipelines.hub_server import HubServer

pytestmark = pytest.mark.thorough

CACHE = (".hf*", ".cache*")
"""What a download leaves: the client's own cache."""
QUICK = {
    "HF_HUB_OFFLINE": "0",
    "HF_HUB_DISABLE_XET": "1",
    "HF_HUB_ETAG_TIMEOUT": "1",
    "HF_HUB_DOWNLOAD_TIMEOUT": "1",
}
WEIGHTS = "vae/diffusion_pytorch_model.safetensors"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    """A Hub that has the model `maker/tiny`."""
    (tmp_path / "repo").mkdir()
    with HubServer({"maker/tiny": copy_tiny(tmp_path / "repo")}) as server:
        yield server


def forge(file: str) -> Callable[[HubServer], None]:
    """Other bytes of the same length, under the ETag of the true file."""

    def change(hub: HubServer) -> None:
        content = (hub.repos["maker/tiny"] / file).read_bytes()
        hub.forged[file] = content[:-1] + bytes([content[-1] ^ 1])

    return change


def forge_git(hub: HubServer) -> None:
    """A file that git keeps is announced by another hash."""
    content = (hub.repos["maker/tiny"] / "vae/config.json").read_bytes()
    hub.etags["vae/config.json"] = f'"{hashlib.sha1(b"blob 9" + content).hexdigest()}"'


def announce(etag: str, file: str = "model_index.json") -> Callable[[HubServer], None]:
    return lambda hub: hub.etags.update({file: etag})


def be_silent(where: str) -> Callable[[HubServer], None]:
    return lambda hub: setattr(hub, "silent", where)


CASES: list[tuple[str, Callable[[HubServer], None], str]] = [
    (
        "weights that are others",
        forge(WEIGHTS),
        "The file diffusion_pytorch_model.safetensors from",
    ),
    (
        "an index that is another",
        forge("model_index.json"),
        "The file model_index.json from ENDPOINT doesn't match",
    ),
    (
        "a config that is another",
        forge("vae/config.json"),
        "The file config.json from ENDPOINT doesn't match",
    ),
    (
        "a file of git that is another",
        forge_git,
        "The file config.json from ENDPOINT doesn't match",
    ),
    ("an ETag above", announce('"../../evil"'), "The Hub at ENDPOINT answered with the ETag"),
    ("an absolute ETag", announce('"/tmp/evil"'), "The Hub at ENDPOINT answered with the ETag"),
    ("an ETag that is a folder", announce('".."'), "The Hub at ENDPOINT answered with the ETag"),
    ("a weak ETag above", announce('W/"../evil"'), "The Hub at ENDPOINT answered with the ETag"),
    ("an ETag of Windows", announce('"..\\\\evil"'), "The Hub at ENDPOINT answered with the ETag"),
    (
        "an ETag without end",
        announce(f'"{"a" * 5000}"'),
        "The Hub at ENDPOINT answered with the ETag",
    ),
    (
        "an ETag above for weights",
        announce('"../../evil"', WEIGHTS),
        "The Hub at ENDPOINT answered with",
    ),
    ("no answer to anything", be_silent(""), "The Hub at ENDPOINT doesn't answer."),
    (
        "no answer for weights",
        be_silent(WEIGHTS),
        "The model maker/tiny couldn't be downloaded from ENDPOINT: timed out.",
    ),
]


def run_against(hub: HubServer, name: str, said: str, tmp_path: Path) -> None:
    environment = {**QUICK, "HF_ENDPOINT": hub.endpoint}
    row = Attack(
        name,
        lambda folder: ["generate", "maker/tiny", "a circle", "-o", str(folder / "out.mp4")],
        2,
        said.replace("ENDPOINT", hub.endpoint),
        left=CACHE,
        environment=environment,
        is_fresh=True,
    )
    run_attack(row, tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        pytest.param(*case, marks=[] if number in (0, 4, 11) else pytest.mark.slow, id=case[0])
        for number, case in enumerate(CASES)
    ],
)
def test_a_hub_that_cannot_be_trusted(
    hub: HubServer, name: str, change: Callable[[HubServer], None], said: str, tmp_path: Path
) -> None:
    """It is refused by name, nothing is written outside of its cache, and what was wrong is not kept."""
    change(hub)
    run_against(hub, name, said, tmp_path)
    names = [path.name for path in tmp_path.rglob("*")]
    assert "evil" not in names
    for file, content in hub.forged.items():
        kept = [path for path in (tmp_path / "row").rglob("*") if path.is_file()]
        assert content not in [path.read_bytes() for path in kept], file
