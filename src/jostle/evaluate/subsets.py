"""Which examples a model is trained on again: random subsets, all but one, all but those that matter most.

Of drops, what is left out stays in its batches with weight 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from jostle.errors import InputError
from jostle.evaluate.inputs import Given, named_scores, require_ranks

DROPS = "drops"
"""The kind of subsets whose missing examples stay in their batches, with weight 0."""


@dataclass(frozen=True, eq=False)
class Subsets:
    """Subsets of the training examples, one a row.

    Attributes:
        members: which examples each subset holds.
        kind: ``"random"``, ``"drops"``, ``"leave-one-out"`` or ``"removal"``; it says how models are trained on them,
            and what a bank of them can be asked.
        labels: what is known of each subset (which examples it lacks, and why), for some kinds.
    """

    members: Bool[np.ndarray, "subset train"]
    kind: str
    labels: Sequence[Mapping[str, Any]] = field(default=())

    def __len__(self) -> int:
        return len(self.members)

    def indices(self, subset: int) -> Int[np.ndarray, " member"]:
        """Return the examples of one subset."""
        return np.flatnonzero(self.members[subset])


def random_subsets(of: int, count: int, *, share: float = 0.5, seed: int = 0, independent: bool = False) -> Subsets:
    """Draw subsets of ``of`` examples: ``round(share * of)`` of them each, without replacement.

    Subset k depends on (seed, k) alone: more subsets leave the first ones as they were.

    Args:
        of: n, the number of training examples.
        count: K, the number of subsets.
        share: α, the share of the examples in a subset.
        seed: the only source of randomness.
        independent: take each example with probability ``share``, as in the paper's appendix. Subsets then differ in
            size, and how well a loss is predicted by the size alone has to be told apart (the control "subset size").
    """
    if not 0 < share < 1 or not 1 <= round(share * of) < of:
        raise InputError("share", got=share, expected=f"a share that leaves some of {of} examples in and some out")
    if count < 1:
        raise InputError("count", got=count, expected="a positive number of subsets")
    members = np.zeros((count, of), bool)
    for row, generator in zip(members, (np.random.default_rng((seed, k)) for k in range(count)), strict=True):
        chosen = generator.random(of) < share if independent else generator.permutation(of)[: round(share * of)]
        row[chosen] = True
    if not members.any(1).all():
        raise InputError("share", got=f"{share}, which leaves a subset empty", expected="a larger share")
    return Subsets(members, "random")


def random_drops(of: int, count: int, *, size: int, seed: int = 0) -> Subsets:
    """All of ``of`` examples, and ``count`` times all but ``size`` of them, drawn without replacement.

    An example is left out by giving its loss weight 0: batches, their order and their denominators stay those of the
    training on all examples, which is the first row. So a drop changes a loss by what its examples did, and by nothing
    else. Drop k depends on (seed, k) alone: more drops leave the first ones as they were.

    Args:
        of: n, the number of training examples.
        count: the number of drops.
        size: how many examples each leaves out; 2 % of them, say.
        seed: the only source of randomness.
    """
    if not 1 <= size < of:
        raise InputError("size", got=size, expected=f"a number of examples from 1 to {of - 1}")
    if count < 1:
        raise InputError("count", got=count, expected="a positive number of drops")
    members = np.ones((1 + count, of), bool)
    for k in range(count):
        members[1 + k, np.random.default_rng((seed, k)).permutation(of)[:size]] = False
    labels = [{"method": "none", "k": 0}, *({"method": "random", "k": int(size)} for _ in range(count))]
    return Subsets(members, DROPS, labels)


def leave_one_out(of: int, which: Sequence[int] | None = None) -> Subsets:
    """All examples but one, for each of ``which`` (default: every example)."""
    removed = np.arange(of) if which is None else np.asarray(which, int)
    if len(removed) and not (removed.min() >= 0 and removed.max() < of):
        raise InputError("which", got=f"{removed.min()} to {removed.max()}", expected=f"indices from 0 to {of - 1}")
    members = np.ones((len(removed), of), bool)
    members[np.arange(len(removed)), removed] = False
    return Subsets(members, "leave-one-out", [{"removed": int(index)} for index in removed])


def removals(
    scores: Mapping[str, Given],
    *,
    queries: Sequence[int],
    counts: Sequence[int],
    random: int = 5,
    seed: int = 0,
) -> Subsets:
    """All examples but the ``k`` most helpful for a query, by each method; and all but ``k`` picked blindly.

    The first subset is all examples. What random removals do is asked of every query, so they are shared.

    Args:
        scores: the methods to compare, by name.
        queries: the queries whose helpful examples are taken away.
        counts: the numbers of examples to take away.
        random: how many times as many are picked blindly, for each count.
        seed: of the blind picks.
    """
    methods = named_scores(scores)
    shapes = {given.shape for given in methods.values()}
    if len(shapes) != 1 or len(next(iter(shapes))) != 2:
        expected = "one or more methods of one shape, (train, query)"
        raise InputError("scores", got=f"shapes {sorted(shapes)}", expected=expected)
    reserved = {"none", "random"} & methods.keys()
    if reserved:
        raise InputError(
            "scores", got=f"a method called {reserved.pop()!r}", expected="another name: that is a control's"
        )
    of, columns = next(iter(shapes))
    if not all(0 <= query < columns for query in queries):
        raise InputError("queries", got=list(queries), expected=f"indices from 0 to {columns - 1}")
    if not all(0 < k < of for k in counts):
        raise InputError("counts", got=list(counts), expected=f"numbers from 1 to {of - 1}")
    for name, given in methods.items():
        require_ranks(given, f"scores of {name}")
    rows, labels = [np.ones(of, bool)], [{"method": "none", "k": 0}]

    def add(removed: np.ndarray, **label: Any) -> None:
        row = np.ones(of, bool)
        row[removed] = False
        rows.append(row)
        labels.append(label)

    for k in map(int, counts):  # numpy's own cannot be written into bank.json
        for repeat in range(random):
            add(np.random.default_rng((seed, k, repeat)).permutation(of)[:k], method="random", k=k, repeat=repeat)
        for name, given in methods.items():
            for query in queries:
                order = np.argsort(given.values[:, query], kind="stable")
                add(order[:k], method=name, k=k, query=int(query))
    return Subsets(np.stack(rows), "removal", labels)
