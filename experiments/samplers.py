"""All samplers side by side: how many draws are effective, and what the scores are worth at equal cost.

    python -m experiments.samplers --only linear --work work --figure experiments/records/samplers.png
    python -m experiments.samplers --only "mlp,diabetes (unseen)" --other-seeds 0 --work work
    python -m experiments.samplers --only cifar10 --work work --cifar10 "--data cifar-10-batches-bin --retrain 0.5"
    python -m experiments.samplers --only stories --work work --stories "--model stories15M --wikipedia articles.jsonl"

On a linear regression (diabetes data; retraining on a subset is solved for, so that the truth is exact), on CIFAR-10
with ResNet-9 and on a language model that is fine-tuned. The last two are those of `experiments.cifar10_retraining` and
`experiments.language_retraining`: the words given for them are those scripts' own arguments, and with the same --work
their models and banks are used. Besides, on the small models of `experiments.resolution` and `experiments.calibration`
("unseen"). --other-seeds 0 leaves out rules that are neither reference nor default.

The reference is the paper's own setting, 4 chains of 100 consecutive draws, by SGLD and by devinterp's RMSprop variant.
Every rule is sampled at the posterior that `jostle.calibrate` chooses; "default" takes its steps between draws by
``thin="auto"``. "Gaussian" is the control without a gradient; its draws are also read at κ = 10, and at what they
support (`jostle.conditioning`), which costs none. Scores are read at three costs: a tenth of the reference's
observations; as many; and as many *passes* as the control takes for these (an example observed counts 1, an example in
a minibatch gradient 3). Errors are those over seeds of the sampler; the bank is the same for all. Called again it goes
on where it stood.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import itertools
import math
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.environment import environment
from torch import nn

import jostle
from experiments import calibration, cifar10_retraining, language_retraining, resolution
from experiments.kept import influence, mean_losses
from experiments.resolution import Problem, Trainer, halves
from experiments.retraining import (
    DEFAULT_RULE,
    READ,
    READ_AT,
    RECORDS,
    Budget,
    OutOfTimeError,
    Record,
    Setting,
    add_keep,
    file_name,
    fill,
)
from jostle.attributors import exact_influence
from jostle.conditioning import CHOICES, Kappa, Moves, most_supported, supports
from jostle.data.datasets import Data
from jostle.evaluate import Bank, lds, random_subsets
from jostle.presets import PRESETS

CHAINS, DRAWS, SEEDS = 4, 100, 5
TENTH, ALL, PASSES = "a tenth of the observations", "as many observations", "as many passes"
COSTS = (TENTH, ALL, PASSES)
BACKWARD = 2
"""A backward pass takes about as long as so many forward ones."""

RULES = {
    "baoab": "BAOAB", "leimkuhler-matthews": "LeimkuhlerMatthews", "sgld": "SGLD", "rmsprop": "RMSpropSGLD",
    "ornstein-uhlenbeck": "OrnsteinUhlenbeck", "sgnht": "SGNHT",
}  # fmt: skip
DEFAULT, OVERDAMPED, CONTROL = "default: BAOAB, thin auto", "LeimkuhlerMatthews, thin auto", "Gaussian: no gradient"
NEARER = {f"{CONTROL}, three times the localization": 3.0, f"{CONTROL}, ten times the localization": 10.0}
CONTROLS = (CONTROL, *NEARER, f"{CONTROL}, paper's localization")
READ_AUTO = ", read at κ auto"
CANDIDATES = (DEFAULT, OVERDAMPED, *(f"{name}{how}" for name in (CONTROL, *NEARER) for how in (READ, READ_AUTO)))
"""What might be the default: each is compared with the reference, the controls and gradients."""
REFERENCES = {"paper: SGLD": "sgld", "paper: RMSprop-SGLD": "rmsprop-devinterp"}
DECAY = 0.01
"""Of the regression: mean loss + DECAY/2·‖w‖²."""


def linear(work: Path, record: Record, budget: Budget, *, train: int = 300, subsets: int = 100) -> Setting:
    """Ridge regression of ten columns on the progression of diabetes, in nats; solved for, on every subset."""
    data = calibration.diabetes(train=train, queries=142)
    (X, y), loss = data.train, data.loss

    def solved(indices: np.ndarray, seed: int) -> nn.Module:
        inputs, targets = X[indices].double(), y[indices].double()
        curvature = inputs.T @ inputs / len(indices) + DECAY * torch.eye(X.shape[1], dtype=torch.float64)
        model = nn.Linear(X.shape[1], 1, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.linalg.solve(curvature, inputs.T @ targets / len(indices)).T)
        return model

    fingerprints = {
        "train": Data(data.train, "train").fingerprint(),
        "query": Data(data.query, "query").fingerprint(),
    }
    bank = fill(
        work / "bank-0.5", random_subsets(train, subsets), solved, data.query, loss, fingerprints, seeds=1,
        budget=budget, record=record, batch_size=142, key="linear regression",
    )  # fmt: skip
    model = solved(np.arange(train), 0)
    trained = jostle.Posterior(n_beta=train, localization=train * DECAY)
    return Setting(
        "linear regression", model, data.train, data.query, loss, {"0.5": bank}, {},
        extra={"exact influence": lambda: {
            "exact influence": exact_influence(model, data.train, data.query, posterior=trained, loss=loss)}},
    )  # fmt: skip


def small(make: Callable[[], Problem], name: str, work: Path) -> Setting:
    """A small model that is trained here, and its bank of retrainings on halves."""
    problem = make()
    trainer = Trainer(problem)
    bank = trainer.bank(work / "bank", halves(len(Data(problem.train, "train"))))
    return Setting(name, trainer.model(), problem.train, problem.query, problem.loss, {"0.5": bank}, {})


SMALL = {**resolution.PROBLEMS, **{f"{name} (unseen)": make for name, make in calibration.PROBLEMS.items()}}


def settings_of(
    name: str, arguments: argparse.Namespace, record: Record, budget: Budget
) -> Iterator[tuple[Setting, Mapping[str, Any], int]]:
    """What there is to measure, the paper's hyperparameters for it, and the size of a minibatch for the other rows."""
    work = arguments.work / name.replace(" ", "_")
    if name == "linear":
        yield linear(work, record, budget), PRESETS["retraining-resnet"], 100
        return
    if name in SMALL:
        yield small(SMALL[name], name, work), PRESETS["retraining-resnet"], SMALL[name]().sampling_batch_size
        return
    words = shlex.split(getattr(arguments, name) or "")
    words = words if "--work" in words else [*words, "--work", str(work)]
    if name == "cifar10":
        given = cifar10_retraining.read_arguments(words)
        for seed in given.seeds:
            for setting in cifar10_retraining.settings_of(given, seed, record, budget, {}):
                renamed = dataclasses.replace(setting, name=f"CIFAR-10, {setting.name}")
                yield renamed, PRESETS["retraining-resnet"], 256
    else:
        given = language_retraining.read_arguments(words)
        for recipe in given.recipe:
            setting = language_retraining.setting_of(given, recipe, record, budget, {})
            yield dataclasses.replace(setting, name=f"stories15M, {recipe}"), PRESETS["retraining-llm"], 32


