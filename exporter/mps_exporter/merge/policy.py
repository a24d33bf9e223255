"""Limits and intervals of the merge."""

MAX_CLIENTS_PER_USER = 256
"""Maximum number of clients with metrics, of the daemons of one ordinary user."""

MAX_USERS_CLIENTS = 1024  # Maximum number of such clients of all ordinary users together.

STRANDED_SECONDS = 1.0
"""Minimum time without a server after which a client is stranded. A client that exits leaves NVML's
list within this time after it left its server."""
