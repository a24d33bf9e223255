"""A CUDA client that makes a context, takes memory and then never calls CUDA again."""

import ctypes
import json
import os
import sys
import time

cuda = ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: object) -> None:
    """Call the driver, or end with what it said."""
    status = getattr(cuda, name)(*arguments)
    if status:
        print(json.dumps({"event": "error", "pid": os.getpid(), "where": name, "code": status}))
        sys.exit(10)


context = ctypes.c_void_p()
memory = ctypes.c_uint64()
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(256 << 20))
print(json.dumps({"event": "ready", "pid": os.getpid(), "uid": os.getuid()}), flush=True)
time.sleep(float(sys.argv[1]))
os._exit(0)
