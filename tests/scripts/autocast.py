"""A bf16 model, and parts of it, in autocast of fp16 and of bf16."""

import torch

torch.manual_seed(0)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = torch.nn.Embedding(4, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        h = self.table(x)
        return h, self.out(h)


for weights in (torch.float32, torch.bfloat16, torch.float16):
    for around in (torch.bfloat16, torch.float16):
        with torch.no_grad(), torch.autocast("cpu", dtype=around):
            net = Net().to(weights).eval()
            print(
                weights, around, [(x.dtype, x.float().sum().item()) for x in net(torch.arange(4))]
            )
