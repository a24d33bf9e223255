"""The GPUs, through NVML.

``binding.py`` is the only importer of pynvml; everything else sees the Protocol of ``library.py``.
"""

from mps_exporter.sources.nvml.session import TICK_SECONDS, Clock, NvmlOptions, NvmlSession

__all__ = ["TICK_SECONDS", "Clock", "NvmlOptions", "NvmlSession"]
