"""Device profiles: each fact has a source, they agree with what a device itself would say, and a
file of the user's own is checked with whole sentences."""

from __future__ import annotations

from pathlib import Path

import pytest

from stopdown.devices.device_choice import Device
from stopdown.devices.device_profiles import (
    Profile,
    describe_device,
    find_device_target,
    find_profile,
    is_profile,
    list_profiles,
    match_profile,
    parse_profile,
    read_profiles,
)
from stopdown.devices.maker_formats import judge_accelerator, judge_cpu
from stopdown.errors import OptionError
from stopdown.number_formats import PRECISIONS
from stopdown.plans.precision import ComponentFacts, choose_precision, explain_plan

PROFILES = list(read_profiles().values())
BF16 = [ComponentFacts("transformer", ("transformer",), {"bf16": 100})]

OWN = """
name = "mine"
title = "My card"
kind = "cuda"

[capability]
number = [7, 5]
source = "its box"

[formats.fp32]
state = "native"
source = "its box"

[formats.fp16]
state = "native"
rate = 3.0
source = "measured with stopdown doctor"

[formats.bf16]
state = "emulated"
source = "its box"
"""


def test_the_profiles_that_users_ask_for_are_there() -> None:
    """Cards without bf16, cards with it, Macs and CPUs can all be asked about."""
    wanted = {
        "v100",
        "t4",
        "rtx20",
        "rtx30",
        "rtx40",
        "rtx50",
        "a100",
        "a10",
        "a30",
        "l4",
        "h100",
        "h200",
    }
    wanted |= {
        "rx6000",
        "rx7000",
        "p100",
        "gtx10",
        "gtx16",
        "mps-m1",
        "mps-m3",
        "cpu-generic",
        "cpu-avx512",
        "cpu-amx",
    }
    assert wanted <= set(list_profiles())


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_every_fact_has_a_source(profile: Profile) -> None:
    """Formats, capability, memory and faults say where they are from."""
    facts = [*profile.formats.values(), *profile.faults]
    facts += [fact for fact in (profile.capability, profile.memory) if fact]
    assert set(PRECISIONS) <= set(profile.formats)
    assert [fact for fact in facts if len(fact.source) < 8] == []


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_a_profile_agrees_with_what_its_device_would_say(profile: Profile) -> None:
    """A format is native in the profile exactly where the rules for a live device find it native."""
    if profile.number:
        verdicts = judge_accelerator(
            "cuda", profile.number, "GTX 1660" if profile.name == "gtx16" else ""
        )
    elif profile.kind == "cuda":
        verdicts = judge_accelerator("rocm", (), profile.architecture)
    elif profile.kind == "mps":
        verdicts = judge_accelerator("mps", profile.macos, f"Apple {profile.architecture}")
    else:
        assert profile.instructions
        verdicts = judge_cpu(profile.instructions)
    for name, verdict in verdicts.items():
        assert (profile.formats[name].state == "native") is verdict.native, name


def test_names_and_aliases_are_not_given_twice() -> None:
    """A name means one profile, and no profile takes the name of a device of this machine."""
    names = [name for profile in PROFILES for name in (profile.name, *profile.aliases)]
    assert len(names) == len(set(names))
    assert not {"auto", "cuda", "mps", "cpu"} & set(names)


def test_support_is_what_a_probe_would_say() -> None:
    """A V100: fp16 native and faster, bf16 works, is not native and is slower than fp32."""
    supports = find_profile("v100").supports
    assert (supports["fp16"].native, supports["fp16"].time_ratio) == (True, 0.149)
    assert (supports["bf16"].native, supports["bf16"].works) == (False, True)
    assert supports["bf16"].time_ratio == 1.37
    assert supports["bf16"].reason == (
        "NVIDIA Tesla V100: bf16 is emulated. bf16 arithmetic needs compute capability 8.0 or higher; "
        "PyTorch computes it in fp32 here but still reports it as supported. Measured with "
        "PyTorch: 10.7 against 14.5 TFLOPS in fp32. Matrix products run at 0.73 times the rate of fp32. "
        "(zzc0721/torch-performance-test-data#140, pytorch/pytorch#148322)"
    )


@pytest.mark.parametrize(
    ("name", "chosen", "planned"),
    [
        ("v100", "fp32", True),
        ("t4", "fp32", True),
        ("rtx20", "fp32", True),
        ("mps-m1", "fp32", True),
        ("a100", "bf16", False),
        ("a30", "bf16", False),
        ("rtx40", "bf16", False),
        ("h100", "bf16", False),
        ("cpu-amx", "bf16", False),
        ("rx6000", "fp32", True),
        ("rx7000", "bf16", False),
        ("p100", "fp32", True),
        ("gtx10", "fp32", False),
        ("gtx16", "fp32", False),
        ("cpu-generic", "fp32", False),
    ],
)
def test_decisions_are_taken_for_a_device_that_is_not_here(
    name: str, chosen: str, planned: bool
) -> None:
    """Weights in bf16: kept where bf16 is native; else fp32, and a plan where fp16 is native."""
    supports = find_profile(name).supports
    assert choose_precision(BF16[0], supports)[0] == chosen
    assert bool(explain_plan(BF16, supports)) is planned


