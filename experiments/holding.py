"""When do the draws support reading at a larger n_beta, and for which retraining is it right?

    python -m experiments.holding --work work [--only mlp,cnn] [--minutes 20] [--figure FILE]

One run of independent Gaussian draws for each model, without a gradient, is read after parts of its draws at several κ
(`jostle.conditioning`). Each reading is judged by the LDS of a bank of retrainings, and by what needs none: how well
the scores from one half of the draws agree with those from the other. The models are those of `experiments.reading`,
a wider one with more training examples, and some whose retraining starts from one warm start and takes few steps or
many: the same draws, judged by banks that differ in nothing but how long was retrained. Called again it goes on where
it stood.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import rankdata
from sklearn.datasets import load_digits
from torch import Tensor, nn

import jostle
from experiments import cifar10_retraining, reading, resolution
from experiments.kept import mean_losses
from experiments.resolution import SUBSETS, halves, lds_over_queries, model_at
from experiments.retraining import ALIKE, Budget, Record, measure_each
from jostle.attributors import FirstOrder, ekfac, gradient_similarity
from jostle.conditioning import CHOICES, LEAST_SUPPORT, Conditioned, Moves
from jostle.data.datasets import Data
from jostle.diagnose.plots import CHAIN_COLOURS
from jostle.estimate import covariance
from jostle.evaluate import Bank, Measure, random_subsets
from jostle.losses import Loss
from jostle.models.functional import SideBySide
from jostle.models.weights import MovingWeights

KAPPAS = (0.0, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
PARTS = (40, 100, 400, 1_600)
CHAINS, RISE = 4, 0.3
DAMPINGS = (1e-8, 1e-4, 1e-2)
"""Of EK-FAC, besides kronfluence's own."""
LABELS, FEWER_LABELS = 2, (1, 0.5, 0.2, 0.1)
KINDS = ("covariance", "correlation")
SHOWN = {"0": 0.9, "3": 0.65, "30": 0.35, "100": 0.1}
"""Which κ of the first order a figure has room for, and their tones."""
STEPS = (1, 4, 16, 64, 256, 1_024)
"""Of retraining from the warm start, each with its bank."""


class Subject(NamedTuple):
    """A model, what its influence is asked for, and the banks that judge it."""

    model: nn.Module
    train: Any
    query: Any
    loss: Loss
    banks: Mapping[str, Bank]
    batch_size: int
    total_rates: Mapping[str, float] | None = None
    """Of each bank's training (`FirstOrder.kappa_of_training`), where all of it is known."""
    start: nn.Module | None = None


def as_before(name: str) -> Callable[[Path, Record, Budget], Subject]:
    def make(work: Path, record: Record, budget: Budget) -> Subject:
        case = reading.CASES[name]()(work, record, budget)
        return Subject(case.model, case.train, case.query, case.loss, {"": case.bank}, case.batch_size)

    return make


def wide(work: Path, record: Record, budget: Budget) -> Subject:
    """Three times as many training examples and twenty times as many weights as the other classifiers have."""
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    X, y = torch.tensor(pixels[order], dtype=torch.float32) / 16, torch.tensor(labels[order])
    problem = resolution.Problem(
        make=lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)),
        train=(X[:1_400], y[:1_400]), query=(X[1_400:1_700], y[1_400:1_700]), loss=jostle.losses.classification(),
        epochs=12, batch_size=50, learning_rate=2e-3, seeds=(1,),
    )  # fmt: skip
    case = reading.trained(problem)(work, record, budget)
    return Subject(case.model, case.train, case.query, case.loss, {"": case.bank}, case.batch_size)


