"""One of two processes that train one model together, a GPU each: data_parallel.py RANK MEETING."""

import json
import os
import sys
import time

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

STEPS, WIDTH, BATCH = 300, 2048, 512

rank, meeting = int(sys.argv[1]), sys.argv[2]
torch.cuda.set_device(rank)
distributed.init_process_group("nccl", init_method=f"file://{meeting}", rank=rank, world_size=2)
model = DistributedDataParallel(
    torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)
    ).cuda(),
    device_ids=[rank],
)
optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.randn(BATCH, WIDTH, device="cuda")


def step() -> None:
    """Forward, backward, all-reduce, update."""
    optimiser.zero_grad(set_to_none=True)
    model(inputs).square().mean().backward()
    optimiser.step()


for _ in range(10):
    step()
torch.cuda.synchronize()
print(json.dumps({"event": "ready", "pid": os.getpid(), "uid": os.getuid()}), flush=True)
begin = time.monotonic()
for _ in range(STEPS):
    step()
torch.cuda.synchronize()
seconds = time.monotonic() - begin
print(json.dumps({"event": "done", "pid": os.getpid(), "seconds": round(seconds, 3)}), flush=True)
distributed.destroy_process_group()
