"""GPU data from NVML. Only ``pynvml_api.py`` imports pynvml."""

from mps_exporter.sources.nvml.session import NvmlSession

__all__ = ["NvmlSession"]
