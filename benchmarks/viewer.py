"""From a click to colour: one query token against 100,000 training tokens, from a trace of half a gigabyte.

    python -m benchmarks.viewer [--tokens N] [--draws T]

The losses are random numbers (cost does not depend on their values), in a run directory as sampling would leave it.
Needs Chromium and the extra ``dev``.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.environment import write_record

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from viewing import CHROMIUM, CLICK, answers_for, served, words, write_run

RECORD = Path(__file__).parent / "records" / "viewer.json"
LENGTH, CHAINS, CLICKS = 125, 4, 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--draws", type=int, default=335)
    arguments = parser.parse_args()
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as directory:
        lengths = {"train": [LENGTH] * (arguments.tokens // LENGTH), "query": [CLICKS + 1]}
        run = write_run(
            Path(directory) / "run", lengths=lengths, chains=CHAINS, draws=arguments.draws,
            examples={name: words(each, 0) for name, each in lengths.items()},
        )  # fmt: skip
        trace_bytes = 4 * CHAINS * arguments.draws * arguments.tokens
        answers = answers_for(run)
        started = time.perf_counter()
        answers.warm()
        reading = time.perf_counter() - started
        server = []
        for position in range(1, CLICKS + 1):
            started = time.perf_counter()
            answers.influence({"run": "0", "set": "query", "sample": "0", "from": str(position)})
            server.append(time.perf_counter() - started)
        asked = {"run": "0", "set": "query", "sample": "0", "from": "3", "level": "token", "columns": "777"}
        started = time.perf_counter()
        answers.errors(asked)
        error = time.perf_counter() - started
        del answers
        with sync_playwright() as playwright, served(run, warm=True) as address:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            started = time.perf_counter()
            page.goto(address)
            page.wait_for_selector(".tokens-view[aria-busy='false']", timeout=120_000)
            opening = time.perf_counter() - started
            clicks = [page.evaluate(CLICK, position) / 1000 for position in range(1, CLICKS + 1)]
            browser.close()
    record = {
        "workload": f"{arguments.tokens:,} training tokens, {CHAINS * arguments.draws:,} draws",
        "trace_bytes": trace_bytes,
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 1),
        "seconds": {
            "reading the traces, once": round(reading, 2),
            "opening the page, traces read": round(opening, 2),
            "one token, server": _spread(server),
            "one token, click to colour": _spread(clicks),
            "one standard error, server": round(error, 4),
        },
    }
    if arguments.tokens == 100_000 and trace_bytes > 500e6:
        write_record(RECORD, record)
    print(record)


def _spread(seconds: list[float]) -> dict[str, float]:
    names = ("fastest", "median", "slowest")
    return {name: round(float(value), 4) for name, value in zip(names, np.quantile(seconds, (0, 0.5, 1)), strict=True)}


if __name__ == "__main__":
    main()
