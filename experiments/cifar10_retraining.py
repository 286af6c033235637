"""The paper's retraining experiment: CIFAR-10, ResNet-9, LDS against the size of the retraining subsets.

    python -m experiments.cifar10_retraining --data cifar-10-batches-bin --work work --record record.json --minutes 9

Of the 50,000 training images 2,500 are set aside to warm up on; n = 47,500 remain. The attribution set is a share
alpha_attribution of these, and models are trained again on a share alpha_retrain of it. The model that is analysed is
trained on all n for 8 epochs, retrained ones for 1, after the same warm-up of their seed; hyperparameters are those of
the paper's table (SGD, learning rate 10, batch 1,024, momentum 0.85, weight decay 0.0153, label smoothing 0.2, 100
warm-up steps, biases of the norms 64 times faster), in the parametrization of Keller Jordan's fast training. Each seed
repeats everything. Scores are those of the model that is analysed, or with --at 0 of what is trained again, the model
after the warm-up of seed 0, from which the former did not begin. --data is the directory of the official binary
batches, or an .npz with train_images, train_labels, test_images and test_labels. Called again it goes on where it
stood.
"""

from __future__ import annotations

import argparse
import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from benchmarks.vision import ResNet9
from torch import Tensor, nn

import jostle
from experiments.figures import draw, draw_places
from experiments.retraining import (
    METHODS,
    Budget,
    Record,
    Setting,
    add_retraining,
    after,
    analysed_model,
    conduct,
    fill,
    parser_of,
    run_at,
)
from jostle.data.datasets import Data
from jostle.evaluate import random_subsets

WARM_UP_IMAGES, WARM_UP_STEPS = 2_500, 100
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY, BIAS_SCALER, LABEL_SMOOTHING = 10.0, 0.85, 0.0153, 64.0, 0.2
BATCH_SIZE = 1_024
PER_1024 = 1_024 * (1 + 1 / (1 - MOMENTUM))
"""Learning rate and weight decay are given for a step of 1,024 examples, with momentum's amplification taken out."""

PAPER = {"n_beta": 200.0, "localization": 1e4, "step_size": 1e-5, "chains": 4, "draws": 100, "batch_size": 1_024}
BLIND = {"n_beta": 0.0, "sampler": "gaussian", "step_size": None, "burn_in": 1, "thin": 1, "chains": 4, "draws": 100,
         "batch_size": 1_024}  # fmt: skip
BIF: dict[str, dict[str, Any]] = {
    "calibrated": {"chains": 4, "draws": 100, "batch_size": 1_024},
    "calibrated, no gradient": BLIND,
    "as in the paper": {**PAPER, "thin": 1},
    "paper, 10 steps between draws": {**PAPER, "thin": 10, "burn_in": 100},
    "paper, no gradient": {**BLIND, "localization": 1e4},
}
"""Those without a localization are calibrated (`jostle.calibrate`, which sees no retraining)."""

TABLE_ALONE = "no gradient, toward|draws, layers alike|layers alike, correlation|GradSim, layers alike|1e-8"
"""What has a row in the table, and no line in the figures: more of them cannot be told apart."""


