"""The small models on which closed-form influence is judged: a list that was fixed first.

Settings are chosen on those for choosing (digits); those for reporting (CIFAR-10 at 16×16, characters of WikiText-2)
are looked at once, at the end. Each architecture is trained by SGD with momentum and by AdamW, short (a few epochs, in
which a gradient of the loss hardly falls: its curvature times the sum of the rates is about 1) and long (many epochs;
of some, weight decay times the sum of the rates is 3 or more, so that they forget where they began). Those for choosing
are trained to the middle as well.

Rates of long trainings are low enough for the question to have an answer. At rates two to six times as high, or with so
much decay that AdamW's steps are mostly noise, trainings that begin 1e-6 apart end about as far apart as those with and
without a drop: what an example did is then nothing that any method could tell. This was looked at with trainings alone
(does half of a drop do half of what all of it does?), without any method.

Activations are smooth for the same reason. With ReLU, what a tenth of a drop does, times ten, ranks what the whole drop
does with an LDS of 0.23 (AdamW, to the middle) to 0.94 (SGD, short) on the perceptron: small changes and large ones are
different questions there. With GELU it is 0.94 to 0.99 (AdamW short, both to the middle; 30 drops).

The network with batch norms is trained with the statistics of its batches, and asked with the running ones that it ends
with, as it would be used: queries' losses, and whatever a method computes, are of the model in eval mode. What an
example does to the statistics of its batch is outside of the influence of its loss: an example that is left out stays
in its batch, with weight 0 (`jostle.evaluate.random_drops`).
"""

from __future__ import annotations

import lzma
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

import jostle
from jostle.evaluate import Subsets, Trainer, random_drops, random_subsets
from jostle.losses import Loss

