"""A CUDA client that makes a context, takes memory and then never calls CUDA again.

sleeper.py SECONDS [stay]: with "stay" it does not end when a call fails.
"""

import ctypes
import json
import os
import sys
import time

cuda = ctypes.CDLL("libcuda.so.1")


def say(event: str, **more: object) -> None:
    """Print an event as client.cu does."""
    words = {"event": event, "pid": os.getpid(), "uid": os.getuid(), **more}
    print(json.dumps(words), flush=True)


def call(name: str, *arguments: object) -> None:
    """Call the driver, or end with what it said."""
    status = getattr(cuda, name)(*arguments)
    if status:
        say("error", where=name, code=status)
        if sys.argv[2:] == ["stay"]:
            time.sleep(float(sys.argv[1]))
        os._exit(10)


context = ctypes.c_void_p()
memory = ctypes.c_uint64()
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(256 << 20))
say("ready")
time.sleep(float(sys.argv[1]))
os._exit(0)
