"""The bench: every workload in each way there is of doing it, in one process.

python -m benchmarks.run small                        # ratios, in a minute, on any machine
python -m benchmarks.run chains                       # 8 chains on a CPU, in every way
python -m benchmarks.run training                     # many small models on subsets, one by one and at once
python -m benchmarks.run 14m 410m 2.8b resnet9 scores # on a GPU; beside devinterp where that is installed
python -m benchmarks.run cifar10                      # on a GPU; all scores of the paper's setting, beside EK-FAC
python -m benchmarks.run 410m --ways "jostle compiled" --profile   # and which kernels take how long
python -m benchmarks.run small --check FILE           # fail where a ratio stays below half of the record's
"""

from __future__ import annotations

import argparse
import bisect
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks import chains, language, scores_memory, small, training, vision
from benchmarks.environment import environment, write_record

WORKLOADS = ["small", "chains", "training", "resnet9", "cifar10", "scores", *language.SHAPES]

REGRESSION = 2.0
"""By what factor a ratio may fall below its record: more than machines and their moods differ."""

SUSTAINED = 4.0
"""Seconds of matrix products, after which the clock is what the limit of power allows."""

ATTEMPTS = 3
"""How often a ratio is measured before it counts as fallen."""


def matmul_peak(seconds: float = 0.0) -> float:
    """Operations a second of a large bfloat16 matrix product, as measured now: in a burst, or within so many seconds.

    A GPU that is busy for long is held back by its limit of power, and has a lower clock.
    """
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    started, times = time.perf_counter(), []
    while len(times) < 20 or time.perf_counter() - started < seconds:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        _ = a @ b
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return 2 * 8192**3 / statistics.median(times[len(times) // 2 :] if seconds else times)


def run_small(measures: Mapping[str, Callable[[], dict[str, float]]], record: Mapping[str, Any]) -> dict[str, Any]:
    """Measure every ratio; again where it is below half of the record's: what is really slower stays so."""
    table: dict[str, Any] = {}
    for name, measure in measures.items():
        for _ in range(ATTEMPTS):
            table[name] = measure()
            print(f"  {name:25} {table[name]['ratio']:8.2f} ×  ({table[name]['seconds']:.4f} s)", flush=True)
            if not regressions({name: table[name]}, record):
                break
    return table


def regressions(measured: Mapping[str, Any], record: Mapping[str, Any]) -> list[str]:
    """What became slower, against the same measurement of another day."""
    return [
        f"{name}: {now['ratio']:.2f} ×, and {record[name]['ratio']:.2f} × in the record"
        for name, now in measured.items()
        if name in record and now["ratio"] * REGRESSION < record[name]["ratio"]
    ]


def unmatched(measured: Mapping[str, Any], record: Mapping[str, Any]) -> list[str]:
    """What is only in one of the two: nobody would notice it becoming slower."""
    return sorted(measured.keys() ^ record.keys())


def main() -> None:
    parser = argparse.ArgumentParser(description="Time every workload in each way of doing it.")
    parser.add_argument("workloads", nargs="+", choices=WORKLOADS)
    parser.add_argument("--ways", nargs="+", help=f"some of: {'; '.join(language.WAYS)}")
    parser.add_argument("--record", type=Path, help="where to write the numbers, with hardware, versions and commit")
    parser.add_argument("--check", type=Path, help="a record to compare the ratios of 'small' with")
    parser.add_argument("--profile", action="store_true", help="language models: print what each kernel takes")
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="    %(message)s", force=True)
    logging.getLogger("jostle").setLevel(logging.DEBUG if arguments.verbose else logging.INFO)
    record: dict[str, Any] = {"workloads": {}}
    if arguments.record and arguments.record.exists():  # a second call adds what the first one had no time for
        record["workloads"] = json.loads(arguments.record.read_text())["workloads"]
    if torch.cuda.is_available():
        record["matmul_peak_tflops"] = matmul_peak() / 1e12
        record["matmul_sustained_tflops"] = matmul_peak(SUSTAINED) / 1e12
        burst, sustained = (record[f"matmul_{kind}_tflops"] for kind in ("peak", "sustained"))
        print(f"matmul peak {burst:.0f} TFLOP/s, sustained {sustained:.0f}", flush=True)

    def save() -> None:
        if arguments.record:
            write_record(arguments.record, record)

    before = json.loads(arguments.check.read_text())["workloads"]["small"] if arguments.check else {}
    for name in arguments.workloads:
        if name == "small":
            record["workloads"][name] = run_small(small.RATIOS, before)
        elif name == "chains":
            record["workloads"][name] = chains.bench()
        elif name == "training":
            record["workloads"][name] = training.bench()
        else:  # on a GPU, which is a little different every time
            peak = 1e12 * record["matmul_peak_tflops"]
            here = {**record, **environment()}
            about = {key: here[key] for key in ("date", "commit", "matmul_peak_tflops", "matmul_sustained_tflops")}
            table = record["workloads"][name] = {"measured": about}  # another call may add others to the record
            if name == "scores":
                table |= scores_memory.bench()
            elif name == "resnet9":
                vision.bench(peak, arguments.ways or vision.WAYS, table, save)
            elif name == "cifar10":
                vision.bench_all_scores(arguments.ways or vision.FULL_WAYS, table, save)
            else:
                draws = language.DRAWS[bisect.bisect([1000, 2000], language.SHAPES[name].width)]
                language.bench(name, peak, arguments.ways or language.WAYS, draws, table, save, arguments.profile)
        save()
    measured = record["workloads"].get("small", {})
    if arguments.check and (others := unmatched(measured, before)):
        sys.exit("not both measured and in the record: " + "; ".join(others))
    if slower := regressions(measured, before):
        sys.exit("slower than half of the record: " + "; ".join(slower))


if __name__ == "__main__":
    main()
