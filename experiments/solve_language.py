"""stories15M, fine-tuned: does the closed form predict what leaving texts out of the fine-tuning does?

    python -m experiments.solve_language prepare --model stories15M --texts articles.jsonl.xz --work work
    python -m experiments.solve_language bank --model stories15M --work work
    python -m experiments.solve_language methods --model stories15M --work work --record record.json

`prepare` writes tokens, `bank` trains once with every text and once without each of 100 random sets of 2 % of them
(same seed, same order: a text that is left out has weight 0 in its batch), and keeps the queries' losses; `methods`
compares methods with it. On "wikipedia" settings were chosen; "pile" was looked at once, at the end. Training is in float32, so
that the same training comes out the same.
"""

from __future__ import annotations

import argparse
import copy
import json
import lzma
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

import jostle
from jostle.data.datasets import Data
from jostle.models.functional import sample_means
from jostle.models.in_place import Graph


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is trained on, and how: all weights, by AdamW, the mean over each sequence's tokens, then over the batch."""

    purpose: str
    """"choosing" or "reporting"."""
    seed: int
    rate: float
    epochs: int
    batch_size: int
    weight_decay: float
    warmup: float = 0.0
    """The share of the steps in which the rate rises; then it falls linearly to 0."""
    clip_norm: float | None = None
    train: int = 1024
    queries: int = 32
    length: int = 128

    @property
    def steps(self) -> int:
        return self.epochs * self.train // self.batch_size

    def rates(self) -> list[float]:
        """The learning rate of each step."""
        rising = round(self.warmup * self.steps)
        return [
            self.rate * ((step + 1) / rising if step < rising else (self.steps - step) / (self.steps - rising))
            for step in range(self.steps)
        ]


MODELS = {
    "wikipedia": Model(purpose="choosing", seed=0, rate=3e-4, epochs=4, batch_size=32, weight_decay=0.01),
    "pile": Model(
        purpose="reporting", seed=1, rate=2e-4, epochs=3, batch_size=16, weight_decay=0.1, warmup=0.1, clip_norm=1.0
    ),
}
DROPS, SHARE = 100, 0.02


def drops(model: Model) -> Float[np.ndarray, "drop train"]:
    """Weights of the texts in each training: first all of them, then without each random set."""
    size = round(SHARE * model.train)
    weights = np.ones((1 + DROPS, model.train), np.float32)
    for number, row in enumerate(weights[1:]):
        row[np.random.default_rng((model.seed, number)).permutation(model.train)[:size]] = 0
    return weights


def prepare(model: Model, tokenizer: Any, texts: Path, path: Path) -> None:
    """Pieces of texts, none of a text in both; at most eight of an article."""

    def pieces() -> Iterator[list[int]]:
        begin = [tokenizer.bos_token_id]
        with lzma.open(texts, "rt", encoding="utf-8") as lines:
            for line in lines:
                tokens = tokenizer(json.loads(line)["text"][:60_000], add_special_tokens=False)["input_ids"]
                size = model.length - 1
                for start in range(0, min(len(tokens) - size + 1, 8 * size), size):
                    yield begin + tokens[start : start + size]

    every = np.array([piece for piece, _ in zip(pieces(), range(model.train + model.queries), strict=False)], np.uint16)
    if len(every) < model.train + model.queries:
        raise SystemExit(f"{texts} has only {len(every)} pieces of {model.length} tokens")
    np.savez_compressed(path, query=every[: model.queries], train=every[model.queries :])


