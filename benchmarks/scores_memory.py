"""Peak memory of a full score matrix: 47,500 training images × 10,000 queries from 400 draws, as in the paper.

    python -m benchmarks.scores_memory [--train N] [--query Q]

The losses are random numbers (cost does not depend on their values), in a trace store on disk as a run would hold them.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import write_record
from jostle.estimate import BUFFER_BYTES, Trace, covariance
from jostle.traces.store import Columns, Traces

RECORD = Path(__file__).parent / "records" / "scores_memory.json"
CHAINS, DRAWS = 4, 100
TRAIN, QUERY = 47_500, 10_000


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def traces_on_disk(directory: Path, train: int, query: int) -> tuple[Trace, Trace]:
    """Losses of as many examples and queries, as a run would have recorded them."""
    sets = {"train": Columns(train), "query": Columns(query)}
    traces = Traces.create(
        directory / "traces.zarr", chains=CHAINS, steps=range(DRAWS), dtype=np.dtype(np.float32), sets=sets,
        observables={},
    )  # fmt: skip
    generator = np.random.default_rng(0)
    for chain in range(CHAINS):
        for name, columns in sets.items():
            values = generator.normal(2.3, 0.1, size=(1, DRAWS, columns.samples)).astype(np.float32)
            traces.record(name, [chain], 0, values)
    return traces.losses("train"), traces.losses("query")


def bench(train: int = TRAIN, query: int = QUERY) -> dict[str, Any]:
    """Seconds of all scores on the GPU and on the CPU, from the trace on disk to the matrix in memory."""
    table: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        left, right = traces_on_disk(Path(directory), train, query)
        few = slice(0, 512)
        sample = [np.asarray(trace[:, :, few]).reshape(-1, 512) for trace in (left, right)]
        expected = np.cov(*sample, rowvar=False)[:512, 512:]
        for name, device in (("jostle, GPU", "cuda"), ("jostle, CPU", "cpu")):
            seconds = []
            for _ in range(3):
                started = time.perf_counter()
                values = covariance(left, right, device=device).values
                seconds.append(time.perf_counter() - started)
                np.testing.assert_allclose(values[few, few], expected, rtol=1e-3, atol=1e-6)
            table[name] = {"seconds": min(seconds), "first": seconds[0]}
            print(f"  scores {name:12} {min(seconds):8.2f} s, the first time {seconds[0]:.2f} s", flush=True)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--train", type=int, default=TRAIN)
    parser.add_argument("--query", type=int, default=QUERY)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        left, right = traces_on_disk(Path(directory), arguments.train, arguments.query)
        covariance(np.asarray(left[:, :, :128]), np.asarray(right[:, :, :128]))  # loads what is loaded once
        output = arguments.train * arguments.query * 4
        before, started = peak_bytes(), time.perf_counter()
        result = covariance(left, right)
        seconds, grown = time.perf_counter() - started, peak_bytes() - before
        columns = [np.asarray(trace[:, :, index]).ravel() for trace, index in ((left, 5), (right, 7))]
        check = np.cov(np.stack(columns))[0, 1]
        np.testing.assert_allclose(result.values[5, 7], check, rtol=1e-4, atol=1e-7)
    record = {
        "workload": f"covariance of {arguments.train} × {arguments.query} from {CHAINS * DRAWS} draws, traces on disk",
        "seconds": round(seconds, 2),
        "output_bytes": output,
        "peak_growth_bytes": grown,
        "beyond_output_bytes": grown - output,
        "allowed_beyond_output_bytes": BUFFER_BYTES,
    }
    assert grown - output <= BUFFER_BYTES, record
    if arguments.train == 47_500 and arguments.query == 10_000:
        write_record(RECORD, record)
    for name, value in record.items():
        print(f"{name:28} {value:,}" if not isinstance(value, str) else f"{name:28} {value}")


if __name__ == "__main__":
    main()
