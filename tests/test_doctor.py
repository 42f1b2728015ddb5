"""`stopdown doctor`: what is tried here, what a profile answers, and what auto would choose."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from stopdown import doctor as health_module
from stopdown.devices.backend_rules import list_attention
from stopdown.devices.device_choice import Device, choose_device
from stopdown.devices.device_profiles import (
    find_profile,
    format_profile,
    parse_profile,
    read_profiles,
)
from stopdown.doctor import examine, foresee, list_fits, read_models, read_switches, try_attention
from stopdown.records import KnownFit, MachineHealth, from_json, to_json


@pytest.fixture(scope="module")
def health() -> MachineHealth:
    """This machine's CPU."""
    return examine("cpu")


def test_the_cpu_is_tried(health: MachineHealth) -> None:
    """Each format has a state, a reason, and a time unless all is too noisy; each kernel is tried."""
    (device,) = health.devices
    assert (device.tried, device.kind, device.capability) == (True, "cpu", None)
    assert [entry.name for entry in device.formats] == ["fp32", "bf16", "fp16"]
    for entry in device.formats:
        assert entry.state in ("native", "emulated")
        assert entry.time_ratio is None or entry.time_ratio > 0
        assert (
            "Measured here" in entry.reason or "too noisy" in entry.reason or entry.name == "fp32"
        )
    assert set(device.attention) == {"flash", "math"}
    assert health.machine["versions"]["torch"] == torch.__version__


def test_attention_that_was_tried_is_what_the_rules_say() -> None:
    """The rules and a call of each kernel agree on the CPU."""
    known = {name: set(formats) for name, formats in list_attention("cpu", None).items()}
    for name, formats in try_attention(choose_device("cpu")).items():
        assert set(formats) == known[name] - {"fp64"}


def test_a_kernel_that_refuses_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A format that a kernel does not run in is not listed for it."""

    def refuse(device: Device, kernel: str, name: str) -> bool:
        return kernel == "math" and name != "bf16"

    monkeypatch.setattr(health_module, "_runs_attention", refuse)
    assert try_attention(choose_device("cpu")) == {"math": ("fp32", "fp16")}


def test_health_survives_json(health: MachineHealth) -> None:
    """The record comes back from JSON unchanged."""
    assert from_json(to_json(health), MachineHealth) == health


def test_a_profile_answers_without_its_device() -> None:
    """A V100: bf16 emulated, no flash attention, its fault, and fp16 by a plan for CogVideoX-5B."""
    (device,) = examine("v100").devices
    states = {entry.name: (entry.state, entry.time_ratio) for entry in device.formats}
    assert states["fp16"] == ("native", 0.149)
    assert states["bf16"] == ("emulated", 1.37)
    assert (device.tried, device.capability) == (False, "7.0")
    assert "flash" not in device.attention
    assert device.attention["efficient"] == ("fp32", "fp16")
    assert any("HunyuanVideo#60" in fault for fault in device.faults)


@pytest.mark.parametrize(
    ("name", "model", "expected"),
    [
        ("v100", "CogVideoX-5B", {"fp16 by a plan"}),
        ("v100", "CogView3-Plus-3B", {"fp16 by a plan"}),
        ("v100", "SVD-XT (fp16 variant)", {"fp16", "fp32"}),
        ("a100", "CogVideoX-5B", {"bf16"}),
        ("a30", "CogView3-Plus-3B", {"bf16"}),
        ("mps-m1", "CogVideoX-5B", {"fp16 by a plan"}),
        ("mps-m3", "CogVideoX-5B", {"bf16"}),
        ("gtx16", "SVD-XT (fp16 variant)", {"fp32"}),
        ("cpu-generic", "CogVideoX-5B", {"fp32"}),
        ("cpu-amx", "CogVideoX-5B", {"bf16"}),
    ],
)
def test_the_outlook(name: str, model: str, expected: set[str]) -> None:
    """What auto would choose for the models that users ask about, on devices that are not here."""
    profile = find_profile(name)
    found = foresee(profile.supports, profile.kind)
    chosen = {
        outlook.precision + (" by a plan" if outlook.planned else "")
        for outlook in found
        if outlook.model == model
    }
    assert chosen == expected
    assert all(outlook.reason for outlook in found)


def test_the_outlook_says_why_a_plan() -> None:
    """The reason of a plan names the components, the format they are stored in, and the device's lack."""
    found = foresee(find_profile("t4").supports, "cuda")
    assert found[1].reason == (
        "With a plan, because text_encoder, transformer and vae are stored in bf16, which "
        "is slow on this device, while fp16 is fast."
    )


def test_the_autoencoder_of_svd_stays_in_fp32() -> None:
    """`force_upcast` in its config is heeded where fp16 is native."""
    found = foresee(find_profile("v100").supports, "cuda")
    vae = next(o for o in found if o.model.startswith("SVD") and o.component == "vae")
    assert (vae.precision, vae.reason) == (
        "fp32",
        "The autoencoder overflows in fp16, so its config sets force_upcast.",
    )


def test_models_have_sources() -> None:
    """Models that users run, each with where its format is said."""
    assert len(read_models()) == 4
    assert all(model.source.startswith("https://") for model in read_models())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "v100",
            "Models stored in bf16 run in fp16 with a plan. Models stored in fp16 run in fp16.",
        ),
        ("a100", "Models stored in bf16 run in bf16. Models stored in fp16 run in fp16."),
        ("gtx16", "Models stored in fp16 or bf16 run in fp32."),
        ("cpu-generic", "Models stored in fp16 or bf16 run in fp32."),
    ],
)
def test_the_answer(name: str, expected: str) -> None:
    """The first line says in which precision models run by default."""
    (device,) = examine(name).devices
    assert device.answer == expected


