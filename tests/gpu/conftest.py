"""The accelerator of this machine, for tests that run on a real one."""

from __future__ import annotations

import sys

import pytest
import torch

from stopdown.devices.device_choice import Device, choose_device


@pytest.fixture
def accelerator(request: pytest.FixtureRequest) -> Device:
    """The accelerator of this machine; the simulated one where there is none."""
    if not torch.accelerator.is_available():
        request.getfixturevalue("simulated")
    return choose_device("auto")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Say at once what failed: time on a lent card may end before the summary does."""
    if report.failed:
        sys.stderr.write(f"\n{report.nodeid}\n{report.longreprtext[-1500:]}\n")
