"""The nodes. Each says what it takes and gives; the work is done elsewhere, and imported there."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import ComfyExtension, io, ui

from .sessions import Options, Session, guard_clip, guard_model, guard_vae

CATEGORY = "stopdown"
Report = io.Custom("STOPDOWN_REPORT")

_FAULTS = ["repair", "raise", "warn"]


def _list_models() -> list[Any]:
    return [
        io.Model.Input("model", optional=True, tooltip="The model for the sampler."),
        io.Clip.Input("clip", optional=True, tooltip="The text encoders."),
        io.Vae.Input("vae", optional=True, tooltip="The autoencoder."),
    ]


def _list_outputs() -> list[Any]:
    return [
        io.Model.Output("model_out", display_name="model"),
        io.Clip.Output("clip_out", display_name="clip"),
        io.Vae.Output("vae_out", display_name="vae"),
        Report.Output("report_out", display_name="report"),
    ]


def _choose_fault() -> Any:
    return io.Combo.Input(
        "on_fault",
        options=_FAULTS,
        default="repair",
        tooltip="repair: bring the layer into range and rerun the same step. raise: stop the "
        "run and report the layer. warn: report it in the log and continue.",
    )


def _guard_all(session: Session, model: Any, clip: Any, vae: Any) -> Any:
    return io.NodeOutput(
        None if model is None else guard_model(model, session),
        None if clip is None else guard_clip(clip, session),
        None if vae is None else guard_vae(vae, session),
        session,
    )


def _show(text: str, picture: Any = None) -> dict[str, Any]:
    """What a node shows in the page, where only pictures are shown on every node, and in the API."""
    from .reports import draw_text

    shown = draw_text(text) if picture is None else picture
    return {**ui.PreviewImage(shown).as_dict(), "text": (text,)}


class RunInFp16(io.ComfyNode):
    """Models that compute in fp16, each brought into range by exponents."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """What it takes and gives."""
        return io.Schema(
            node_id="StopdownRunInFp16",
            display_name="Run in fp16",
            category=CATEGORY,
            description="Runs in fp16, even where ComfyUI would use bf16 or fp32. Powers of two, "
            "computed from the weights, keep activations in range, so the picture matches"
            " fp32 instead of being black.",
            inputs=_list_models(),
            outputs=_list_outputs(),
        )

    @classmethod
    def execute(cls, model: Any = None, clip: Any = None, vae: Any = None) -> io.NodeOutput:
        """The models, guarded and in fp16."""
        return _guard_all(Session(Options(fp16=True)), model, clip, vae)


class Guard(io.ComfyNode):
    """Models that run as ComfyUI runs them, and whose faults are named and repaired."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """What it takes and gives."""
        return io.Schema(
            node_id="StopdownGuard",
            display_name="Guard against black pictures",
            category=CATEGORY,
            description="Checks the output of each step. NaN, Inf and clamped values are traced to "
            "the component, layer and step where they begin, and repaired during the run.",
            inputs=[*_list_models(), _choose_fault()],
            outputs=_list_outputs(),
        )

    @classmethod
    def execute(
        cls, on_fault: str, model: Any = None, clip: Any = None, vae: Any = None
    ) -> io.NodeOutput:
        """The models, guarded."""
        return _guard_all(Session(Options(on_fault)), model, clip, vae)


class CheckSums(io.ComfyNode):
    """Models whose sums are looked at before their first run."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """What it takes and gives."""
        return io.Schema(
            node_id="StopdownCheckSums",
            display_name="Check fp16 accumulation",
            category=CATEGORY,
            description="Tells you whether the sums in a model's matrix products fit in fp16 "
            "accumulators, which --fast fp16_accumulation and some attention kernels use."
            " For this, the model runs once in fp32 before its first run.",
            inputs=_list_models(),
            outputs=_list_outputs(),
        )

    @classmethod
    def execute(cls, model: Any = None, clip: Any = None, vae: Any = None) -> io.NodeOutput:
        """The models, each of which is run in fp32 first."""
        return _guard_all(Session(Options("warn", sums=True)), model, clip, vae)


class ShowReport(io.ComfyNode):
    """What a guard saw, as text and as a picture."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """What it takes and gives."""
        return io.Schema(
            node_id="StopdownReport",
            display_name="Guard report",
            category=CATEGORY,
            description="What the guard found and repaired in the run that made these images.",
            inputs=[
                io.Image.Input(
                    "images", tooltip="The resulting images, so that the report runs after them."
                ),
                Report.Input("report", tooltip="The report of Run in fp16 or Guard."),
            ],
            outputs=[
                io.Image.Output("images_out", display_name="images"),
                io.String.Output("text"),
                io.Image.Output("picture"),
            ],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, images: Any, report: Session) -> io.NodeOutput:
        """The images as they came, the text and the picture."""
        from .reports import draw_text, write_report

        runs = report.take_runs()
        text = write_report(runs)
        picture = draw_text(text, is_faulty=any(record.repairs for _, record in runs))
        return io.NodeOutput(images, text, picture, ui=_show(text, picture))


class Doctor(io.ComfyNode):
    """What this machine computes in."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """What it takes and gives."""
        return io.Schema(
            node_id="StopdownDoctor",
            display_name="Doctor",
            category=CATEGORY,
            description="Shows which formats this machine supports natively, and any problems with "
            "its setup.",
            inputs=[],
            outputs=[io.String.Output("text")],
            is_output_node=True,
            not_idempotent=True,
        )

    @classmethod
    def execute(cls) -> io.NodeOutput:
        """The doctor's card."""
        from .reports import write_health

        text = write_health()
        return io.NodeOutput(text, ui=_show(text))