def calibrated(
    setting: Setting, rules: Iterable[str], batch_size: int, kept: dict[str, Any], budget: Budget,
    save: Callable[[], None],
) -> None:  # fmt: skip
    """Hyperparameters for every rule, at one posterior: that of the first, which is the default."""
    for rule in rules:
        if rule in kept:
            continue
        first = kept.get(DEFAULT_RULE, {})
        try:
            kept[rule] = setting.calibrate(
                rule, batch_size, budget, **{name: first[name] for name in ("localization", "n_beta") if name in first}
            )
        except jostle.InputError as error:
            kept[rule] = {"fault": str(error)}
        print(f"  calibrated {rule}: {kept[rule]}", flush=True)
        save()


def rows_of(
    paper: Mapping[str, Any], found: Mapping[str, Any], batch_size: int, draws: int
) -> dict[str, dict[str, Any]]:
    """The settings of every row; what matters most comes first."""
    keys = ("n_beta", "localization", "step_size", "burn_in", "thin")
    paper = {**paper, "chains": CHAINS, "draws": DRAWS, "thin": 1}
    rows: dict[str, dict[str, Any]] = {name: {**paper, "sampler": rule} for name, rule in REFERENCES.items()}
    rules = {
        f"{RULES[rule]}, calibrated": {
            "sampler": rule, "chains": CHAINS, "draws": draws, "batch_size": batch_size,
            **{key: found[rule][key] for key in keys},
        }
        for rule in RULES if "fault" not in found.get(rule, {"fault": "not asked for"})
    }  # fmt: skip
    blind = {"sampler": "gaussian", "n_beta": 0.0, "chains": CHAINS, "draws": DRAWS, "burn_in": 1, "thin": 1}
    for rule, automatic in ((RULES[DEFAULT_RULE], DEFAULT), ("LeimkuhlerMatthews", OVERDAMPED)):
        if f"{rule}, calibrated" in rules:
            rows[automatic] = {**rules[f"{rule}, calibrated"], "draws": DRAWS, "thin": "auto"}
    default = rows.get(DEFAULT)
    if default is not None:
        rows[CONTROL] = {**blind, "localization": default["localization"]}
        rows |= {name: {**blind, "localization": times * default["localization"]} for name, times in NEARER.items()}
    rows[CONTROLS[-1]] = {**blind, "localization": paper["localization"]}
    rows |= rules
    if "SGLD, calibrated" in rules:
        rows["SGLD, calibrated, thin 1"] = {**rules["SGLD, calibrated"], "draws": DRAWS, "thin": 1}
    return rows


