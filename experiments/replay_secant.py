"""Replay with an example's own steps as they would be without it, in place of their derivative.

    python -m experiments.replay_secant small --data DIR --only mlp-adamw-short --smoothings 0.1 0.01
    python -m experiments.replay_secant language --model stories15M --work work --only gentle --smoothings 0.01 0.001

Where example i with the part h of a step's gradient g is left out, Adam's moments after that step change by
−(1 − β₁)h and (1 − β₂)((g − h)² − g²), and the weights by what the step makes of these: exactly, but for the smoothing
of the root. What that costs a query later is taken from the derivative, as ever.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from benchmarks.environment import environment
from torch import Tensor
from torch.func import grad

from experiments import small_models, solve_language
from experiments.solve_small import BANKS
from jostle.evaluate.metrics import lds_of, slopes_of
from jostle.losses import plain_operations
from jostle.runs import replaying
from jostle.training.backwards import Backwards, Costs
from jostle.training.repeatable import Microbatch, Repetition, own_randomness, set_random_state
from jostle.training.steps import Root, Rule, clipped, kept_of, rules_of


class SecantBackwards(Backwards):
    """Goes back as others do, but for what it says of examples; for Adam and AdamW without running statistics."""

    def __init__(self, repetition: Repetition, root: Root, *, share: float) -> None:
        super().__init__(repetition, root)
        self._share = share

    def step(
        self, costs: Costs, number: int, moved: Sequence[bool], found: Callable[[Microbatch, Tensor], None]
    ) -> Costs:
        own = self._leaving_out(costs, number, moved)
        return super().step(costs, number, moved, lambda part, _: found(part, -own[id(part)]))

    def _leaving_out(self, costs: Costs, number: int, moved: Sequence[bool]) -> dict[int, Tensor]:
        """The rise of each query's loss without an example in this step, (query, sample) for each microbatch."""
        repetition = self._repetition
        rules = {id(parameter): rule for parameter, rule in rules_of(repetition.optimizer, repetition.kind)}
        names = [name for name, does in zip(self._trained, moved, strict=True) if does]
        by_part = [(part, self._each(part)) for part in repetition.about.steps[number]]
        total = [torch.stack([each[name].sum(0) for _, each in by_part]).sum(0) for name in names]
        cut, _ = clipped(total, repetition.about.clip_norm)
        factor = cut[0].norm() / total[0].norm().clamp(min=1e-30)
        queries = len(costs.weights[names[0]])
        rises = {id(part): cut[0].new_zeros(queries, len(part.examples)) for part, _ in by_part}
        for name, gradient in zip(names, cut, strict=True):
            parameter = self._parameters[name]
            rule, kept = rules[id(parameter)], kept_of(repetition.optimizer, repetition.kind, parameter)
            first, second = rule.settings["betas"]
            mean = first * kept["exp_avg"] + (1 - first) * gradient
            square = second * kept["exp_avg_sq"] + (1 - second) * gradient.square()
            smoothing = self._share * square.mean()
            plain = adams_step(rule, mean, square, smoothing)
            by_weight, by_mean, by_square = (
                one.flatten(1)
                for one in (costs.weights[name], *(costs.kept[name][k] for k in ("exp_avg", "exp_avg_sq")))
            )
            for part, each in by_part:
                for_each = []
                for own in each[name]:
                    h = factor * own
                    less, other = -(1 - first) * h, (1 - second) * ((gradient - h).square() - gradient.square())
                    apart = adams_step(rule, mean + less, square + other, smoothing) - plain
                    for_each.append(
                        by_weight @ apart.flatten() + by_mean @ less.flatten() + by_square @ other.flatten()
                    )
                rises[id(part)] += torch.stack(for_each, 1)
        return rises

    def _each(self, part: Microbatch) -> dict[str, Tensor]:
        """Each example's part of the gradient, (sample, ...)."""
        weights = {name: value.detach() for name, value in self._parameters.items()}
        repetition, objective, rows = self._repetition, self._objective, []
        with own_randomness(), plain_operations():
            set_random_state(part.state or repetition.random)
            batch = repetition.about.data.batch(part.examples)
            with torch.no_grad():
                counts = part.share * objective.shares(self._call(objective.loss, weights, batch), batch)
            for place, example in enumerate(part.examples):
                alone = repetition.about.data.batch(np.array([example]))

                def counted(weights: Any, alone: Any = alone, own: Tensor = counts[place]) -> Tensor:
                    losses = self._call(objective.loss, weights, alone)[0]
                    own = own[: len(losses)] if own.ndim else own
                    return torch.where(own > 0, own * losses, 0.0).sum()

                rows.append(grad(counted)(weights))
        return {name: torch.stack([row[name] for row in rows]) for name in weights}


