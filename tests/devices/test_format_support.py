"""Formats that devices compute in: the timed probe beside what their makers say."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from models.devices import CPU
from stopdown.devices import format_support
from stopdown.devices.device_choice import Device, choose_device
from stopdown.devices.format_support import Support, Timing, probe_formats, weigh_support
from stopdown.devices.maker_formats import (
    Verdict,
    judge_cpu,
    read_cpu_flags,
)
from stopdown.number_formats import name_dtype

pytestmark = pytest.mark.usefixtures("processor", "nothing_is_kept")


@pytest.mark.usefixtures("two_cards")
def test_emulated_bf16_is_not_called_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a V100, where torch says that bf16 is supported, the answer is that it is emulated."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
    seconds = {"fp32": 1.0, "bf16": 1.6, "fp16": 0.15}
    times = {name: Timing(value, value) for name, value in seconds.items()}
    monkeypatch.setattr(format_support, "_time_formats", lambda _: times)
    format_support._probe_once.cache_clear()
    formats = probe_formats(choose_device())
    format_support._probe_once.cache_clear()
    assert (formats["bf16"].native, formats["bf16"].time_ratio) == (False, 1.6)
    assert (formats["fp16"].native, formats["fp16"].time_ratio) == (True, 0.15)
    assert formats["fp16"].reason == ("Compute capability 7.0 has fp16 arithmetic at full rate.")
    assert formats["fp16"].measured == (
        "Measured here, a matmul takes 0.15 and a convolution 0.15 times as long as in fp32, so fp16 is "
        "faster."
    )


# Formats: what a timed probe says


def test_measurements_join_the_verdict() -> None:
    """The ratio is the geometric mean of both operations, and the reason says what it means."""
    reference = Timing(0.001, 0.002)
    verdict = Verdict(True, "Nothing is known.", is_known=False)
    support = weigh_support("bf16", verdict, Timing(0.004, 0.002), reference)
    assert asdict(support) == {
        "native": True,
        "works": True,
        "time_ratio": 2.0,
        "reason": "Nothing is known. Here it takes more than 1.5 times as long as fp32.",
        "measured": "Measured here, a matmul takes 4 and a convolution 1 times as long as in fp32, so bf16 "
        "saves memory but is slower.",
        "is_slow": True,
    }


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("seconds", [0.2, 1.49, 1.51, 30.0])
def test_where_facts_are_known_no_time_decides(native: bool, seconds: float) -> None:
    """Other work on the machine changes times, and no choice or reason with them."""
    timing = Timing(seconds, seconds)
    support = weigh_support("bf16", Verdict(native, "Documented."), timing, Timing(1.0, 1.0))
    assert (support.native, support.is_slow, support.reason) == (native, False, "Documented.")
    assert native or "fast" not in support.measured
    unknown = Verdict(True, "Nothing is known.", is_known=False)
    assert weigh_support("bf16", unknown, timing, Timing(1.0, 1.0)).is_slow is (seconds > 1.5)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.85, "is faster"),
        (1.05, "saves memory but no time"),
        (1.2, "saves memory but is slower"),
    ],
)
def test_speed_is_said_in_words(seconds: float, words: str) -> None:
    """A ratio below 0.9 is faster, one above 1.1 slower."""
    timing = Timing(seconds, seconds)
    support = weigh_support("fp16", Verdict(True, "Native."), timing, Timing(1.0, 1.0))
    assert words in support.measured
    assert support.reason == "Native."


@pytest.mark.parametrize(("first", "second"), [(0.61, 0.93), (1.02, 1.44), (1.9, 2.6)])
def test_a_reason_stays_from_run_to_run(first: float, second: float) -> None:
    """Two measurements that decide the same give the same reason: figures stand beside it."""
    supports = [
        weigh_support("bf16", Verdict(True, "Native."), Timing(x, x), Timing(1.0, 1.0))
        for x in (first, second)
    ]
    assert supports[0].reason == supports[1].reason
    assert supports[0].measured != supports[1].measured


def test_what_fails_when_tried_does_not_work() -> None:
    """A failed probe outweighs the verdict, and its message is in the reason."""
    failed = Timing(failure="no kernel image is available.")
    support = weigh_support("fp16", Verdict(True, "Native."), failed, Timing(1.0, 1.0))
    assert (support.native, support.works, support.time_ratio) == (False, False, None)
    assert support.reason == "Native. It was tried and failed: no kernel image is available."


def test_the_probe_answers_for_this_cpu() -> None:
    """On this CPU all three formats run, with reasons and an answer fit for JSON; a busy one says so."""
    formats = probe_formats(choose_device("cpu"))
    assert list(formats) == ["fp32", "bf16", "fp16"]
    assert formats["fp32"].time_ratio == 1.0
    for name in ("bf16", "fp16"):
        support = formats[name]
        assert support.works
        assert support.time_ratio is None or support.time_ratio > 0
        assert support.native == judge_cpu(read_cpu_flags())[name].native
        is_told = "Measured here" in support.measured
        assert is_told is (support.time_ratio is not None)
        assert is_told or "too noisy to show" in support.measured
    json.dumps({name: asdict(support) for name, support in formats.items()})


def test_the_probe_runs_once_and_cannot_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call measures nothing, and a caller's changes do not reach the next."""
    first = probe_formats(choose_device("cpu"))
    monkeypatch.setattr(format_support, "_time_formats", lambda *_: pytest.fail("measured again"))
    first.clear()
    assert list(probe_formats(choose_device("cpu"))) == ["fp32", "bf16", "fp16"]


