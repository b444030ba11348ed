"""Ctrl-C in two strengths: the first ends training after the step in hand, the second ends it at once."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Within it, the first SIGINT calls `stop`, and the next raises KeyboardInterrupt as usual. Main thread only."""

    def first(signum, frame):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop()

    before = signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
