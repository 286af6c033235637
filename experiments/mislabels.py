"""Do wrong labels stand out? CIFAR-10N's human label noise, ResNet-9, detection by self-influence.

    python -m experiments.mislabels --data cifar-10-batches-bin --labels labels.npz --work work --record record.json \
        --figure figure.png --minutes 9

People labelled the 50,000 training images of CIFAR-10 again, three of them each (Wei et al., *Learning with Noisy
Labels Revisited*, 2022). A model is trained on what they said: on the majority's label (noise "aggre", 9 % wrong), on
the first one's ("random1", 17 %) or on a wrong one where there is any ("worse", 40 %). Which of the 47,500 are wrong is
then to be told from the model alone. Network, split, training and samplers are those of `cifar10_retraining`; the
labels are the only change. --labels is an .npz with the arrays of CIFAR-10N: clean_label, aggre_label, ... in the order
of the official batches. Each seed repeats everything. Called again it goes on where it stood.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats
import torch
from torch import Tensor, nn

import jostle
from experiments.cifar10_retraining import BATCH_SIZE, BIF, WARM_UP_STEPS, Images, Retrainer, new_model
from experiments.figures import best_ekfac
from experiments.retraining import (
    DAMPINGS,
    Budget,
    Record,
    analysed_model,
    conduct,
    file_name,
    finished,
    parser_of,
    sample,
)
from jostle.attributors import ekfac_self_influence, gradient_self_influence
from jostle.diagnose.plots import CHAIN_COLOURS
from jostle.evaluate import mislabel_detection, self_influence
from jostle.evaluate.metrics import NORMAL_95

NOISES = {"aggre": "aggre_label", "random1": "random_label1", "worse": "worse_label"}
METHODS = ("outputs", "gradients", "ekfac", "bif")
TRIED = {f"EK-FAC, damping {damping:g}": damping for damping in DAMPINGS[1::2]}
INSPECTED = np.linspace(0, 1, 101)
QUERIES = 10_000

Suspects = dict[str, tuple[np.ndarray, dict[str, Any]]]
"""By method: a number for each training example, most negative for the most suspicious, and what to keep beside it."""


def logits_of(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(part).float() for part in images.split(1_000)])


def from_outputs(model: nn.Module, data: tuple[Tensor, Tensor]) -> Suspects:
    """What needs no derivative: the loss, the margin to the best other class; and no information at all."""
    logits, labels = logits_of(model, data[0]), data[1][:, None]
    own = logits.gather(1, labels)[:, 0]
    others = logits.scatter(1, labels, -torch.inf)
    return {
        "loss": (-torch.nn.functional.softplus(others.logsumexp(1) - own).cpu().numpy(), {}),
        "margin": ((own - others.max(1).values).cpu().numpy(), {}),
        "random": (np.random.default_rng(0).normal(size=len(labels)), {}),
    }


def jobs_of(
    arguments: argparse.Namespace, model: nn.Module, images: Images, work: Path, budget: Budget,
    bif: Mapping[str, Mapping[str, Any]],
) -> dict[str, Callable[[], Suspects]]:  # fmt: skip
    """What there is to run, by method."""
    data = images.all
    few = images.query[0][:64], images.query[1][:64]  # a run wants something that is influenced

    def from_ekfac(name: str, damping: float | None) -> Suspects:
        # The first to come fits the factors, so its time is the whole time; the others take them over.
        values = ekfac_self_influence(
            model, data, damping=damping, batch_size=arguments.scoring_batch, directory=work / "ekfac"
        )
        return {name: (values, {"damping": damping})}

    def from_bif(name: str, settings: Mapping[str, Any]) -> Suspects:
        run, about = sample(
            model, data, few, settings, loss=jostle.losses.classification(), weights="all", budget=budget,
            out=work / "runs" / file_name(name), precision="bfloat16" if data[0].is_cuda else "model",
        )  # fmt: skip
        return {
            f"BIF {name}": (self_influence(run), about),
            f"BIF {name}, relative to the loss": (self_influence(run, normalize=True), about),
        }

    dampings: dict[str, float | None] = {"EK-FAC, damping 1e-8": 1e-8, "EK-FAC, default damping": None, **TRIED}
    groups: dict[str, dict[str, Callable[[], Suspects]]] = {
        "outputs": {"loss": lambda: from_outputs(model, data)},
        "gradients": {"GradSim": lambda: {"GradSim": (gradient_self_influence(model, data), {})}},
        "ekfac": {name: lambda name=name, value=value: from_ekfac(name, value) for name, value in dampings.items()},
        "bif": {f"BIF {name}": lambda name=name, given=given: from_bif(name, given) for name, given in bif.items()},
    }
    return {name: job for group in arguments.methods for name, job in groups[group].items()}


def one_model(
    arguments: argparse.Namespace, noise: str, seed: int, record: Record, budget: Budget,
    bif: Mapping[str, Mapping[str, Any]],
) -> None:  # fmt: skip
    """Train on one kind of labels, and see what finds the wrong ones."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with np.load(arguments.labels) as arrays:
        clean, given = (arrays[name].astype(np.int64) for name in ("clean_label", NOISES[noise]))
    images = Images(arguments.data, seed, QUERIES, device, arguments.images, given)
    if not np.array_equal(clean, images.own):
        raise SystemExit(f"{arguments.labels} has labels of other images than {arguments.data}, or in another order")
    n, truth = len(images.places), clean[images.places]
    wrong = given[images.places] != truth
    key = f"{noise}, seed {seed}"
    work = arguments.work / file_name(key)
    retrainer = Retrainer(images, images.all, seed, arguments.epochs, arguments.warm_up_steps, arguments.train_batch)
    model = analysed_model(
        work / "model.pt", lambda: new_model(images.warm_up, seed), lambda: retrainer(np.arange(n), 999), record, budget
    )
    measured = record.content["measured"].setdefault(key, {})
    jobs = {
        name: job for name, job in jobs_of(arguments, model, images, work, budget, bif).items() if name not in measured
    }
    if jobs:
        answers = logits_of(model, images.all[0]).argmax(1).cpu().numpy()
        right = logits_of(model, images.query[0][: arguments.tested]).argmax(1) == images.query[1][: arguments.tested]
        about = {
            "images": n, "wrong_labels": int(wrong.sum()), "test_accuracy": float(right.float().mean()),
            "predicts_the_given_label": float((answers == given[images.places]).mean()),
            "predicts_the_true_label": float((answers == truth).mean()),
            "predicts_the_given_label_where_it_is_wrong": float((answers == given[images.places])[wrong].mean()),
        }  # fmt: skip
        record.content.setdefault("models", {})[key] = about
        print(f"{key}: {about}", flush=True)
    for _, suspects, seconds in finished(jobs, key, record, budget):
        for name, (values, about) in suspects.items():
            with record.failing(key, name):
                found = mislabel_detection(values, wrong)
                measured[name] = {
                    "auroc": found.auroc.value, "standard_error": found.auroc.standard_error,
                    "found": [round(found.found_at(share), 4) for share in INSPECTED], "seconds": seconds, **about,
                }  # fmt: skip
                print(f"  {name:60} AUROC {found.auroc}   {measured[name]['seconds']:.1f} s", flush=True)