DROPS, SHARE = 100, 0.02
HALVES, HALF_SEEDS = 100, 2
OTHER_SEEDS = 1000
"""Halves begin elsewhere and in another order than the model that is asked."""
SIDE = 16
CHARACTERS, WINDOW = 64, 32
"""The commonest characters, all others being one more kind, and how many of them a sequence has."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is trained, on what, and how; every sequence and every image counts alike.

    Attributes:
        purpose: whether settings may be chosen on it, or it is only reported.
        weight_decay: decoupled in AdamW, coupled in SGD.
        seed: of the data, the weights and the order.
    """

    name: str
    purpose: Literal["choosing", "reporting"]
    data: Literal["digits", "cifar10", "wikitext2"]
    architecture: str
    optimizer: Literal["sgd", "adamw"]
    rate: float
    epochs: int
    weight_decay: float
    seed: int
    batch_size: int = 40
    momentum: float = 0.9
    """Of SGD."""
    train: int = 600
    queries: int = 50

    @property
    def steps(self) -> int:
        return self.epochs * self.train // self.batch_size

    @property
    def total_rate(self) -> float:
        """τ: how far a gradient of 1 that never changes would lead, in units of the optimizer's metric."""
        return self.steps * self.rate / (1 - self.momentum if self.optimizer == "sgd" else 1)

    @property
    def loss(self) -> Loss:
        return jostle.losses.next_token() if self.data == "wikitext2" else jostle.losses.classification()

    def drops(self) -> Subsets:
        return random_drops(self.train, DROPS, size=round(SHARE * self.train), seed=self.seed)

    def halves(self) -> Subsets:
        return random_subsets(self.train, HALVES, seed=self.seed)

    def examples(self, directory: Path | None) -> tuple[Any, Any]:
        """Training examples and queries, none in both."""
        chosen = DATA[self.data](directory, self.train + self.queries, self.seed)
        if isinstance(chosen, Tensor):
            return {"input_ids": chosen[: self.train]}, {"input_ids": chosen[self.train :]}
        X, y = chosen
        return (X[: self.train], y[: self.train]), (X[self.train :], y[self.train :])

    def new(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(OTHER_SEEDS * self.seed + seed)
            return ARCHITECTURES[self.architecture]()

    def new_optimizer(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=self.rate, momentum=self.momentum, weight_decay=self.weight_decay)
        return torch.optim.AdamW(parameters, lr=self.rate, weight_decay=self.weight_decay)

    def trainer(self, train: Any, *, first_seed: int = 0, **more: Any) -> Trainer:
        """Train the model; ``first_seed`` is what its weights begin with where the training's seed is 0."""
        given = {"optimizer": self.new_optimizer, "epochs": self.epochs, "batch_size": self.batch_size} | more
        return Trainer(lambda seed: self.new(first_seed + seed), train, loss=self.loss, **given)


def digits(directory: Path | None, count: int, seed: int) -> tuple[Float[Tensor, "image 64"], Int[Tensor, " image"]]:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    chosen = np.random.default_rng(seed).permutation(len(labels))[:count]
    return torch.tensor(pixels[chosen] / 16, dtype=torch.float32), torch.tensor(labels[chosen])


def cifar10(
    directory: Path | None, count: int, seed: int
) -> tuple[Float[Tensor, "image 3 16 16"], Int[Tensor, " image"]]:
    """Means of 2 by 2 pixels, each colour with mean 0 and variance 1."""
    path = found(directory, "cifar-10-batches-bin/data_batch_1.bin")
    rows = np.fromfile(path, np.uint8).reshape(-1, 3_073)
    chosen = rows[np.random.default_rng(seed).permutation(len(rows))[:count]]
    images = chosen[:, 1:].reshape(-1, 3, SIDE, 2, SIDE, 2).astype(np.float64).mean((3, 5))
    images = (images - images.mean((0, 2, 3), keepdims=True)) / images.std((0, 2, 3), keepdims=True)
    return torch.tensor(images, dtype=torch.float32), torch.tensor(chosen[:, 0].astype(np.int64))


def wikitext2(directory: Path | None, count: int, seed: int) -> Int[Tensor, "sequence 32"]:
    """Windows of a text that do not overlap, from all over it."""
    text = lzma.decompress(found(directory, "wikitext-2/valid.txt.xz").read_bytes()).decode()
    commonest = [character for character, _ in Counter(text).most_common(CHARACTERS - 1)]
    kinds = {character: number for number, character in enumerate(commonest)}
    windows = np.random.default_rng(seed).permutation(len(text) // WINDOW)[:count]
    return torch.tensor([
        [kinds.get(character, CHARACTERS - 1) for character in text[WINDOW * window : WINDOW * (window + 1)]]
        for window in windows
    ])  # fmt: skip


def found(directory: Path | None, name: str) -> Path:
    path = Path() if directory is None else directory / name
    if not path.is_file():
        raise SystemExit(f"--data needs {name} in it")
    return path


DATA: dict[str, Callable[[Path | None, int, int], Any]] = {
    "digits": digits, "cifar10": cifar10, "wikitext2": wikitext2,
}  # fmt: skip


def logistic() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 10))


def mlp() -> nn.Module:
    """4,074 weights."""
    return nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 16), nn.GELU(), nn.Linear(16, 10))


