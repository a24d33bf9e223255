"""The GPUs of a simulated host behind the exporter's reader of NVML, with replies from a seed."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mps_exporter.observations import GpuProcess, NvmlObservation
from mps_exporter.sources.nvml import NvmlSession
from mps_exporter.sources.nvml.pynvml_api import Code, Listed
from testing.fake_nvml import EPOCH, FakeDevice, FakeNvml, recorded
from testing.page import Page
from testing.world.model import World
from testing.world.obstacles import CODES, OFTEN, Obstacles
from testing.world.processes import SMS, Gpu

SCALES = {
    "_ratio": 1e-2,
    "_watts": 1e-3,
    "_joules_total": 1e-3,
    "_seconds_total": 1e-9,
    "_hertz": 1e6,
    "_nvlink_transmit_bytes_total": 1024,
    "_nvlink_receive_bytes_total": 1024,
}
"""NVML's unit in that of a metric, by the end of its name."""
OF_THE_MODEL = ("MigMode", "Persistence", "Capability", "Architecture", "Cores", "EventReasons")
NOT_NUMBERS = (*OF_THE_MODEL, "NumFans", "ComputeMode")
"""Parts of the names of functions whose replies differ from readings."""
FIELDS = (29, 30, 31, 38, 45, 52, 59, *range(74, 83), 94, 142, 143, 144, 145, 160, 169)
FIELDS += (*range(173, 184), *range(269, 272))
OF_ALL_LINKS = (138, 139)
SHOWN = {"Utilization": (0,), "UtilizationRates": (0, 1), "BAR1": (0, 2), "Constraints": (0, 1)}
"""The places in a reply that are readings; of other lists the first."""
MODELS = (((9, 0), 9, 128), ((8, 0), 7, 64), ((7, 0), 5, 64), ((12, 0), 10, 128))
"""Compute capability, NVML's number of the architecture, cores of an SM."""
MODES = ("default", "exclusive_thread", "prohibited", "exclusive_process")
GPM = dict(
    zip(
        (1, 2, 3, 4, 5, 10, 11, 12, 13),
        ("graphics", "sm", "sm_occupancy", "integer", "tensor", "dram", "fp64", "fp32", "fp16"),
        strict=True,
    )
)
COUNTED = ("graphics", "sm", "tensor", "dram")
TRAFFIC = {20: "transmit", 21: "receive"}
LISTS = {"Compute": "compute", "MPSCompute": "mps", "Graphics": "graphics"}
SINCE_THE_BOOT = 1000.0  # The driver's buffer of samples is full.
SHARE_WITH_MIG = 0.2
INSTANCES = ("MIG-00000000-aaaa", "MIG-00000001-bbbb")
MEMORY = {"total": 17 << 30, "free": 12 << 30, "reserved": 0}
LAG_SECONDS = 0.5  # The driver samples every 0.2 s.


Model = tuple[tuple[int, int], int, int]


def model_of(world: World, uuid: str) -> Model:
    return world.random(uuid, "model").choice(MODELS)


def mode_of(world: World, uuid: str) -> str:
    return world.random(uuid, "mode").choice(("default", "default", "prohibited", MODES[3]))


def sms_of(model: Model, ratio: float) -> int | None:
    """Return the SMs of a share; None where the rounding was never measured."""
    if ratio == 1.0:
        return SMS
    return max(8, int(ratio * SMS / 2 + 1e-9) * 2) if model[0] == (9, 0) else None


