"""Calls that write into what they are given: tensors, lists, a cache."""

import torch

torch.manual_seed(0)


class Writes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x, kept):
        x.mul_(2)
        self.count += 1
        kept.append(self.layer(x).log())
        return kept[-1]


net, kept = Writes().eval(), []
with torch.no_grad():
    for _ in range(3):
        x = torch.randn(2, 4)
        found = net(x, kept)
        print(x.tolist(), found is kept[-1], found.tolist(), len(kept), net.count.item())
