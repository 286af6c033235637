"""Ctrl-C and SIGTERM: a request to stop between two steps."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from jostle.ranks import BEAT_SECONDS, Ranks


@contextlib.contextmanager
def interruptible(ranks: Ranks) -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C or SIGTERM into a request to stop between two steps; a second one stops at once.

    The loss of another rank is such a request, too.
    """
    asked = threading.Event()
    ranks.interrupted = asked.is_set
    if threading.current_thread() is not threading.main_thread():
        yield lambda: ranks.lost
        return

    def ask(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked.is_set() or ranks.lost
    except KeyboardInterrupt:
        if not asked.is_set():  # but another rank of the crew was, or knows of one that is lost
            ranks.raise_if_lost(within=3 * BEAT_SECONDS)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def stopped_at_once() -> Iterator[None]:
    """Meanwhile the first one stops at once: for what takes minutes, has no steps, and leaves nothing half done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
