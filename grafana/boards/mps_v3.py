"""MPS v3, and SM partitions of v2: named servers, namespaces, partitions, control groups."""

from grafana import style
from grafana.board import Board, Row, Variable, job
from grafana.boards import shared
from grafana.panels import Column, hidden, table

_NAMESPACE = "job, instance, daemon, server_name, namespace"
_PARTITION = "job, instance, daemon, server_name, gpu, uuid, partition"
_REST = 'label_replace(%s, "partition", "in no partition", "", "")'
_MEMBER = "job, instance, daemon, server, pid"
_DEVICE = "job, instance, daemon, server_name, gpu, uuid"
_CGROUP = "job, instance, cgroup, gpu, uuid"
_YES_NO = (("0", "no"), ("1", "yes"))
PANELS = (
    table(
        "Servers of MPS v3 daemons",
        "Healthy: Ready. Every named server; one without a PID is configured and has no process.",
        (
            "topk(500, max by (job, instance, daemon, server_name, status, server, uid,"
            " allowed_devices, context_ids, pipe_directory) (mps_named_server_info))",
        ),
        (
            Column("Server", "server_name"),
            Column("Status", "status", width=100),
            Column("PID", "server", width=80),
            Column("User", "uid", width=75, links=(shared.to_user("${__data.fields.User}"),)),
            Column("GPUs", "allowed_devices", width=200),
            Column("Contexts", "context_ids", width=90),
            Column("Pipe directory", "pipe_directory"),
            *hidden("A", "daemon", "instance", "job"),
        ),
        sort="Server",
        descending=False,
        none="None: MPS v3 has them (nvidia-cuda-mps-control -p 3).",
        found="mps_named_server_info",
        height=6,
    ),
    table(
        "Namespaces of MPS v3 servers",
        "For information: what each namespace allows each of its clients. An empty limit is none "
        "where the column Limited says no, else not known. A namespace without limits has the "
        "whole GPU.",
        (
            f"topk(500, max by ({_NAMESPACE}, status, pipe_directory) (mps_namespace_info))",
            f"topk(500, max by ({_NAMESPACE}) (mps_namespace_active_thread_ratio))",
            f'topk(500, max by ({_NAMESPACE}) (mps_namespace_limited{{limit="active_threads"}}))',
            f"topk(500, max by ({_NAMESPACE}) (mps_namespace_pinned_memory_limit_bytes))",
            f'topk(500, max by ({_NAMESPACE}) (mps_namespace_limited{{limit="pinned_memory"}}))',
            f"topk(500, max by ({_NAMESPACE}) (mps_namespace_client_priority))",
            f"topk(500, max by ({_NAMESPACE}) (mps_namespace_clients))",
        ),
        (
            Column("Server", "server_name"),
            Column("Namespace", "namespace", width=130),
            Column("Server status", "status", width=125),
            Column("Clients", "G", width=85),
            Column("SM share", "B", unit=style.SHARE, decimals=0, width=90),
            Column("SMs limited", "C", texts=_YES_NO, width=105),
            Column("Memory limit", "D", unit=style.BYTES, width=110),
            Column("Memory limited", "E", texts=_YES_NO, width=130),
            Column("Priority", "F", width=75),
            Column("Pipe directory", "pipe_directory"),
            *hidden("daemon", "A", "instance", "job"),
        ),
        sort="Clients",
        none="None: MPS v3 has them.",
        found="mps_namespace_info",
    ),
    table(
        "SM partitions",
        "For information: static SM partitions of v2 (-S) and v3 daemons. Clients is empty where "
        "the environment of a client cannot be read. In use is what a v2 daemon says.",
        (
            f"topk(500, max by ({_PARTITION}, partition_id, status, include_remainder)"
            " (mps_sm_partition_info)"
            f" or max by ({_PARTITION}) ({_REST % 'mps_sm_partition_unallocated_sms'}))",
            f"topk(500, max by ({_PARTITION}) (mps_sm_partition_sms)"
            f" or max by ({_PARTITION}) ({_REST % 'mps_sm_partition_unallocated_sms'}))",
            f"topk(500, max by ({_PARTITION}) (mps_sm_partition_chunks)"
            f" or max by ({_PARTITION}) ({_REST % 'mps_sm_partition_unallocated_chunks'}))",
            f"topk(500, max by ({_PARTITION}) (mps_sm_partition_clients))",
            f"topk(500, max by ({_PARTITION}) (mps_sm_partition_in_use))",
        ),
        (
            Column("Server", "server_name"),
            Column("GPU", "gpu", width=70),
            Column("Partition", "partition", width=180),
            Column("Status", "status", width=100),
            Column("SMs", "B", width=70),
            Column("Chunks", "C", width=75),
            Column("Remainder", "include_remainder", width=120),
            Column("Clients", "D", width=85),
            Column("In use", "E", texts=_YES_NO, width=75),
            Column("ID", "partition_id", width=140),
            *hidden("uuid", "daemon", "A", "instance", "job"),
        ),
        sort="SMs",
        none="No daemon has SM partitions.",
        found="mps_sm_partition_info or mps_sm_partition_unallocated_sms",
    ),
    table(
        "Clients in namespaces and partitions",
        "Healthy: an empty Fault. Who is in which namespace and SM partition. Fault: why a client "
        "cannot have been meant for its partition.",
        (
            f"topk(500, max by ({_MEMBER}, uid, command) (mps_client_info"
            f" and on ({_MEMBER}) (mps_client_namespace_info or mps_client_sm_partition_info)))",
            f"topk(500, max by ({_MEMBER}, server_name, namespace) (mps_client_namespace_info))",
            f"topk(500, max by ({_MEMBER}, partition, fault) (mps_client_sm_partition_info))",
            f"topk(500, max by ({_MEMBER}) (mps_client_active_thread_ratio"
            f" and on ({_MEMBER}) (mps_client_namespace_info or mps_client_sm_partition_info)))",
        ),
        (
            Column("User", "uid", width=75, links=(shared.to_user("${__data.fields.User}"),)),
            Column("Program", "command"),
            Column("PID", "pid", width=80),
            Column("Named server", "server_name", width=150),
            Column("Namespace", "namespace", width=180),
            Column("Partition", "partition", width=180),
            Column("Fault", "fault", width=110),
            Column("SM share", "D", unit=style.SHARE, decimals=0, width=90),
            Column("Server", "server", width=85),
            *hidden("A", "B", "C", "daemon", "instance", "job"),
        ),
        sort="PID",
        descending=False,
        none="No client is in a namespace or an SM partition.",
        found="mps_client_namespace_info or mps_client_sm_partition_info",
    ),
    table(
        "GPUs of MPS v3 servers",
        "For information: the GPUs as each named server numbers them, with all their SMs and "
        "chunks, the units in which the driver divides a GPU.",
        (
            f"topk(500, max by ({_DEVICE}, ordinal, pci_bus_id, name, attributes)"
            " (mps_server_device_info))",
            f"topk(500, max by ({_DEVICE}) (mps_server_device_sms))",
            f"topk(500, max by ({_DEVICE}) (mps_server_device_chunks))",
        ),
        (
            Column("Server", "server_name"),
            Column("GPU", "gpu", width=70),
            Column("Ordinal", "ordinal", width=85),
            Column("Name", "name", width=180),
            Column("SMs", "B", width=55),
            Column("Chunks", "C", width=70),
            Column("PCI", "pci_bus_id", width=110),
            Column("Attributes", "attributes", width=95),
            *hidden("uuid", "daemon", "A", "instance", "job"),
        ),
        sort="Server",
        descending=False,
        none="No daemon lists GPUs: v3 does.",
        found="mps_server_device_info",
        height=6,
    ),
    table(
        "GPU memory of control groups",
        "Healthy: used below the soft limit. Above it MPS may end a client of the group when "
        "others need the memory; at the hard limit allocations fail. A group whose column Limited "
        "says no may still be limited by one above it.",
        (
            f"topk(500, max by ({_CGROUP}, container_id, pod_uid, slurm_job_id, systemd_unit)"
            " (mps_cgroup_memory_used_bytes * on (job, instance, cgroup)"
            " group_left (container_id, pod_uid, slurm_job_id, systemd_unit) mps_cgroup_info))",
            f"topk(500, max by ({_CGROUP}) (mps_cgroup_memory_soft_limit_bytes))",
            f"topk(500, max by ({_CGROUP}) (mps_cgroup_memory_hard_limit_bytes))",
            f"topk(500, max by ({_CGROUP}) (mps_cgroup_memory_limited))",
            f"topk(500, max by ({_CGROUP}) (mps_cgroup_memory_used_bytes"
            " / mps_cgroup_memory_hard_limit_bytes))",
        ),
        (
            Column("Control group", "cgroup"),
            Column("GPU", "gpu", width=70),
            Column("Used", "A", unit=style.BYTES, width=95),
            Column("Soft limit", "B", unit=style.BYTES, width=100),
            Column("Hard limit", "C", unit=style.BYTES, width=100),
            Column("Limited", "D", texts=_YES_NO, width=80),
            Column("Limit used", "E", unit=style.SHARE, steps=shared.FULL, decimals=0, width=95),
            Column("Slurm job", "slurm_job_id", width=90),
            Column("Pod", "pod_uid", width=110),
            Column("Container", "container_id", width=110),
            Column("Unit", "systemd_unit", width=140),
            *hidden("uuid", "instance", "job"),
        ),
        sort="Used",
        none="No control group has GPU memory of its own: dmem, Linux 6.14 and driver 615.",
        found="mps_cgroup_info",
    ),
)

BOARD = Board(
    uid="mps-v3",
    name="v3 and partitions",
    description="Hosts with MPS v3 or SM partitions: servers, namespaces, partitions, memory.",
    variables=(
        job(),
        Variable(
            "instance",
            "Host",
            '{__name__=~"mps_named_server_info|mps_sm_partition_info", job=~"$job"}',
            everything=False,
            any_value=".+",
            several=False,
        ),
    ),
    rows=(Row("What does this host have?", PANELS),),
)
