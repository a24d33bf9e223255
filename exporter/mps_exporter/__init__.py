"""Prometheus exporter for NVIDIA MPS (Multi-Process Service)."""

__version__ = "0.1.0"
