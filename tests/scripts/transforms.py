"""vmap, jacobians, export and tracing of a module."""

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh()).eval()
x = torch.randn(2, 3)
print(torch.func.vmap(model)(x).tolist())
print(torch.func.jacrev(model)(x[0]).tolist())
weights = dict(model.named_parameters())
print(torch.func.functional_call(model, weights, (x,)).tolist())
print(torch.jit.trace(model, x)(x).tolist())
