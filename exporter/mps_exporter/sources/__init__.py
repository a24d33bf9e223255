"""The sources of observations: one file for each source. Only this package reads the host."""
