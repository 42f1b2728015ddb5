"""ComfyUI nodes that run models in fp16 with Stopdown, and name what goes wrong.

Nothing of Stopdown is imported until a node runs.
"""

from .nodes import comfy_entrypoint

WEB_DIRECTORY = "./web"

__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]
