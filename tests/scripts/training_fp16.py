"""Train in fp16 with a loss scale and without a GradScaler; a step overflows and is left out."""

import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 4).half()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for scale in (8.0, 60000.0, 8.0):
    optimizer.zero_grad()
    loss = model(torch.randn(2, 4).half() * 8).square().sum()
    (loss * scale).backward()
    found = [p.grad.isfinite().all().item() for p in model.parameters()]
    if all(found):
        for p in model.parameters():
            p.grad /= scale
        optimizer.step()
    print(found, loss.item(), model.weight.sum().item())
