"""Tests of the choice of precision: a table of plain cases, without torch."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stopdown.devices.format_support import Support, Timing, weigh_support
from stopdown.devices.maker_formats import judge_accelerator, judge_cpu
from stopdown.errors import OptionError
from stopdown.plans.precision import (
    ComponentFacts,
    choose_precision,
    decide_precisions,
    find_plan_path,
    parse_request,
    resolve_request,
)
from stopdown.records import ComponentPlan

FP32 = Support(True, True, 1.0, "fp32 is native on every device.")


def make_supports(bf16: Support, fp16: Support) -> dict[str, Support]:
    return {"fp32": FP32, "bf16": bf16, "fp16": fp16}


def weigh_cuda(capability: tuple[int, int], **ratios: float) -> dict[str, Support]:
    """What the probe says of a card with these times over those of fp32."""
    verdicts = judge_accelerator("cuda", capability)
    base = Timing(1.0, 1.0)
    return {
        name: weigh_support(name, verdicts[name], Timing(ratio, ratio), base)
        for name, ratio in {"fp32": 1.0, **ratios}.items()
    }


V100 = weigh_cuda((7, 0), bf16=4.0, fp16=0.25)
A100 = weigh_cuda((8, 0), bf16=0.2, fp16=0.2)
P40 = weigh_cuda((6, 1), bf16=3.0, fp16=1.1)
PLAIN_CPU = {
    name: weigh_support(name, verdict, Timing(ratio, ratio), Timing(1.0, 1.0))
    for (name, verdict), ratio in zip(judge_cpu([]).items(), (1.0, 2.0, 8.0), strict=True)
}
SLOW_CPU = make_supports(
    Support(True, True, 3.0, "bf16 is native and slow.", is_slow=True),
    Support(False, True, 9.0, "No fp16."),
)
NOISY = make_supports(
    Support(True, True, None, "bf16 is native; too noisy."),
    Support(False, True, None, "fp16 is emulated; too noisy."),
)
BROKEN = make_supports(
    Support(False, False, None, "It was tried and failed: not implemented for 'BFloat16'."),
    Support(True, True, 0.5, "fp16 is native."),
)


def make_facts(stored: str | None, *, force_upcast: bool = False) -> ComponentFacts:
    return ComponentFacts("unet", ("unet",), {stored: 100} if stored else {}, {}, force_upcast)


@pytest.mark.parametrize(
    ("supports", "stored", "force_upcast", "chosen", "reason"),
    [
        (
            A100,
            "bf16",
            False,
            "bf16",
            "The weights are stored in bf16, and compute capa",
        ),
        (
            A100,
            "fp16",
            False,
            "fp16",
            "The weights are stored in fp16, and compute capa",
        ),
        (A100, "fp32", False, "fp32", "The weights are stored in fp32; fp32 holds them exactly."),
        (A100, "fp8-e4m3", False, "fp32", "The weights are stored in fp8-e4m3; fp32 holds them"),
        (
            A100,
            None,
            False,
            "fp32",
            "The format of its weights on disk is unknown, so it runs in fp32",
        ),
        (
            V100,
            "fp16",
            False,
            "fp16",
            "The weights are stored in fp16, and compute capa",
        ),
        (V100, "bf16", False, "fp32", "The weights are stored in bf16. Compute capability 7.0 has"),
        (P40, "fp16", False, "fp32", "The weights are stored in fp16. Compute capability 6.1"),
        (PLAIN_CPU, "bf16", False, "fp32", "The weights are stored in bf16. The CPU has no bf16"),
        (PLAIN_CPU, "fp16", False, "fp32", "The weights are stored in fp16. The CPU has no fp16"),
        (SLOW_CPU, "bf16", False, "fp32", "The weights are stored in bf16. bf16 is native and"),
        (
            NOISY,
            "bf16",
            False,
            "bf16",
            "The weights are stored in bf16 and used as they are. bf16 is nati",
        ),
        (NOISY, "fp16", False, "fp32", "The weights are stored in fp16. fp16 is emulated; too"),
        (BROKEN, "bf16", False, "fp32", "The weights are stored in bf16. It was tried and failed"),
        (V100, "fp16", True, "fp32", "The autoencoder overflows in fp16, so its config sets"),
        (A100, "fp16", True, "fp32", "The autoencoder overflows in fp16, so its config sets"),
        (
            A100,
            "bf16",
            True,
            "bf16",
            "The weights are stored in bf16, and compute capa",
        ),
    ],
)
def test_the_choice_follows_from_facts(
    supports: Mapping[str, Support],
    stored: str | None,
    force_upcast: bool,
    chosen: str,
    reason: str,
) -> None:
    """Native formats, the stored format and force_upcast decide, and the reason says which."""
    precision, sentence = choose_precision(make_facts(stored, force_upcast=force_upcast), supports)
    assert precision == chosen
    assert sentence.startswith(reason)
    assert sentence.endswith(".")


def test_bf16_weights_without_bf16_say_why_not_fp16() -> None:
    """On a V100 the whole reason: what is stored, what is missing, and what fp16 would risk."""
    _, reason = choose_precision(make_facts("bf16"), V100)
    assert reason == (
        "The weights are stored in bf16. Compute capability 7.0 has no bf16 arithmetic (it "
        "begins with 8.0); torch emulates it in fp32 but still reports it as supported. In fp16 "
        "(maximum 65504), activations of bf16-trained models may overflow, so it runs in fp32."
    )


def test_most_of_the_bytes_decide_what_is_stored() -> None:
    """A checkpoint with a few fp32 tensors counts as bf16."""
    facts = ComponentFacts("vae", ("vae",), {"fp32": 10, "bf16": 90})
    assert facts.stored_mostly == "bf16"
    assert ComponentFacts("vae", ("vae",), {}).stored_mostly is None


T5 = ComponentFacts("text_encoder", ("text_encoder",), {"bf16": 9}, {"fp16": ("wo",), "bf16": ()})
TRANSFORMER = ComponentFacts("transformer", ("transformer",), {"bf16": 9})
VAE = ComponentFacts("vae", ("vae.encode", "vae.decode"), {"fp16": 9}, {}, True)
MODEL = (T5, TRANSFORMER, VAE)
CALLS = {facts.name: facts.calls for facts in MODEL}


def test_each_call_gets_one_decision() -> None:
    """An autoencoder has two calls; what was asked for wins, and the rest is chosen."""
    request = {"text_encoder": "fp16-plain", "vae.encode": "fp16"}
    decisions = decide_precisions(MODEL, A100, request)
    assert decisions[0] == ComponentPlan(
        "text_encoder",
        precision="fp16",
        reasons=("You asked for fp16-plain. `wo` stays in fp32, as the model's authors specify.",),
        stored="bf16",
        kept_fp32=("wo",),
    )
    assert [(d.component, d.precision) for d in decisions] == [
        ("text_encoder", "fp16"),
        ("transformer", "bf16"),
        ("vae.encode", "fp16"),
        ("vae.decode", "fp32"),
    ]
    assert decisions[2].reason == "You asked for fp16."
    assert decisions[3].reason.startswith("The autoencoder overflows in fp16, so its config sets")


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_a_plan_that_plain_fp16_leaves_out_is_mentioned(precision: str) -> None:
    """A converted component whose config carries its plan overflows in plain fp16 like the original."""
    facts = ComponentFacts("transformer", ("transformer",), {"bf16": 9}, carries_plan=True)
    (decision,) = decide_precisions([facts], A100, {"transformer": precision})
    said = " The plan in its config.json isn't applied to plain fp16." * (precision == "fp16")
    assert decision.reason == f"You asked for {precision}.{said}"


@pytest.mark.parametrize(("precision", "kept"), [("fp16", ("wo",)), ("bf16", ()), ("fp32", ())])
def test_what_is_kept_in_fp32_depends_on_the_precision(
    precision: str, kept: tuple[str, ...]
) -> None:
    """Transformers keeps T5's wo in fp32 when it loads fp16, and not when it loads bf16."""
    (decision,) = decide_precisions([T5], A100, {"text_encoder": precision})
    assert decision.kept_fp32 == kept
    assert ("wo" in decision.reason) == bool(kept)


