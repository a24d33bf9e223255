"""A small training loop, as many researchers run by the dozen: a perceptron, batches of 64."""

import json
import os
import sys
import time

import torch

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 4000

device = torch.device("cuda")
model = torch.nn.Sequential(
    torch.nn.Linear(784, 512),
    torch.nn.ReLU(),
    torch.nn.Linear(512, 512),
    torch.nn.ReLU(),
    torch.nn.Linear(512, 10),
).to(device)
optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.randn(64, 784, device=device)
labels = torch.randint(0, 10, (64,), device=device)
torch.cuda.synchronize()
print(json.dumps({"event": "ready", "pid": os.getpid(), "uid": os.getuid()}), flush=True)
begin = time.monotonic()
for _ in range(STEPS):
    optimiser.zero_grad(set_to_none=True)
    torch.nn.functional.cross_entropy(model(inputs), labels).backward()
    optimiser.step()
torch.cuda.synchronize()
seconds = time.monotonic() - begin
print(json.dumps({"event": "done", "pid": os.getpid(), "seconds": round(seconds, 3)}), flush=True)
