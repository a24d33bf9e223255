"""A PyTorch program that ends with work queued: torch_leave.py MODE SECONDS.

MODE: matmul (large products on one stream), streams (on four), graph (as a CUDA graph), train (a
small training loop, whose kernels take microseconds).
"""

import os
import sys
import time

import torch


def say(word: str) -> None:
    """Print how far it is."""
    print(f"[{os.getpid()}] t={time.time():.3f} {word}", flush=True)


def queue_products(square: torch.Tensor, streams: list[torch.cuda.Stream]) -> None:
    """Queue 400 products of 8192 x 8192 matrices, about 20 ms each."""
    results = [torch.empty_like(square) for _ in streams]
    torch.cuda.synchronize()
    for number in range(400):
        with torch.cuda.stream(streams[number % len(streams)]):
            torch.matmul(square, square, out=results[number % len(streams)])


def queue_graph(square: torch.Tensor) -> None:
    """Queue 40 replays of a graph of 50 such products."""
    result = torch.empty_like(square)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.matmul(square, square, out=result)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(50):
            torch.matmul(square, square, out=result)
    for _ in range(40):
        graph.replay()


def train(seconds: float) -> None:
    """Train a small perceptron."""
    layers = (torch.nn.Linear(784, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    model = torch.nn.Sequential(*layers).cuda()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(64, 784, device="cuda")
    labels = torch.randint(0, 10, (64,), device="cuda")
    say("queued")
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimiser.step()


mode, length = sys.argv[1], float(sys.argv[2])
try:
    matrix = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    say("init")
    if mode == "train":
        train(length)
    else:
        if mode == "graph":
            queue_graph(matrix)
        else:
            wanted = 4 if mode == "streams" else 1
            queue_products(matrix, [torch.cuda.Stream() for _ in range(wanted)])
        say("queued")
        time.sleep(length)
except RuntimeError as error:
    say(f"CUDA error: {str(error).splitlines()[0]}")
    os._exit(10)
