"""A PyTorch program that ends with work queued: torch_leave.py MODE SECONDS.

MODE: matmul (large products on one stream), streams (on four).
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


mode, length = sys.argv[1], float(sys.argv[2])
try:
    matrix = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    say("init")
    wanted = 4 if mode == "streams" else 1
    queue_products(matrix, [torch.cuda.Stream() for _ in range(wanted)])
    say("queued")
    time.sleep(length)
except RuntimeError as error:
    say(f"CUDA error: {str(error).splitlines()[0]}")
    os._exit(10)
