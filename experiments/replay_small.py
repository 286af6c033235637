"""Small networks: does the derivative of a training predict what leaving examples out of it does?

    python -m experiments.replay_small --data DIR [--only NAME ...] [--purpose choosing]

Models and their banks of trainings are those of `experiments/solve_small.py`, where other methods are. On those for
choosing, what Adam's steps are divided by in the derivative was smoothed by several shares (`SHARES`).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.environment import environment, write_record

import jostle
from experiments.small_models import MODELS, Model
from experiments.solve_small import BANKS, BOOTSTRAP
from jostle.evaluate.metrics import lds_of, slopes_of

SHARES = (0.0, 0.001, 0.01, 0.1, 1.0)
RECORD = Path(__file__).parent / "records" / "replay_small.json"


def compare(about: Model, train: Any, query: Any) -> dict[str, Any]:
    """What the derivative says, and takes."""
    bank = dict(np.load(BANKS / f"{about.name}.npz"))
    trainer = about.trainer(train)
    started = time.perf_counter()
    trainer(np.arange(about.train), 0)
    training = time.perf_counter() - started
    rows = {}
    tried = SHARES if about.purpose == "choosing" and about.optimizer == "adamw" else (None,)
    for share in tried:
        given: dict[str, Any] = {} if share is None else {"smoothing": share}
        found = jostle.replay(trainer.repeatable(0), query, check=0, **given)
        measured = {}
        alike: dict[str, Any] = {"bootstrap": BOOTSTRAP, "seed": 0}
        drops = [~about.drops().members[1:] @ found.effects]
        changes = (bank["drops"][1:] - bank["drops"][0].astype(np.float64))[:, None]
        (measured["LDS"],) = lds_of(drops, changes, per="query", correlation="spearman", **alike)
        (measured["slope"],) = slopes_of(drops, changes, pooled=False, **alike)
        if "halves" in bank:
            halves = [-(about.halves().members @ found.effects)]
            (measured["LDS of halves"],) = lds_of(halves, bank["halves"], per="query", correlation="spearman", **alike)
        name = "replay" if share is None else f"replay, smoothing {share:g}"
        seconds = found.provenance["seconds"]
        rows[name] = {metric: one.to_dict() for metric, one in measured.items()} | {"seconds": seconds}
        told = "   ".join(f"{metric} {one}" for metric, one in measured.items())
        print(f"{about.name:24} {name:24} {told}   {seconds:.1f} s, a training {training:.2f} s", flush=True)
    queries = bank["drops"].shape[1]
    return {"seconds_of_training": training, "queries": queries, "environment": environment(), "methods": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(MODELS))
    parser.add_argument("--purpose", choices=["choosing", "reporting"], default="choosing")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--record", type=Path, default=RECORD)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    names = arguments.only or [name for name, about in MODELS.items() if about.purpose == arguments.purpose]
    for name in names:
        compared = compare(MODELS[name], *MODELS[name].examples(arguments.data))
        record = json.loads(arguments.record.read_text()) if arguments.record.exists() else {}
        models = record.get("models", {}) | {name: compared}
        write_record(arguments.record, {"threads": arguments.threads, "bootstrap": BOOTSTRAP, "models": models})


if __name__ == "__main__":
    main()
