"""stories15M, fine-tuned: does the closed form predict what leaving texts out of the fine-tuning does?

    python -m experiments.solve_language prepare --model stories15M --texts articles.jsonl.xz --work work
    python -m experiments.solve_language bank --model stories15M --work work
    python -m experiments.solve_language methods --model stories15M --work work --record record.json
    python -m experiments.solve_language methods --only long --model stories15M --work work --record times.json

`prepare` writes tokens, `bank` trains once with every text and once without each of 100 random sets of 2 % of them
(same seed, same order: a text that is left out has weight 0 in its batch), and keeps the queries' losses in
`experiments/banks/language`; `methods` compares methods with them. On "wikipedia" settings are chosen, "gentle" is the
same at half the rate; "pile" is for reporting, and looked at once; "long" has no bank and is for seconds. Training is
in float32 ("wikipedia") or TF32, so that the same training comes out the same.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import itertools
import json
import logging
import lzma
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.environment import environment
from jaxtyping import Float
from torch import Tensor, nn

import jostle
from experiments.conjugate_gradients import Iterate, KroneckerPreconditioner, solve
from jostle.curvature.gauss_newton import GaussNewton
from jostle.curvature.labels import loss_counts, relabelled
from jostle.curvature.per_example import PerExample
from jostle.data.datasets import Data
from jostle.evaluate import random_drops
from jostle.evaluate.metrics import lds_of, slopes_of
from jostle.models.functional import eval_mode, sample_means
from jostle.models.in_place import Graph, InPlace
from jostle.models.weights import MovingWeights
from jostle.training.objective import Objective
from jostle.training.repeatable import Microbatch, Repeatable


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is trained on, and how: all weights, by AdamW, the mean over each sequence's tokens, then over the batch."""

    purpose: str
    """"choosing", "reporting", or "timing"."""
    seed: int
    rates_tried: Sequence[float]
    """Learning rates, largest first: trained with is the first of which the truth is steady (`steady_rate`)."""
    epochs: int
    batch_size: int
    weight_decay: float
    warmup: float = 0.0
    """The share of the steps in which the rate rises; then it falls linearly to 0."""
    clip_norm: float | None = None
    products: str = "tf32"
    """How matrix products of training are computed; the same training comes out the same either way."""
    train: int = 1024
    queries: int = 32
    length: int = 128

    @property
    def steps(self) -> int:
        return self.epochs * self.train // self.batch_size

    def rates(self, rate: float) -> list[float]:
        """The learning rate of each step, at most so large."""
        rising = round(self.warmup * self.steps)
        return [
            rate * ((step + 1) / rising if step < rising else (self.steps - step) / (self.steps - rising))
            for step in range(self.steps)
        ]


