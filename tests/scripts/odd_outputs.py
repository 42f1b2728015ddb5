"""Outputs that are no tensors: generators, numbers, complex and sparse tensors, arrays, nothing."""

import torch


class Gives(torch.nn.Module):
    def forward(self, what):
        return {
            "generator": lambda: (x for x in (1, 2)),
            "number": lambda: float("inf"),
            "complex": lambda: torch.complex(torch.ones(2), torch.zeros(2)).conj(),
            "sparse": lambda: torch.eye(2).to_sparse(),
            "array": lambda: torch.ones(2).numpy(),
            "nothing": lambda: None,
            "empty": lambda: torch.empty(0),
            "whole": lambda: torch.arange(3),
            "float8": lambda: torch.ones(2).to(torch.float8_e4m3fn),
        }[what]()


gives = Gives().eval()
for name in ("number", "complex", "sparse", "array", "nothing", "empty", "whole", "float8"):
    print(name, gives(name))
print(list(gives("generator")))