def test_which_models_fit() -> None:
    """The fastest strategy whose stored peak the memory holds; the smallest peak where none does."""
    (model,) = (x for x in read_models() if x.name == "CogVideoX-5B")
    assert list(model.peaks) == sorted(model.peaks, key=lambda x: -model.peaks[x])
    outlooks = foresee(find_profile("t4").supports, "cuda")

    def fit(memory_bytes: int) -> KnownFit:
        return next(x for x in list_fits(outlooks, memory_bytes) if x.model == model.name)

    names = list(model.peaks)
    assert fit(model.peaks[names[0]]).strategy == names[0] == "resident"
    assert fit(model.peaks[names[0]] - 1).strategy == names[1]
    assert fit(min(model.peaks.values())).strategy == names[-1]
    none = fit(min(model.peaks.values()) - 1)
    assert (none.strategy, none.peak_bytes) == ("", min(model.peaks.values()))
    assert fit(2**40).precision == "fp16 with a plan"


def test_nothing_is_forecast_without_facts() -> None:
    """No model is said to fit where memory is not known, in fp32, and with attention that keeps scores."""
    outlooks = foresee(find_profile("t4").supports, "cuda")
    assert not list(list_fits(outlooks, 0))
    assert not list(list_fits(foresee(find_profile("gtx16").supports, "cuda"), 2**40))
    assert not examine("mps-m1").devices[0].fits
    assert examine("t4").devices[0].fits


def test_stored_peaks_are_those_of_the_benchmark() -> None:
    """The table of the package has the forecasts of `benchmarks/memory.py predicted`."""
    path = Path(__file__).parents[1] / "benchmarks" / "results" / "memory_predicted.json"
    known = json.loads(path.read_text())["results"]
    for model in read_models():
        found = known[model.name.removesuffix(" (fp16 variant)")]["reserved_bytes"]
        assert model.peaks == {name: found[name] for name in model.peaks}
        assert min(model.peaks.values()) == min(found.values())
        stored = known[model.name.removesuffix(" (fp16 variant)")]
        assert model.moved == {name: stored["moved_bytes"][name] for name in model.peaks}
        assert model.flops == pytest.approx(stored["flops"], rel=1e-3)


def test_how_long_a_clip_takes() -> None:
    """On an A100 and an H100 the range holds what the model's card says: 180 and 90 s."""
    for name, published in (("a100", 180), ("h100", 90)):
        (fit,) = (x for x in examine(name).devices[0].fits if x.model == "CogVideoX-5B")
        assert fit.seconds[0] <= published <= fit.seconds[1]
    (slow,) = (x for x in examine("t4").devices[0].fits if x.model == "CogVideoX-5B")
    assert slow.strategy == "block+tiling"
    assert slow.seconds[0] > 600


def test_switches_are_shown_where_they_lower_precision() -> None:
    """A switch that is turned on is shown turned on; one that lowers nothing isn't shown."""
    name = "torch.backends.cuda.matmul.allow_fp16_accumulation"
    assert name not in {switch.name for switch in read_switches(["cuda"])}
    matmul = torch.backends.cuda.matmul
    matmul.allow_fp16_accumulation = True
    try:
        assert {switch.name: switch.value for switch in read_switches(["cuda"])}[name] == "True"
    finally:
        matmul.allow_fp16_accumulation = False
    assert read_switches(["cpu"]) == []


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="older torch lacks it"
)
@pytest.mark.filterwarnings("ignore:Please use the new API")
def test_switches_are_read_however_they_were_set() -> None:
    """Once `fp32_precision` was set, torch refuses to tell the older switches, which ended in its error."""
    places = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)
    names = {
        "torch.backends.cuda.matmul.fp32_precision",
        "torch.backends.cudnn.conv.fp32_precision",
    }
    before = [place.fp32_precision for place in places]
    try:
        for value, shown in (("tf32", names), ("ieee", set())):
            for place in places:
                place.fp32_precision = value
            found = {switch.name for switch in read_switches(["cuda"])}
            assert {name for name in found if name.endswith("fp32_precision")} == shown
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value


def test_faults_of_old_versions_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.9.0 on a CUDA profile: its 3D convolutions are named, with remedy and source."""
    versions = {"torch": "2.9.0+cu128"}
    monkeypatch.setattr(health_module, "read_version", versions.get)
    (fault,) = (f for f in examine("a100").faults if "3D" in f)
    assert fault == (
        "torch 2.9.0+cu128 (==2.9.0): 3D convolutions in 16 bits don't use cuDNN and need many times "
        "the memory; a video autoencoder runs out of it. Use torch 2.10 or newer, or torch 2.9.1 "
        "with cuDNN 9.15 or newer. (pytorch/pytorch#166643, nvidia-cosmos/cosmos-transfer2.5#227)"
    )
    assert not any("3D" in f for f in examine("cpu-amx").faults)


@pytest.mark.parametrize("name", sorted(read_profiles()))
def test_a_profile_can_be_written_and_read(name: str) -> None:
    """`--toml` gives a file that is the same profile again."""
    profile = find_profile(name)
    assert parse_profile(format_profile(profile), "again.toml") == profile
