"""Limits, intervals and timeouts of this package."""

# ---------------------------------------------------------------------------- replies of the tool

MAX_LIST_ROWS = 1024
"""Maximum number of rows that are read of one list of the control tool; more rows are counted."""

MAX_QUOTED_CHARACTERS = 200
"""Maximum length of a quotation of the control tool's output in a message."""

MIN_QUERY_AGE_SECONDS = 1.0
"""Minimum age of a server that is queried: the log lines of its start may not have been read."""

RETRY_INTERVAL_SECONDS = 60.0
"""Minimum interval after a reply that explained nothing; doubles each time."""

LOG_PRECEDENCE_SECONDS = 2.0
"""Time before a query whose events are left to the log."""

CONTRADICTION_CONFIRM_SECONDS = 10.0
"""Minimum time between two replies that contradict the log and so prove that it lost a line."""
