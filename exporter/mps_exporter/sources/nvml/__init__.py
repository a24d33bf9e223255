"""GPU data from NVML. Only ``pynvml_api.py`` imports pynvml."""

from mps_exporter.sources.nvml.session import Clock, NvmlOptions, NvmlSession

__all__ = ["Clock", "NvmlOptions", "NvmlSession"]
