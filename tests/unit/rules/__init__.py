"""Tests of prometheus/: the rules, their tests, runbooks and configuration, without any server."""