def shown_methods(seeds: Sequence[Mapping[str, Any]]) -> list[str]:
    """All, but of the dampings that were only tried the best one: by its mean over seeds, if it was tried on each."""
    names = list(dict.fromkeys(name for found in seeds for name in found))
    means = {
        name: {"auroc": np.mean([found[name]["auroc"] for found in seeds])}
        for name in names
        if all(name in found for found in seeds)
    }
    best = best_ekfac(means, "auroc")
    return [name for name in names if name not in TRIED or name == best]


def interval(found: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """The mean AUROC over seeds, and half of its 95 % interval: Student's, and by bootstrap where there is one seed."""
    aurocs = [one["auroc"] for one in found]
    seeds = len(aurocs)
    if seeds == 1:
        return aurocs[0], NORMAL_95 * found[0]["standard_error"]
    error = np.std(aurocs, ddof=1) / np.sqrt(seeds)
    return float(np.mean(aurocs)), float(scipy.stats.t.ppf(0.975, seeds - 1) * error)


def draw(
    path: Path, measured: Mapping[str, Mapping[str, Any]], models: Mapping[str, Any], noises: Sequence[str]
) -> None:
    """For each kind of noise: how many wrong labels are found among the first, and the AUROC; means over seeds."""
    from matplotlib.figure import Figure

    rows = [noise for noise in noises if any(key.startswith(f"{noise},") for key in measured)]
    figure = Figure(figsize=(13, 5.2 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), 2, squeeze=False)
    for (curves, bars), noise in zip(panels, rows, strict=True):
        seeds = {key: found for key, found in measured.items() if key.startswith(f"{noise},")}
        names = shown_methods(list(seeds.values()))
        for index, name in enumerate(names):
            found = [one[name] for one in seeds.values() if name in one]
            colour = "#999999" if name == "random" else CHAIN_COLOURS[index % len(CHAIN_COLOURS)]
            style = ("-", "--", ":")[index // len(CHAIN_COLOURS) % 3]
            curve = np.mean([one["found"] for one in found], axis=0)
            curves.plot(INSPECTED, curve, color=colour, linestyle=style)
            # Drawn as the curve is, so that these are its legend, too.
            middle, half = interval(found)
            bars.plot([middle - half, middle, middle + half], 3 * [index], color=colour, linestyle=style, marker="|")
            bars.plot(middle, index, color=colour, marker="o")
        share = np.mean([models[key]["wrong_labels"] / models[key]["images"] for key in seeds])
        curves.plot(INSPECTED, np.minimum(INSPECTED / share, 1), color="black", linewidth=0.8)
        curves.set(xlabel="share of the training set inspected", ylabel="share of the wrong labels found")
        curves.set_title(f"{noise}: {share:.0%} of {models[next(iter(seeds))]['images']:,} labels wrong")
        bars.set_yticks(range(len(names)), names)
        bars.invert_yaxis()
        bars.axvline(0.5, color="black", linewidth=0.8)
        bars.set_title("AUROC, ± 95 %; lines as on the left")
        for panel in (curves, bars):
            panel.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = parser_of("mislabels", "Mislabelled images of CIFAR-10N, by self-influence.", methods=METHODS)
    parser.add_argument("--data", type=Path, required=True, help="CIFAR-10: the official binary batches, or an .npz")
    parser.add_argument("--labels", type=Path, required=True, help="CIFAR-10N, as .npz")
    parser.add_argument("--figure", type=Path, help="default: beside the record")
    parser.add_argument("--noise", nargs="+", choices=list(NOISES), default=["aggre", "worse"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="repeat everything")
    parser.add_argument("--images", type=int, help="use only so many training images, a fifth of them to warm up on")
    parser.add_argument("--tested", type=int, default=QUERIES, help="test images, for the model's accuracy")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--train-batch", type=int, default=BATCH_SIZE)
    parser.add_argument("--warm-up-steps", type=int, default=WARM_UP_STEPS)
    parser.add_argument("--scoring-batch", type=int, default=512, help="examples in one pass of EK-FAC")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True

    def every_model(record: Record, budget: Budget, bif: Mapping[str, Mapping[str, Any]]) -> None:
        for noise in arguments.noise:
            for seed in arguments.seeds:
                one_model(arguments, noise, seed, record, budget, bif)

    content = conduct(arguments, {"model": "ResNet-9, 1,972,792 weights"}, BIF, every_model)
    done = {key: found for key, found in content["measured"].items() if found}
    if done:
        draw(arguments.figure or arguments.record.with_suffix(".png"), done, content["models"], list(NOISES))


if __name__ == "__main__":
    main()
