"""The sub-commands."""