def draws_at(cost: str, run: jostle.Run, observed: int, sampled: int) -> int | None:
    """How many draws of each chain a cost pays for; None where the run has not as many."""
    thin, burn_in, batch_size = (run.config[name] for name in ("thin", "burn_in", "batch_size"))
    if cost == PASSES:
        step = (1 + BACKWARD) * min(batch_size, sampled) if run.config["posterior"]["n_beta"] else 0
        # The first draw is at the end of the burn-in.
        draws = int((DRAWS * observed - step * (burn_in - thin)) / (observed + step * thin))
        draws = min(draws, DRAWS)
    else:
        draws = DRAWS // 10 if cost == TENTH else DRAWS
    return draws if 2 <= draws <= run.draws else None


def measured(
    run: jostle.Run, diagnosed: Mapping[str, Any], bank: Bank, sampled: int, kappa: Kappa = 0.0
) -> dict[str, Any]:
    """What a run is worth: the LDS per query over subsets at every cost, beside its diagnostics."""
    kept: dict[str, Any] = {
        "draws": run.draws, "thin": run.config["thin"], "burn_in": run.config["burn_in"],
        "seconds": run.manifest["seconds"]["sampling"], "preparing": run.manifest["seconds"]["preparing"],
        "effective_draws": diagnosed.get("effective_draws"), "rise": diagnosed.get("rise"),
        "verdict": diagnosed["verdict"]["level"], "failed_chains": len(run.failed_chains),
    }  # fmt: skip
    if not len(run.healthy_chains):
        return kept
    train, query = mean_losses(run, "train"), mean_losses(run, "query")
    held = run.traces.held_losses("train")[:, :, :][run.healthy_chains]
    for cost in COSTS:
        draws = draws_at(cost, run, train.shape[2] + query.shape[2], sampled)
        kept[cost] = None
        if draws is not None:
            losses, chains = (train[:, :draws], query[:, :draws]), np.arange(len(train))
            moves = Moves(held[:, :draws], chains) if kappa else None
            at = most_supported(supports(*losses, chains, CHOICES, moves=moves)) if kappa == "auto" else kappa
            kept[cost] = {"draws": draws, "kappa": at} | {
                kind: lds(bank, influence(
                    *losses, run.manifest["fingerprints"], normalize=kind == "correlation", kappa=at, moves=moves
                ), bootstrap=0).value
                for kind in ("covariance", "correlation")
            }  # fmt: skip
    return kept


