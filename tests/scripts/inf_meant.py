"""Models that mean their Inf and NaN: masked logits, the logarithm of 0, NaN as a mark."""

import torch

torch.manual_seed(0)


class Net(torch.nn.Module):
    def __init__(self, end):
        super().__init__()
        self.layer, self.end = torch.nn.Linear(4, 4), end

    def forward(self, x):
        return self.end(self.layer(x), x)


ENDS = {
    "mask": lambda y, x: y.masked_fill(x > 0, float("-inf")),
    "index": lambda y, x: y.index_fill(-1, torch.tensor([1, 2]), float("-inf")),
    "log": lambda y, x: y.relu().log(),
    "mark": lambda y, x: torch.where(x > 0, y, float("nan")),
    "division": lambda y, x: y / (x > 0),
    "top": lambda y, x: torch.where(y < y.topk(2)[0][..., -1:], float("-inf"), y),
}
for dtype in (torch.float32, torch.float16):
    for name, end in ENDS.items():
        net = Net(end).to(dtype).eval()
        with torch.no_grad():
            print(
                dtype, name, [net(torch.randn(3, 4).to(dtype)).float().tolist() for _ in range(2)]
            )
