"""What checkpoints and checksums cost of a run's time.

    python -m benchmarks.checkpoints --record benchmarks/records/checkpoints.json

The time of every checkpoint, of seeing that the chunks before it are on the disk (fsync), and of every checksum of a
chunk of a trace or of a checkpoint, is taken inside of a run, and compared to the time of the run. Processor time,
since others may use the machine; what waits for the disk is in the wall-clock time beside it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import google_crc32c
import torch
from torch import nn

import jostle
from benchmarks.environment import write_record
from jostle.chains.checkpoints import Checkpoints
from jostle.traces.store import Traces


class Stopwatch:
    """Adds up the time of all calls of a function."""

    def __init__(self, function: Any) -> None:
        self._function, self.calls, self.cpu, self.wall = function, 0, 0.0, 0.0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        cpu, wall = time.thread_time(), time.perf_counter()
        try:
            return self._function(*arguments, **options)
        finally:
            self.calls += 1
            self.cpu += time.thread_time() - cpu
            self.wall += time.perf_counter() - wall


def measure(*, hidden: int, examples: int, draws: int, checkpoint_seconds: float) -> dict[str, Any]:
    """Run a classifier and take the time of what keeps it safe."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    X, y = torch.randn(examples, 64), torch.arange(examples) % 10
    save, sync, value = Checkpoints.save, Traces.sync, google_crc32c.value
    saving, syncing, summing = Stopwatch(save), Stopwatch(sync), Stopwatch(value)
    Checkpoints.save = lambda *arguments: saving(*arguments)  # type: ignore[method-assign]
    Traces.sync = lambda *arguments: syncing(*arguments)  # type: ignore[method-assign]
    google_crc32c.value = summing
    place = Path(tempfile.mkdtemp())
    try:
        cpu = time.process_time()
        run = jostle.attribute(
            model, (X, y), (X[:100], y[:100]), chains=2, draws=draws, thin=10, batch_size=256,
            posterior=jostle.Posterior(n_beta=100, localization=1000), sampler=jostle.SGNHT(step_size=1e-4),
            out=place / "run", chains_at_once=1, checkpoint_seconds=checkpoint_seconds, progress=False,
        )  # fmt: skip
        cpu = time.process_time() - cpu
        seconds = run.manifest["seconds"]["sampling"]
        state = sum(path.stat().st_size for path in (place / "run" / "state").iterdir())
        traces = sum(path.stat().st_size for path in (place / "run" / "traces.zarr").rglob("*") if path.is_file())
    finally:
        Checkpoints.save, Traces.sync, google_crc32c.value = save, sync, value  # type: ignore[method-assign]
        shutil.rmtree(place)
    return {
        "moving weights": run.manifest["moving_weights"],
        "checkpoint_seconds": checkpoint_seconds,
        "sampling seconds": round(seconds, 2),
        "checkpoints": saving.calls,
        "checkpoints, share of processor time": round(saving.cpu / cpu, 5),
        "checkpoints, share of wall-clock time": round(saving.wall / seconds, 5),
        "chunks on the disk, share of wall-clock time": round(syncing.wall / seconds, 5),
        "checksums, share of processor time": round(summing.cpu / cpu, 5),
        "bytes of state that are kept": state,
        "bytes of traces": traces,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = [
        measure(hidden=hidden, examples=2000, draws=draws, checkpoint_seconds=seconds)
        for hidden, draws in ((64, 200), (700, 20))
        for seconds in (1.0, 60.0)
    ]
    print(json.dumps(results, indent=2))
    if options.record:
        write_record(options.record, {"runs": results})


if __name__ == "__main__":
    main()
