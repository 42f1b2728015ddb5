"""Train in fp32 with an optimizer and a schedule, evaluating in between."""

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
for _ in range(4):
    loss = (model(torch.randn(8, 4)) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    model.eval()
    with torch.no_grad():
        print(loss.item().hex(), model(torch.ones(1, 4)).item().hex())
    model.train()