def adams_step(rule: Rule, mean: Tensor, square: Tensor, smoothing: Tensor) -> Tensor:
    """How far Adam moves weights by these moments, as they stand before their correction for the first steps."""
    (first, second), settings = rule.settings["betas"], rule.settings
    root = ((square + smoothing) / (1 - second**rule.number)).clamp(min=0).sqrt()  # rounding may be below 0
    return -settings["lr"] / (1 - first**rule.number) * mean / (root + settings["eps"])


def measured(effects: np.ndarray, left_out: np.ndarray, changes: np.ndarray) -> dict[str, Any]:
    """LDS and slope on a bank of drops."""
    predicted = [left_out.astype(float) @ effects]
    (lds,) = lds_of(predicted, changes, per="query", correlation="spearman", bootstrap=1000, seed=0)
    (slope,) = slopes_of(predicted, changes, pooled=False, bootstrap=1000, seed=0)
    return {"lds": lds.to_dict(), "slope": slope.to_dict(), "told": f"LDS {lds}  slope {slope}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["small", "language"])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--only", nargs="+", required=True)
    parser.add_argument("--smoothings", nargs="+", type=float, default=[0.1, 0.01])
    parser.add_argument("--ways", nargs="+", choices=["derivative", "secant"], default=["derivative", "secant"])
    parser.add_argument("--queries", type=int, help="The first so many.")
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    rows = []
    for name in arguments.only:
        training, query, left_out, changes = (small if arguments.what == "small" else language)(name, arguments)
        for smoothing in arguments.smoothings:
            for way in arguments.ways:
                backwards = partial(SecantBackwards, share=smoothing) if way == "secant" else Backwards
                with patch.object(replaying, "Backwards", backwards):
                    found = replaying.replay(training, query, smoothing=smoothing, check=0)
                row = {"model": name, "way": way, "smoothing": smoothing, "seconds": found.provenance["seconds"],
                       **measured(found.effects, left_out, changes)}  # fmt: skip
                rows.append(row)
                print(f"{name:24} {way:10} {smoothing:<8g} {row['told']}  {row['seconds']:.1f} s", flush=True)
                if arguments.record is not None:
                    arguments.record.write_text(
                        json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n"
                    )


def small(name: str, arguments: argparse.Namespace) -> Any:
    torch.set_num_threads(1)
    about, bank = small_models.MODELS[name], np.load(BANKS / f"{name}.npz")
    train, query = about.examples(arguments.data)
    some = slice(arguments.queries)
    query = {k: v[some] for k, v in query.items()} if isinstance(query, dict) else tuple(part[some] for part in query)
    changes = (bank["drops"][1:] - bank["drops"][0].astype(np.float64))[:, None, some]
    return about.trainer(train).repeatable(0), query, ~about.drops().members[1:], changes


def language(name: str, arguments: argparse.Namespace) -> Any:
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    trial = solve_language.Trial(solve_language.MODELS[name], name, arguments)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    start = auto.from_pretrained(arguments.model, dtype=torch.float32).to(next(trial.model.parameters()).device)
    assert trial.changes is not None
    some = slice(arguments.queries)
    query = solve_language.texts_of(trial)[1][some]
    return trial.repeatable(start), query, trial.left_out, trial.changes[:, :, some]


if __name__ == "__main__":
    main()
