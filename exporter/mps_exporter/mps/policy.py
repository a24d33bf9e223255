"""Limits, intervals and timeouts of this package."""

# ---------------------------------------------------------------------------- replies of the tool

MAX_LIST_ROWS = 1024
"""Maximum number of rows that are read of one list of the control tool; more rows are counted."""

MAX_QUOTED_CHARACTERS = 200
"""Maximum length of a quotation of the control tool's output in a message."""