MODELS = {
    "wikipedia": Model(
        purpose="choosing", seed=0, rates_tried=(1e-4, 5e-5, 2e-5), epochs=4, batch_size=32, weight_decay=0.01,
        products="ieee",
    ),
    "gentle": Model(
        purpose="choosing", seed=0, rates_tried=(5e-5,), epochs=4, batch_size=32, weight_decay=0.01
    ),
    "pile": Model(
        purpose="reporting", seed=1, rates_tried=(2e-4, 1e-4, 5e-5, 2e-5, 1e-5, 5e-6), epochs=3, batch_size=16,
        weight_decay=0.1, warmup=0.1, clip_norm=1.0,
    ),
    "long": Model(
        purpose="timing", seed=0, rates_tried=(1e-4,), epochs=1, batch_size=32, weight_decay=0.01, train=4096,
        queries=64, length=256,
    ),
}  # fmt: skip
DAMPINGS = (None, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
"""Of EK-FAC; None: its own."""
REFINED = (1e-1, 1e-2, 1e-3, 1e-4)
"""Of EK-FAC with conjugate gradients."""
SMOOTHINGS = (0.1, 0.01, 0.001, 1.0, 0.0)
"""Of replay."""
BANKS = Path(__file__).parent / "banks" / "language"
DROPS, SHARE = 100, 0.02

PART, STEADY, LOOKED_AT = 0.3, 0.8, 6
"""The truth is steady where lowering the weight of a set by this part changes the queries' losses as leaving all of it
out does, in a correlation of so much, for the first sets. Elsewhere it is mostly chance, which nothing can predict: at
3e-4 on "wikipedia" the correlation is 0.35."""


def drops(model: Model) -> Float[np.ndarray, "drop train"]:
    """Weights of the texts in each training: first all of them, then without each random set."""
    return random_drops(model.train, DROPS, size=round(SHARE * model.train), seed=model.seed).members.astype(np.float32)


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
        self.about, self.model, self.rate = about, copy.deepcopy(start), about.rates_tried[0]
        device = next(start.parameters()).device
        self.train = Data([row.tolist() for row in train.astype(int)], "train", device=device)
        self.query = Data([row.tolist() for row in query.astype(int)], "query", device=device)
        self._weights = [*self.model.parameters()]
        self._start = [value.detach().clone() for value in self._weights]
        self.loss: Any = jostle.losses.next_token(chunk_bytes=16 << 30)
        cuda = device.type == "cuda"
        self._rate = torch.tensor(self.rate, device=device)
        self._optimizer = torch.optim.AdamW(
            self._weights, lr=self._rate if cuda else self.rate, weight_decay=about.weight_decay,
            fused=cuda, capturable=cuda,
        )  # fmt: skip
        self._factor = torch.ones((), device=device)
        self._step: Any = self._plain_step
        torch.backends.cuda.matmul.fp32_precision = about.products
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

    def batches(self) -> list[np.ndarray]:
        """The texts of each step."""
        about = self.about
        generator = np.random.default_rng((about.seed, 0))
        indices = np.concatenate([generator.permutation(about.train) for _ in range(about.epochs)])
        return np.split(indices, about.steps)

    def repeatable(self, start: nn.Module) -> Repeatable:
        """The same training, by the plain optimizer: its kernels are others, so it comes out the same to rounding."""
        about, rate = self.about, self.rate
        factors = [own / rate for own in about.rates(rate)]
        return Repeatable(
            start.train(), self.train, Objective(self.loss, "sequences"),
            lambda parameters: torch.optim.AdamW(parameters, lr=rate, weight_decay=about.weight_decay),
            [[Microbatch(batch)] for batch in self.batches()],
            schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: factors[min(step, len(factors) - 1)]
            ),
            clip_norm=about.clip_norm,
        )  # fmt: skip

    def __call__(self, weights: Float[np.ndarray, " train"]) -> Float[np.ndarray, " query"]:
        """Train with these weights of the texts, and return the queries' losses."""
        self.model.train()
        with torch.no_grad():
            for place, value in zip(self._weights, self._start, strict=True):
                place.copy_(value)
        for state in self._optimizer.state.values():
            for value in state.values():
                value.zero_()
        rates = self.about.rates(self.rate)
        device, factors = self.train.batch([0])["input_ids"].device, []
        for batch, rate in zip(self.batches(), rates, strict=True):
            if device.type == "cuda":
                self._rate.fill_(rate)
            else:
                self._optimizer.param_groups[0]["lr"] = rate
            given = torch.from_numpy(weights[batch].astype(np.float32)).to(device)
            factors.append(self._step(torch.from_numpy(batch).to(device), given))
        self.clip_factor = float(np.average(torch.stack(factors).cpu(), weights=rates))
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


