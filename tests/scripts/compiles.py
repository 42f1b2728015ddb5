"""Compiled models, one of which overflows in fp16, and how often each was compiled."""

import sys

import torch

torch.manual_seed(0)
counts = []


def count(graph, inputs):
    counts.append(1)
    return graph.forward


class Net(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.up, self.norm, self.down = (
            torch.nn.Linear(8, 8),
            torch.nn.LayerNorm(8),
            torch.nn.Linear(8, 8),
        )
        self.up.weight.data.mul_(scale)

    def forward(self, x):
        return self.down(self.norm(self.up(x)))


fits = torch.compile(Net(1.0).eval(), backend=count)
wide = torch.compile(Net(float(sys.argv[1])).eval().half(), backend=count)
with torch.no_grad():
    for _ in range(3):
        found = fits(torch.ones(1, 8)), wide(torch.ones(1, 8).half())
        print(len(counts), [x.isfinite().all().item() for x in found])
print(found[0].tolist())
