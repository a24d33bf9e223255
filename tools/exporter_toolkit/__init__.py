"""Prometheus' own reader of web configuration files, to compare with."""
