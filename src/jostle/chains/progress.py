"""How far the chains have come, or what else is being done: a bar on a terminal, a line a minute in a log."""

from __future__ import annotations

import contextlib
import contextvars
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from jostle.chains.observing import Observer

SECONDS_BETWEEN_LINES = 60.0
"""How often a log is told of progress."""


_part_of_more = contextvars.ContextVar("part_of_more", default=False)


@contextlib.contextmanager
def part_of_more() -> Iterator[None]:
    """What is sampled meanwhile is a part of something that has the last word itself."""
    token = _part_of_more.set(True)
    try:
        yield
    finally:
        _part_of_more.reset(token)


def say_at_the_end(line: Callable[[], str]) -> None:
    """Say a last word on what was sampled, where nobody else will; it is not made up otherwise."""
    if not _part_of_more.get():
        print(f"jostle: {line()}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Progress:
    """What a progress bar is told after every step."""

    steps_done: int
    mean_loss: float | None


def duration(seconds: float) -> str:
    """So long, in a unit that suits it."""
    for unit, size in (("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= (2 * size if size > 1 else 1):
            return f"{seconds / size:.3g} {unit}"
    return f"{1e3 * seconds:.3g} ms"


@contextlib.contextmanager
def telling(show: bool) -> Iterator[Callable[[str], None]]:
    """What is being done now, where nobody knows how long it takes: a line that changes; in a log, one a minute."""
    if not show:
        yield lambda what: None
        return
    from rich.console import Console

    console = Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter):
        last = time.monotonic()

        def tell(what: str) -> None:
            nonlocal last
            if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                print(f"jostle: {what}", file=sys.stderr, flush=True)

        yield tell
        return
    from rich.progress import Progress as RichProgress
    from rich.progress import TextColumn, TimeElapsedColumn

    columns = (TimeElapsedColumn(), TextColumn("gone"), TextColumn("{task.description}", markup=False))
    # What a program reads from stdout does not go through here.
    with RichProgress(*columns, console=console, transient=True, redirect_stdout=False) as line:
        task = line.add_task("")
        yield lambda what: line.update(task, description=what)


@contextlib.contextmanager
def progress_bar(show: bool, steps: int, observers: Mapping[str, Observer]) -> Iterator[Callable[[Progress], None]]:
    """A progress bar with the mean training loss, beside its value at w*; in a log, a line a minute."""
    if not show:
        yield lambda progress: None
        return
    from rich.console import Console

    console = Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter):
        yield _minutely(steps)
        return
    from rich.progress import (
        BarColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as RichProgress

    center = float(next(iter(observers.values())).center_losses.mean())
    columns = (
        BarColumn(10),  # all of it fits into 80 columns
        TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
        TimeElapsedColumn(),
        TextColumn("gone"),
        TimeRemainingColumn(),
        TextColumn("left"),
        TextColumn("{task.fields[loss]}"),
    )
    with RichProgress(*columns, console=console) as bar:
        task = bar.add_task("", total=steps, loss=f"loss {center:.4g} at w*")

        def report(progress: Progress) -> None:
            if progress.mean_loss is not None:
                bar.update(task, loss=f"loss {progress.mean_loss:.4g} ({center:.4g} at w*)")
            bar.update(task, completed=progress.steps_done)

        yield report


def _minutely(steps: int) -> Callable[[Progress], None]:
    """Say once a minute, on stderr, how far the chains have come."""
    began = last = time.monotonic()
    first: int | None = None

    def report(progress: Progress) -> None:
        nonlocal last, first
        now, first = time.monotonic(), progress.steps_done if first is None else first
        if now - last >= SECONDS_BETWEEN_LINES and progress.steps_done > first:
            last = now
            left = (steps - progress.steps_done) * (now - began) / (progress.steps_done - first)
            done = f"{progress.steps_done:,} of {steps:,} steps"
            print(f"jostle: {done}, about {duration(left)} left", file=sys.stderr, flush=True)

    return report
