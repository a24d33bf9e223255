"""The logs of all daemons: `follower` reads them, `tail` is one file, `stamps` its times."""
