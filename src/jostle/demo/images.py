"""Which handwritten digits taught a small classifier to read the ones it finds hard, and the ones it finds easy?"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from jostle.chains.progress import part_of_more
from jostle.demo import require_packages
from jostle.posterior import Posterior
from jostle.runs.run import Run
from jostle.runs.sampling import attribute
from jostle.samplers import SGLD
from jostle.scores import Entry, Ranking

TEST_IMAGES = 450
HARD_QUERIES, ORDINARY_QUERIES = 3, 3
SHOWN = 6
"""How many helpful and how many harmful training images are shown for each query."""

# One hidden layer and 20 epochs: it reads 94-98 % of the test digits, so there are mistakes to explain, and its mean
# training loss is still 0.09: a loss that was driven to nothing has no gradient left by which to move with another.
HIDDEN_UNITS = 64
EPOCHS, BATCH_SIZE, LEARNING_RATE, WEIGHT_DECAY = 20, 64, 3e-3, 1e-2

# Chosen on another split of the digits by the linear datamodeling score: how well influence, summed over a subset of
# the training set, ranks the losses of classifiers retrained on it (300 random halves; mean over 100 test images, ± its
# standard error over them). On this split: 0.41 ± 0.02 (normalized 0.28 ± 0.01), against 0.32 at n_beta = 100, 0.33 at
# localization = 300, and 0.27 ± 0.01 (0.22 ± 0.01) at n_beta = 0, where no gradient is used at all. It is a broad
# optimum: (n_beta, localization) = (1000, 30), (3000, 100) and (100, 10) give 0.38 to 0.40, with fewer effective draws.
# The share of helpful images that show the same digit, which the demo prints, cannot choose: of the first ten for each
# of 50 test images it is 100 % at n_beta = 1000 and at 0.
#
# The step size makes ε·(localization + n_beta·λ) = 0.8, with λ = 2.7 the largest eigenvalue of the mean loss's Hessian;
# 1,200 draws are worth some 250 independent ones. Mean training loss: 0.085 at w*, 0.095 over the draws. (The
# scores above are those of 800 draws with batches of 256.)
POSTERIOR = Posterior(n_beta=1000, localization=100)
SAMPLER = SGLD(step_size=3e-4)
CHAINS, DRAWS, BURN_IN, THIN, SAMPLING_BATCH_SIZE = 8, 150, 100, 10, 512

HELPFUL, HARMFUL = "#1f77b4", "#d95f02"
"""Blue and orange: a pair that a colour-blind reader can tell apart, on paper and on a dark terminal."""


class Digits(NamedTuple):
    """Images and their labels, as every function of a data set here takes them: a tuple of tensors."""

    images: Float[Tensor, "sample 8 8"]
    labels: Int[Tensor, " sample"]

    def take(self, indices: Tensor | Sequence[int]) -> Digits:
        """Return some of them."""
        return Digits(self.images[indices], self.labels[indices])


@dataclass(frozen=True)
class Query:
    """A test image, what the classifier makes of it, and the training images that matter for that."""

    index: int
    image: Float[Tensor, "8 8"]
    label: int
    predicted: int
    loss: float
    ranking: Ranking


def demonstrate(out: Path, *, seed: int = 0) -> Run:
    """Train, attribute, print and draw; the same ``out`` and seed again read the finished run.

    Raises:
        InputError: the packages of the extra ``demo`` are missing, or ``out`` holds something else.
    """
    require_packages("sklearn", "matplotlib")
    stdout, stderr = Console(highlight=False), Console(stderr=True)
    show_progress = stderr.is_terminal
    train_set, test_set = load_digits(seed)
    with _one_thread(), part_of_more():
        model = train(train_set, seed, progress=stderr if show_progress else None)
        with torch.no_grad():
            logits = model(test_set.images)
        chosen = choose_queries(logits, test_set.labels)
        run = attribute(
            model,
            train_set,
            test_set.take(chosen),
            posterior=POSTERIOR,
            sampler=SAMPLER,
            chains=CHAINS,
            draws=DRAWS,
            burn_in=BURN_IN,
            thin=THIN,
            batch_size=SAMPLING_BATCH_SIZE,
            out=out / "run",
            seed=seed,
            progress=show_progress,
            examples={"train": shown(train_set), "query": shown(test_set.take(chosen), logits[chosen].argmax(1))},
        )
        scores = run.influence(normalize=True, standard_error=True)
    losses = F.cross_entropy(logits, test_set.labels, reduction="none")
    queries = [
        Query(
            index=index,
            image=test_set.images[index],
            label=int(test_set.labels[index]),
            predicted=int(logits[index].argmax()),
            loss=float(losses[index]),
            ranking=scores.top(column, k=SHOWN),
        )
        for column, index in enumerate(chosen)
    ]
    picture = out / "influence.png"
    draw(queries, train_set, picture)
    accuracy = (logits.argmax(1) == test_set.labels).double().mean().item()
    _report(stdout, run, queries, train_set, accuracy, picture)
    return run


def shown(digits: Digits, predicted: Tensor | None = None) -> list[dict[str, Any]]:
    """Return what a run keeps to show of images: dark on light, as they were written."""
    examples: list[dict[str, Any]] = [
        {"image": 1 - image, "label": int(label)} for image, label in zip(*digits, strict=True)
    ]
    for example, reading in zip(examples, [] if predicted is None else predicted.tolist(), strict=False):
        example["read as"] = reading
    return examples


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one core: these matrices are too small to share, and two threads mostly wait for each other.

    One thread also sums in one order, so that training gives the same weights, and the run is found again, whatever
    the number of cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def load_digits(seed: int) -> tuple[Digits, Digits]:
    """Return scikit-learn's handwritten digits, split at random into a training and a test set."""
    from sklearn import datasets

    pixels, labels = datasets.load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 8, 8) / 16
    digits = Digits(images, torch.tensor(labels))
    order = torch.randperm(len(digits.labels), generator=torch.Generator().manual_seed(seed))
    return digits.take(order[TEST_IMAGES:]), digits.take(order[:TEST_IMAGES])