def time_again(seconds: Mapping[str, float], noise: float = 1.0) -> dict[str, Timing]:
    """What a probe answers in a new process on a machine of these speeds."""
    operations = {name: Timing(value, value, noise=noise) for name, value in seconds.items()}
    made = iter(operations.values())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(format_support, "_sample", lambda *_: defaultdict(list))
        patch.setattr(format_support, "_sum_up", lambda *_: next(made))
        return format_support._time_formats(choose_device("cpu"))


def test_times_are_kept_for_later_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ratio beside the limit chooses the same format in each run, until the device is examined."""
    first = {"fp32": 1.0, "bf16": 1.49, "fp16": 1.6}
    second = {"fp32": 1.0, "bf16": 1.51, "fp16": 1.6}
    time_again(first, noise=2.0)
    assert time_again(first)["bf16"].matmul_s == 1.49  # what was noisy is not kept
    assert time_again(second)["bf16"].matmul_s == 1.49
    format_support.forget_timings(choose_device("cpu"))
    assert time_again(second)["bf16"].matmul_s == 1.51
    (kept,) = (tmp_path / "timings").iterdir()
    for spoilt in ("", "[]", '{"fp32": {"matmul_s": 1, "convolution_s": 1}}', '{"fp32": 1}'):
        kept.write_text(spoilt)
        assert time_again(first)["bf16"].matmul_s == 1.49
        assert time_again(second)["bf16"].matmul_s == 1.49
        kept.unlink()
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert time_again(second)["bf16"].matmul_s == 1.51


def test_the_probe_leaves_the_process_as_it_was() -> None:
    """No random numbers are drawn, and ambient autocast does not change what is measured."""
    format_support._probe_once.cache_clear()
    before = torch.get_rng_state()
    seen = []
    original = format_support._make_operations

    def watch(device: Device, dtype: torch.dtype) -> object:
        operations = original(device, dtype)
        seen.append((dtype, operations[0]().dtype))
        return operations

    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", dtype=torch.bfloat16):
        patch.setattr(format_support, "_make_operations", watch)
        probe_formats(choose_device("cpu"))
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(torch.get_rng_state(), before)
    assert len(seen) == 3
    assert all(asked is given for asked, given in seen)


class Machine:
    """A device without a clock of its own: each operation takes what it is said to take.

    Attributes:
        seconds: of an operation by format.
        delays: what the next operations take longer, one after the other.
        order: formats in the order in which they were run.
    """

    def __init__(self, patch: pytest.MonkeyPatch, **seconds: float) -> None:
        self.seconds, self.now = seconds, 0.0
        self.delays: Iterator[float] = itertools.repeat(0.0)
        self.order: list[str] = []
        patch.setattr(format_support, "time", SimpleNamespace(perf_counter=lambda: self.now))
        patch.setattr(format_support, "_make_operations", self._make)

    def _make(self, device: Device, dtype: torch.dtype) -> tuple[Any, Any]:
        name = name_dtype(dtype)

        def run() -> torch.Tensor:
            self.order.append(name)
            self.now += self.seconds[name] + next(self.delays)
            return torch.ones(1)

        return run, run

    def probe(self) -> dict[str, Support]:
        """What the probe says of the format, all native."""
        times = format_support._time_formats(CPU)
        verdict = Verdict(True, "Native.")
        return {name: weigh_support(name, verdict, times[name], times["fp32"]) for name in times}


def test_formats_are_timed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round runs all formats, so that none of them alone meets what else runs there."""
    machine = Machine(monkeypatch, fp32=1e-4, bf16=5e-5, fp16=2e-4)
    found = machine.probe()
    assert {name: support.time_ratio for name, support in found.items()} == {
        "fp32": 1.0,
        "bf16": 0.5,
        "fp16": 2.0,
    }
    rounds = machine.order[6:]
    assert all(len(set(rounds[at : at + 6])) == 3 for at in range(0, len(rounds), 6))


