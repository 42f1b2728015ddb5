"""Hooks that the script puts on and takes off, and methods that it replaces."""

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval()
seen = []
handle = model[0].register_forward_hook(
    lambda module, args, output: seen.append(output.sum().item())
)
with torch.no_grad():
    print(model(torch.ones(1, 4)).tolist(), seen)
    handle.remove()
    forward = model[0].forward
    model[0].forward = lambda x: forward(x) * 2
    print(model(torch.ones(1, 4)).tolist(), len(seen))
    print(model.forward(torch.ones(1, 4)).tolist(), model.forward.__func__ is type(model).forward)
