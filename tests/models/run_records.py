"""The record of a run whose frames are black."""

from __future__ import annotations

from stopdown.records import ComponentPlan, Finding, RunRecord

RECORD = RunRecord(
    source="shapes",
    fingerprint="",
    pipeline="CogVideoXPipeline",
    request={"prompt": "a red circle"},
    device="cpu (a CPU)",
    device_reason="cpu was requested.",
    machine={},
    decisions=(ComponentPlan("transformer", precision="bf16", reasons=("You asked for bf16.",)),),
    calls=(),
    stages_s={"load": 1.5},
    peak_bytes=1,
    peak_source="measured",
    own_s=0.0,
    findings=(Finding("black-frames", "output", "All 9 frames.", "Use fp32."),),
    output="clip.mp4",
    elapsed_s=2.0,
)