def test_a_slow_format_is_timed_fewer_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation that uses up its share is run twice after its first run, the others go on."""
    machine = Machine(monkeypatch, fp32=1e-4, bf16=1e-4, fp16=format_support._SHARE_S)
    assert machine.probe()["fp16"].time_ratio == 500
    assert machine.order.count("fp16") == 2 * 3
    assert machine.order.count("bf16") == 2 * (1 + format_support._ROUNDS)


def test_interruptions_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of five samples that take ten times as long do not change the answer."""
    machine = Machine(monkeypatch, fp32=1e-4, bf16=5e-5, fp16=1e-4)
    machine.delays = itertools.cycle([0.001, 0.0, 0.001, 0.001, 0.0])
    found = machine.probe()
    assert (found["bf16"].time_ratio, found["fp16"].time_ratio) == (0.5, 1.0)


@pytest.mark.parametrize("seed", range(5))
def test_a_machine_that_is_too_busy_says_so(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Where no sample is undisturbed there is no ratio, whatever the format really takes."""
    machine = Machine(monkeypatch, fp32=1e-4, bf16=5e-5, fp16=5e-5)
    chance = random.Random(seed)
    machine.delays = iter(lambda: 10 ** chance.uniform(-4, 0), None)
    support = machine.probe()["bf16"]
    assert (support.native, support.works, support.time_ratio) == (True, True, None)
    assert support.reason == "Native."
    assert support.measured == "The timings on this machine are too noisy to show how fast it is."


@pytest.mark.parametrize(
    ("timing", "reference", "ratio"),
    [
        (Timing(0.0023, 0.5), Timing(1.0, 1.0), None),  # a product cannot be 435 times as fast
        (Timing(0.1, 0.1, noise=1.4), Timing(1.0, 1.0, noise=1.3), None),
        (Timing(0.1, 0.1, noise=1.2), Timing(1.0, 1.0, noise=1.2), 0.1),
        (Timing(300.0, 300.0, noise=3.0), Timing(1.0, 1.0, noise=2.0), 300.0),
        (Timing(3.0, 3.0, noise=3.0), Timing(1.0, 1.0), None),
    ],
)
def test_noise_is_not_told_as_speed(timing: Timing, reference: Timing, ratio: float | None) -> None:
    """What no device does and what samples disagree on has no ratio; what is slow for sure has one."""
    assert weigh_support("bf16", Verdict(True, "Native."), timing, reference).time_ratio == ratio


def test_a_probe_that_gives_nan_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose arithmetic gives NaN for a harmless sum is found by the probe."""
    broken = (lambda: torch.tensor([math.nan]), lambda: torch.ones(1))
    monkeypatch.setattr(format_support, "_make_operations", lambda *_: broken)
    assert format_support._time_formats(CPU)["fp16"].failure == (
        "a sum of products of 0.125 wasn't finite."
    )


def test_a_format_that_raises_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A format for which the backend has no kernel is reported, not raised."""

    def refuse(*_: object) -> None:
        raise RuntimeError("\"slow_conv2d_cpu\" not implemented for 'Half'\nmore")

    monkeypatch.setattr(format_support, "_make_operations", refuse)
    assert format_support._time_formats(CPU)["fp16"].failure == (
        "\"slow_conv2d_cpu\" not implemented for 'Half'."
    )


def test_timings_of_smaller_products_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored times belong to the sizes that were timed: those of small products are of their launch."""
    device = choose_device("cpu")
    kept = format_support._kept_timings(device)
    monkeypatch.setattr(format_support, "_choose_sizes", lambda device: (128, 32, 16))
    assert format_support._kept_timings(device) != kept