class Explain(io.ComfyNode):
    """The cause of a message, or of a picture that is black."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """What it takes and gives."""
        return io.Schema(
            node_id="StopdownExplain",
            display_name="Explain",
            category=CATEGORY,
            description="Finds the cause of an error message, a log or a bad picture, and the fix.",
            inputs=[
                io.String.Input(
                    "message", multiline=True, default="", tooltip="An error message, or a log."
                ),
                io.Image.Input("images", optional=True, tooltip="Pictures that look wrong."),
            ],
            outputs=[io.String.Output("text")],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, message: str, images: Any = None) -> io.NodeOutput:
        """The causes."""
        from .reports import write_causes

        text = write_causes(message, images)
        return io.NodeOutput(text, ui=_show(text))


class SaveFp16Checkpoint(io.ComfyNode):
    """A model's weights in fp16, with the exponents that a run found."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """What it takes and gives."""
        return io.Schema(
            node_id="StopdownSaveFp16",
            display_name="Save fp16 checkpoint",
            category=CATEGORY,
            description="Writes the model with its exponents folded into the weights, LoRA included. "
            "The file has the same names and shapes, so other programs can read it.",
            inputs=[
                io.Model.Input("model", tooltip="The model that the sampler ran."),
                Report.Input(
                    "report",
                    tooltip="The report of Run in fp16, from the run that made the images.",
                ),
                io.Image.Input(
                    "images", tooltip="The resulting images, so that saving happens after them."
                ),
                io.String.Input(
                    "filename_prefix",
                    default="diffusion_models/stopdown_fp16",
                    tooltip="Relative to ComfyUI's output folder.",
                ),
            ],
            outputs=[io.String.Output("text")],
            is_output_node=True,
        )

    @classmethod
    def execute(
        cls, model: Any, report: Session, images: Any, filename_prefix: str
    ) -> io.NodeOutput:
        """Where it was written."""
        from .files import save_fp16

        text = save_fp16(model, report, filename_prefix)
        return io.NodeOutput(text, ui=_show(text))


class StopdownExtension(ComfyExtension):
    """The nodes of this pack."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """All of them."""
        return [RunInFp16, Guard, CheckSums, ShowReport, Doctor, Explain, SaveFp16Checkpoint]


async def comfy_entrypoint() -> StopdownExtension:
    """Asked by ComfyUI when it starts."""
    return StopdownExtension()