def measure(
    setting: Setting, paper: Mapping[str, Any], batch_size: int, work: Path, record: Record, budget: Budget,
    *, draws: int = DRAWS, seeds: int = SEEDS, other_seeds: int = SEEDS, reference_seeds: int | None = None,
    only: Sequence[str] = ("*",),
) -> None:  # fmt: skip
    """Measure whatever the record lacks, of the rows whose names match a pattern."""
    kept = record.content["measured"].setdefault(setting.name, {"calibration": {}, "baselines": {}, "rows": {}})
    work = work / file_name(setting.name)
    setting.keep_banks()
    bank = setting.banks.get("0.5") or next(iter(setting.banks.values()))
    sampled = len(Data(setting.sampling_data or setting.train, "sampling_data"))
    kept |= {
        "environment": environment(), "train": bank.about["train"], "queries": bank.about["queries"],
        "sampling_data": sampled, "bank": bank.summary()["text"], "batch_size": batch_size,
    }  # fmt: skip
    rules = RULES if other_seeds else [rule for rule in RULES if rule in (DEFAULT_RULE, "leimkuhler-matthews")]
    calibrated(setting, rules, batch_size, kept["calibration"], budget, record.write)
    baselines = dataclasses.replace(setting, methods=("gradients",), bif={})
    for name, job in baselines.jobs(work, budget).items():
        if name not in kept["baselines"]:
            budget.check()
            started = time.perf_counter()
            scores = job()[name]
            seconds = time.perf_counter() - started
            kept["baselines"][name] = lds(bank, scores).to_dict() | {"seconds": seconds}
            print(f"  {name}: {kept['baselines'][name]['value']:.3f}", flush=True)
            record.write()
    table = rows_of(paper, kept["calibration"], batch_size, draws)
    for seed, (name, options) in itertools.product(range(seeds), table.items()):  # if time runs out, all rows have some
        if seed >= other_seeds and name.startswith(tuple(f"{rule}, calibrated" for rule in RULES.values())):
            continue  # few seeds tell which rule is best; more of them are for the claims
        if reference_seeds is not None and seed >= reference_seeds and name in REFERENCES:
            continue
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in only):
            continue
        # Draws without a gradient are read in three ways; they are taken once.
        several: dict[str, Kappa] = {name: 0.0, f"{name}{READ}": READ_AT, f"{name}{READ_AUTO}": "auto"}
        readings = several if name in CONTROLS else {name: 0.0}
        rows = {read: kept["rows"].setdefault(read, {"settings": options, "seeds": {}}) for read in readings}
        if all(str(seed) in row["seeds"] for row in rows.values()):
            continue
        key = f"{setting.name}: {name}, seed {seed}, CPU"
        started = time.process_time()
        try:
            run, _ = setting.sample(f"{name}, seed {seed}", {**options, "seed": seed}, work, budget)
        except (jostle.ChainsFailedError, jostle.InputError) as error:  # what a rule cannot do is a result
            for row in rows.values():
                row["seeds"][str(seed)] = {"fault": f"{type(error).__name__}: {str(error)[:300]}"}
            continue
        finally:
            record.add_seconds(key, time.process_time() - started)
            record.write()
        spent = record.content["seconds"].pop(key)["seconds"]  # in all, where the run was interrupted
        diagnosed = run.diagnostics()
        for read, kappa in readings.items():
            found = measured(run, diagnosed, bank, sampled, kappa) | {"cpu_seconds": spent}
            rows[read]["seeds"][str(seed)] = found
            print(f"  {read}, seed {seed}: {found}", flush=True)
        record.write()
    kept["summary"] = summary(kept)
    record.write()