class Images:
    """CIFAR-10 on the device, normalized, its training images in an order of the seed: first those to warm up on.

    ``given`` are labels of the training images to use instead of their ``own``, in the official order; ``places`` says
    where those of ``all`` stand in it.
    """

    def __init__(
        self, path: Path, seed: int, queries: int, device: str, most: int | None, given: np.ndarray | None = None
    ) -> None:
        images, labels = zip(*(read(path, part) for part in ("train", "test")), strict=True)
        self.own = labels[0]
        labels = (labels[0] if given is None else given, labels[1])
        mean = images[0].mean((0, 2, 3), keepdims=True)
        std = images[0].std((0, 2, 3), keepdims=True)
        order = np.random.default_rng(seed).permutation(len(labels[0]))[:most]
        warm = min(WARM_UP_IMAGES, len(order) // 5)
        self.places = order[warm:]
        parts = {
            "warm_up": (images[0][order[:warm]], labels[0][order[:warm]]),
            "all": (images[0][order[warm:]], labels[0][order[warm:]]),
            "query": (images[1][:queries], labels[1][:queries]),
        }
        self.warm_up, self.all, self.query = (
            (torch.from_numpy((x - mean) / std).to(device), torch.from_numpy(y).to(device)) for x, y in parts.values()
        )


def read(path: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            images, labels = arrays[f"{part}_images"], arrays[f"{part}_labels"]
        images = images if images.shape[1] == 3 else images.transpose(0, 3, 1, 2)
    else:
        names = ["test_batch"] if part == "test" else [f"data_batch_{i}" for i in range(1, 6)]
        rows = np.concatenate([np.fromfile(path / f"{name}.bin", np.uint8).reshape(-1, 3_073) for name in names])
        images, labels = rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]
    return images.astype(np.float32) / 255, labels.astype(np.int64).ravel()


def new_model(warm_up: tuple[Tensor, Tensor], seed: int) -> nn.Module:
    """Its first layer whitens patches and stays as it is; other filters begin as the identity, norms only shift."""
    torch.manual_seed(seed)
    model = ResNet9().to(warm_up[0].device)
    first: Any = model.layers[0]
    patches = warm_up[0].unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5).reshape(-1, 12)
    values, vectors = torch.linalg.eigh(torch.cov(patches.T.double()))
    filters = (vectors / (values + 5e-4).sqrt()).T.flip(0).float().view(12, 3, 2, 2)
    with torch.no_grad():
        first.weight.copy_(torch.cat([filters, -filters]))
        first.bias.zero_()
    first.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.4
            module.weight.requires_grad_(False)
        elif isinstance(module, nn.Conv2d) and module is not first:
            nn.init.dirac_(module.weight.data[: module.in_channels])
    for parameter in model.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.SGD:
    biases = [module.bias for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    known = {id(bias) for bias in biases}
    others = [value for value in model.parameters() if value.requires_grad and id(value) not in known]
    rate, decay = LEARNING_RATE / PER_1024, WEIGHT_DECAY * BATCH_SIZE / PER_1024
    groups = [
        {"params": values, "lr": scaled, "weight_decay": decay / scaled, "peak": scaled}
        for values, scaled in ((biases, BIAS_SCALER * rate), (others, rate))
    ]
    return torch.optim.SGD(groups, momentum=MOMENTUM, nesterov=True)


def schedule_of(steps: int) -> np.ndarray:
    """Which part of its peak the learning rate has at each step."""
    return np.interp(np.arange(steps), [0, max(1, int(0.23 * steps)), steps], [0.2, 1.0, 0.07])


def steps_of(images: int, epochs: int, batch_size: int = BATCH_SIZE) -> int:
    return max(1, epochs * images // min(batch_size, images))


def training_of(steps: int) -> dict[str, float]:
    """What `FirstOrder.kappa_of_training` asks for: how far a gradient of 1 of the mean loss leads, and what holds."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=MOMENTUM, nesterov=True)
    for factor in schedule_of(steps):
        optimizer.param_groups[0]["lr"] = factor * LEARNING_RATE / PER_1024
        weight.grad = torch.full((1,), float(BATCH_SIZE))
        optimizer.step()
    return {"total_rate": -weight.item(), "weight_decay": WEIGHT_DECAY / LEARNING_RATE}


def train(
    model: nn.Module, optimizer: torch.optim.SGD, data: tuple[Tensor, Tensor], seed: int, *,
    steps: int, batch_size: int, part: float = 1.0,
) -> None:  # fmt: skip
    """So many steps over shuffled batches, or a part of them; the learning rate rises to its peak and falls again."""
    X, y = data
    bfloat16 = X.is_cuda
    generator = torch.Generator().manual_seed(seed)
    model.train()
    order = torch.empty(0, dtype=torch.long)
    for factor in schedule_of(steps)[: round(part * steps)]:
        while len(order) < batch_size:
            order = torch.cat([order, torch.randperm(len(y), generator=generator)])
        chosen, order = order[:batch_size].to(X.device), order[batch_size:]
        for group in optimizer.param_groups:
            group["lr"] = factor * group["peak"]
        with torch.autocast(X.device.type, torch.bfloat16, enabled=bfloat16):
            logits = model(X[chosen].contiguous(memory_format=torch.channels_last))
        loss = F.cross_entropy(logits.float(), y[chosen], label_smoothing=LABEL_SMOOTHING, reduction="sum")
        # The rates are for sums over 1,024 examples; a smaller batch takes the same step.
        (loss * (BATCH_SIZE / batch_size)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    model.eval()


class Retrainer:
    """Trains on subsets, from the state that its seed has after the warm-up, which is made once."""

    def __init__(
        self, images: Images, data: tuple[Tensor, Tensor], seed: int, epochs: int, warm_up_steps: int,
        batch_size: int = BATCH_SIZE,
    ) -> None:  # fmt: skip
        self._images, self._data, self._seed, self._epochs = images, data, seed, epochs
        self._warm_up_steps, self._batch_size = warm_up_steps, batch_size

    @functools.cache  # noqa: B019 - lives as long as the script
    def _warm(self, seed: int) -> tuple[nn.Module, Mapping[str, Any]]:
        model = new_model(self._images.warm_up, seed)
        optimizer = optimizer_of(model)
        size = min(self._batch_size, len(self._images.warm_up[1]))
        train(model, optimizer, self._images.warm_up, seed, steps=self._warm_up_steps, batch_size=size)
        return model, optimizer.state_dict()

    def start(self, seed: int) -> nn.Module:
        """What is trained again."""
        return self._warm(1_000 * self._seed + seed)[0].eval()

    def __call__(self, indices: np.ndarray, seed: int, part: float = 1.0) -> nn.Module:
        seed = 1_000 * self._seed + seed
        warm, state = self._warm(seed)
        model = copy.deepcopy(warm)
        optimizer = optimizer_of(model)
        optimizer.load_state_dict(copy.deepcopy(dict(state)))  # it would share the momenta otherwise
        chosen = torch.from_numpy(indices).to(self._data[1].device)
        data = self._data[0][chosen], self._data[1][chosen]
        size = min(self._batch_size, len(indices))
        steps = steps_of(len(indices), self._epochs, self._batch_size)
        train(model, optimizer, data, seed, steps=steps, batch_size=size, part=part)
        return model


def accuracy(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    with torch.no_grad():
        right = [
            (model(x).argmax(1) == y).sum() for x, y in zip(data[0].split(1_000), data[1].split(1_000), strict=True)
        ]
    return float(sum(right)) / len(data[1])


def settings_of(
    arguments: argparse.Namespace, seed: int, record: Record, budget: Budget, bif: Mapping[str, Mapping[str, Any]]
) -> Iterator[Setting]:
    """The model of a seed and its banks, for each attribution set; what the work directory lacks is made first."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images = Images(arguments.data, seed, arguments.queries, device, arguments.images)
    work = arguments.work / f"seed-{seed}"
    n = len(images.all[1])
    base = Retrainer(images, images.all, seed, arguments.epochs, arguments.warm_up_steps)
    model = analysed_model(
        work / "model.pt", lambda: new_model(images.warm_up, seed), lambda: base(np.arange(n), 999), record, budget
    )
    reached = accuracy(model, images.query)
    record.content.setdefault("accuracy", {})[f"seed {seed}"] = reached
    print(f"seed {seed}: {n} images, accuracy {reached:.3f}", flush=True)
    loss, smoothed = jostle.losses.classification(), jostle.losses.classification(label_smoothing=LABEL_SMOOTHING)
    query_fingerprint = Data(images.query, "query").fingerprint()
    for share in arguments.attribution:
        count = round(share * n)
        data = images.all[0][:count], images.all[1][:count]
        fingerprints = {"train": Data(data, "train").fingerprint(), "query": query_fingerprint}
        retrainer = Retrainer(images, data, seed, arguments.retrain_epochs, arguments.warm_up_steps)
        along = functools.partial(_along, retrainer, images, count, work / f"part-{share:g}", record, budget)
        banks, sgd = {}, {}
        for alpha in arguments.retrain:
            key = f"{alpha:g}"
            sgd[key] = training_of(steps_of(round(alpha * count), arguments.retrain_epochs))
            banks[key] = fill(
                work / f"bank-{share:g}-{alpha:g}",
                random_subsets(count, arguments.subsets, share=alpha, seed=seed, independent=arguments.independent),
                retrainer, images.query, loss, fingerprints, seeds=arguments.retrain_seeds, budget=budget,
                record=record, batch_size=2_000, key=f"alpha_attribution {share:g}, alpha_retrain {key}",
            )  # fmt: skip
        yield Setting(
            f"seed {seed}, alpha_attribution {share:g}", model, data, images.query, loss, banks, bif,
            sampling_data=images.all, potential_loss=smoothed if arguments.smoothing else None,
            batch_size=arguments.scoring_batch, precision="bfloat16" if device == "cuda" else "model",
            ekfac_repeats=arguments.ekfac_repeats, methods=arguments.methods, dampings=arguments.dampings,
            keep=arguments.keep, labels=arguments.labels, label_seeds=arguments.label_seeds,
            read_at=arguments.read_at, only=arguments.only,
            sgd=sgd, start=retrainer.start(seed=0), along=along,
            alike=arguments.alike, first_order_at=arguments.first_order_at,
        )  # fmt: skip


def _along(
    retrainer: Retrainer, images: Images, count: int, path: Path, record: Record, budget: Budget, part: float
) -> nn.Module:
    """What a part of a retraining on all images of an attribution set comes to; it is made once."""
    return analysed_model(
        path.with_name(f"{path.name}-{part:g}.pt"), lambda: new_model(images.warm_up, 0),
        lambda: retrainer(np.arange(count), 0, part), record, budget,
    )  # fmt: skip


def read_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of("cifar10_retraining", "LDS on CIFAR-10 with ResNet-9, as in the paper.", methods=METHODS)
    add_retraining(
        parser, queries=10_000, retrain=[0.1, 0.3, 0.5, 0.7], retrain_seeds=1, ekfac_repeats=2, scoring_batch=1_000
    )
    parser.add_argument("--data", type=Path, required=True, help="the official binary batches, or an .npz")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="repeat everything")
    parser.add_argument("--attribution", type=float, nargs="+", default=[0.1], help="alpha_attribution")
    parser.add_argument("--independent", action="store_true", help="each image with probability alpha, as in the paper")
    parser.add_argument("--epochs", type=int, default=8, help="of the model that is analysed")
    parser.add_argument("--retrain-epochs", type=int, default=1)
    parser.add_argument("--warm-up-steps", type=int, default=WARM_UP_STEPS)
    parser.add_argument("--smoothing", action="store_true", help="label smoothing in the BIF's potential too")
    parser.add_argument("--images", type=int, help="use only so many training images (to try the script)")
    return parser.parse_args(words)


def main() -> None:
    arguments = read_arguments()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True

    def every_seed(record: Record, budget: Budget, bif: Mapping[str, Mapping[str, Any]]) -> None:
        for seed in arguments.seeds:
            for setting in settings_of(arguments, seed, record, budget, bif):
                scores = arguments.work / f"seed-{seed}" / "scores"
                run_at(arguments.at, setting, scores, record, budget, together=arguments.together)

    measured = conduct(arguments, {"model": "ResNet-9, 1,972,792 weights"}, BIF, every_seed)["measured"]
    for share in arguments.attribution:
        chosen = {
            name: found
            for name, found in measured.items()
            if name.endswith(f"alpha_attribution {share:g}") and all(f"{a:g}" in found for a in arguments.retrain)
        }
        if chosen:
            draw(arguments.record.with_name(f"{arguments.record.stem}-{share:g}.png"), chosen, "alpha_retrain",
                 leave_out=TABLE_ALONE)  # fmt: skip
        for name, found in chosen.items() if len(chosen) > 1 else ():
            seed = name.split(",")[0].replace(" ", "-")
            path = arguments.record.with_name(f"{arguments.record.stem}-{share:g}-{seed}.png")
            draw(path, {name: found}, "alpha_retrain", list(chosen.values()), TABLE_ALONE)
    panels = {}
    for share in arguments.attribution:
        name = f"alpha_attribution {share:g}"
        both = [one for one in measured if one.endswith(name) and f"{one}{after(0)}" in measured]
        if both:
            panels[name] = {
                "where training begins": [measured[f"{one}{after(0)}"] for one in both],
                "the trained model": [measured[one] for one in both],
            }
    if panels:
        draw_places(arguments.record.with_name(f"{arguments.record.stem}-places.png"), panels, "alpha_retrain")


if __name__ == "__main__":
    main()