def train(digits: Digits, seed: int, *, progress: Console | None = None) -> nn.Module:
    """Return a classifier, trained in a second or two."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, HIDDEN_UNITS), nn.ReLU(), nn.Linear(HIDDEN_UNITS, 10))
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        for _ in track(range(EPOCHS), "training", console=progress, disable=progress is None):
            for indices in torch.randperm(len(digits.labels)).split(BATCH_SIZE):
                batch = digits.take(indices)
                optimizer.zero_grad()
                F.cross_entropy(model(batch.images), batch.labels).backward()
                optimizer.step()
    return model


def choose_queries(logits: Float[Tensor, "sample 10"], labels: Int[Tensor, " sample"]) -> list[int]:
    """Return the test images that were misread most badly, then ordinary ones; each shows another digit."""
    right = F.one_hot(labels, logits.shape[1]).bool()
    margin = logits[right] - logits.masked_fill(right, -torch.inf).amax(1)
    hardest_first = margin.argsort()
    most_ordinary_first = (margin - margin.median()).abs().argsort()
    chosen: list[int] = []
    for candidates, count in ((hardest_first, HARD_QUERIES), (most_ordinary_first, ORDINARY_QUERIES)):
        chosen += _first_of_other_digits(candidates.tolist(), labels, chosen)[:count]
    return chosen


def _first_of_other_digits(candidates: Iterable[int], labels: Tensor, taken: Sequence[int]) -> list[int]:
    firsts: dict[int, int] = {}
    for index in candidates:
        firsts.setdefault(int(labels[index]), index)
    seen = {int(labels[index]) for index in taken}
    return [index for digit, index in firsts.items() if digit not in seen]


def _correlation(entry: Entry) -> float:
    """The posterior correlation: a score is minus that."""
    return -entry.score


def _report(
    console: Console, run: Run, queries: Sequence[Query], train_set: Digits, accuracy: float, picture: Path
) -> None:
    """Print the result, what its sign means, and where to go on from."""
    diagnostics = run.diagnostics()
    console.print(
        f"A classifier of {run.manifest['moving_weights']:,} weights learned from {len(train_set.labels):,} images of "
        f"digits, and reads {accuracy:.1%} of {TEST_IMAGES} others rightly. Its weights were jostled: {CHAINS} chains "
        f"of {DRAWS} draws, over which its mean training loss is {diagnostics['mean_loss']:.3f} "
        f"(undisturbed: {diagnostics['mean_loss_at_center']:.3f}).\n"
    )
    console.print(_table(queries, train_set))
    same_digit = [train_set.labels[entry.index] == query.label for query in queries for entry in query.ranking.helpful]
    console.print(
        Text.assemble(
            "The number is the posterior correlation, ± its Monte Carlo standard error.\n",
            ("Positive", f"bold {HELPFUL}"),
            ": the two losses move together, so training on the image helps.\n",
            ("Negative", f"bold {HARMFUL}"),
            ": they move against each other, so training on it harms.\n",
            f"Of the {len(same_digit)} most helpful images, {sum(same_digit)} show the same digit as their test image; "
            "of images picked blindly, one in ten would.\n",
        )
    )
    # Paths and code are to be copied: neither wrapped, nor read as markup.
    for line in (
        f"Picture: {picture}",
        f"Run:     {run.directory}",
        "",
        f"Look at it:  jostle view {run.directory}",
        "",
        "Go on in Python (a score is minus the posterior correlation: negative helps):",
        "    import jostle",
        f"    scores = jostle.load({str(run.directory)!r}).influence(normalize=True)",
        "    print(scores.top(query=0, k=10).helpful)",
    ):
        console.print(line, markup=False, soft_wrap=True)


def _table(queries: Sequence[Query], train_set: Digits) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("test image", no_wrap=True)
    for name, colour in (("helpful", HELPFUL), ("harmful", HARMFUL)):
        heading = f"bold {colour}"
        table.add_column(name, justify="right", header_style=heading, no_wrap=True)
        table.add_column("digit", justify="center", header_style=heading, no_wrap=True)
        table.add_column("correlation", style=colour, header_style=heading, no_wrap=True)

    def cells(entry: Entry | None) -> tuple[str, str, str]:
        if entry is None:
            return "", "", ""
        digit = int(train_set.labels[entry.index])
        return f"#{entry.index}", str(digit), f"{_correlation(entry):+.2f} ± {entry.standard_error:.2f}"

    for query in queries:
        about = f"#{query.index}, a {query.label}", f"read as {query.predicted}", f"loss {query.loss:.2f}"
        rows = zip_longest(about, query.ranking.helpful, query.ranking.harmful)
        for what, helpful, harmful in rows:
            table.add_row(what, *cells(helpful), *cells(harmful))
        table.add_section()
    return table


def draw(queries: Sequence[Query], train_set: Digits, path: Path) -> None:
    """Draw each query in a row of its own, with its most helpful and its most harmful training images."""
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    def show(axes: Axes, image: Tensor, caption: str, colour: str) -> None:
        axes.imshow(image, cmap="gray_r", vmin=0, vmax=1)
        axes.set_axis_on()
        axes.set(xticks=[], yticks=[])
        axes.set_xlabel(caption, color=colour, fontsize=11)
        for spine in axes.spines.values():
            spine.set(color=colour, linewidth=1.2)

    # `Figure` itself, without pyplot: no window, no global state, and PNG is drawn by Agg.
    figure = Figure(figsize=(14, 1.3 * len(queries) + 0.4), layout="constrained")
    parts = (
        (1, "test image", "black"),
        (SHOWN, "most helpful: training on these lowers its loss", HELPFUL),
        (SHOWN, "most harmful: training on these raises its loss", HARMFUL),
    )
    grid = figure.add_gridspec(1, len(parts), width_ratios=[1.2, SHOWN, SHOWN])
    panels = []
    for column, (width, title, colour) in enumerate(parts):
        part = figure.add_subfigure(grid[0, column])
        part.suptitle(title, color=colour, fontsize=13, fontweight="bold")
        panel = part.subplots(len(queries), width, squeeze=False)
        for axes in panel.flat:
            axes.set_axis_off()  # until there is an image to show
        panels.append(panel)
    for row, query in enumerate(queries):
        show(panels[0][row, 0], query.image, f"{query.label}, read as {query.predicted}", "black")
        for panel, entries, colour in (
            (panels[1], query.ranking.helpful, HELPFUL),
            (panels[2], query.ranking.harmful, HARMFUL),
        ):
            for axes, entry in zip(panel[row], entries, strict=False):
                caption = f"{int(train_set.labels[entry.index])}:  {_correlation(entry):+.2f}".replace("-", "−")
                show(axes, train_set.images[entry.index], caption, colour)
    note = "under a training image: its digit, and the posterior correlation of its loss with the test image's loss"
    figure.text(0.5, -0.01, note, ha="center", va="top", color="dimgray", fontsize=11)
    figure.savefig(path, dpi=120, bbox_inches="tight", pad_inches=0.2)
