"""What tests of several folders share: tiny pipelines that are saved once, one thread a process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Processes of one run share the cores: each gets one thread, which tiny tensors want anyway."""
    if hasattr(config, "workerinput"):
        import torch

        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def save_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a tiny pipeline, by name, stored format and overflowing component."""
    from stopdown import testing
    from stopdown.formats import FORMATS

    root = tmp_path_factory.mktemp("tiny")

    @functools.cache
    def save(name: str, stored: str = "bf16", overflow: str | None = None) -> Path:
        folder = root / f"{name}-{stored}-{overflow}"
        dtype = FORMATS[stored].torch_dtype
        return testing.save_pipeline(name, folder, dtype=dtype, overflow=overflow)

    return save


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """A command in this process: its exit code, and what it wrote to stdout and stderr."""
    from stopdown.app import cli

    def run_cli(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()  # what making the model wrote
        with pytest.raises(SystemExit) as left:
            cli.main([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return int(left.value.code or 0), captured.out, captured.err

    return run_cli
