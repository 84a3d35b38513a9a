"""Tests of signals: the first requests a stop, the second ends the process, and handlers are restored."""

from __future__ import annotations

import signal
import threading

import pytest

from minillm_core.plugins.attribution import SIGNALS
from minillm_core.train.signals import MASHED, StopRequest, stop_on_signals


@pytest.mark.parametrize("number", SIGNALS)
def test_first_and_second(number: signal.Signals) -> None:
    with stop_on_signals() as stop:
        assert not stop.requested
        signal.raise_signal(number)
        assert stop.requested
        assert stop.signal is number
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_handlers_are_put_back_even_after_an_error() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(RuntimeError), stop_on_signals():
        raise RuntimeError
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_on_signals() as stop:
            signal.raise_signal(signal.SIGINT)
            assert not stop.requested
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_installs_nothing() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def work() -> None:
        with stop_on_signals() as stop:
            seen.append((signal.getsignal(signal.SIGINT), stop.requested))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(before, False)]


def test_the_first_one_ends_where_nobody_is_patient() -> None:
    with stop_on_signals(patient=False) as stop:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        assert stop.signal is signal.SIGTERM
        assert not stop.hurried


def test_a_hand_on_the_key_does_not_disturb_the_end() -> None:
    now = [0.0]
    stop = StopRequest(clock=lambda: now[0])
    stop.receive(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        stop.receive(signal.SIGINT)
    assert stop.hurried
    stop.receive(signal.SIGINT)
    now[0] += MASHED  # code has caught the KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        stop.receive(signal.SIGINT)