def test_a_precision_that_does_not_work_is_refused() -> None:
    """The message says what was tried, and what to type."""
    with pytest.raises(OptionError) as caught:
        decide_precisions([TRANSFORMER], BROKEN, {"transformer": "bf16"})
    assert str(caught.value) == (
        "transformer can't run in bf16 on this device. It was tried and failed: not implemented "
        "for 'BFloat16'. Use precision=\"transformer=fp32\", or leave it to auto."
    )


def test_a_slow_precision_that_was_asked_for_is_given() -> None:
    """A user who asks for emulated bf16 gets it, and reads that it is emulated."""
    (decision,) = decide_precisions([TRANSFORMER], V100, {"transformer": "bf16"})
    assert decision.precision == "bf16"
    assert decision.reason.startswith(
        "You asked for bf16. Compute capability 7.0 has no bf16 arithmetic"
    )


@pytest.mark.parametrize(
    ("text", "request_"),
    [
        ("auto", {}),
        (" AUTO ", {}),
        (
            "fp16",
            {
                "text_encoder": "fp16",
                "transformer": "fp16",
                "vae.encode": "fp16",
                "vae.decode": "fp16",
            },
        ),
        ("transformer=bf16", {"transformer": "bf16"}),
        ("vae=fp32", {"vae.encode": "fp32", "vae.decode": "fp32"}),
        ("vae=half, vae.decode=float32", {"vae.encode": "fp16", "vae.decode": "fp32"}),
        ("transformer=auto,vae.encode=bf16", {"vae.encode": "bf16"}),
        ("transformer=bf16+vae=fp32", {"transformer": "bf16", **dict.fromkeys(VAE.calls, "fp32")}),
        ("vae=fp16,vae.decode=fp32", {"vae.encode": "fp16", "vae.decode": "fp32"}),
        ("vae.decode=fp32,vae=fp16", {"vae.encode": "fp16", "vae.decode": "fp32"}),
        ("vae=fp16,vae.decode=auto", {"vae.encode": "fp16"}),
        ("vae=fp16,vae=half", {"vae.encode": "fp16", "vae.decode": "fp16"}),
    ],
)
def test_a_request_is_read(text: str, request_: dict[str, str]) -> None:
    """Names, aliases, components and methods of an autoencoder; auto leaves a call open."""
    assert resolve_request(parse_request(text), CALLS) == request_


