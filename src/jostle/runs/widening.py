"""More queries at draws that are recorded: at the weights that were kept, or where the chains come by once more."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from jostle.chains.chain import Dynamics, Group
from jostle.chains.checkpoints import Checkpoints
from jostle.chains.observing import Observer
from jostle.chains.progress import progress_bar
from jostle.chains.recording import NoRecorder, TraceRecorder
from jostle.chains.running import Pace, run_chains
from jostle.errors import InputError
from jostle.ranks import Ranks
from jostle.runs.layout import withdraw_queries, write_manifest
from jostle.runs.manifest import place_of_traces
from jostle.traces.store import Traces

log = logging.getLogger("jostle")

DEVIATION = 0.01
"""How far the losses of a chain that walks again may be from those recorded, as a share of how far they have moved."""


ELSEWHERE = {
    "expected": "chains that come by where they were",
    "fix": "add queries on the hardware and with the versions of the run, or sample with keep_weights",
}


class RefusedError(Exception):
    """Queries cannot be added: what was got, what was expected, what to do."""

    def __init__(self, **words: str) -> None:
        super().__init__(words["got"])
        self.words = words


class Widening:
    """The chains of a run again, at the draws that are recorded, where only what was added is looked at.

    Kept weights are read; without them every chain walks again from w*, with the minibatches and the noise that it
    had, and so arrives at the same draws. That it does is checked on the training losses, at its second draw (the first
    may be w*) and its last.

    Args:
        dynamics: how the chains move.
        traces: what is recorded.
        draws: of each chain.
        first: how many queries there were; those that were added are counted from here.
        added: observes the queries that were added.
        train: observes the training examples.
    """

    def __init__(
        self, dynamics: Dynamics, traces: Traces, *, draws: int, first: int, added: Observer, train: Observer
    ) -> None:
        self._dynamics, self._traces = dynamics, traces
        self._first, self._added, self._train = first, added, train
        self.model = dynamics.model
        self._kept = traces.trace("weights") if traces.keeps_weights else None
        config = dataclasses.replace(dynamics.config, draws=draws, until=None, minutes=None)
        # Kept weights are one step apart.
        self.config = config if self._kept is None else dataclasses.replace(config, burn_in=0, thin=1)

    def start(self, chains: list[int]) -> Group:
        """Put chains at w*, or at the first weights that were kept."""
        group = self._dynamics.start(chains)
        self._read(group)
        return group

    def advance(self, group: Group, most: int = 1) -> None:
        """Move a group by a step, or by up to so many, or to the next weights that were kept."""
        if self._kept is None:
            self._dynamics.advance(group, most)
        else:
            group.step += 1
            self._read(group)

    def observe(self, group: Group) -> dict[str, Float[Tensor, "chain column"]]:
        """Return the losses of the queries that were added."""
        draw, last = (group.step - self.config.burn_in) // self.config.thin, self.config.draws - 1
        if self._kept is None and draw in (min(1, last), last):
            _require_same(self._dynamics, self._traces, self._train, group, draw)
        losses = self._added(self.model, group.weights)
        finite = self.model.crew.all(torch.isfinite(losses))
        if not finite.all():
            row, column = (~finite).nonzero()[0].tolist()
            number = self._first + self._added.columns.owner(column)
            raise RefusedError(
                got=f"query {number}, whose loss is {losses[row, column]:g} at draw {draw} of chain "
                f"{group.chains[row]}",
                expected="finite losses at every draw",
                fix="leave it out: the run is as it was",
            )
        return {"query": losses}

    def _read(self, group: Group) -> None:
        if self._kept is not None:
            for row, chain in enumerate(group.chains):
                group.weights[row].copy_(self.model.moving.keep(torch.from_numpy(self._kept[chain, group.step])))


def try_widening(
    directory: Path, manifest: dict[str, Any], dynamics: Dynamics, train: Observer, *, at_once: int
) -> None:
    """Refuse, before anything is changed, a run whose chains would not come by where they were.

    The first of them walk to their second draw; kept weights need no such trial.
    """
    traces = Traces(place_of_traces(directory, manifest))
    chains = _not_failed(manifest, range(manifest["planned"]["chains"]))[:at_once]
    if not chains:
        raise InputError("query", got="more of them for a run whose chains all failed", expected="draws to see them at")
    if traces.keeps_weights:
        return
    group, config, draw = dynamics.start(chains), dynamics.config, min(1, manifest["draws"] - 1)
    while group.step < config.burn_in + draw * config.thin:
        dynamics.advance(group)
    try:
        _require_same(dynamics, traces, train, group, draw)
    except RefusedError as refused:
        raise InputError("query", **refused.words) from None


def widen(
    directory: Path,
    manifest: dict[str, Any],
    ranks: Ranks,
    dynamics: Dynamics,
    added: Observer,
    train: Observer,
    *,
    pace: Pace,
    shown: bool,
) -> None:
    """Observe queries that were added at the draws that are recorded.

    Raises:
        InputError: a loss of one of them is not finite at some draw, or the chains do not come by where they were; the
            run is put back to what it was without them.
    """
    there = manifest["widening"]
    log.info("%d queries are added to %d", added.columns.samples, there["queries"])
    traces = Traces(place_of_traces(directory, manifest), writable=True)
    widening = Widening(dynamics, traces, draws=there["draws"], first=there["queries"], added=added, train=train)
    own = _not_failed(manifest, ranks.chains(there["chains"], pace.at_once))
    recorder = TraceRecorder(traces, first_column=there["columns"]) if ranks.crew.leads else NoRecorder()
    refused: dict[str, str] | None = None
    with progress_bar(shown, len(own) * widening.config.steps[-1], {"query": added}) as report:
        try:
            failures, _ = run_chains(
                widening, recorder, Checkpoints(directory / "widening"), pace, chains=own, report=report
            )
            if failures:
                got = f"chain {failures[0].chain}, whose {failures[0].reason} as they had not before"
                refused = RefusedError(got=got, **ELSEWHERE).words
        except RefusedError as error:
            recorder.flush()  # nothing of it is still being written when it is taken back
            refused = error.words
    gathered = ranks.gather(refused)

    def verdict() -> dict[str, str] | None:
        refused = next((words for words in gathered if words), None)
        if refused:
            withdraw_queries(directory, manifest)
        return refused

    refused = ranks.share(verdict)
    if refused:
        raise InputError("query", **refused)
    del manifest["widening"]
    if ranks.leads:
        # Before it is said: no later widening may begin with these.
        shutil.rmtree(directory / "widening", ignore_errors=True)
        write_manifest(directory, manifest)


def _not_failed(manifest: dict[str, Any], chains: Iterable[int]) -> list[int]:
    failed = {failure["chain"] for failure in manifest["failed_chains"]}
    return [chain for chain in chains if chain not in failed]


def _require_same(dynamics: Dynamics, traces: Traces, train: Observer, group: Group, draw: int) -> None:
    """Refuse chains that are elsewhere than they were: what is seen there has nothing to do with what is recorded."""
    losses, center = traces.losses("train"), traces.center_losses("train")
    for chain, now in zip(group.chains, train(dynamics.model, group.weights).cpu().numpy(), strict=True):
        then = losses[chain, draw]
        off, moved = np.linalg.norm(now - then), np.linalg.norm(then - center)
        if not off <= DEVIATION * moved + 1e-6 * np.linalg.norm(then):
            raise RefusedError(
                got=f"training losses that are {off:.2g} from those recorded at draw {draw} of chain {chain}, "
                f"which are {moved:.2g} from those at w*",
                **ELSEWHERE,
            )