def mean_and_error(values: Sequence[float | None]) -> dict[str, float | None] | None:
    """Over seeds; None where one has no value. A single seed has no error."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    error = float(np.std(known, ddof=1) / math.sqrt(len(known))) if len(known) > 1 else None
    return {"mean": float(np.mean(known)), "standard_error": error}


def summary(kept: Mapping[str, Any]) -> dict[str, Any]:
    """Every row's means with their errors over seeds, and the claims that they decide."""
    table: dict[str, Any] = {}
    # Without a GPU, what this process computed counts: others may use the machine.
    clock = "seconds" if kept["environment"]["accelerator"] else "cpu_seconds"
    for name, row in kept["rows"].items():
        sound = [one for one in row["seeds"].values() if "fault" not in one]
        if not sound:
            continue
        table[name] = {
            "seeds": len(sound),
            "thin": [one["thin"] for one in sound],
            "failed_chains": sum(one["failed_chains"] for one in sound),
            "rise": float(np.mean([one["rise"] for one in sound])),
            "effective_draws_an_observation": _ratio(sound, lambda one: CHAINS * one["draws"]),
            "effective_draws_a_second": _ratio(sound, lambda one: one[clock]),
        } | {
            cost: {
                kind: mean_and_error([(one.get(cost) or {}).get(kind) for one in sound])
                for kind in ("covariance", "correlation")
            }
            for cost in COSTS
        }  # fmt: skip
    return {"table": table, "claims": claims(table, kept["baselines"])}


def _ratio(sound: Sequence[Mapping[str, Any]], of: Callable[[Mapping[str, Any]], float]) -> float | None:
    known = [one["effective_draws"] / of(one) for one in sound if one["effective_draws"] is not None]
    return float(np.median(known)) if known else None


def claims(table: Mapping[str, Any], baselines: Mapping[str, Any]) -> dict[str, Any]:
    """Each candidate minus what it is to reach or beat, with the error of the difference over seeds."""

    def value(name: str, cost: str, kind: str) -> dict[str, float] | None:
        found = table.get(name, {}).get(cost, {}).get(kind)
        return None if found is None or found["standard_error"] is None else found

    def best(names: Sequence[str], cost: str, kind: str) -> dict[str, float] | None:
        known = [one for one in (value(name, cost, kind) for name in names) if one is not None]
        return max(known, key=lambda one: one["mean"], default=None)

    found: dict[str, Any] = {}
    for candidate, kind in itertools.product(CANDIDATES, ("covariance", "correlation")):
        gradients = baselines.get("GradSim" if kind == "covariance" else "gradient cosine")
        exact = None if gradients is None else {"mean": gradients["value"], "standard_error": 0.0}
        tenth, references = value(candidate, TENTH, kind), best([*REFERENCES], ALL, kind)
        pairs = {"a tenth against the better reference": (tenth, references)}
        for cost in COSTS:
            ours = value(candidate, cost, kind)
            pairs[f"{cost}, against the better control"] = ours, best(CONTROLS, cost, kind)
            pairs[f"{cost}, against gradient similarity"] = ours, exact
        found.setdefault(candidate, {})[kind] = {
            name: {
                "difference": ours["mean"] - theirs["mean"],
                "standard_error": math.hypot(ours["standard_error"], theirs["standard_error"]),
            }
            for name, (ours, theirs) in pairs.items() if ours is not None and theirs is not None
        }  # fmt: skip
    return found