WORDS = ["fp16", "half", "auto", "vae", ".decode", ".", "=", ",", "+", " ", ".json", "transformer"]


@given(st.lists(st.sampled_from(WORDS) | st.text(max_size=3)).map("".join))
def test_any_text_is_a_request_or_refused(text: str) -> None:
    """No text raises anything else; what is read gives each call one known precision."""
    try:
        request = parse_request(text)
        found = resolve_request(request, CALLS)
    except OptionError:
        return
    assert set(found) <= {call for calls in CALLS.values() for call in calls}
    assert set(found.values()) <= {"fp32", "bf16", "fp16"}


@given(st.permutations(["vae=fp16", "vae.decode=fp32", "transformer=bf16"]), st.sampled_from(",+"))
def test_the_order_of_parts_says_nothing(parts: list[str], sign: str) -> None:
    """A method goes before its component wherever it stands."""
    assert resolve_request(parse_request(sign.join(parts)), CALLS) == {
        "transformer": "bf16",
        "vae.encode": "fp16",
        "vae.decode": "fp32",
    }


def test_a_request_says_what_each_precision_is_for() -> None:
    """A component, a method of one, or all; a plan's file is a request of its own, whatever its path."""
    asked = parse_request("transformer=bf16,vae.decode=fp32")
    assert asked == {"transformer": "bf16", "vae.decode": "fp32"}
    assert parse_request("fp16") == {"": "fp16"}
    assert parse_request(" runs/a=1,b=2/plan.json ") == {}
    assert find_plan_path(" runs/a=1,b=2/plan.json ") == "runs/a=1,b=2/plan.json"
    assert find_plan_path("transformer=bf16") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "transfomer=bf16",
            "The model has no component 'transfomer'. It has text_encoder, transformer, vae, "
            'vae.decode, vae.encode. For example: precision="transformer=bf16".',
        ),
        (
            "text_encoder_2=bf16",
            "The model has no component 'text_encoder_2'. It has text_encoder, transformer, vae, "
            'vae.decode, vae.encode. For example: precision="text_encoder=bf16".',
        ),
        (
            "fp64",
            "The precision 'fp64' is unknown. Known values are fp32, bf16, fp16, fp16-plain, auto, and "
            "the path of a plan, such as "
            'plan.json. For example: precision="fp16", or '
            'precision="transformer=bf16,vae=fp32".',
        ),
        (
            "vae=int8",
            "The precision 'int8' is unknown. Known values are fp32, bf16, fp16, fp16-plain, auto, and "
            "the path of a plan, such as "
            'plan.json. For example: precision="fp16", or '
            'precision="transformer=bf16,vae=fp32".',
        ),
        (
            "transformer=fp16,bf16",
            "The entry 'bf16' of a precision doesn't name a component. Each entry is "
            'COMPONENT=PRECISION. For example: precision="transformer=bf16,vae=fp32". Components '
            "that aren't named are chosen by auto.",
        ),
        (
            "vae.decode=fp16,vae.decode=fp32",
            "The precision asks for vae.decode=fp16 and for vae.decode=fp32. Each component has one "
            "precision, and each of its methods can have its own. Leave one of the two out.",
        ),
        (
            "vae.decod=fp16",
            "The model has no component 'vae.decod'. It has text_encoder, transformer, vae, "
            'vae.decode, vae.encode. For example: precision="vae.decode=bf16".',
        ),
    ],
)
def test_a_request_that_cannot_be_read_is_explained(text: str, message: str) -> None:
    """An unknown component is answered with the nearest, an unknown precision with those there are."""
    with pytest.raises(OptionError) as caught:
        resolve_request(parse_request(text), CALLS)
    assert str(caught.value) == message
