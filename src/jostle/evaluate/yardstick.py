"""A yardstick without a bank of trainings: what a replay predicts of drops, where its own check has passed."""

from __future__ import annotations

from pathlib import Path

from jostle.errors import InputError
from jostle.evaluate.bank import LOSS, Bank
from jostle.evaluate.subsets import DROPS, Subsets
from jostle.runs.replaying import Replay

TRUSTED = 0.9
"""The lower bound of the correlation with trainings that were really done again."""


def predicted(replay: Replay, subsets: Subsets, *, out: str | Path) -> Bank:
    """Return a bank of drops whose losses a replay has predicted, in place of training again.

    Losses are those above the training on all examples, whose own are 0. Whatever is measured with the bank says
    beside it that nothing was trained.

    Args:
        replay: with its check, the lower bound of whose correlation is at least `TRUSTED`.
        subsets: `random_drops`, each of no more examples than those of the check.
        out: the directory of the bank.

    Raises:
        InputError: a replay without a check or with a poor one, or subsets that it says nothing of.

    Example:
        >>> bank = predicted(replay, random_drops(1000, 100, size=20), out="banks/predicted")
        >>> print(compare(bank, {"EK-FAC": scores}))
    """
    train, query = replay.effects.shape
    if replay.check is None:
        raise InputError("replay", got="one without a check", expected="one with it", fix="replay(..., check=20)")
    correlation, error = replay.check.correlation
    lowest = correlation - 1.96 * error
    if not lowest >= TRUSTED:
        raise InputError(
            "replay",
            got=f"one whose correlation with real trainings is {correlation:.2f}, and may be {lowest:.2f}",
            expected=f"at least {TRUSTED:g}",
            fix="train again (jostle.evaluate.retrain), or check it with more trainings: replay(..., check=60)",
        )
    if subsets.kind != DROPS or subsets.members.shape[1] != train:
        got = f"{subsets.kind} subsets of {subsets.members.shape[1]} examples"
        raise InputError("subsets", got=got, expected=f"random_drops of the replay's {train}")
    largest = int((~subsets.members).sum(1).max())
    if largest > replay.check.left_out:
        raise InputError(
            "subsets", got=f"drops of {largest} examples", expected=f"at most the {replay.check.left_out} of the check",
            fix="replay(..., share=...) checks larger ones",
        )  # fmt: skip
    fingerprints = {name: replay.provenance["fingerprints"][name] for name in ("train", "query")}
    bank = Bank.create(out, subsets, queries=query, fingerprints=fingerprints)
    by = {"by": "a replay", "check": str(replay.check)}
    bank.require_manner("replay", "training", by)
    bank.keep_manner(training=by)
    for number, _ in bank.todo(1):
        bank.store(number, 0, {LOSS: replay.effects[~subsets.members[number]].sum(0)})
    return bank
