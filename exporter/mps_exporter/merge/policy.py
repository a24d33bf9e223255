"""Limits and intervals of this package."""

MAX_CLIENTS_PER_USER = 256
"""Maximum number of clients of one ordinary user's daemons that have metrics of their own."""

MAX_LIMITED_CLIENTS = 1024
"""Maximum number of such clients of all ordinary users together."""
