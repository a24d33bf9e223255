"""The GPUs, through NVML.

``binding.py`` is the only importer of pynvml; everything else sees the Protocol of ``library.py``.
"""

from exporter.sources.nvml.source import TICK_SECONDS, Clock, Nvml, NvmlOptions

__all__ = ["TICK_SECONDS", "Clock", "Nvml", "NvmlOptions"]
