"""Intervals, timeouts and limits of the NVML source."""

# Intervals of readings: each depends on the cost of the call and on the rate of change

EACH = 0.0  # Interval of values that cost microseconds: read at each collection.
SLOW = 5.0
"""Interval in seconds of values that may change at any time, but cost 0.3 ms or more. These and
slower values are renewed between collections, so that no collection waits for them."""
MINUTE = 60.0  # Interval of settings and of counters of rare events, which cost about 1 ms.
HOUR = 3600.0  # Interval in seconds of values that only a repair or a new board changes.

# Work between collections

TICK_INTERVAL_SECONDS = 1.0
"""Interval of `NvmlSession.tick`.

GPM counts cycles: over 7 s with a changing clock rate the busier part weighs 6 % too much. PCIe
counters wrap every 70 ms; GPM's rate corrects an error below 2 GiB.
"""
MAX_TICK_AGE_SECONDS = 1.5
"""Maximum age of the last tick for a collection to use what the tick read. Sampling takes 3 to 4 ms
on an H200 (GPM 2, utilization 1.25), as much as all other readings together."""
MIN_SAMPLE_INTERVAL_SECONDS = 0.1
"""Minimum interval between two samples of a GPU's activity: the shortest that GPM supports, by
NVIDIA's documentation of DCGM."""
BUSY_SAMPLE_INTERVAL_SECONDS = 5.0
"""Interval at which ticks read the utilization samples: the driver retains those of 14 s."""
INSTANCE_SAMPLE_INTERVAL_SECONDS = 5.0
"""Interval at which ticks sample a MIG instance: a host may have dozens."""

# Recovery

REFUSED_RETRY_INTERVAL_SECONDS = 600.0
"""Interval at which a refused query is repeated if the refusal may be lifted."""
INIT_RETRY_INTERVAL_SECONDS = 10.0  # Interval between initializations while NVML is missing.
MIN_LOST_RETRY_SECONDS = 60.0
"""Delay after the loss of a GPU until NVML is initialized again; doubled after each attempt."""
MAX_LOST_RETRY_SECONDS = 600.0  # Maximum of that delay.
MIG_SCAN_INTERVAL_SECONDS = 10.0  # Interval between scans for new MIG instances.

# Xid events and control groups

EVENT_TIMEOUT_MILLISECONDS = 500
"""Timeout of one wait for Xid events; the thread can be stopped between two waits."""
EVENT_RETRY_SECONDS = 1.0  # Delay after a failed wait: for a lost GPU it fails at once.
EVENT_STOP_TIMEOUT_SECONDS = 3.0  # Timeout of the Xid thread before NVML is shut down.
MAX_CGROUPS = 128  # Control groups whose memory is read: one call for each group and GPU.