def cnn(norms: bool = False) -> nn.Module:
    """7,778 weights, or 7,818 with batch norms."""
    # A bias before a batch norm would never have a gradient, and a metric made from gradients no finite size there.
    norm: Callable[[int], nn.Module] = nn.BatchNorm2d if norms else lambda width: nn.Identity()
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=not norms), norm(16), nn.GELU(),
        nn.Conv2d(16, 24, 3, stride=2, padding=1, bias=not norms), norm(24), nn.GELU(),
        nn.Flatten(), nn.Linear(24 * (SIDE // 4) ** 2, 10),
    )  # fmt: skip


class Block(nn.Module):
    """Attention to what comes before, in plain operations, which have every derivative; then a hidden layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.asked, self.given = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.hidden = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.register_buffer("later", torch.ones(WINDOW, WINDOW, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        parts = self.asked(self.norms[0](x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts[0], parts[1], parts[2]
        likeness = query @ key.transpose(2, 3) / query.shape[3] ** 0.5
        later: Any = self.later
        attention = likeness.masked_fill(later[:length, :length], -torch.inf).softmax(3)
        x = x + self.given((attention @ value).transpose(1, 2).flatten(2))
        return x + self.hidden(self.norms[1](x))


class Transformer(nn.Module):
    """One block of width 32; 17,952 weights."""

    def __init__(self, width: int = 32, blocks: int = 1, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(CHARACTERS, width), nn.Embedding(WINDOW, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CHARACTERS)

    def forward(
        self, input_ids: Int[Tensor, "sequence token"], attention_mask: Tensor | None = None
    ) -> Float[Tensor, "sequence token kind"]:
        """Return logits; all sequences are of one length, so that a mask has nothing to say."""
        places = self.places.weight[: input_ids.shape[1]]
        return self.head(self.norm(self.blocks(self.tokens(input_ids) + places)))


ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "logistic": logistic, "mlp": mlp, "cnn": cnn, "cnn with batch norms": lambda: cnn(norms=True),
    "transformer": Transformer,
}  # fmt: skip


def lengths(about: Mapping[str, Any], **each: tuple[float, int, float]) -> list[Model]:
    """Models of each length: its rate, epochs and weight decay."""
    name = f"{about['architecture'].replace(' with batch norms', '-norms')}-{about['optimizer']}"
    return [
        Model(name=f"{name}-{length}", rate=rate, epochs=epochs, weight_decay=weight_decay, **about)
        for length, (rate, epochs, weight_decay) in each.items()
    ]


def listed() -> list[Model]:
    choosing: dict[str, Any] = {"purpose": "choosing", "data": "digits", "seed": 0, "train": 800}
    images: dict[str, Any] = {"purpose": "reporting", "data": "cifar10", "seed": 1, "train": 800, "batch_size": 50}
    text: dict[str, Any] = {"purpose": "reporting", "data": "wikitext2", "seed": 2, "train": 500}
    logistic, mlp = ({"architecture": name, **choosing} for name in ("logistic", "mlp"))
    text["architecture"] = "transformer"
    plain, norms = ({"architecture": name, **images} for name in ("cnn", "cnn with batch norms"))
    sgd, adamw = {"optimizer": "sgd"}, {"optimizer": "adamw"}
    return [
        *lengths(logistic | sgd, short=(0.003, 3, 5e-4), middle=(0.02, 20, 5e-4), long=(0.05, 60, 5e-3)),
        *lengths(logistic | adamw, short=(1e-3, 3, 0.01), middle=(3e-3, 20, 0.01), long=(1e-2, 60, 0.3)),
        *lengths(mlp | sgd, short=(0.01, 3, 5e-4), middle=(0.02, 20, 5e-4), long=(0.02, 60, 0.0125)),
        *lengths(mlp | adamw, short=(5e-4, 3, 0.01), middle=(1e-3, 20, 0.01), long=(1e-3, 60, 0.1)),
        *lengths(plain | sgd, short=(0.003, 3, 5e-4), long=(0.01, 20, 0.1)),
        *lengths(plain | adamw, short=(3e-4, 3, 0.01), long=(5e-4, 20, 0.01)),
        *lengths(norms | sgd, short=(0.001, 3, 5e-4), long=(1.5e-3, 20, 5e-4)),
        *lengths(norms | adamw, short=(3e-4, 3, 0.01), long=(3e-4, 20, 0.01)),
        *lengths(text | sgd, short=(0.02, 3, 5e-4), long=(0.1, 20, 0.013)),
        *lengths(text | adamw, short=(1e-3, 3, 0.01), long=(4e-3, 20, 3.3)),
    ]


MODELS = {model.name: model for model in listed()}
