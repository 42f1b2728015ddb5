"""Errors of a model's own, which the script catches: sizes, types and exceptions of its code."""

import torch

model = torch.nn.Linear(4, 4).eval()
for given in (torch.ones(1, 3), "text", None, torch.ones(1, 4, dtype=torch.long)):
    try:
        model(given)
    except Exception as error:
        print(type(error).__name__, str(error).splitlines()[0])


class Stops(torch.nn.Module):
    def forward(self, x):
        raise StopIteration(x)


try:
    Stops()(1)
except StopIteration as error:
    print("stopped", error.value)
