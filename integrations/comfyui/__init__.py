"""ComfyUI nodes that run models in fp16 with Stopdown, and name what goes wrong.

Nothing of Stopdown is imported until a node runs.
"""

try:
    from .nodes import comfy_entrypoint
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("comfy_api"):
        raise
    raise ImportError(
        "Stopdown's nodes need ComfyUI 0.3.64 or newer: this one has no comfy_api.latest. Update ComfyUI."
    ) from None

WEB_DIRECTORY = "./web"

__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]
