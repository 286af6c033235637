"""The paper's language-model experiment, where its BIF loses to EK-FAC: fine-tuning on Wikipedia text.

    python -m experiments.language_retraining --model stories15M --wikipedia articles.jsonl.xz --work work \
        --record record.json --minutes 9 --recipe strong

4,096 attribution and 256 evaluation sequences of 256 tokens, at most eight of an article and no article in both; 100
subsets at alpha 0.5; one epoch of full-parameter AdamW from the pretrained model with a linear schedule, by one of two
recipes: "paper" (learning rate 3e-5, batch 256, weight decay 0.01) or "strong" (3e-4, batch 32). The model that is
analysed is fine-tuned on all 4,096 in the same way. Every method sees the linear layers of the blocks; the first order
in the metric of Adam is asked a second time for all weights, and says so. BIF correlation is the paper's implementation
A, covariance its B. --seeds repeats everything with other articles, subsets and orders of fine-tuning. --sweep adds a
grid of n_beta and localization, each with its mean loss beside its LDS. --at 0.25 takes scores after a quarter of the
fine-tuning, --at 0 those of the pretrained model. Called again it goes on where it stood. The banks of the record,
three retrainings of every half, are kept: unpacked into the work directory, they need not be trained again:

    tar -xJf experiments/records/banks/language.tar.xz -C work
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
import lzma
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import jostle
from experiments.figures import draw
from experiments.retraining import (
    METHODS,
    Budget,
    Record,
    Setting,
    add_retraining,
    analysed_model,
    conduct,
    file_name,
    fill,
    parser_of,
    run_at,
)
from jostle.data.datasets import Data
from jostle.evaluate import random_subsets
from jostle.models.functional import sample_means
from jostle.models.in_place import Graph

RECIPES = {
    "paper": {"learning_rate": 3e-5, "batch_size": 256, "weight_decay": 0.01},
    "strong": {"learning_rate": 3e-4, "batch_size": 32, "weight_decay": 0.01},
}
WEIGHTS = "attention+mlp"

PAPER = {"n_beta": 800.0, "localization": 5e4, "step_size": 2e-6, "chains": 4, "draws": 300, "burn_in": 150}
BLIND = {"n_beta": 0.0, "sampler": "gaussian", "step_size": None, "burn_in": 1, "thin": 1, "chains": 4, "draws": 500,
         "batch_size": 32}  # fmt: skip
BIF: dict[str, dict[str, Any]] = {
    "calibrated": {"chains": 4, "draws": 250, "batch_size": 32},
    "calibrated, no gradient": BLIND,
    "as in the paper": {**PAPER, "thin": 1, "batch_size": 128},
    "paper, no gradient": {**BLIND, "localization": 5e4},
}
"""Those without a localization are calibrated (`jostle.calibrate`, which sees no retraining)."""

ARTICLES_OF_A_SEED = 900
"""So many are enough for the sequences of one."""

SWEEP = {"n_beta": (0.0, 30.0, 100.0, 300.0, 1000.0), "localization": (1e4, 3e4, 1e5, 3e5)}


def sequences(path: Path, tokenizer: Any, count: int, length: int, skip: int = 0) -> tuple[list[list[int]], int]:
    """Token ids of so many pieces of articles after the first ``skip``; and how many articles were read."""
    found: list[list[int]] = []
    begin = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    used = skip
    with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else open(path, encoding="utf-8") as lines:
        for line in itertools.islice(lines, skip, None):
            used += 1
            tokens = tokenizer(json.loads(line)["text"][:60_000], add_special_tokens=False)["input_ids"]
            size = length - len(begin)
            pieces = [begin + tokens[at : at + size] for at in range(0, len(tokens) - size + 1, size)]
            found += pieces[:8]  # no article fills the set
            if len(found) >= count:
                return found[:count], used
    raise SystemExit(f"{path} has only {len(found)} sequences of {length} tokens after {skip} articles, not {count}")


class FineTuner:
    """Fine-tunes on subsets, again and again, in one working model that is put back to the pretrained weights.

    AdamW on all weights, a linear schedule to 0; the mean over each sequence's tokens, then over the batch. On a GPU a
    step (forward, backward, update) is recorded once as a CUDA graph and replayed: of a small model, launching its
    kernels one by one takes many times longer than they do.

    Args:
        pretrained: where each fine-tuning begins; stays as it is.
        data: what indices refer to.

    Attributes:
        graph: a step of a whole batch, once it is recorded.
    """

    def __init__(
        self, pretrained: nn.Module, data: Data, *,
        learning_rate: float, batch_size: int, weight_decay: float, epochs: int = 1,
    ) -> None:  # fmt: skip
        self._model, self._data = copy.deepcopy(pretrained), data
        self._weights = [*self._model.state_dict().values()]
        self._pretrained = [value.clone() for value in self._weights]
        self._learning_rate, self._batch_size, self._epochs = learning_rate, batch_size, epochs
        self._device = next(self._model.parameters()).device
        cuda = self._device.type == "cuda"
        # On a GPU there is room for the logits: they need not be computed again on the way back.
        self._loss = jostle.losses.next_token(**({"chunk_bytes": 16 << 30} if cuda else {}))
        rate: Any = torch.tensor(learning_rate, device=self._device) if cuda else learning_rate  # a graph reads it
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=rate, weight_decay=weight_decay, fused=cuda, capturable=cuda
        )
        self.graph: Graph | None = None
        self._to_be_recorded = cuda and data.on_device

    def __call__(self, indices: np.ndarray, seed: int, part: float = 1.0) -> nn.Module:
        """Return the working model, fine-tuned on these, or a part of the way; the next call goes on with it."""
        self._model.train()
        if self._to_be_recorded:
            self._record()
        self._reset()
        generator = np.random.default_rng(seed)
        cuts = range(self._batch_size, len(indices), self._batch_size)
        batches = [batch for _ in range(self._epochs) for batch in np.split(generator.permutation(indices), cuts)]
        for done, chosen in enumerate(batches[: round(part * len(batches))]):
            self._set_rate(self._learning_rate * (1 - done / len(batches)))
            if self.graph is not None and len(chosen) == self._batch_size:
                self.graph(torch.from_numpy(chosen))
            else:
                self._step(self._data.batch(chosen))
        return self._model.eval()

    def _step(self, batch: Any) -> Tensor:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
            value = sample_means(self._loss(self._model, batch), self._loss, batch).mean()
        value.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return value.detach()

    def _record(self) -> None:
        """Record a step of a whole batch, of the data set's full length; what it does to the weights is undone."""
        self._to_be_recorded = False
        longest = self._data.longest(range(len(self._data)))
        rows = torch.arange(self._batch_size, device=self._device) % len(self._data)
        try:
            self.graph = Graph(
                lambda rows: self._step(self._data.gather(rows, longest)), [rows], torch.cuda.graph_pool_handle()
            )
        except Exception as error:  # a model may do anything that a graph cannot hold
            reason = str(error).partition("\n")[0][:150]
            print(f"  steps are not recorded as a CUDA graph ({type(error).__name__}: {reason})", flush=True)
            self._optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _reset(self) -> None:
        """The pretrained weights and an optimizer that has seen nothing, in the places that the graph knows."""
        for place, value in zip(self._weights, self._pretrained, strict=True):
            place.copy_(value)
        for state in self._optimizer.state.values():
            for value in state.values():
                value.zero_()

    def _set_rate(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def training_of(recipe: str, examples: int) -> dict[str, float]:
    """What `FineTuner` does with so many examples, in the words of `FirstOrder.kappa_of_training`."""
    about = RECIPES[recipe]
    steps = math.ceil(examples / about["batch_size"])
    total = about["learning_rate"] * (steps + 1) / 2  # falls linearly, from the first step's whole rate
    return {"total_rate": total, "weight_decay": about["weight_decay"], "batch_size": about["batch_size"]}


def sweep(draws: int) -> dict[str, dict[str, Any]]:
    """Independent draws as far as steps can make them: the step is as long as localization and curvature allow."""
    grid = itertools.product(SWEEP["n_beta"], SWEEP["localization"])
    return {
        f"sweep n_beta {n_beta:g} localization {localization:g}": {
            "n_beta": n_beta, "localization": localization, "chains": 4, "draws": draws, "batch_size": 32,
            **({"sampler": "gaussian", "burn_in": 1, "thin": 1} if n_beta == 0 else
               {"step_size": 0.2 / (localization + 100 * n_beta), "thin": 10, "burn_in": 50}),
        }
        for n_beta, localization in grid
    }  # fmt: skip


def draw_sweep(path: Path, methods: dict[str, Any]) -> None:
    """LDS and rise in loss over the grid."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    panels = figure.subplots(1, 3)
    names = [
        [f"BIF sweep n_beta {n_beta:g} localization {g:g}" for g in SWEEP["localization"]] for n_beta in SWEEP["n_beta"]
    ]
    nothing = dict.fromkeys(("per_query", "per_query_error", "mean_loss", "mean_loss_at_center"), np.nan)
    for panel, kind in zip(panels, ("covariance", "correlation", "rise"), strict=True):
        table = np.full((len(names), len(names[0])), np.nan)
        errors = table.copy()
        for place, name in np.ndenumerate(np.array(names)):
            row = methods.get(f"{name}, {'covariance' if kind == 'rise' else kind}", nothing)
            table[place] = row["mean_loss"] - row["mean_loss_at_center"] if kind == "rise" else row["per_query"]
            errors[place] = np.nan if kind == "rise" else row["per_query_error"]
        panel.set_facecolor("0.9")  # of cells that were not sampled
        image = panel.imshow(table, cmap="viridis", aspect="auto")
        for (i, j), value in np.ndenumerate(table):
            text = "–" if np.isnan(value) else f"{value:.2f}"
            text += "" if np.isnan(errors[i, j]) else f" ± {errors[i, j]:.2f}"
            light = np.isnan(value) or image.norm(value) > 0.6
            panel.text(j, i, text, ha="center", va="center", color="black" if light else "white", fontsize=9)
        panel.set_xticks(range(len(SWEEP["localization"])), [f"{g:g}" for g in SWEEP["localization"]])
        panel.set_yticks(range(len(SWEEP["n_beta"])), [f"{n:g}" for n in SWEEP["n_beta"]])
        title = "rise in mean loss (nats)" if kind == "rise" else f"LDS per query, {kind}"
        panel.set(xlabel="localization", ylabel="n_beta", title=title)
    figure.savefig(path, dpi=130)


def setting_of(
    arguments: argparse.Namespace, recipe: str, record: Record, budget: Budget, bif: Mapping[str, Mapping[str, Any]],
    *, seed: int = 0,
) -> Setting:  # fmt: skip
    """The model of a recipe and its banks; what the work directory lacks is made first.

    Another seed has other articles, other subsets and other orders of fine-tuning.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer: Any = AutoTokenizer.from_pretrained(arguments.model)
    auto: Any = AutoModelForCausalLM
    pretrained = auto.from_pretrained(arguments.model, dtype=torch.float32).to(device)
    skipped = ARTICLES_OF_A_SEED * seed
    query, used = sequences(arguments.wikipedia, tokenizer, arguments.queries, arguments.length, skip=skipped)
    train, _ = sequences(arguments.wikipedia, tokenizer, arguments.train, arguments.length, skip=used)
    data = Data(train, "train", device=torch.device(device))
    fingerprints = {"train": data.fingerprint(), "query": Data(query, "query").fingerprint()}
    loss = jostle.losses.next_token()
    name = named(recipe, seed)
    work = arguments.work / file_name(name)

    tuner = functools.partial(FineTuner, pretrained, data, **RECIPES[recipe])
    retrainer = tuner()
    first = 1_000 * seed
    model = analysed_model(
        work / "model.pt",
        lambda: copy.deepcopy(pretrained),
        lambda: copy.deepcopy(retrainer(np.arange(len(train)), first + 999)),  # which goes on working
        record,
        budget,
    )
    banks, adam = {}, {}
    for alpha in arguments.retrain:
        subsets = random_subsets(len(train), arguments.subsets, share=alpha, seed=seed)
        adam[f"{alpha:g}"] = training_of(recipe, len(subsets.indices(0)))
        banks[f"{alpha:g}"] = fill(
            work / f"bank-{alpha:g}", subsets, lambda indices, one: retrainer(indices, first + one), query,
            loss, fingerprints, seeds=arguments.retrain_seeds, budget=budget, record=record, batch_size=64,
            key=f"{name}, alpha_retrain {alpha:g}",
        )  # fmt: skip
    retrainer.graph = None  # the memory of its step is for others now

    def along(part: float) -> nn.Module:
        """What the training of the model comes to after a part of it; it is made once."""
        return analysed_model(
            work / f"part-{part:g}.pt", lambda: copy.deepcopy(pretrained),
            lambda: copy.deepcopy(tuner()(np.arange(len(train)), first + 999, part)), record, budget,
        )  # fmt: skip

    repeated = {
        f"{label}{f', seed {drawn}' if drawn else ''}": {**options, "seed": drawn}
        for label, options in bif.items()
        for drawn in range(1 if label.startswith("sweep") else arguments.bif_seeds)
    }
    return Setting(
        name, model, train, query, loss, banks, repeated, weights=WEIGHTS, texts=(train, query),
        batch_size=arguments.scoring_batch, precision="bfloat16" if device == "cuda" else "model",
        ekfac_repeats=arguments.ekfac_repeats, methods=arguments.methods, dampings=arguments.dampings,
        keep=arguments.keep, labels=arguments.labels, label_seeds=arguments.label_seeds,
        read_at=arguments.read_at, only=arguments.only, adam=adam, alike=arguments.alike,
        first_order_at=arguments.first_order_at, start=pretrained, along=along,
    )  # fmt: skip


def named(recipe: str, seed: int) -> str:
    return f"{recipe}, seed {seed}" if seed else recipe


def read_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    description = "LDS of a language model that is fine-tuned on Wikipedia text."
    parser = parser_of("language_retraining", description, methods=METHODS)
    add_retraining(
        parser, queries=256, retrain=[0.5], retrain_seeds=2, ekfac_repeats=3, scoring_batch=32,
        read_at=(10.0, 30.0, 100.0),
    )  # fmt: skip
    parser.add_argument("--model", type=Path, required=True, help="a directory with a causal LM and its tokenizer")
    parser.add_argument("--wikipedia", type=Path, required=True, help='JSONL with "text", plain or .xz')
    parser.add_argument("--recipe", nargs="+", choices=list(RECIPES), default=["strong", "paper"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="repeat everything, with other articles")
    parser.add_argument("--train", type=int, default=4_096)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--bif-seeds", type=int, default=3, help="repeat each run of the BIF with other seeds")
    parser.add_argument(
        "--sweep", type=int, nargs="?", const=75, metavar="DRAWS", help="a grid of n_beta and localization as well"
    )
    return parser.parse_args(words)


def main() -> None:
    arguments = read_arguments()

    def every_recipe(record: Record, budget: Budget, bif: Mapping[str, Mapping[str, Any]]) -> None:
        for seed, recipe in itertools.product(arguments.seeds, arguments.recipe):
            print(named(recipe, seed), flush=True)
            given = {**bif, **(sweep(arguments.sweep) if arguments.sweep else {})}
            setting = setting_of(arguments, recipe, record, budget, given, seed=seed)
            scores = arguments.work / file_name(setting.name) / "scores"
            run_at(arguments.at, setting, scores, record, budget, together=arguments.together)

    about = {"model": arguments.model.name, "weights": WEIGHTS, "recipes": RECIPES}
    for name, found in conduct(arguments, about, BIF, every_recipe)["measured"].items():
        stem = f"{arguments.record.stem}-{file_name(name)}"
        draw(arguments.record.with_name(f"{stem}.png"), {name: found}, "alpha_retrain")
        if arguments.sweep:
            methods = next(iter(found.values()))["methods"]
            draw_sweep(arguments.record.with_name(f"{stem}-sweep.png"), methods)


if __name__ == "__main__":
    main()
