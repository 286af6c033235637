"""Kills runs with SIGKILL at random moments, lets them go on, and compares what comes of them to the last bit.

    python -m benchmarks.kills --kills 100 --record benchmarks/records/kills.json

A kill comes at a moment drawn evenly from all of a run's time from the making of its directory to its end: while it
is laid out, sampled, checkpointed (after every step, or every few), extended by draws and a chain, then by queries, and
finished.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import jostle
from benchmarks.environment import write_record
from jostle.runs.integrity import examine

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(24, 4, generator=GENERATOR), torch.arange(24) % 3
SHORT: dict[str, Any] = {"chains": 2, "draws": 8, "query": (X[:5], Y[:5])}
LONG: dict[str, Any] = SHORT | {"chains": 3, "draws": 14}
WIDE: dict[str, Any] = LONG | {"query": (X[:9], Y[:9])}


def sample(out: Path, *, checkpoint_seconds: float, extend: bool) -> None:
    """Sample or, where some is there, go on; then ask for more of it."""
    for asked in (SHORT, LONG, WIDE) if extend else (SHORT,):
        torch.manual_seed(0)
        # Whoever has more already refuses less of it.
        with contextlib.suppress(*([jostle.InputError] if extend and asked is not WIDE else [])):
            jostle.attribute(
                nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), (X, Y), **asked, thin=2, burn_in=2,
                batch_size=6, posterior=jostle.Posterior(n_beta=20, localization=100), out=out,
                sampler=jostle.SGNHT(step_size=1e-3), chains_at_once=1, observation_batch_size=1,
                checkpoint_seconds=checkpoint_seconds, progress=False,
            )  # fmt: skip


def in_a_child(work: Any) -> int:
    """Run something in a process of its own, which can be killed; return its number."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def finish(child: int) -> int:
    """Wait for a process; return how it ended: its exit status, or minus the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def until_it_is_there(path: Path) -> None:
    """Wait for the making of a directory."""
    while not path.exists():
        time.sleep(0.0005)


def contents(out: Path) -> dict[str, np.ndarray]:
    """Return everything that a run recorded."""
    traces = jostle.load(out).traces
    return {name: traces.trace(name)[:] for name in traces.arrays}


def moment(out: Path) -> str:
    """Say where a kill struck, by what it left."""
    if not (out / "manifest.json").exists():
        return "laying out"
    manifest = json.loads((out / "manifest.json").read_text())
    if list(out.rglob("*.partial")):
        return "amid a write"
    if manifest["status"] == "complete":
        return "finished, or not yet extended"
    if "replay" in manifest:
        return "adding queries"
    return "extending" if manifest["planned"]["draws"] == LONG["draws"] else "sampling"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    random = np.random.default_rng(options.seed)
    moments, identical, kills, late, started = Counter(), 0, 0, 0, time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        expected: dict[bool, dict[str, np.ndarray]] = {}
        takes: dict[tuple[bool, float], float] = {}
        ways = [(extend, seconds) for extend in (False, True) for seconds in (0.0, 0.01)]
        for number, way in enumerate(ways):
            out = place / f"whole-{number}"
            settings: dict[str, Any] = {"extend": way[0], "checkpoint_seconds": way[1]}
            child = in_a_child(lambda out=out, settings=settings: sample(out, **settings))
            until_it_is_there(out)
            begun = time.perf_counter()
            assert finish(child) == 0
            takes[way] = time.perf_counter() - begun
        for number, (extend, _) in enumerate(ways):
            expected[extend] = contents(place / f"whole-{number}")
        while kills < options.kills:
            way = ways[int(random.integers(len(ways)))]
            out = place / f"run-{kills}-{late}"
            settings = {"extend": way[0], "checkpoint_seconds": way[1]}
            child = in_a_child(lambda out=out, settings=settings: sample(out, **settings))
            until_it_is_there(out)
            time.sleep(random.uniform(0, takes[way]))
            os.kill(child, signal.SIGKILL)
            if finish(child) == 0:  # it was done before
                late += 1
                continue
            kills += 1
            moments[moment(out)] += 1
            assert finish(in_a_child(lambda out=out, settings=settings: sample(out, **settings))) == 0
            found = contents(out)
            same = all(np.array_equal(found[name], value) for name, value in expected[way[0]].items())
            identical += same and set(found) == set(expected[way[0]]) and examine(out) == []
    result = {
        "kills": kills,
        "identical": identical,
        "left by the kill": dict(moments.most_common()),
        "too late": late,
        "seconds": round(time.perf_counter() - started, 1),
    }
    print(json.dumps(result))
    if options.record:
        write_record(options.record, result)


if __name__ == "__main__":
    main()
