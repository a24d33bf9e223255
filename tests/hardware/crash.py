"""A program whose framework crashes on the GPU: an index that is out of range, as in many a bug."""

import json
import os
import sys
import time

import torch

table = torch.nn.Embedding(10, 4).cuda()
torch.cuda.synchronize()
print(json.dumps({"event": "ready", "pid": os.getpid(), "uid": os.getuid()}), flush=True)
time.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else 5)
try:
    table(torch.tensor([99]).cuda())
    torch.cuda.synchronize()
except RuntimeError as error:
    words = str(error).splitlines()[0]
    print(json.dumps({"event": "error", "pid": os.getpid(), "where": words}), flush=True)
    sys.exit(1)
