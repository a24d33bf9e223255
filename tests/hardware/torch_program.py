"""What people run with PyTorch: torch_program.py FUNCTION ARGUMENT...

Like client.cu it prints its events as JSON, and leave() prints the words of leave.cu.
"""

import itertools
import json
import os
import sys
import time
from collections.abc import Callable

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel


def say(event: str, **more: object) -> None:
    print(json.dumps({"event": event, "pid": os.getpid(), "uid": os.getuid(), **more}), flush=True)


def perceptron(*widths: int) -> torch.nn.Sequential:
    layers: list[torch.nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1]).cuda()


def repeat(step: Callable[[], None], steps: int) -> None:
    """Take steps, and say how long they took."""
    torch.cuda.synchronize()
    say("ready")
    begin = time.monotonic()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    say("done", seconds=round(time.monotonic() - begin, 3))


def train(steps: str) -> None:
    """A small training loop, as many researchers run by the dozen: batches of 64."""
    model = perceptron(784, 512, 512, 10)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(64, 784, device="cuda")
    labels = torch.randint(0, 10, (64,), device="cuda")

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimiser.step()

    repeat(step, int(steps))


def parallel(rank: str, meeting: str) -> None:
    """One of two processes that train one model together, a GPU each."""
    torch.cuda.set_device(int(rank))
    distributed.init_process_group(
        "nccl", init_method=f"file://{meeting}", rank=int(rank), world_size=2
    )
    model = DistributedDataParallel(perceptron(2048, 2048, 2048), device_ids=[int(rank)])
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(512, 2048, device="cuda")

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        model(inputs).square().mean().backward()
        optimiser.step()

    for _ in range(10):
        step()
    repeat(step, 300)
    distributed.destroy_process_group()


def crash(seconds: str) -> None:
    """A framework that crashes on the GPU: an index that is out of range, as in many a bug."""
    table = torch.nn.Embedding(10, 4).cuda()
    torch.cuda.synchronize()
    say("ready")
    time.sleep(float(seconds))
    try:
        table(torch.tensor([99]).cuda())
        torch.cuda.synchronize()
    except RuntimeError as error:
        say("error", where=str(error).splitlines()[0])
        sys.exit(1)


def leave(mode: str, seconds: str) -> None:
    """End with work queued: 400 products of 8192 x 8192, 20 ms each, on one stream or on four."""
    square = torch.randn(8192, 8192, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(4 if mode == "streams" else 1)]
    results = [torch.empty_like(square) for _ in streams]
    torch.cuda.synchronize()
    print(f"[{os.getpid()}] t={time.time():.3f} init", flush=True)
    for number in range(400):
        with torch.cuda.stream(streams[number % len(streams)]):
            torch.matmul(square, square, out=results[number % len(streams)])
    print(f"[{os.getpid()}] t={time.time():.3f} queued", flush=True)
    time.sleep(float(seconds))


ACTS: dict[str, Callable[..., None]] = {
    "train": train,
    "parallel": parallel,
    "crash": crash,
    "leave": leave,
}
ACTS[sys.argv[1]](*sys.argv[2:])