def test_an_alias_means_its_profile() -> None:
    """RTX 3090 is the RTX 30 series; upper case and spaces are forgiven."""
    assert find_profile(" RTX3090 ").name == "rtx30"
    assert is_profile("h200")
    assert not is_profile("cpu")


def test_an_unknown_device_names_those_that_are_known() -> None:
    """The message lists devices of this machine's kind and all profiles, and the nearest of them."""
    with pytest.raises(OptionError) as caught:
        find_device_target("v10")
    text = str(caught.value)
    assert text.startswith(
        "The device 'v10' is unknown. This machine's devices are called auto, cuda, cuda:1, mps and cpu. "
    )
    assert "a100, a30, cpu-amx" in text
    assert text.endswith('Use device="v100".')
    with pytest.raises(OptionError, match='Use device="mps-m1"'):
        find_device_target("macbook")
    with pytest.raises(OptionError, match='Use device="t4"'):
        find_device_target("t5")


def test_a_device_of_this_machine_is_described() -> None:
    """The CPU here has a profile of what it says itself; a profile's name gives that profile."""
    device, profile = find_device_target("cpu")
    assert (device.type, profile.kind, profile.name) == ("cpu", "cpu", "cpu")
    assert profile.supports["fp32"].native
    asked, known = find_device_target("v100")
    assert (asked.type, asked.capability, known.name) == ("cuda", (7, 0), "v100")
    assert asked.memory_bytes == known.memory_bytes
    assert round(known.memory_bytes / 2**30, 2) == 15.78


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("cuda", "Tesla V100-SXM2-16GB", "v100"),
        ("cuda", "NVIDIA A100-SXM4-80GB", "a100"),
        ("cuda", "NVIDIA GeForce RTX 4090", "rtx40"),
        ("cuda", "NVIDIA GeForce GTX 1660 Ti", "gtx16"),
        ("cuda", "AMD Radeon RX 7900 XTX", "rx7000"),
        ("cuda", "NVIDIA L40S", None),
        ("mps", "Apple M1 Max", "mps-m1"),
        ("mps", "Apple M4", "mps-m3"),
        ("cpu", "Apple M1", None),
    ],
)
def test_a_real_name_finds_its_profile(kind: str, name: str, expected: str | None) -> None:
    """The names that PyTorch and macOS give match, and those of other devices do not."""
    found = match_profile(Device(kind, 0, name, None, 0))
    assert (found.name if found else None) == expected


def test_rates_and_faults_reach_a_real_device() -> None:
    """A V100 in this machine has the rate and the faults of its profile, and its own memory."""
    profile = describe_device(Device("cuda", 0, "Tesla V100-SXM2-32GB", (7, 0), 2**35))
    assert profile.formats["fp16"].rate == 6.7
    assert profile.faults
    assert profile.memory_bytes == 2**35


def test_a_file_of_the_users_own(tmp_path: Path) -> None:
    """`--device mine.toml` is a profile like the others."""
    path = tmp_path / "mine.toml"
    path.write_text(OWN)
    device, profile = find_device_target(str(path))
    assert (device.name, profile.supports["fp16"].time_ratio) == ("My card", 0.333)


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("kind =", "kind", "isn't TOML: Expected '=' after a key"),
        ('title = "My card"', "", "isn't complete: Object missing required field `title`"),
        (
            'kind = "cuda"',
            'kind = "tpu"',
            "isn't complete: Invalid enum value 'tpu' - at `$.kind`",
        ),
        ("rate = 3.0", "speed = 3.0", "isn't complete: Object contains unknown field `speed`"),
        ("rate = 3.0", "rate = -1.0", "gives formats.fp16 the rate -1.0, which isn't above 0"),
        ("formats.bf16", "formats.half", "names the format half; known are fp64, fp32, bf16"),
        (
            "formats.bf16",
            "formats.fp64",
            "doesn't say how bf16 is computed (table [formats.bf16])",
        ),
        ('"measured with stopdown doctor"', '" "', "gives no source for formats.fp16"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, before: str, after: str, problem: str) -> None:
    """The message names the file, what is wrong in it, what a profile has, and where to see one."""
    path = tmp_path / "mine.toml"
    path.write_text(OWN.replace(before, after, 1))
    with pytest.raises(OptionError) as caught:
        find_device_target(str(path))
    text = str(caught.value)
    assert text.startswith(f"The profile {path} {problem}")
    assert "A profile has name, title, kind (cuda, mps or cpu) and a table [formats.NAME]" in text
    assert text.endswith("See stopdown doctor --device v100 --toml for one that is complete.")


def test_a_cuda_profile_needs_its_capability() -> None:
    """Without capability or architecture nothing could be said of its kernels."""
    text = OWN.replace('[capability]\nnumber = [7, 5]\nsource = "its box"\n', "")
    with pytest.raises(OptionError, match="is of the kind cuda and has neither capability nor"):
        parse_profile(text, "mine.toml")


def test_a_missing_file_is_refused() -> None:
    """The message says how to get a profile to start from."""
    with pytest.raises(OptionError) as caught:
        find_device_target("nowhere.toml")
    assert str(caught.value) == (
        "The profile nowhere.toml can't be read: no such file or directory. "
        "Name a TOML file that exists; stopdown doctor --device v100 --toml prints "
        "one to start from."
    )
