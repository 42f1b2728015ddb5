"""CogVideo's Gradio demo with tiny models, and somebody who presses its button.

    python tests/processes/gradio_program.py make DEMO FOLDER
    python tests/processes/gradio_program.py press URL FILE

The first writes what the demo downloads beside CogVideoX, by the demo's own classes: Real-ESRGAN and
RIFE. The second asks for a video over the demo's own HTTP interface, and copies it to FILE.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch


def make(demo: Path, folder: Path) -> None:
    """Repositories of the two other models."""
    sys.path.insert(0, str(demo))
    from rife.RIFE_HDv3 import Model
    from spandrel.architectures.ESRGAN import ESRGAN

    torch.manual_seed(0)
    for name in ("esrgan", "rife"):
        (folder / name).mkdir(parents=True)
    small = ESRGAN(num_filters=4, num_blocks=1)
    torch.save(small.state_dict(), folder / "esrgan" / "RealESRGAN_x4.pth")
    flow = {f"module.{name}": value for name, value in Model().flownet.state_dict().items()}
    torch.save(flow, folder / "rife" / "flownet.pkl")


def press(url: str, file: Path) -> None:
    """One video from a prompt and a seed."""
    from gradio_client import Client

    client = Client(url, verbose=False, download_files=str(file.parent))
    video = client.predict(
        "a girl riding a bike", None, None, 0.8, 5, False, False, api_name="/generate"
    )[0]
    shutil.copy(video["video"] if isinstance(video, dict) else video, file)


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        press(sys.argv[2], Path(sys.argv[3]))