def steady_rate(training: Trained, every: np.ndarray) -> float:
    """The first learning rate at which the truth is steady, or the steadiest; no method of attribution is looked at."""
    found: dict[float, float] = {}
    for rate in training.about.rates_tried:
        training.rate = rate
        none = training(every[0])
        whole = [training(weights) - none for weights in every[1 : 1 + LOOKED_AT]]
        small = [training(1 - PART * (1 - weights)) - none for weights in every[1 : 1 + LOOKED_AT]]
        steady = np.corrcoef(np.ravel(small), np.ravel(whole))[0, 1]
        print(f"rate {rate:g}: correlation {steady:.3f}, spreads {np.std(small):.5f}, {np.std(whole):.5f}",
              flush=True)  # fmt: skip
        found[rate] = float(steady)
        if steady >= STEADY:
            return rate
    return max(found, key=lambda rate: found[rate])


def bank(about: Model, name: str, arguments: argparse.Namespace) -> None:
    """Keep the queries' losses of every training; what is there is not made again."""
    path = BANKS / f"{name}.npz"
    every, training = drops(about), trained(about, name, arguments)
    if path.exists():
        kept = np.load(path)
        losses, training.rate = kept["losses"], float(kept["rate"])
    else:
        losses = np.full((len(every), about.queries), np.nan, np.float32)
        training.rate = steady_rate(training, every)
    started = time.perf_counter()
    for number in np.flatnonzero(np.isnan(losses[:, 0])):
        losses[number] = training(every[number])
        if number == 0:
            again = training(every[0])
            print(f"repeated: largest difference {np.abs(again - losses[0]).max():.2g}", flush=True)
        if number % 10 == 0:
            print(f"{number}: {losses[number].mean():.5f}, {time.perf_counter() - started:.1f} s", flush=True)
            np.savez_compressed(path, losses=losses, rate=training.rate)
        if time.perf_counter() - started > 60 * arguments.minutes:
            break
    np.savez_compressed(path, losses=losses, rate=training.rate)


class Trial:
    """What every method is given: the trained model, its training, and the changes that really came (None: no bank)."""

    def __init__(self, about: Model, name: str, arguments: argparse.Namespace) -> None:
        training, path, every = trained(about, name, arguments), BANKS / f"{name}.npz", drops(about)
        kept = np.load(path) if about.purpose != "timing" else None
        training.rate = float(kept["rate"]) if kept is not None else about.rates_tried[0]
        again, self.repeated, self.changes = training(every[0]), 0.0, None
        if kept is not None:
            losses = kept["losses"]
            if np.isnan(losses).any():
                raise SystemExit(f"the bank of {name} is not finished")
            self.left_out, self.changes = 1 - every[1:], losses[1:, None].astype(np.float64) - losses[0]
            self.repeated = float(np.abs(again - losses[0]).max())
        self.about, self.model, self.repeatable = about, training.model, training.repeatable
        self.train, self.query, self.loss = training.train, training.query, jostle.losses.next_token()
        named = dict(zip(dict(self.model.named_parameters()), training.second_moments, strict=True))
        self.training = jostle.Training(
            optimizer="adamw", total_rate=sum(about.rates(training.rate)), weight_decay=about.weight_decay,
            clip_factor=training.clip_factor, batch_size=about.batch_size, second_moments=named,
            count_alike="sequences",
        )  # fmt: skip
        self.rate = training.rate
        self.rows: list[dict[str, Any]] = []

    def tell(self, method: str, effect: np.ndarray, **others: Any) -> None:
        """Hold predicted effects of leaving out (train, query) against the real ones."""
        row: dict[str, Any] = {"method": method, **others}
        self.rows.append(row)
        if self.changes is None:
            print(f"{method:60} {others}", flush=True)
            return
        predicted = [self.left_out.astype(float) @ effect]
        given: Any = {"bootstrap": 1000, "seed": 0}
        (lds,) = lds_of(predicted, self.changes, per="query", correlation="spearman", **given)
        (slope,), (pooled,) = (slopes_of(predicted, self.changes, pooled=pooled, **given) for pooled in (False, True))
        row |= {"lds": lds.to_dict(), "slope": slope.to_dict(), "pooled": pooled.to_dict()}
        print(f"{method:60} LDS {lds}  slope {slope}  pooled {pooled}  {others}", flush=True)


