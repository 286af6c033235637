"""Runs to look at, made of random numbers, and a browser to look with."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
import yaml

from jostle.config import fingerprint_settings
from jostle.runs.manifest import FORMAT
from jostle.runs.run import Run
from jostle.traces.store import Columns, Traces
from jostle.viewer.answers import Answers
from jostle.viewer.server import make_app
from jostle.viewer.sources import open_sources

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")

# What a person would see: from the press of the button until the browser has painted the new colours.
CLICK = """
async (position) => {
  const view = document.querySelector(".tokens-view");
  const token = document.querySelectorAll(".query-pane > .text .token")[position];
  const done = new Promise((resolve) => {
    const observer = new MutationObserver(() => {
      if (view.getAttribute("aria-busy") === "false") { observer.disconnect(); resolve(); }
    });
    observer.observe(view, { attributes: true });
  });
  const start = performance.now();
  token.dispatchEvent(new PointerEvent("pointerdown", { bubbles: true, button: 0 }));
  window.dispatchEvent(new PointerEvent("pointerup"));
  await done;
  await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
  return performance.now() - start;
}
"""


def write_run(
    directory: Path,
    *,
    lengths: dict[str, Sequence[int]] | None = None,
    sizes: dict[str, int] | None = None,
    examples: dict[str, list[dict[str, Any]]] | None = None,
    images: dict[str, np.ndarray] | None = None,
    chains: int = 3,
    draws: int = 40,
    recorded: Sequence[int] | None = None,
    seed: int = 0,
) -> Path:
    """Write a run whose losses share a few random walks; the first token of every sequence has none.

    ``recorded`` says how many draws of each chain are there yet, of a run that is still sampling.
    """
    generator = np.random.default_rng(seed)
    directory.mkdir(parents=True)
    sets = {name: Columns(size) for name, size in (sizes or {}).items()}
    for name, each in (lengths or {}).items():
        offsets = np.concatenate([[0], np.cumsum(each)])
        sets[name] = Columns(len(each), offsets, np.concatenate([1 + np.arange(length) for length in each]))
    config = {
        "chains": chains, "draws": draws, "burn_in": 5, "thin": 2, "batch_size": 8, "keep": "traces", "seed": seed,
        "posterior": {"n_beta": 30.0, "localization": 1e3, "prior_precision": 0.0, "weights": "all"},
        "sampler": {"name": "SGLD", "step_size": 1e-4}, "loss": "next_token", "observables": [],
    }  # fmt: skip
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    traces = Traces.create(
        directory / "traces.zarr", chains=chains, steps=range(5, 5 + 2 * draws, 2), dtype=np.dtype(np.float32), sets=sets,
        observables={},
    )  # fmt: skip
    shared = generator.normal(size=(chains, draws, 6))
    for name, columns in sets.items():
        mixing = generator.normal(size=(6, columns.total)) ** 3
        losses = 3 + 0.05 * (shared @ mixing + generator.normal(size=(chains, draws, columns.total)))
        traces.record_center(name, np.full(columns.total, 2.9, np.float32))
        for chain in range(chains):
            there = draws if recorded is None else recorded[chain]
            if there:
                traces.record(name, [chain], 0, losses[chain : chain + 1, :there].astype(np.float32))
    for name, shown in (examples or {}).items():
        (directory / "examples").mkdir(exist_ok=True)
        (directory / "examples" / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in shown))
    for name, pixels in (images or {}).items():
        (directory / "examples").mkdir(exist_ok=True)
        np.save(directory / "examples" / f"{name}.images.npy", pixels)
    manifest = {
        "format": FORMAT, "jostle": "0.1.0", "status": "complete" if recorded is None else "sampling",
        "created": "2026-01-01T00:00:00Z", "moving_weights": 100, "failed_chains": [], "remarks": [], "scale": 0.1,
        "fingerprints": {"config": fingerprint_settings(config), "train": "a", "query": "b", "sampling_data": "a"},
        "draws": draws if recorded is None else 0, "seconds": {"preparing": 0.0, "sampling": 1.0}, "device": "cpu",
    }  # fmt: skip
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return directory


def words(lengths: Sequence[int], seed: int, **fields: Sequence[Any]) -> list[dict[str, Any]]:
    """Texts of so many scored words and one before them."""
    generator = np.random.default_rng(seed)
    lexicon = ["the", "cat", "sat", "on", "a", "mat", "and", "slept", "dog", "ran", "far", "away", "home", "again"]
    shown = []
    for number, length in enumerate(lengths):
        tokens = ["Once", *(" " + lexicon[k] for k in generator.integers(len(lexicon), size=length))]
        shown.append(
            {"text": "".join(tokens), "tokens": tokens, "scored": [False] + [True] * length}
            | {name: values[number] for name, values in fields.items()}
        )
    return shown


def token_run(directory: Path, *, train: int = 12, query: int = 3, length: int = 9, **more: Any) -> Path:
    """A run of short texts."""
    lengths = {"train": [length + k % 4 for k in range(train)], "query": [5 + k for k in range(query)]}
    examples = {
        "train": words(lengths["train"], 1, source=[("book", "web")[k % 2] for k in range(train)]),
        "query": words(lengths["query"], 2),
    }
    return write_run(directory, lengths=lengths, examples=examples, **more)


def answers_for(*paths: Path) -> Answers:
    return Answers(open_sources(paths, Run))


@contextlib.contextmanager
def served(*paths: Path, warm: bool = False) -> Iterator[str]:
    """The page of some runs, at an address of this machine."""
    answers = answers_for(*paths)
    if warm:
        answers.warm()
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    config = uvicorn.Config(make_app(answers), log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join()
        bound.close()