class Trained:
    """The training, repeated with any weights of its texts, in one working model.

    Attributes:
        model: as it stands after the last call.
        second_moments: v̂ of AdamW, bias-corrected, by parameter.
        clip_factor: the mean factor of clipping, weighted by rates.
    """

    def __init__(self, about: Model, start: nn.Module, train: np.ndarray, query: np.ndarray) -> None:
        self.about, self.model = about, copy.deepcopy(start)
        device = next(start.parameters()).device
        self.train = Data([row.tolist() for row in train.astype(int)], "train", device=device)
        self.query = Data([row.tolist() for row in query.astype(int)], "query", device=device)
        self._weights = [*self.model.parameters()]
        self._start = [value.detach().clone() for value in self._weights]
        self.loss: Any = jostle.losses.next_token(chunk_bytes=16 << 30)
        cuda = device.type == "cuda"
        self._rate = torch.tensor(about.rate, device=device)
        self._optimizer = torch.optim.AdamW(
            self._weights, lr=self._rate if cuda else about.rate, weight_decay=about.weight_decay,
            fused=cuda, capturable=cuda,
        )  # fmt: skip
        self._factor = torch.ones((), device=device)
        self._step: Any = self._plain_step
        if cuda:
            rows = torch.arange(about.batch_size, device=device)
            weights = torch.ones(about.batch_size, device=device)
            self._step = Graph(self._plain_step, [rows, weights], torch.cuda.graph_pool_handle())

    def _plain_step(self, rows: Tensor, weights: Tensor) -> Tensor:
        batch = self.train.gather(rows, self.about.length)
        value = sample_means(self.loss(self.model, batch), self.loss, batch) @ weights / len(rows)
        gradients = torch.autograd.grad(value, self._weights)
        if self.about.clip_norm is not None:
            length = torch.stack([gradient.norm() for gradient in gradients]).norm()
            self._factor.copy_((self.about.clip_norm / (length + 1e-6)).clamp(max=1.0))
            gradients = [gradient * self._factor for gradient in gradients]
        for weight, gradient in zip(self._weights, gradients, strict=True):
            weight.grad = gradient
        self._optimizer.step()
        return self._factor.clone()

    def __call__(self, weights: Float[np.ndarray, " train"]) -> Float[np.ndarray, " query"]:
        """Train with these weights of the texts, and return the queries' losses."""
        self.model.train()
        with torch.no_grad():
            for place, value in zip(self._weights, self._start, strict=True):
                place.copy_(value)
        for state in self._optimizer.state.values():
            for value in state.values():
                value.zero_()
        about = self.about
        generator = np.random.default_rng((about.seed, 0))
        indices = np.concatenate([generator.permutation(about.train) for _ in range(about.epochs)])
        device, factors = self.train.batch([0])["input_ids"].device, []
        for batch, rate in zip(np.split(indices, about.steps), about.rates(), strict=True):
            if device.type == "cuda":
                self._rate.fill_(rate)
            else:
                self._optimizer.param_groups[0]["lr"] = rate
            given = torch.from_numpy(weights[batch].astype(np.float32)).to(device)
            factors.append(self._step(torch.from_numpy(batch).to(device), given))
        self.clip_factor = float(np.average(torch.stack(factors).cpu(), weights=about.rates()))
        self.model.eval()
        with torch.no_grad():
            batch = self.query.whole()
            return sample_means(self.loss(self.model, batch), self.loss, batch).cpu().numpy()

    @property
    def second_moments(self) -> list[Tensor]:
        return [self._optimizer.state[value]["exp_avg_sq"] / (1 - 0.999**self.about.steps) for value in self._weights]


def trained(about: Model, name: str, arguments: argparse.Namespace) -> Trained:
    """The training of a model of the list."""
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    auto: Any = AutoModelForCausalLM
    start = auto.from_pretrained(arguments.model, dtype=torch.float32).to(device)
    tokens = np.load(arguments.work / f"{name}.npz")
    torch.use_deterministic_algorithms(True, warn_only=True)
    return Trained(about, start, tokens["train"], tokens["query"])


def bank(about: Model, name: str, arguments: argparse.Namespace) -> None:
    """Keep the queries' losses of every training; what is there is not made again."""
    path = arguments.work / f"{name}-drops.npy"
    every = drops(about)
    losses = np.load(path) if path.exists() else np.full((len(every), about.queries), np.nan, np.float32)
    training = trained(about, name, arguments)
    started = time.perf_counter()
    for number in np.flatnonzero(np.isnan(losses[:, 0])):
        losses[number] = training(every[number])
        if number == 0:
            again = training(every[0])
            print(f"repeated: largest difference {np.abs(again - losses[0]).max():.2g}", flush=True)
        if number % 10 == 0:
            print(f"{number}: {losses[number].mean():.5f}, {time.perf_counter() - started:.1f} s", flush=True)
            np.save(path, losses)
        if time.perf_counter() - started > 60 * arguments.minutes:
            break
    np.save(path, losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["prepare", "bank", "methods"])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=list(MODELS), default=["wikipedia"])
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    for name in arguments.only:
        about = MODELS[name]
        if arguments.what == "prepare":
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(arguments.model)
            prepare(about, tokenizer, arguments.texts, arguments.work / f"{name}.npz")
        elif arguments.what == "bank":
            bank(about, name, arguments)


if __name__ == "__main__":
    main()
