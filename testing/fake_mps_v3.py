"""Published output of the control tool of driver 615 for an MPS v3 daemon.

None of this was run here. Each text has its source: "docs" are examples of NVIDIA's manual, release
615 (https://docs.nvidia.com/deploy/mps/); "capture" is the output of a real daemon in a test or a
guide of another project. "columns": only the default table of the list is published; the CSV has
the column names of the manual.
"""

# docs, mpsv3-interface: server list --format=csv,noheader
SERVER_DOCS = "training,1000,48201,Ready,/run/nvidia-mps/training,GPU-abcd-1234,-"

# columns: docs, mpsv3-interface, "Output columns" of server list
SERVER_HEADER = "name,uid,pid,status,pipe-directory,allowed-devices,context-ids"

# capture, driver 615, kai-scheduler/gpu-fractioning, mpsd/internal/mpsctl/control_test.go:
# client list --format=csv,noheader
CLIENTS_CAPTURE = """\
3167082,srv,GPU-cc97390c-c189-71f5-1bb7-5b0af481fa0d,srv/default (0),VLLM::EngineCore
3165259,srv,GPU-cc97390c-c189-71f5-1bb7-5b0af481fa0d,srv/default (0),VLLM::EngineCore
"""

# capture, the same test: client list, whose table cuts the PIDs
CLIENTS_TABLE = """\
PID     SERVER        DEVICE                                         MAWS NS                   CMD
316...  srv           GPU-cc97390c-c189-71f5-1bb7-5b0af481fa0d       srv/default (0)           \
VLLM::EngineCore
316...  srv           GPU-cc97390c-c189-71f5-1bb7-5b0af481fa0d       srv/default (0)           \
VLLM::EngineCore
"""

# columns: the header of that table, with commas
CLIENT_HEADER = "PID,SERVER,DEVICE,MAWS NS,CMD"

# docs, mpsv3-interface: client list --server=training --format=csv,noheader
CLIENTS_DOCS = """\
51023,training,0,default,python train.py
51087,training,0,high_priority,python eval.py
"""

# capture, driver 615.71.09, ai-dynamo/dynamo, "Per-GPU Compute and Memory Limits with MPS":
# table of namespace list --server=shared, here with commas
NAMESPACES_CSV = """\
NAME,SERVER,SERVER STATUS,PINNED MEMORY LIMIT,ACTIVE THREAD PERCENTAGE
small,shared,Ready,20G,30.00
large,shared,Ready,56G,70.00
default,shared,Ready,10G,50.00
"""

# columns: docs, mpsv3-interface, "Output columns" of namespace list
NAMESPACE_HEADER = (
    "name,server,server-status,pinned-memory-limit,active-thread-percentage,client-priority,"
    "pipe-directory"
)

# docs, mpsv3-interface: sm-partition list --server=training --all
PARTITIONS_TABLE = """\
SERVER DEVICE NAME CHUNKS SM-COUNT INCLUDE-REMAINDER STATUS VISIBLE-UUID
training GPU-74d43ed3-cdf7-e667-3644-bf5b4f46ed65 large 4 34 false created \
Kp8AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA
training GPU-74d43ed3-cdf7-e667-3644-bf5b4f46ed65 - 1 8 - unallocated -
"""

# docs, common-tasks: sm-partition list --server=training --all, with shortened UUIDs
PARTITIONS_TABLE_SHORT = """\
SERVER DEVICE NAME CHUNKS SM-COUNT INCLUDE-REMAINDER STATUS VISIBLE-UUID
training GPU-74d43ed3 large 5 40 false created Kp8AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA
training GPU-74d43ed3 medium 3 24 false created Jn6AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA
training GPU-74d43ed3 small 2 28 false created Hm2AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA
"""

# docs, mpsv3-interface: feature describe
FEATURES_CSV = """\
FEATURE,STATE,MODULE,COVERS
memacct,enabled (default),memacct,-
context-share,enabled (default),context-share,-
"""

# docs, mpsv3-interface: audit_log is the only key, and is off by default; no output is published
ACCOUNTING_CSV = "KEY,VALUE\naudit_log,false\n"

# columns: docs, mpsv3-interface, "Output columns" of device list; no example is published
DEVICE_HEADER = "Ordinal,Server,PCI ID,Device UUID,Name,Total SMs,Total Chunks,Attributes"

# docs, common-tasks: lspart of a v2 daemon with -S; the page has lost the columns' blanks
LSPART_DOCS = """\
GPU Partition free used free used clients
chunk chunk SM SM
GPU-74d43ed3 - 0 10 0 80 -
GPU-74d43ed3 Dx4AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA - 5 - 40 Yes
GPU-74d43ed3 Cx4AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA - 3 - 24 Yes
GPU-74d43ed3 Bx4AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA - 2 - 28 Yes
"""

# capture, sgl-project/sglang-omni, tests/unit_test/mps (works with a real daemon): empty cells are
# blank, and a partition's identifier has slashes
LSPART_CAPTURE = """\
GPU Partition free used free used clients
chunks chunks SM SM
GPU-aa 5 10 52 80
GPU-aa D/79e/DgwYMDAAAAAAAAAAAAAAAAAAAAAAAAAA 10 80 Yes
"""


DMEM_GPU = "00000000:02:00.0"
# docs, mpsv3-memory-partitioning: the example of nvidia-smi memory-limits --get; with the dmem
# controller they are dmem.current, dmem.min and dmem.max of the group
DMEM_USED, DMEM_SOFT_LIMIT, DMEM_HARD_LIMIT = 512 << 20, 4096 << 20, 8192 << 20


def csv_of(table: str) -> str:
    """Return a table of the manual, whose cells do not contain blanks, as CSV."""
    return "".join(",".join(line.split()) + "\n" for line in table.splitlines())


MANUAL = {
    "server list --format=csv": f"{SERVER_HEADER}\n{SERVER_DOCS}\n",
    "namespace list --format=csv": (
        f"{NAMESPACE_HEADER}\n"
        "default,training,Ready,8G,unlimited,0,/run/nvidia-mps/training/default\n"
        "high_priority,training,Ready,4G,50.00,0,/run/nvidia-mps/training/high_priority\n"
    ),
    "client list --all --format=csv": "PID,SERVER,DEVICE,MAWS NS,CMD\n" + CLIENTS_DOCS,
    "sm-partition list --all --format=csv": csv_of(PARTITIONS_TABLE),
    "device list --format=csv": (
        f"{DEVICE_HEADER}\n"
        "0,training,0000:02:00.0,GPU-74d43ed3-cdf7-e667-3644-bf5b4f46ed65,NVIDIA RTX PRO 6000,"
        "188,23,-\n"
    ),
    "feature describe --format=csv": FEATURES_CSV,
    "memacct describe --format=csv": ACCOUNTING_CSV,
}
"""Replies of a synthetic host with the manual's examples: its server "training"."""

CAPTURED = {
    **MANUAL,
    # Only the names of the captures' servers are published.
    "server list --format=csv": (
        f"{SERVER_HEADER}\n"
        "srv,1000,48201,Ready,/run/nvidia-mps/srv,GPU-cc97390c-c189-71f5-1bb7-5b0af481fa0d,-\n"
        "shared,1001,48202,Ready,/run/nvidia-mps/shared,-,3 4\n"
    ),
    "namespace list --format=csv": NAMESPACES_CSV,
    "client list --all --format=csv": f"{CLIENT_HEADER}\n{CLIENTS_CAPTURE}",
    "sm-partition list --all --format=csv": csv_of(PARTITIONS_TABLE_SHORT),
}
"""Replies of a synthetic host with the captures."""