class FromWarmStart:
    """SGD from where a small separate set has led; what is analysed was trained long, on many more examples."""

    MOMENTUM, BATCH = 0.85, 100

    def __init__(
        self, make: Callable[[], nn.Module], X: Tensor, y: Tensor, sizes: tuple[int, int, int, int], *, rate: float,
        long: int, steps: Sequence[int] = STEPS, shares: Sequence[float] = (0.5,),
    ) -> None:  # fmt: skip
        warm, everything, train, queries = sizes
        edges = np.cumsum([0, warm, everything, queries])
        warm_up, everything, self.query = ((X[a:b], y[a:b]) for a, b in itertools.pairwise(edges))
        self.train = everything[0][:train], everything[1][:train]
        self.loss = jostle.losses.classification()
        self._rate, self._long, self._steps, self._shares = rate, long, steps, shares
        torch.manual_seed(1)
        self._template = make().eval()
        self._moving = MovingWeights(self._template, "all")
        self._many = SideBySide(self._template, self._moving)
        self._many.evaluate(self.loss, self._moving.center[None].repeat(2, 1), Data(self.train, "train").batch([0, 1]))
        self._warm = self.fit(self._moving.center[None], warm_up, [np.arange(warm)], 50)
        self._everything = everything

    def fit(self, starts: Tensor, examples: Any, subsets: list[np.ndarray], steps: int) -> Tensor:
        """Nesterov's momentum from each row of weights on its own subset, with a learning rate that falls to 0."""
        data, batch = Data(examples, "train"), self.BATCH
        generator = np.random.default_rng(0)
        orders = [np.empty(0, int) for _ in subsets]

        def gradient(weights: Tensor) -> Tensor:
            nonlocal orders
            for row, subset in enumerate(subsets):
                if len(orders[row]) < batch:
                    orders[row] = np.concatenate([orders[row], generator.permutation(subset)])
            now, orders = [order[:batch] for order in orders], [order[batch:] for order in orders]
            return self._many.mean_loss_gradient(self.loss, weights, data, now)

        return self._descend(starts, gradient, steps)

    def _descend(self, starts: Tensor, gradient: Callable[[Tensor], Tensor], steps: int) -> Tensor:
        weights = nn.Parameter(starts.clone())
        optimizer = torch.optim.SGD([weights], lr=self._rate, momentum=self.MOMENTUM, nesterov=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
        for _ in range(steps):
            weights.grad = gradient(weights.detach())
            optimizer.step()
            schedule.step()
        return weights.detach()

    def total_rate(self, steps: int) -> float:
        """How far a gradient of 1 leads: the learning rates of all steps, with what momentum has made of them."""
        return -self._descend(torch.zeros(1), torch.ones_like, steps).item()

    def model(self, weights: Tensor) -> nn.Module:
        return model_at(weights, self._template, self._moving)

    def bank(self, directory: Path, steps: int, share: float) -> Bank:
        """Retrainings of so many steps on random shares, side by side."""
        train, query = Data(self.train, "train"), Data(self.query, "query")
        subsets = halves(len(train)) if share == 0.5 else random_subsets(len(train), SUBSETS, share=share)
        fingerprints = {"train": train.fingerprint(), "query": query.fingerprint()}
        bank = Bank.create(directory, subsets, queries=len(query), fingerprints=fingerprints)
        if bank.todo(1):
            measure = Measure(self.query, self.loss, {}, batch_size=len(query))
            members = [subsets.indices(subset) for subset in range(SUBSETS)]
            for subset, weights in enumerate(self.fit(self._warm.repeat(SUBSETS, 1), self.train, members, steps)):
                bank.store(subset, 0, measure(self.model(weights)))
        return bank

    def __call__(self, work: Path, record: Record, budget: Budget) -> Subject:
        banks, rates = {}, {}
        for steps, share in itertools.product(self._steps, self._shares):
            key = f"{steps} steps" + ("" if share == 0.5 else f" on {share:g}")
            rates[key] = self.total_rate(steps)
            banks[key] = self.bank(work / f"bank-{key.replace(' ', '-').removesuffix('-steps')}", steps, share)
            print(f"  {key}: {banks[key].values().mean():.3f} nats", flush=True)
        model = self.model(self.fit(self._warm, self._everything, [np.arange(len(self._everything[1]))], self._long)[0])
        for name, (X, y) in (("train", self.train), ("query", self.query)):
            with torch.no_grad():
                logits = model(X)
            correct = (logits.argmax(1) == y).float().mean()
            print(f"  {name}: {nn.functional.cross_entropy(logits, y):.3f} nats, accuracy {correct:.2f}", flush=True)
        return Subject(model, self.train, self.query, self.loss, banks, 100, rates, self.model(self._warm[0]))


def warm_digits(make: Callable[[], nn.Module]) -> FromWarmStart:
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(3).permutation(len(labels))
    X, y = torch.tensor(pixels[order], dtype=torch.float32) / 16, torch.tensor(labels[order])
    return FromWarmStart(make, X, y, (200, 1_200, 400, 200), rate=0.1, long=1_000)


def small_convolutional() -> nn.Module:
    """For images of 16 × 16; 26,000 weights."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def warm_cifar(
    path: Path | None, steps: Sequence[int] = (1, 4, 16), shares: Sequence[float] = (0.5, 0.1)
) -> FromWarmStart:
    """`experiments.cifar10_retraining` in small: the same shares of images of half the size; 26,000 weights."""
    if path is None:
        raise jostle.InputError("data", got="nothing", expected="CIFAR-10's binary batches", fix="name their directory")
    images, labels = cifar10_retraining.read(path, "train")
    order = np.random.default_rng(0).permutation(len(labels))[:10_800]
    X = nn.functional.avg_pool2d(torch.from_numpy(images[order]), 2)
    X = (X - X.mean((0, 2, 3), keepdim=True)) / X.std((0, 2, 3), keepdim=True)
    return FromWarmStart(
        small_convolutional, X, torch.from_numpy(labels[order]), (500, 10_000, 1_000, 300), rate=0.05, long=1_000,
        steps=steps, shares=shares,
    )  # fmt: skip


LONGER = "CIFAR-10 from a warm start for longer"
WARM: dict[str, Callable[[Path | None], FromWarmStart]] = {
    "mlp from a warm start": lambda data: warm_digits(
        lambda: nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    ),
    "CIFAR-10 from a warm start": warm_cifar,
    LONGER: lambda data: warm_cifar(data, STEPS[:5], (0.5,)),
}
SUBJECTS: dict[str, Callable[[Path | None], Callable[[Path, Record, Budget], Subject]]] = {
    **{name: lambda data, name=name: as_before(name) for name in reading.CASES},
    "wide mlp": lambda data: wide,
    **WARM,
}


GROUPS = {
    "tried": [*reading.TRIED],
    "not tried": [*reading.UNSEEN, "wide mlp"],
    "mlp from a warm start": ["mlp from a warm start"],
    "CIFAR-10 from a warm start": ["CIFAR-10 from a warm start"],
}


def losses_of(subject: Subject, path: Path, draws: int) -> list[np.ndarray]:
    """(chain, draw, column) of training examples, queries and what is held, sampled once."""
    if not path.exists():
        chosen = jostle.calibrate(
            subject.model, subject.train, loss=subject.loss, batch_size=subject.batch_size, pilot=False, rise=RISE,
            kappa=0.0,
        )  # fmt: skip
        run = jostle.attribute(
            subject.model, subject.train, subject.query, loss=subject.loss, chains=CHAINS, draws=draws // CHAINS,
            progress=False, **chosen.settings,
        )  # fmt: skip
        held = run.traces.held_losses("train")[:, :, :][run.healthy_chains]
        np.savez(path, train=mean_losses(run, "train"), query=mean_losses(run, "query"), held=held)
    with np.load(path) as arrays:
        return [arrays[name] for name in ("train", "query", "held")]


def scores_of(train: np.ndarray, query: np.ndarray, held: np.ndarray) -> dict[tuple[str, float], np.ndarray]:
    """Influence at every κ, as covariance and as correlation."""
    moves = Moves(held, np.arange(len(held)))
    found = {}
    for kappa in KAPPAS:
        sides: Any = (train, query) if not kappa else [Conditioned(trace, moves, kappa) for trace in (train, query)]
        for kind in KINDS:
            found[kind, kappa] = -covariance(*sides, normalize=kind == "correlation").values.astype(np.float64)
    return found


def agreement(a: np.ndarray, b: np.ndarray, *, ranks: bool) -> float:
    """Correlation of two matrices along their rows, mean over columns."""
    if ranks:
        a, b = rankdata(a, axis=0), rankdata(b, axis=0)
    a, b = (values - values.mean(0) for values in (a, b))
    return float(((a * b).sum(0) / np.sqrt((a**2).sum(0) * (b**2).sum(0))).mean())


def read(losses: Sequence[np.ndarray], banks: Mapping[str, Bank], fingerprints: Any) -> dict[str, Any]:
    """LDS and agreement of halves at every κ. Halves are two chains each, in all three ways."""
    whole = scores_of(*losses)
    splits = [([0, other], [rest for rest in (1, 2, 3) if rest != other]) for other in (1, 2, 3)]
    parts = [tuple(scores_of(*(trace[half] for trace in losses)) for half in split) for split in splits]
    members = next(iter(banks.values())).subsets.members.astype(float)
    table: dict[str, Any] = {"covariance": {}, "correlation": {}}
    for (kind, kappa), values in whole.items():
        scores = jostle.Scores(values=values, method="bif", provenance={"fingerprints": fingerprints})
        pairs = [(a[kind, kappa], b[kind, kappa]) for a, b in parts]
        table[kind][f"{kappa:g}"] = {
            "lds": {name: lds_over_queries(bank, scores) for name, bank in banks.items()},
            "ranks": float(np.mean([agreement(a, b, ranks=True) for a, b in pairs])),
            "values": float(np.mean([agreement(a, b, ranks=False) for a, b in pairs])),
            "subsets": float(np.mean([agreement(members @ a, members @ b, ranks=True) for a, b in pairs])),
        }
    return table


def spectrum(held: np.ndarray) -> dict[str, float]:
    """In how many directions what is held moves: tr(K)²/tr(K²), and the share of the largest."""
    sizes = Moves(held, np.arange(len(held))).sizes.numpy()
    return {"effective_directions": float(sizes.sum() ** 2 / (sizes**2).sum()), "largest": sizes[-1] / sizes.sum()}


def baselines(subject: Subject) -> Iterator[tuple[str, Mapping[str, jostle.Scores]]]:
    """What takes no draws, by name, with the scores for each bank: they differ where they know how it was trained."""
    given: Any = {"model": subject.model, "train": subject.train, "query": subject.query, "loss": subject.loss}

    def same(scores: jostle.Scores) -> dict[str, jostle.Scores]:
        return dict.fromkeys(subject.banks, scores)

    yield "gradient similarity", same(gradient_similarity(**given))
    yield "gradient cosine", same(gradient_similarity(**given, cosine=True))
    yield "EK-FAC", same(ekfac(**given))
    for damping in DAMPINGS:
        yield f"EK-FAC, damping {damping:g}", same(ekfac(**given, damping=damping))
    if subject.total_rates is not None:
        ways = [("isotropic", LABELS), ("layers", LABELS), *(("isotropic", labels) for labels in FEWER_LABELS)]
        for metric, labels in ways:
            limit = FirstOrder(**given, labels=labels, metric=metric, start=subject.start)
            told = {key: limit.kappa_of_training(rate) for key, rate in subject.total_rates.items()}
            name = "first order" + (ALIKE if metric == "layers" else "")
            rounded = {key: round(kappa, 2) for key, kappa in told.items()}
            print(f"  {name}, {labels:g} labels, κ of the training: {rounded}", flush=True)
            for kind in KINDS:
                read = functools.partial(limit.influence, normalize=kind == "correlation")
                for kappa in KAPPAS if labels == LABELS else ():
                    yield f"{name}, {kind}, κ = {kappa:g}", same(read(kappa=kappa))
                fewer = "" if labels == LABELS else f", {labels:g} labels"
                yield f"{name}, {kind}, κ of the training{fewer}", {key: read(kappa=told[key]) for key in told}


def measure(name: str, work: Path, record: Record, budget: Budget, *, draws: int, data: Path | None = None) -> None:
    """Whatever the record lacks of one model."""
    kept = record.content["measured"].setdefault(name, {"parts": {}, "baselines": {}})
    missing = any(str(part) not in kept["parts"] for part in PARTS if part <= draws)
    compared = name not in (*WARM, "wide mlp") or "gradient cosine" in kept["baselines"]
    if compared and not missing:
        return
    budget.check()
    started = time.process_time()
    directory = work / name.replace(" ", "_")
    subject = SUBJECTS[name](data)(directory, record, budget)
    print(f"{name}: banks ready, {time.process_time() - started:.0f} s", flush=True)
    first = next(iter(subject.banks.values()))
    if not compared:
        for method, found in baselines(subject):
            cells = {key: lds_over_queries(bank, found[key]) for key, bank in subject.banks.items()}
            for key, cell in cells.items() if "of the training" in method else ():
                cell["kappa"] = found[key].provenance["kappa"]
            kept["baselines"][method] = cells
            print(f"{name}: {method} { {key: round(cell['lds'], 3) for key, cell in cells.items()} }", flush=True)
        record.write()
    if not missing:
        return
    losses = losses_of(subject, directory / f"draws-{draws}.npz", draws)
    print(f"{name}: draws ready, {time.process_time() - started:.0f} s", flush=True)
    kept |= {"weights": sum(value.numel() for value in subject.model.parameters()), "train": first.about["train"],
             "queries": first.about["queries"], "spectrum": spectrum(losses[-1])}  # fmt: skip
    fingerprints = {side: first.about["fingerprints"][side] for side in ("train", "query")}
    for part in (part for part in PARTS if part <= draws):
        table = read([trace[:, : part // CHAINS] for trace in losses], subject.banks, fingerprints)
        kept["parts"][str(part)] = table
        record.write()
        for key in subject.banks:
            shown = "  ".join(
                f"{kappa}: {cell['lds'][key]['lds']:.3f} ({cell['values']:.2f}, {cell['subsets']:.2f})"
                for kappa, cell in table["covariance"].items()
            )
            print(f"{name} {key}, {part} draws: {shown}", flush=True)


def support(table: Mapping[str, Any], kappa: float) -> float:
    """That of `jostle.conditioning.supports`, from the agreement of halves in the record (all three ways to halve)."""
    agreed = [table[f"{at:g}"]["values"] for at in (kappa, 0.0)]
    roots = [math.sqrt(2 * r / (1 + r)) if r > 0 else 0.0 for r in agreed]
    return roots[0] / roots[1] if roots[1] else 0.0


def chosen(table: Mapping[str, Any], least: float = LEAST_SUPPORT) -> float:
    """What ``kappa="auto"`` reads at."""
    return next((kappa for kappa in CHOICES if support(table, kappa) >= least), 0.0)


def gains(measured: Mapping[str, Any], kind: str, least: float = LEAST_SUPPORT) -> list[dict[str, Any]]:
    """For every model, part of the draws and bank: the LDS at 0, and what a κ, or the choice, adds to it."""
    rows = []
    for name, kept in measured.items():
        for part, both in kept["parts"].items():
            # The choice is that of covariances, for either kind.
            table, auto = both[kind], chosen(both["covariance"], least)
            for bank in table["0"]["lds"]:
                lds = {kappa: table[f"{kappa:g}"]["lds"][bank]["lds"] for kappa in KAPPAS}
                rows.append({
                    "name": name, "draws": int(part), "bank": bank, "lds": lds[0.0], "auto": auto,
                    "gain": {kappa: lds[kappa] - lds[0.0] for kappa in KAPPAS} | {"auto": lds[auto] - lds[0.0]},
                    "support": {kappa: support(both["covariance"], kappa) for kappa in CHOICES},
                })  # fmt: skip
    return rows


def summary(measured: Mapping[str, Any], kind: str, least: float = LEAST_SUPPORT) -> str:
    """Mean and worst gain over κ = 0 of groups of models."""
    lines = [f"| {kind} | cells | κ = 3 | κ = 10 | auto |", "| --- | --- | --- | --- | --- |"]
    for group, names in GROUPS.items():
        rows = [row for row in gains(measured, kind, least) if row["name"] in names]
        cells = []
        for key in (3.0, 10.0, "auto"):
            values = [row["gain"][key] for row in rows]
            cells.append(f"{np.mean(values):+.3f}, worst {min(values):+.3f}" if values else "")
        lines.append(f"| {group} | {len(rows)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def markdown(measured: Mapping[str, Any], kind: str) -> str:
    """A line for each model, bank and part of the draws."""
    lines = [
        f"| {kind} | draws | support of 3 / 10 | κ = 0 | κ = 3 | κ = 10 | κ = 30 | auto |",
        "| " + " | ".join(["---"] * 8) + " |",
    ]
    for row in gains(measured, kind):
        cells = [f"{row['lds'] + row['gain'][kappa]:.3f}" for kappa in (0.0, 3.0, 10.0, 30.0)]
        name = row["name"] + (f", {row['bank']}" if row["bank"] else "")
        supported = " / ".join(f"{row['support'][kappa]:.2f}" for kappa in (3.0, 10.0))
        auto = f"{row['lds'] + row['gain']['auto']:.3f} (κ = {row['auto']:g})"
        lines.append(f"| {name} | {row['draws']:,} | {supported} | {' | '.join(cells)} | {auto} |")
    return "\n".join(lines)


def draw(measured: Mapping[str, Any], path: Path) -> None:
    """What κ = 10 adds, against how far the draws support it; and against how long was retrained, as does all else."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    marks = dict(zip(GROUPS, ("o", "s", "^", "v"), strict=True))
    for colour, (group, names) in zip(CHAIN_COLOURS, GROUPS.items(), strict=False):
        rows = [row for row in gains(measured, "covariance") if row["name"] in names]
        left.plot(
            [row["support"][10.0] for row in rows], [row["gain"][10.0] / row["lds"] for row in rows], marks[group],
            color=colour, label=group, markersize=5, alpha=0.8,
        )  # fmt: skip
    left.axvline(LEAST_SUPPORT, color="0.4", linestyle=":")
    left.set(xlabel="support of κ = 10 by the draws", ylabel="change of the LDS from κ = 0 to 10, relative")
    lines = [("mlp from a warm start", 400), ("mlp from a warm start", 1_600), ("CIFAR-10 from a warm start", 400)]
    for colour, (name, part) in zip(CHAIN_COLOURS, [*lines, (LONGER, 1_600)], strict=False):
        rows = [row for row in gains(measured, "correlation") if (row["name"], row["draws"]) == (name, part)]
        rows = [row for row in rows if row["bank"].endswith("steps")]
        if rows:
            changes = [row["gain"][10.0] / row["lds"] for row in rows]
            middle.plot(_steps(rows), changes, "o-", color=colour, label=f"{name}, {part:,} draws", markersize=4)
    middle.set(ylabel="the same, of correlations")
    lines = {"gradient similarity": "0.6", "EK-FAC": "#E69F00", "EK-FAC, damping 0.01": "#D55E00"}
    lines |= {f"first order, correlation, κ = {kappa}": f"{tone:.2f}" for kappa, tone in SHOWN.items()}
    lines["first order, correlation, κ of the training"] = "black"
    without_draws = measured.get(LONGER, {"baselines": {}})["baselines"]
    for name, colour in lines.items() if without_draws else ():
        ours, found = name.startswith("first order"), without_draws[name]
        right.plot(
            _steps([{"bank": bank} for bank in found]), [cell["lds"] for cell in found.values()],
            ":" if colour == "black" else "o-" if ours else "s--",
            color=colormaps["viridis"](float(colour)) if ours and colour != "black" else colour,
            label=name.replace(", correlation", ""), markersize=4,
        )  # fmt: skip
    right.set(ylabel="LDS, CIFAR-10 in small, without draws")
    for axes in (middle, right):
        axes.set(xlabel="steps of retraining from the warm start", xscale="log")
    for axes in (left, middle):
        axes.axhline(0, color="0.4", linewidth=0.8)
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7, loc="best" if axes is left else "lower center" if axes is right else "upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _steps(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    return [int(row["bank"].split()[0]) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description="LDS and agreement of halves at several κ, after parts of the draws.")
    parser.add_argument("--data", type=Path, help="CIFAR-10's binary batches, for the model of them")
    parser.add_argument("--draws", type=int, default=PARTS[-1])
    measured = measure_each(
        parser, "holding", SUBJECTS, {"chains": CHAINS, "rise": RISE},
        lambda name, given, *kept: measure(name, given.work, *kept, draws=given.draws, data=given.data), draw,
    )  # fmt: skip
    for kind in ("covariance", "correlation"):
        print(f"\n{markdown(measured, kind)}\n\n{summary(measured, kind)}", flush=True)


if __name__ == "__main__":
    main()
