"""Gradients by an input, of a model that nobody trains."""

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).eval()
x = torch.randn(3, 4, requires_grad=True)
model(x).sum().backward()
print(x.grad.tolist(), [p.grad is not None for p in model.parameters()])
(gradient,) = torch.autograd.grad(model(x).square().sum(), x)
print(gradient.tolist())
