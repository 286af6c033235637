"""The bench: every workload in each way there is of doing it, in one process.

python -m benchmarks.run                     # everything that this machine can do
python -m benchmarks.run 410m 2.8b --record benchmarks/records/speed_h200.json
"""

from __future__ import annotations

import argparse
import logging
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks import language, vision
from benchmarks.environment import write_record


def matmul_peak() -> float:
    """Operations a second of a large bfloat16 matrix product, as measured now."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        a @ b
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return 2 * 8192**3 / statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time every workload in each way of doing it.")
    parser.add_argument("workloads", nargs="*", default=["14m", "410m", "2.8b", "resnet9"])
    parser.add_argument("--ways", nargs="+")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="    %(message)s", force=True)
    logging.getLogger("jostle").setLevel(logging.DEBUG if arguments.verbose else logging.INFO)
    logging.getLogger().setLevel(logging.WARNING)

    peak = matmul_peak()
    print(f"matmul peak {peak / 1e12:.0f} TFLOP/s", flush=True)
    record: dict[str, Any] = {"matmul_peak_tflops": peak / 1e12, "workloads": {}}
    for name in arguments.workloads:
        if name == "resnet9":
            record["workloads"][name] = vision.bench(peak, arguments.ways or vision.WAYS)
        else:
            fewer, more = (10, 60) if language.SHAPES[name].width < 2000 else (5, 25)
            record["workloads"][name] = language.bench(name, peak, arguments.ways or language.WAYS, fewer, more)
        if arguments.record:
            write_record(arguments.record, record)


if __name__ == "__main__":
    main()
