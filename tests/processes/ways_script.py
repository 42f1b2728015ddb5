"""Make one change of the table of ways in, as a user's script does: FOLDER MODEL CHANGE OUTPUT."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from models.pipeline_calls import load_plain
from models.ways_in import CHANGES, MODELS

folder, name, change, output = sys.argv[1:]
model, row = MODELS[name], CHANGES[change]
with torch.no_grad():
    pipe = load_plain(Path(folder), torch.float16)
    if row.prepare:
        row.prepare(pipe, model)
    torch.save(row.make(pipe, model), output)
