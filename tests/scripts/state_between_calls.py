"""Save, load, cast, copy and compare a model between its calls."""

import copy
import io

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)).eval()
x = torch.randn(2, 4)
with torch.no_grad():
    first = model(x)
    kept = io.BytesIO()
    torch.save(model.state_dict(), kept)
    kept.seek(0)
    other = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)).eval()
    other.load_state_dict(torch.load(kept))
    print(torch.equal(other(x), first), torch.equal(copy.deepcopy(model)(x), first))
    print(model.double()(x.double()).dtype, model.half()(x.half()).dtype, sorted(vars(model)))
    whole = io.BytesIO()
    torch.save(model, whole)
    whole.seek(0)
    print(torch.load(whole, weights_only=False)(x.half()).tolist())
