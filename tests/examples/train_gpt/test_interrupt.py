"""The first SIGINT asks, the second insists, and afterwards all is as before."""

import signal

import pytest

from cute_fa.examples.train_gpt.interrupt import on_interrupt


@pytest.fixture
def earlier_handler():
    def handler(signum, frame):
        pass

    before = signal.signal(signal.SIGINT, handler)
    yield handler
    signal.signal(signal.SIGINT, before)


def test_first_asks_second_insists(earlier_handler):
    calls = []
    with pytest.raises(KeyboardInterrupt):
        with on_interrupt(lambda: calls.append("stop")):
            signal.raise_signal(signal.SIGINT)
            assert calls == ["stop"], "the first calls stop and raises nothing"
            signal.raise_signal(signal.SIGINT)
    assert calls == ["stop"], "the second does not call it again"
    assert signal.getsignal(signal.SIGINT) is earlier_handler, "the handler is put back"
