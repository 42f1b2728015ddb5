"""The pack's example workflows, with tiny models in the place of those that they name.

A workflow is the page's format: nodes at places, links by number, widgets in order. `write_prompt` gives
what the page would queue.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from comfyui.prompts import WIDTHS, Prompt

EXAMPLES = Path(__file__).parents[2] / "integrations" / "comfyui" / "example_workflows"
TINY_UNETS = {
    "flux": "flux_black",
    "z_image": "z_image_black",
    "qwen_image": "qwen_image_black",
    "wan": "wan_black",
}
_LOADERS = ("CLIPLoader", "DualCLIPLoader")
_WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")

Workflow = dict[str, Any]


def read_workflow(name: str) -> Workflow:
    """An example with tiny models, small pictures and few steps; its nodes and links stay.

    Text encoders of these models have no tiny form: what they would give is drawn.
    """
    found: Workflow = json.loads((EXAMPLES / f"{name}.json").read_text())
    gone = {node["id"] for node in found["nodes"] if node["type"] in _LOADERS}
    found["nodes"] = [node for node in found["nodes"] if node["id"] not in gone]
    found["links"] = [link for link in found["links"] if link[1] not in gone]
    for node in found["nodes"]:
        values = node["widgets_values"]
        if node["type"] == "UNETLoader":
            values[0] = f"{TINY_UNETS[name]}.safetensors"
        elif node["type"] == "VAELoader":
            values[0] = f"{'small' if values[0] == 'ae.safetensors' else 'wan'}.safetensors"
        elif node["type"] == "CLIPTextEncode":
            node |= {"type": "TestConditioning", "inputs": [], "title": "Test conditioning"}
            node["widgets_values"] = [len(values[0]), 6, WIDTHS[name], 32]
        elif node["type"].startswith("Empty"):
            values[:3] = [64, 64, 1]
        elif node["type"] == "KSampler":
            values[2] = 3
    return found


def leave_out(workflow: Workflow) -> Workflow:
    """The same without our nodes: ComfyUI's own node has the model computed in fp16."""
    found = copy.deepcopy(workflow)
    nodes = {node["id"]: node for node in found["nodes"]}
    (ours,) = [node for node in nodes.values() if node["type"] == "StopdownRunInFp16"]
    (report,) = [node for node in nodes.values() if node["type"] == "StopdownReport"]
    sources = {link[0]: link for link in found["links"]}
    vae = sources[next(x["link"] for x in ours["inputs"] if x["name"] == "vae")]
    images = sources[report["inputs"][0]["link"]]
    kept = []
    for link in found["links"]:
        if link[1] == ours["id"] and link[5] == "VAE":
            link[1:3] = vae[1:3]
        elif link[1] == report["id"]:
            link[1:3] = images[1:3]
        if report["id"] not in (link[1], link[3]) and not (link[3] == ours["id"] and link[4]):
            kept.append(link)
    ours |= {"type": "ModelComputeDtype", "widgets_values": ["fp16"]}
    ours["inputs"], ours["outputs"] = ours["inputs"][:1], ours["outputs"][:1]
    found["links"] = kept
    found["nodes"] = [node for node in found["nodes"] if node is not report]
    return found


def write_prompt(workflow: Workflow, classes: dict[str, Any]) -> Prompt:
    """What the page queues for a workflow.

    Args:
        classes: what ComfyUI says of its nodes, from `/object_info`.
    """
    sources = {link[0]: [str(link[1]), link[2]] for link in workflow["links"]}
    prompt = {}
    for node in workflow["nodes"]:
        linked = {x["name"]: sources[x["link"]] for x in node["inputs"] if x["link"] in sources}
        given = classes[node["type"]]["input"]
        values = iter(node["widgets_values"])
        inputs: dict[str, Any] = {}
        for name, (kind, *more) in {
            **given.get("required", {}),
            **given.get("optional", {}),
        }.items():
            if isinstance(kind, list) or kind in _WIDGETS:
                inputs[name] = next(values)
                if more and more[0].get("control_after_generate"):
                    next(values)
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs | linked}
    return prompt
