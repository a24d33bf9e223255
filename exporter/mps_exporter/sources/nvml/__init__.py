"""The GPUs, through NVML.

``pynvml_api.py`` is the only importer of pynvml.
"""

from mps_exporter.sources.nvml.session import TICK_SECONDS, Clock, NvmlOptions, NvmlSession

__all__ = ["TICK_SECONDS", "Clock", "NvmlOptions", "NvmlSession"]
