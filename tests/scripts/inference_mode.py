"""Inference mode, other default dtypes, and threads that share a model."""

from concurrent.futures import ThreadPoolExecutor

import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 4).eval()
with torch.inference_mode():
    print(model(torch.ones(1, 4)).is_inference())
torch.set_default_dtype(torch.float64)
with torch.no_grad():
    print(torch.nn.Linear(2, 2).eval()(torch.ones(1, 2)).dtype)
    with ThreadPoolExecutor(2) as pool:
        inputs = [torch.full((1, 4), float(n), dtype=torch.float32) for n in range(6)]
        print([x.tolist() for x in pool.map(model, inputs)])