def markdown(kept: Mapping[str, Any]) -> str:
    """The table of one setting: correlation / covariance."""

    def cell(one: Mapping[str, Any]) -> str:
        def text(each: Mapping[str, float | None] | None) -> str:
            if each is None:
                return "–"
            error = each["standard_error"]
            return f"{each['mean']:.3f}" + ("" if error is None else f" ± {error:.3f}")

        return " / ".join(text(one[kind]) for kind in ("correlation", "covariance"))

    def number(value: float | None) -> str:
        return "–" if value is None else f"{value:.3g}"

    lines = [
        f"| | thin | effective draws an observation | a second | {' | '.join(COSTS)} |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in kept["summary"]["table"].items():
        thin = "–".join(str(one) for one in sorted({min(row["thin"]), max(row["thin"])}))
        rates = [number(row[f"effective_draws_{unit}"]) for unit in ("an_observation", "a_second")]
        lines.append(f"| {name} | {thin} | {' | '.join(rates)} | {' | '.join(cell(row[cost]) for cost in COSTS)} |")
    for name, found in kept["baselines"].items():
        lines.append(f"| {name} | | | | {found['value']:.3f} | | |")
    return "\n".join(lines)


def draw(measured: Mapping[str, Any], path: Path) -> None:
    """LDS of every row at the three costs, with errors over seeds; baselines are lines."""
    from matplotlib.figure import Figure

    names = [name for name in measured if measured[name].get("summary", {}).get("table")]
    heights = [1.2 + 0.24 * len(measured[name]["summary"]["table"]) for name in names]
    figure = Figure(figsize=(12, 0.7 + sum(heights)), layout="constrained")
    panels = figure.subplots(len(names), 2, squeeze=False, sharey="row", sharex="row", height_ratios=heights)
    colours = dict(zip(COSTS, ("#E69F00", "#0072B2", "#009E73"), strict=True))
    for line, name in zip(panels, names, strict=True):
        table, baselines = measured[name]["summary"]["table"], measured[name]["baselines"]
        for axes, kind, similar in zip(
            line, ("correlation", "covariance"), ("gradient cosine", "GradSim"), strict=True
        ):
            for place, row in enumerate(table.values()):
                for shift, cost in zip((-0.22, 0.0, 0.22), COSTS, strict=True):
                    if row[cost][kind] is not None:
                        axes.errorbar(
                            row[cost][kind]["mean"], place + shift, xerr=row[cost][kind]["standard_error"], fmt="o",
                            color=colours[cost], markersize=4, capsize=2, label=cost if place == 0 else None,
                        )  # fmt: skip
            for baseline, style in ((similar, ":"), ("exact influence", "--")):
                if baseline in baselines:
                    axes.axvline(baselines[baseline]["value"], color="0.3", linestyle=style, label=baseline)
            axes.set(title=f"{name}\n{kind}", xlabel="LDS per query, ± standard error over seeds")
            axes.set_yticks(range(len(table)), list(table))
            axes.grid(axis="x", alpha=0.3)
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
        line[0].invert_yaxis()
    labelled = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(labelled.values(), labelled.keys(), loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="All samplers on three models, at equal cost.")
    parser.add_argument(
        "--only", default="linear", help=f"some of: {','.join(['linear', 'cifar10', 'stories', *SMALL])}"
    )
    parser.add_argument("--cifar10", metavar="WORDS", help="arguments of experiments.cifar10_retraining")
    parser.add_argument("--stories", metavar="WORDS", help="arguments of experiments.language_retraining")
    parser.add_argument("--work", type=Path, required=True, help="banks and runs")
    parser.add_argument("--record", type=Path, default=RECORDS / "samplers.json")
    parser.add_argument("--figure", type=Path, help="draw what the record has")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop cleanly after so long")
    parser.add_argument("--draws", type=int, default=DRAWS, help="of each chain, where the rule is not a reference")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of the samplers")
    parser.add_argument(
        "--other-seeds", type=int, default=SEEDS, help="of rules that are neither reference nor default"
    )
    parser.add_argument(
        "--reference-seeds", type=int, help="of the references, at least 2; default: as many as of the others"
    )
    parser.add_argument(
        "--rows", nargs="+", default=["*"], metavar="PATTERN", help='only these, e.g. "paper*" "Gauss*"'
    )
    add_keep(parser)
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    budget = Budget(arguments.minutes)
    record = Record(arguments.record, {"chains": CHAINS, "draws": DRAWS})
    status = "complete"
    try:
        for name in filter(None, arguments.only.split(",")):
            for setting, paper, batch_size in settings_of(name, arguments, record, budget):
                measure(
                    dataclasses.replace(setting, keep=arguments.keep), paper, batch_size,
                    arguments.work / name / "samplers", record, budget,
                    draws=arguments.draws, seeds=arguments.seeds, other_seeds=arguments.other_seeds,
                    reference_seeds=arguments.reference_seeds, only=arguments.rows,
                )  # fmt: skip
    except OutOfTimeError:
        status = "out of time; the same command goes on"
    for name, kept in record.content["measured"].items():
        kept["summary"] = summary(kept)
        print(f"\n{name}\n{markdown(kept)}\n{kept['summary']['claims']}", flush=True)
    record.write()
    if arguments.figure:
        draw(record.content["measured"], arguments.figure)
    print(status, flush=True)


if __name__ == "__main__":
    main()