def linear_layers(model: nn.Module) -> list[str]:
    """The weights that EK-FAC knows: of linear layers, but for the head."""
    return [
        f"{path}.weight" for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and "lm_head" not in path
    ]  # fmt: skip


def texts_of(trial: Trial) -> list[list[list[int]]]:
    return [[row.tolist() for row in data.whole()["input_ids"].cpu()] for data in (trial.train, trial.query)]


@contextlib.contextmanager
def timed(about: dict[str, Any]) -> Iterator[None]:
    """Seconds and the most memory that were taken."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    yield
    if cuda:
        torch.cuda.synchronize()
        about["gigabytes"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
    about["seconds"] = round(time.perf_counter() - started, 2)


def solved(trial: Trial, weights: Any, **settings: Any) -> None:
    """`jostle.solve`, as it comes."""
    about: dict[str, Any] = {}
    with timed(about):
        found = jostle.solve(
            trial.model, *texts_of(trial), training=trial.training, loss=trial.loss, weights=weights, **settings
        )
    if found.tokens is not None:
        sums = np.array([tokens.sum(0) for tokens in found.tokens])
        about["tokens_apart"] = float(np.abs(sums - found.effects).max() / np.abs(found.effects).max())
    about |= {"error": float(np.median(found.errors / found.spreads))}
    about |= {name: found.provenance[name] for name in ("runs", "passes")}
    words = ["solve", *(["linear layers"] if weights != "all" else []), *(f"{k} {v}" for k, v in settings.items())]
    trial.tell(", ".join(words), found.effects.astype(np.float64), **about)


def replayed(trial: Trial, path: Path, smoothing: float, **settings: Any) -> None:
    """`jostle.replay`, from the weights that training began with."""
    from transformers import AutoModelForCausalLM

    about: dict[str, Any] = {}
    auto: Any = AutoModelForCausalLM
    start = auto.from_pretrained(path, dtype=torch.float32).to(next(trial.model.parameters()).device)
    with timed(about):
        found = jostle.replay(
            trial.repeatable(start), texts_of(trial)[1], smoothing=smoothing, check=0, **settings
        )  # fmt: skip
    about |= {"states_apart": found.provenance["states_apart"]}
    trial.tell(f"replay, smoothing {smoothing:g}", found.effects, **about)


def refined(trial: Trial, damping: float, iterations: Sequence[int] = (3, 12)) -> None:
    """EK-FAC refined by conjugate gradients: exact products, damped as EK-FAC is, alike in all directions."""
    about: dict[str, Any] = {}
    count, linear = len(trial.train), linear_layers(trial.model)
    moving = MovingWeights(trial.model, linear)
    scale = torch.full_like(moving.center, damping**-0.5)
    with eval_mode(trial.model), InPlace(trial.model, moving) as model:
        each = PerExample(model, trial.loss)
        right, train = (
            torch.cat([rows.to(kind) for _, rows in each(data, range(len(data)))])
            for data, kind in ((trial.query, moving.dtype), (trial.train, torch.bfloat16))
        )
        each.scale = scale
        (labelled,) = relabelled(model, trial.loss, trial.train, 1, 0)
        counts = loss_counts(model, trial.loss, trial.train).to(scale)

        def rows() -> Iterator[Tensor]:
            for chosen, block in each(labelled, range(count)):
                yield block * (counts[chosen.start : chosen.stop, None] / count).sqrt()

        precondition = KroneckerPreconditioner(moving, rows)
    with GaussNewton(trial.model, linear, trial.loss, trial.train, dtype=torch.bfloat16) as curvature:

        def enough(iterate: Iterate) -> bool:
            if iterate.iterations in iterations:
                about["seconds"] = round(time.perf_counter() - started, 2)
                solutions = (scale * iterate.solutions).to(torch.bfloat16)
                effect = torch.mm(train, solutions.T).double().cpu().numpy() / count
                name = f"EK-FAC and conjugate gradients, damping {damping:g}, {iterate.iterations} iterations"
                trial.tell(name, effect, **about)
            return False

        started = time.perf_counter()
        solve(
            lambda vectors: vectors + scale * curvature(scale * vectors), scale * right,
            preconditioner=precondition, iterations=max(iterations), enough=enough,
        )  # fmt: skip


def ekfac(trial: Trial, damping: float | None, directory: str) -> None:
    """EK-FAC, of the linear layers; factors that are in the directory are used again."""
    about: dict[str, Any] = {}
    with timed(about):
        scores = jostle.attributors.ekfac(
            trial.model, *texts_of(trial), damping=damping, directory=directory, loss=trial.loss,
            weights=linear_layers(trial.model), batch_size=64,
        )  # fmt: skip
    trial.tell(f"EK-FAC, damping {damping}", -scores.values / len(trial.train), **about)


def first_order(trial: Trial) -> None:
    """Gradients of sampled labels as curvature, damped as the training damps it; without a unit."""
    about: dict[str, Any] = {}
    with timed(about):
        found = jostle.attributors.FirstOrder(
            trial.model, *texts_of(trial), loss=trial.loss, weights=linear_layers(trial.model), labels=1,
            metric="adam", rounded=True,
        )  # fmt: skip
        kappa = found.kappa_of_training(
            sum(trial.about.rates(trial.rate)), weight_decay=trial.about.weight_decay,
            batch_size=trial.about.batch_size,
        )  # fmt: skip
        scores = found.influence(kappa=kappa)
    trial.tell("first order, 1 label", -scores.values.astype(np.float64), **about)


def methods(about: Model, name: str, arguments: argparse.Namespace) -> None:
    """Compare `jostle.solve` with EK-FAC on one model, in one process."""
    trial = Trial(about, name, arguments)
    print(f"{name}: repeated to {trial.repeated:.2g}; clip factor {trial.training.clip_factor:.3f}", flush=True)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with tempfile.TemporaryDirectory() as directory:
        plans: dict[str, list[Callable[[], None]]] = {
            "solve": [lambda: solved(trial, "all")],
            "tokens": [lambda: solved(trial, "all", tokens=True)],
            "longer": [lambda: solved(trial, "all", within=0.1)],
            "linear": [lambda: solved(trial, linear_layers(trial.model))],
            "ekfac": [
                functools.partial(ekfac, trial, damping, directory)
                for damping in (DAMPINGS if trial.changes is not None else DAMPINGS[:1])
            ],
            "replay": [functools.partial(replayed, trial, arguments.model, smoothing) for smoothing in SMOOTHINGS],
            "first-order": [lambda: first_order(trial)],
            "refined": [functools.partial(refined, trial, damping) for damping in REFINED],
        }
        started = time.perf_counter()
        for plan in itertools.chain.from_iterable(plans[which] for which in arguments.methods):
            if time.perf_counter() - started > 60 * arguments.minutes:
                break
            plan()
            if arguments.record is not None:
                told = {"model": name, "rate": trial.rate, "environment": environment(), "rows": trial.rows}
                arguments.record.write_text(json.dumps(told, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["prepare", "bank", "methods"])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=list(MODELS), default=["wikipedia"])
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--methods", nargs="+", default=["solve", "linear", "ekfac", "refined"])
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(format="  %(relativeCreated)d ms: %(message)s")
    logging.getLogger("jostle").setLevel(logging.INFO)
    for name in arguments.only:
        about = MODELS[name]
        if arguments.what == "prepare":
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(arguments.model)
            prepare(about, tokenizer, arguments.texts, arguments.work / f"{name}.npz")
        elif arguments.what == "bank":
            bank(about, name, arguments)
        else:
            methods(about, name, arguments)


if __name__ == "__main__":
    main()
