"""The commands: ``serve`` and ``demo``, ``doctor``, ``top``, ``record``."""

import asyncio
import signal
from collections.abc import Callable


def on_signals(action: Callable[[], object], *signals: signal.Signals) -> None:
    """Call ``action`` in the running event loop when one of the signals is received."""
    for received in signals:
        # Leave SIGHUP ignored if it is: nohup(1) did that on purpose. An ignored SIGINT is handled
        # all the same: a shell ignores it in background jobs only for Ctrl-C in the foreground.
        if received is signal.SIGHUP and signal.getsignal(received) is signal.SIG_IGN:
            continue
        asyncio.get_running_loop().add_signal_handler(received, action)