class Gpus:
    """The driver's readings of a host's GPUs, and the exporter's session with NVML."""

    def __init__(self, world: World, clock: Callable[[], float], obstacles: Obstacles) -> None:
        self._world, self._clock, self._obstacles = world, clock, obstacles
        self._library = library = FakeNvml()
        self._numbers: dict[str, set[int]] = {}
        """UUID -> the different numbers that the driver replies."""
        self._stepped_ms, self._since = 0, 0.0
        self._session = NvmlSession(
            library,
            driver_directory="/nonexistent",
            now=lambda: world.now_ms / 1000,
            clock=lambda: library.now,
        )

    def read(self, listed: Callable[[int], Sequence[GpuProcess]]) -> NvmlObservation:
        """Return what the exporter reads now, with these processes on the GPU of an index."""
        library, world = self._library, self._world
        library.now = self._clock() + SINCE_THE_BOOT
        if not library.gpus:
            library.gpus = list(map(self._device, world.gpus))
            if world.random("mig", "mode").random() < SHARE_WITH_MIG:
                library.gpus.append(self._divided())
            self._since = library.now
            library.clock_steps.append((-1.0, world.now_ms / 1000 - library.now - EPOCH))
            self._stepped_ms = world.stepped_ms
        if step_ms := world.stepped_ms - self._stepped_ms:
            library.clock_steps.append((library.now, step_ms / 1000))
            self._stepped_ms = world.stepped_ms
        for gpu, device in zip(world.gpus, library.gpus, strict=False):
            device.gone = Code.GPU_IS_LOST if gpu.uuid in world.lost_gpus else None
            found = listed(gpu.index)
            for name, kind in LISTS.items():
                device.processes[name] = {
                    one.pid: one.used_memory_bytes for one in found if one.kind == kind
                }
        library.failing.clear()
        if (random := self._obstacles.random(OFTEN)) is not None:
            library.fail(random.choice(sorted(library.calls) or [""]), random.choice(CODES))
        return self._session.observe()

    def _device(self, gpu: Gpu) -> FakeDevice:
        random = self._world.random(gpu.uuid, "replies")
        numbers = iter(random.sample(range(10_000, 100_000), 300))
        percents = iter(random.sample(range(2, 100), 20))
        given = self._numbers[gpu.uuid] = set[int]()

        def number(name: str, place: int = 0) -> int:
            value = next(percents if "Utilization" in name else numbers)
            shown = [places for part, places in SHOWN.items() if part in name]
            if place in (shown[-1] if shown else (0,)):
                given.add(value)
            return value

        replies: dict[str, Any] = dict(recorded())
        for name, reply in recorded().items():
            if name.startswith("nvml") and not any(one in name for one in NOT_NUMBERS):
                if isinstance(reply, int):
                    replies[name] = number(name)
                elif isinstance(reply, list):
                    replies[name] = [number(name, place) for place, _ in enumerate(reply)]
        fields = [*((one, 0) for one in FIELDS), *((one, 0xFFFFFFFF) for one in OF_ALL_LINKS)]
        replies["fields"] = {
            f"{one}:{scope}": {"code": 0, "value": number("")} for one, scope in fields
        }
        capability, architecture, cores = model_of(self._world, gpu.uuid)
        replies |= {
            "nvmlDeviceGetCudaComputeCapability()": list(capability),
            "nvmlDeviceGetArchitecture()": architecture,
            "nvmlDeviceGetNumGpuCores()": cores * SMS,
            "nvmlDeviceGetComputeMode()": MODES.index(mode_of(self._world, gpu.uuid)),
            "nvmlDeviceGetPciInfo()": f"0000{gpu.pci}.0",
        }
        share = random.random()
        metrics = {one: random.uniform(1, 100) for one in (*GPM, *TRAFFIC)}
        return FakeDevice(gpu.uuid, replies, lambda now: now * share, metrics)

    def _divided(self) -> FakeDevice:
        """Return a GPU without a daemon, in two MIG instances."""
        reply = {**recorded(), "nvmlDeviceGetMigMode()": [1, 1]}
        instances = {}
        for slot, uuid in enumerate(INSTANCES):
            ids = {"nvmlDeviceGetGpuInstanceId()": slot + 7, "nvmlDeviceGetComputeInstanceId()": 0}
            replies = {**recorded(), **ids, "memory()": {**MEMORY, "used": 5 << 30}}
            instances[slot] = FakeDevice(
                uuid, replies, lambda now: now / 4, dict.fromkeys(GPM, 50.0)
            )
            instances[slot].processes = {"Compute": {70 + slot: 1 << 20}}
        reply["nvmlDeviceGetMaxMigDeviceCount()"] = 7
        listed: dict[str, Listed] = {"Compute": {70 + slot: 1 << 20 for slot in instances}}
        return FakeDevice("GPU-divided", reply, processes=listed, instances=instances)

    def differences(self, page: Page) -> Iterator[str]:
        """Yield the replies that are not on the page, and the readings that are wrong."""
        gpus = self._library.gpus[: len(self._world.gpus)]
        divided = [one.uuid for one in self._library.gpus if one not in gpus]
        for uuid in (*divided, *(INSTANCES if divided else ())):
            used = page.value("mps_gpu_memory_used_bytes", uuid=uuid)
            own = page.value("mps_gpu_processes", uuid=uuid, kind="direct")
            if page.value("mps_gpu_info", uuid=uuid) != 1 or (own or 0) != (uuid in INSTANCES):
                yield f"{uuid} is not shown, or not with its process"
            if uuid in INSTANCES and (
                used != 5 << 30 or page.value("mps_gpu_power_watts", uuid=uuid)
            ):
                yield f"{uuid} uses {used} bytes, or has the power of the whole GPU"
        for device in gpus:
            if page.value("mps_gpu_up", uuid=device.uuid):
                yield from self._of_device(device, page)
            elif page.value("mps_gpu_up", uuid=device.uuid) is None:
                yield f"{device.uuid} is not shown"

    def _of_device(self, device: FakeDevice, page: Page) -> Iterator[str]:
        if device.uuid in self._world.lost_gpus:
            yield f"{device.uuid} is lost, and not shown so"
            return
        shown = set[int]()
        for name, samples in page.items():
            scale = next((one for end, one in SCALES.items() if name.endswith(end)), 1.0)
            here = (one.value / scale for one in samples if one.labels.get("uuid") == device.uuid)
            shown |= {round(value) for value in here if value < 1e12}
        if missing := self._numbers[device.uuid] - shown:
            yield f"no metric of {device.uuid} is {missing}"
        for name, true, slack in self._of_time(device, page):
            seen = page.value(name, uuid=device.uuid)
            if seen is not None and abs(seen - true) > slack:
                yield f"{name} of {device.uuid} is {seen}, not {true}"

    def _of_time(self, device: FakeDevice, page: Page) -> Iterator[tuple[str, float, float]]:
        """Yield metric, value, and greatest error of what the exporter computes from samples."""
        busy, active = (
            self._library.now
            - self._since
            - (page.value("mps_gpu_unobserved_seconds_total", uuid=device.uuid, counter=one) or 0.0)
            for one in ("busy", "active")
        )
        share = device.busy(1.0)
        yield "mps_gpu_busy_seconds_total", share * busy, 2.0 + abs(self._stepped_ms)
        for metric, name in GPM.items():
            ratio = device.metrics[metric] / 100 * share
            kind = name if name == "sm_occupancy" else f"{name}_active"
            yield f"mps_gpu_{kind}_ratio", ratio, 1e-6
            if name in COUNTED:
                yield f"mps_gpu_{name}_active_seconds_total", ratio * active, LAG_SECONDS
        for metric, name in TRAFFIC.items():
            rate = device.metrics[metric] * share * 2**20
            yield f"mps_gpu_pcie_{name}_bytes_total", rate * active, rate * LAG_SECONDS
