"""Spawned children, one with a model that cannot be repaired in silence."""

import multiprocessing
import sys

import torch


def paint(seed):
    torch.manual_seed(seed)
    module = torch.nn.Linear(4, 4).eval()
    with torch.no_grad():
        return module(torch.ones(4)).tolist(), sys.argv[1:]


if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        print(pool.map(paint, range(3)))
