"""Does the per-token BIF find a word's translation?

    python -m experiments.word_alignment --english train.en --french train.fr --work DIR [--minutes 8]

A language model of 3 million parameters learns Multi30k as sentence pairs, in both orders, so that either language
predicts the other. Then attention (or attention and MLPs) is jostled, and the losses of two sets of pairs are recorded,
token by token: pairs that were trained on and pairs that were held out. A word of the held-out pairs is given, and
every word of the other language is scored by the mean posterior correlation of its training tokens with the given
word's held-out tokens, which are never in the same sequence. Is the first one the translation?

Precision at 1 and mean reciprocal rank (± standard error over words), in both directions together, at several
localizations (all of them shown), against

- the same with no gradient (n_beta = 0), and with the draws of the two sets shuffled against each other;
- per-token gradients with respect to the same weights, dot product and cosine;
- cosine of the model's word embeddings;
- co-occurrence (positive PMI, Dice, count) in the observed training pairs alone, and in both observed sets.

What the right answer is comes from all 29,000 pairs: IBM model 1 both ways, content words, confident entries alone.
Candidates are all words of the other language with enough tokens, function words included, identical strings left out.

Localizations are chosen by what they do: how much an independent Gaussian perturbation with that precision raises the
mean training loss. n_beta is then such that the largest curvature of n_beta times the loss, at w* or at such
perturbations of it, is three times the localization: the gradient matters, and the step stays stable.

Text files may be compressed by xz. Everything is kept in --work, and a second call goes on with what is missing.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.environment import write_record
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

import jostle
from jostle.weights import MovingWeights

RECORD = Path(__file__).parent / "records" / "word_alignment.json"
FIGURE = RECORD.with_suffix(".png")
LANGUAGES = ("english", "french")
WORDS = {"english": re.compile(r"'s|\w+|[^\w\s]"), "french": re.compile(r"\w+'|\w+|[^\w\s]")}
SPECIAL = ("<pad>", "<unk>", "<english>", "<french>", "<end>")
PAD, UNKNOWN, END = 0, 1, 4
BEGIN = {"english": 2, "french": 3}
IGNORED = -100
LONGEST_PAIR = 45
"""Words of both sentences together; longer pairs (4 %) are left out, so that padding stays small."""

FUNCTION_WORDS = {
    "english": """a an the this that these those some any each every all both many several few one another other others
        and or but while as if than so because when where who whom which what whose how there here i you he she it we
        they me him her us them my your his its our their himself herself itself themselves is are was were be been
        being am do does did doing done has have had having can could will would may might must shall should not no of
        in on at to from by for with without about above across after against along among around before behind below
        beneath beside between beyond down during front inside into near next off onto out outside over past through
        toward towards under until up upon very just only also too then back away together get gets getting""",
    "french": """un une le la les l' d' de du des au aux à en dans sur sous par pour avec sans chez vers contre entre
        devant derrière près autour depuis pendant après avant lors travers côté dessus dessous haut bas long dehors
        et ou mais donc car si que qu' qui quoi dont où quand comme tandis lorsque alors tout tous toute toutes autre
        autres même plusieurs quelques quelque chaque certains certaines ce c' cet cette ces ça ceci cela il elle ils
        elles on je j' tu nous vous se s' lui leur leurs eux me m' te t' y n' ne pas plus moins très aussi bien son sa
        ses mon ma mes ton ta tes notre nos votre vos est sont était étaient être été étant a ont avait ayant avoir
        fait font faisant faire va vont peut train""",
}


def say(*words: object) -> None:
    print(*words, flush=True)


# ---------------------------------------------------------------------------------------------------------------- text


def read_sentences(path: Path, language: str) -> list[list[str]]:
    opened: Any = lzma.open if path.suffix == ".xz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        return [WORDS[language].findall(line.lower().replace("’", "'")) for line in file]


@dataclass(frozen=True)
class Corpus:
    """Aligned sentences as word numbers; one vocabulary for both languages, as a language model would have it."""

    sentences: dict[str, list[list[int]]]
    words: list[str]

    @classmethod
    def read(cls, paths: dict[str, Path], most: int | None, fewest: int = 5) -> Corpus:
        texts = {language: read_sentences(path, language)[:most] for language, path in paths.items()}
        counts = [Counter(word for sentence in text for word in sentence) for text in texts.values()]
        known = sorted({word for count in counts for word, times in count.items() if times >= fewest})
        words = [*SPECIAL, *known]
        number = {word: index for index, word in enumerate(words)}
        short = [
            index
            for index, pair in enumerate(zip(*texts.values(), strict=True))
            if all(pair) and sum(map(len, pair)) <= LONGEST_PAIR
        ]
        return cls(
            {
                language: [[number.get(word, UNKNOWN) for word in text[index]] for index in short]
                for language, text in texts.items()
            },
            words,
        )

    def __len__(self) -> int:
        return len(self.sentences["english"])


@dataclass(frozen=True)
class Sequences:
    """Pairs in both orders, padded on the right; and of each token its language (0, 1; −1 for what is no word)."""

    tokens: Tensor
    language: Tensor
    pair: np.ndarray

    @classmethod
    def of(cls, corpus: Corpus, pairs: Sequence[int]) -> Sequences:
        width = LONGEST_PAIR + 3
        tokens = torch.full((2 * len(pairs), width), PAD)
        language = torch.full_like(tokens, -1)
        for row, (pair, order) in enumerate((pair, order) for pair in pairs for order in (LANGUAGES, LANGUAGES[::-1])):
            at = 0
            for name in order:
                sentence = torch.tensor(corpus.sentences[name][pair])
                tokens[row, at] = BEGIN[name]
                tokens[row, at + 1 : at + 1 + len(sentence)] = sentence
                language[row, at + 1 : at + 1 + len(sentence)] = LANGUAGES.index(name)
                at += 1 + len(sentence)
            tokens[row, at] = END
        return cls(tokens, language.masked_fill(tokens < len(SPECIAL), -1), np.repeat(np.asarray(pairs), 2))

    @property
    def columns(self) -> dict[str, Tensor]:
        """For Jostle. Padding is on the right and unscored; attention is causal, so no mask is needed for it."""
        return {"input_ids": self.tokens, "labels": self.tokens.masked_fill(self.tokens == PAD, IGNORED)}


# ---------------------------------------------------------------------------------------------------------- dictionary


def model_one(source: list[list[int]], target: list[list[int]], size: int, rounds: int = 8) -> np.ndarray:
    """t(target | source) by expectation maximization, IBM model 1 without the empty word: a source × target matrix.

    Reference: Brown et al., *The Mathematics of Statistical Machine Translation*, 1993.
    """
    keys, cells, done = [], [], 0
    for left, right in zip(source, target, strict=True):
        left, right = np.array(left), np.array(right)
        keys.append((left[None] * size + right[:, None]).ravel())
        cells.append(np.repeat(np.arange(done, done + len(right)), len(left)))
        done += len(right)
    cell = np.concatenate(cells)
    pairs, entry = np.unique(np.concatenate(keys), return_inverse=True)
    given, word = np.divmod(pairs, size)
    probability = np.ones(len(pairs))
    for _ in range(rounds):
        expected = probability[entry]
        expected /= np.bincount(cell, expected)[cell]  # which source word explains this target token
        probability = np.bincount(entry, expected, len(pairs))
        probability /= np.bincount(given, probability, size)[given]
    table = np.zeros((size, size), np.float32)
    table[given, word] = probability
    return table


def build_dictionary(corpus: Corpus, fewest: int) -> np.ndarray:
    """Which (English, French) word pairs are translations: √(t(f|e)·t(e|f)) ≥ 0.3, content words, not identical.

    A word may have several, since French inflects: blue is bleu, bleue and bleus.
    """
    size = len(corpus.words)
    sentences = [corpus.sentences[language] for language in LANGUAGES]
    table = model_one(sentences[0], sentences[1], size) * model_one(sentences[1], sentences[0], size).T
    right = table >= 0.3**2
    for axis, language in enumerate(LANGUAGES):
        counts = Counter(word for sentence in corpus.sentences[language] for word in sentence)
        function_words = set(FUNCTION_WORDS[language].split())
        fit = np.array([
            counts[index] >= fewest and len(word) > 2 and word.isalpha() and word not in function_words
            for index, word in enumerate(corpus.words)
        ])  # fmt: skip
        right &= fit[:, None] if axis == 0 else fit[None]
    np.fill_diagonal(right, False)
    return right


# --------------------------------------------------------------------------------------------------------------- model


def build_model(vocabulary: int, quick: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers, heads = (32, 2, 2) if quick else (192, 4, 6)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=heads, max_position_embeddings=LONGEST_PAIR + 3, tie_word_embeddings=True,
        pad_token_id=PAD, bos_token_id=None, eos_token_id=END, initializer_range=0.05,
    ))  # fmt: skip
    # Plain matmuls: sequences are short, and fused kernels run one after another under vmap.
    model.set_attn_implementation("eager")
    return model


def token_losses(model: Any, tokens: Tensor) -> Tensor:
    """−log p of each token after the first, 0 for padding."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=PAD, reduction="none").view(
        len(tokens), -1
    )


@torch.no_grad()
def loss_by_half(model: nn.Module, data: Sequences) -> dict[str, float]:
    """Mean loss of the words of first and of second sentences: how much a translation helps."""
    device = next(model.parameters()).device
    losses = torch.cat([token_losses(model, part.to(device)).cpu() for part in data.tokens.split(256)])
    language = data.language[:, 1:]
    is_first = language == data.language[:, 1:2]
    known = language >= 0
    return {
        "first sentence": losses[known & is_first].mean().item(),
        "second sentence": losses[known & ~is_first].mean().item(),
    }


def train_model(model: nn.Module, data: Sequences, held_out: Sequences, epochs: int) -> dict[str, Any]:
    """AdamW with warm-up and cosine decay; TF32 matmuls while training."""
    device = next(model.parameters()).device
    tokens = data.tokens.to(device)
    batch = 256 if len(tokens) > 10_000 else 64
    steps = epochs * (len(tokens) // batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    started, step = time.perf_counter(), 0
    torch.set_float32_matmul_precision("high")
    for epoch in range(epochs):
        model.train()
        total = torch.zeros((), device=device)
        for chosen in torch.randperm(len(tokens), generator=generator).split(batch)[: len(tokens) // batch]:
            rate = min(1.0, (step + 1) / 200) * 0.5 * (1 + math.cos(math.pi * step / steps))
            optimizer.param_groups[0]["lr"] = 2e-3 * rate
            part = tokens[chosen.to(device)]
            value = token_losses(model, part).sum() / (part[:, 1:] != PAD).sum()
            optimizer.zero_grad()
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total += value.detach()
            step += 1
        model.eval()
        halves = {name: round(value, 3) for name, value in loss_by_half(model, held_out).items()}
        seconds = time.perf_counter() - started
        say(f"epoch {epoch + 1}: {total.item() / (len(tokens) // batch):.3f}, held out {halves}, {seconds:.0f} s")
    torch.set_float32_matmul_precision("highest")
    return {
        "epochs": epochs, "seconds": round(time.perf_counter() - started, 1),
        "held_out_loss": loss_by_half(model, held_out),
        "trained_loss": loss_by_half(model, Sequences(data.tokens[:1024], data.language[:1024], data.pair[:1024])),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------- localizations


def mean_loss(model: nn.Module, moving: MovingWeights, flat: Tensor, tokens: Tensor) -> Tensor:
    """As in the potential: the mean over each sequence's tokens, then over sequences."""
    losses = functional_call(_Losses(model), {f"model.{k}": v for k, v in moving.unflatten(flat).items()}, (tokens,))
    return (losses.sum(1) / (tokens[:, 1:] != PAD).sum(1)).mean()


class _Losses(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return token_losses(self.model, tokens)


def largest_curvature(model: nn.Module, moving: MovingWeights, at: Tensor, tokens: Tensor, rounds: int) -> float:
    """Largest eigenvalue of the Hessian of the mean loss, by power iteration on differences of gradients."""

    def gradient(flat: Tensor) -> Tensor:
        leaf = flat.detach().requires_grad_()
        return torch.autograd.grad(mean_loss(model, moving, leaf, tokens), leaf)[0]

    torch.manual_seed(0)
    direction = torch.randn_like(moving.center)
    value, reach = 0.0, 0.05
    for _ in range(rounds):
        direction = direction / direction.norm()
        image = gradient(at + reach * direction) - gradient(at - reach * direction)
        image /= 2 * reach
        value, direction = float(direction @ image), image
    return abs(value)


@torch.no_grad()
def rises(model: nn.Module, moving: MovingWeights, tokens: Tensor, repeats: int = 4) -> dict[float, float]:
    """For each localization, by how much N(0, 1/localization) on every weight raises the mean loss."""
    grid = [float(digit * 10**power) for power in range(1, 7) for digit in (1, 1.5, 2, 3, 5, 7)]
    center = mean_loss(model, moving, moving.center, tokens).item()
    generator = torch.Generator(device=tokens.device).manual_seed(0)
    out = {}
    for localization in grid:
        values = []
        for _ in range(repeats):
            noise = torch.randn(moving.center.shape, generator=generator, device=tokens.device)
            values.append(mean_loss(model, moving, moving.center + noise / math.sqrt(localization), tokens).item())
        out[localization] = float(np.mean(values)) - center
    return out


# ------------------------------------------------------------------------------------------------------ scores by word


@dataclass(frozen=True)
class Types:
    """The words of each language with enough tokens; of each token which of them it is (−1: none), and its sentence."""

    words: dict[str, np.ndarray]
    of_token: np.ndarray
    is_first: np.ndarray

    @classmethod
    def of(cls, data: Sequences, corpus: Corpus, fewest_pairs: int) -> Types:
        tokens, language = data.tokens.numpy(), data.language.numpy()
        of_token = np.full(tokens.shape, -1)
        words, first = {}, 0
        for number, name in enumerate(LANGUAGES):
            here = language == number
            pairs = np.unique(np.stack([np.broadcast_to(data.pair[:, None], tokens.shape)[here], tokens[here]]), axis=1)
            counts = Counter(pairs[1].tolist())
            kept = np.array(sorted(w for w, n in counts.items() if n >= fewest_pairs and corpus.words[w][0].isalpha()))
            place = np.full(len(corpus.words), -1)
            place[kept] = np.arange(first, first + len(kept))
            of_token[here] = place[tokens[here]]
            words[name] = kept
            first += len(kept)
        return cls(words, of_token, language == (tokens[:, :1] == BEGIN["french"]))

    @property
    def count(self) -> int:
        return sum(map(len, self.words.values()))

    def rows(self, language: str) -> slice:
        first = 0 if language == "english" else len(self.words["english"])
        return slice(first, first + len(self.words[language]))


def average_by_type(values: np.ndarray, types: np.ndarray, count: int) -> np.ndarray:
    """Mean over the columns of each type: (row, column) → (type, row)."""
    order = np.argsort(types, kind="stable")
    order = order[types[order] >= 0]
    kinds, starts, sizes = np.unique(types[order], return_index=True, return_counts=True)
    assert len(kinds) == count
    sums = np.add.reduceat(values[:, order], starts, axis=1, dtype=np.float64)
    return (sums / sizes).T.astype(np.float32)


def traces_by_type(run: jostle.Run, name: str, types: Types) -> dict[str, np.ndarray]:
    """Standardized and centred losses, averaged by word: products over draws are mean correlations and covariances."""
    columns = run.traces.columns(name)
    assert columns.offsets is not None
    assert columns.positions is not None
    owner = np.repeat(np.arange(columns.samples), np.diff(columns.offsets))
    healthy = np.setdiff1d(np.arange(run.config["chains"]), run.failed_chains)
    losses = np.asarray(run.traces.losses(name)[:])[healthy].reshape(-1, columns.total)
    centered = losses - losses.mean(0, dtype=np.float64).astype(np.float32)
    spread = centered.std(0)
    kinds = types.of_token[owner, columns.positions]
    is_first = types.is_first[owner, columns.positions]
    standard = centered / np.where(spread > 0, spread, np.inf) / math.sqrt(len(losses))
    # Every pair stands in both orders, so that every word has tokens in first and in second sentences.
    return {
        "correlation": average_by_type(standard, kinds, types.count),
        "correlation of first sentences": average_by_type(standard, np.where(is_first, kinds, -1), types.count),
        "correlation of second sentences": average_by_type(standard, np.where(is_first, -1, kinds), types.count),
        "covariance": average_by_type(centered, kinds, types.count) / math.sqrt(len(losses) - 1),
    }


Vectors = Callable[[str], np.ndarray]


class Evaluation:
    """Ranks the words of one language for the words of the other, and says how often the translation comes first."""

    def __init__(self, corpus: Corpus, dictionary: np.ndarray, train: Types, query: Types) -> None:
        self.corpus, self.train, self.query = corpus, train, query
        self.directions = []
        for given, wanted in (LANGUAGES, LANGUAGES[::-1]):
            asked, candidates = query.words[given], train.words[wanted]
            table = dictionary if given == "english" else dictionary.T
            right = table[np.ix_(asked, candidates)]
            possible = right.any(1)
            allowed = asked[possible, None] != candidates[None]
            self.directions.append((given, wanted, np.flatnonzero(possible), right[possible], allowed))
        self.count = sum(len(rows) for _, _, rows, _, _ in self.directions)

    def ranks(self, scores: dict[str, np.ndarray]) -> np.ndarray:
        """The rank of the best right word for every word asked; ties count against the method."""
        out = []
        for given, _, rows, right, allowed in self.directions:
            values = np.where(allowed, scores[given][rows], -np.inf)
            best = np.where(right, values, -np.inf).max(1)
            out.append(1 + ((values >= best[:, None]) & ~right).sum(1))
        return np.concatenate(out)

    def summary(self, scores: dict[str, np.ndarray]) -> dict[str, float]:
        """Of plain scores, and of scores less what each candidate gets on average (some words go with everything)."""
        out = {}
        for kind in ("", "_centered"):
            used = scores if not kind else {
                given: scores[given] - scores[given][rows].mean(0) for given, _, rows, _, _ in self.directions
            }  # fmt: skip
            ranks = self.ranks(used)
            for name, values in (("precision_at_1", ranks == 1), ("mean_reciprocal_rank", 1 / ranks)):
                out[name + kind] = float(values.mean())
                out[name + kind + "_error"] = float(values.std(ddof=1) / math.sqrt(len(ranks)))
        return out

    def vectors(self, train: np.ndarray, query: np.ndarray) -> dict[str, np.ndarray]:
        """Scores from one vector for each word: given (held out) × wanted (trained on)."""
        return {
            given: query[self.query.rows(given)] @ train[self.train.rows(wanted)].T
            for given, wanted, *_ in self.directions
        }

    def shown(self, scores: dict[str, np.ndarray], count: int = 12) -> dict[str, list[str]]:
        """The first three candidates for the commonest English words of the dictionary, right ones starred."""
        given, wanted, rows, right, allowed = self.directions[0]
        tokens = self.query.of_token
        often = np.bincount(tokens[tokens >= 0], minlength=self.query.count)[self.query.rows(given)][rows]
        out = {}
        for place in np.argsort(-often, kind="stable")[:count]:
            values = np.where(allowed[place], scores[given][rows[place]], -np.inf)
            first = np.argsort(-values)[:3]
            out[self.corpus.words[self.query.words[given][rows[place]]]] = [
                self.corpus.words[self.train.words[wanted][index]] + ("*" if right[place, index] else "")
                for index in first
            ]
        return out

    def chance(self, repeats: int = 200) -> dict[str, float]:
        """Random scores."""
        generator = np.random.default_rng(0)
        ranks = np.concatenate([
            self.ranks({
                given: generator.random((len(self.query.words[given]), len(self.train.words[wanted])))
                for given, wanted, *_ in self.directions
            })
            for _ in range(repeats)
        ])  # fmt: skip
        return {"precision_at_1": float((ranks == 1).mean()), "mean_reciprocal_rank": float((1 / ranks).mean())}


def cooccurrence(corpus: Corpus, pairs: Sequence[int], evaluation: Evaluation) -> dict[str, dict[str, np.ndarray]]:
    """Positive PMI, Dice coefficient and count over the given pairs (each counted once)."""
    size = len(corpus.words)
    present = {language: np.zeros((len(pairs), size), np.float32) for language in LANGUAGES}
    for language, table in present.items():
        for row, pair in enumerate(pairs):
            table[row, corpus.sentences[language][pair]] = 1
    out: dict[str, dict[str, np.ndarray]] = {"positive PMI": {}, "Dice": {}, "count": {}}
    for given, wanted, *_ in evaluation.directions:
        left = present[given][:, evaluation.query.words[given]]
        right = present[wanted][:, evaluation.train.words[wanted]]
        both, alone, other = left.T @ right, left.sum(0)[:, None], right.sum(0)[None]
        with np.errstate(divide="ignore", invalid="ignore"):
            # A word that is not among these pairs goes with nothing.
            information = np.log(both * len(pairs) / (alone * other))
            out["positive PMI"][given] = np.maximum(np.nan_to_num(information, neginf=0), 0)
            out["Dice"][given] = np.nan_to_num(2 * both / (alone + other))
        out["count"][given] = both
    return out


def gradients_by_type(
    model: nn.Module, moving: MovingWeights, parts: dict[str, Tensor], data: Sequences, types: Types, *, most: int
) -> dict[str, Tensor]:
    """Mean gradient, and mean unit gradient, of each word's token losses (at most ``most`` tokens a word).

    ``parts`` are sets of the moving weights, as masks: for each the dot product of two means is the mean dot product,
    and that of mean unit vectors the mean cosine.
    """
    device = moving.center.device
    generator = np.random.default_rng(0)
    places = [np.argwhere(types.of_token == kind) for kind in range(types.count)]
    chosen = [generator.permutation(place)[:most] for place in places]
    kinds = torch.from_numpy(np.repeat(np.arange(types.count), list(map(len, chosen)))).to(device)
    sizes = torch.bincount(kinds, minlength=types.count)[:, None]
    where = torch.from_numpy(np.concatenate(chosen)).to(device)
    order = where[:, 1].argsort()  # by position: what follows a token does not matter to it, and is cut off
    network: Any = model

    class OneLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = network

        def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
            hidden = self.model.base_model(input_ids=tokens[None, :-1], use_cache=False)[0][0]
            state = hidden.index_select(0, position[None] - 1)
            return F.cross_entropy(self.model.get_output_embeddings()(state), tokens.index_select(0, position[None]))

    def loss(flat: Tensor, tokens: Tensor, position: Tensor) -> Tensor:
        weights = {f"model.{name}": value for name, value in moving.unflatten(flat).items()}
        return functional_call(OneLoss(), weights, (tokens, position))

    every = vmap(grad(loss), in_dims=(None, 0, 0))
    tokens = data.tokens.to(device)
    out = {
        f"{name}/{kind}": torch.zeros(types.count, int(mask.sum()), device=device)
        for name, mask in parts.items()
        for kind in ("dot product", "cosine")
    }
    with torch.no_grad():
        for number in order.split(max(1, 200_000_000 // moving.total)):
            rows, positions = where[number].T
            gradient = every(moving.center, tokens[rows, : int(positions.max()) + 1], positions)
            for name, mask in parts.items():
                part = gradient[:, mask]
                out[f"{name}/dot product"].index_add_(0, kinds[number], part)
                out[f"{name}/cosine"].index_add_(0, kinds[number], part / part.norm(dim=1, keepdim=True))
    return {name: value / sizes for name, value in out.items()}


# ----------------------------------------------------------------------------------------------------------------- all


@dataclass(frozen=True)
class Setting:
    weights: str
    rise: float
    has_gradient: bool
    seed: int = 0

    @property
    def name(self) -> str:
        kind = "BIF" if self.has_gradient else "no gradient"
        return f"{kind}, {self.weights}, rise {self.rise:g}" + (f", seed {self.seed}" if self.seed else "")

    @property
    def file(self) -> str:
        return re.sub(r"[^\w.+]+", "-", self.name) + ".npz"


RISES = (0.1, 0.3, 1.0)
SETTINGS = [
    Setting(weights, rise, has_gradient)
    for weights in ("attention", "embedding", "attention+mlp")
    for rise in (0.3, 1.0, 0.1)
    for has_gradient in (True, False)
] + [Setting("attention", rise, True, seed=1) for rise in (0.3, 1.0, 0.1)]


def sample(
    setting: Setting, model: nn.Module, sets: dict[str, Sequences], drawn_from: Sequences, types: dict[str, Types],
    calibration: dict[str, Any], arguments: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    """Sample one setting, or read what an earlier call left of it; losses averaged by word."""
    path = arguments.work / setting.file
    if path.exists():
        with np.load(path) as stored:
            return {name: stored[name] for name in stored.files if name != "about"} | {
                "about": json.loads(str(stored["about"]))
            }
    known = calibration[setting.weights]["wanted"][f"{setting.rise:g}"]
    localization, curvature = known["localization"], max(known["curvature_at_center_and_perturbed"])
    n_beta = 3 * localization / curvature if setting.has_gradient else 0.0
    started = time.perf_counter()
    run = jostle.attribute(
        model, sets["train"].columns, sets["query"].columns, sampling_data=drawn_from.columns,
        loss=jostle.losses.next_token(),
        posterior=jostle.Posterior(n_beta=n_beta, localization=localization, weights=setting.weights),
        chains=arguments.chains, batch_size=64, seed=setting.seed, progress=False, observation_batch_size=512,
        **(
            {"sampler": jostle.SGLD(step_size=0.4 / localization), "draws": arguments.draws,
             "burn_in": arguments.burn_in, "thin": arguments.thin}
            if setting.has_gradient  # without one, every step is a new draw
            else {"sampler": jostle.Gaussian(), "draws": 4 * arguments.draws, "burn_in": 1, "thin": 1}
        ),
    )  # fmt: skip
    about = run.diagnostics()
    result: dict[str, Any] = {
        f"{name}/{kind}": values for name in sets for kind, values in traces_by_type(run, name, types[name]).items()
    }
    result["about"] = {
        "localization": localization, "n_beta": n_beta, "seconds": round(time.perf_counter() - started, 1),
        **{key: about[key] for key in ("mean_loss_at_center", "mean_loss", "effective_draws")},
        "failed_chains": len(about["failed_chains"]),
    }  # fmt: skip
    stored: Any = result | {"about": np.array(json.dumps(result["about"]))}
    np.savez(path, **stored)
    return result


def score(setting: Setting, sampled: dict[str, Any], evaluation: Evaluation) -> dict[str, Any]:
    row: dict[str, Any] = sampled["about"] | {"weights": setting.weights, "rise": setting.rise, "seed": setting.seed}
    for kind in (name.removeprefix("train/") for name in sampled if name.startswith("train/")):
        scores = evaluation.vectors(sampled[f"train/{kind}"], sampled[f"query/{kind}"])
        row[kind] = evaluation.summary(scores)
        if kind == "correlation":
            row["first_three"] = evaluation.shown(scores)
            # The same numbers, but the draws of one set no longer belong to those of the other.
            shuffled = np.random.default_rng(0).permutation(sampled["query/correlation"].shape[1])
            control = evaluation.vectors(sampled["train/correlation"], sampled["query/correlation"][:, shuffled])
            row["shuffled draws"] = evaluation.summary(control)
    return row


OTHERS = ("correlation of first sentences", "correlation of second sentences", "covariance", "shuffled draws")
"""What else is read off the same draws, besides the correlation over all tokens."""


def line(name: str, row: dict[str, float]) -> str:
    text = f"{name:52} {row['precision_at_1']:.3f}"
    if "precision_at_1_error" in row:
        text += f" ± {row['precision_at_1_error']:.3f}   MRR {row['mean_reciprocal_rank']:.3f}"
        text += f"   centred {row['precision_at_1_centered']:.3f}, {row['mean_reciprocal_rank_centered']:.3f}"
    return text


def draw(record: dict[str, Any], path: Path) -> None:
    """Precision at 1 of everything, as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [(name, row, "0.65") for name, row in record["baselines"].items()]
    for name, row in record["settings"].items():
        if "failed" in row:
            continue
        rows.append((name, row["correlation"], "tab:blue" if row["n_beta"] else "tab:orange"))
    figure, axis = plt.subplots(figsize=(8, 0.26 * len(rows) + 1), layout="constrained")
    places = np.arange(len(rows))[::-1]
    axis.barh(
        places, [row["precision_at_1"] for _, row, _ in rows], xerr=[row["precision_at_1_error"] for _, row, _ in rows],
        color=[color for _, _, color in rows],
    )  # fmt: skip
    axis.axvline(record["chance"]["precision_at_1"], color="black", linewidth=0.8, linestyle=":")
    axis.set_yticks(places, [name for name, _, _ in rows], fontsize=8)
    axis.set_xlabel(f"translation found first, of {record['words_asked']} words (dotted: chance)")
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def calibrate(model: nn.Module, tokens: Tensor, path: Path, quick: bool) -> dict[str, Any]:
    """Localizations that raise the loss as wanted, and the largest curvature, for each choice of weights."""
    if path.exists():
        return json.loads(path.read_text())
    out: dict[str, Any] = {}
    for weights in dict.fromkeys(setting.weights for setting in SETTINGS):
        moving = MovingWeights(model, weights)
        found = rises(model, moving, tokens, repeats=1 if quick else 4)
        wanted = {}
        for rise in RISES:
            distance = {at: abs(math.log(max(value, 1e-9) / rise)) for at, value in found.items()}
            localization = min(distance, key=distance.__getitem__)
            # A model that fits its data well is flat there and nowhere else; chains live around it.
            torch.manual_seed(0)
            noise = torch.randn(2, moving.total, device=tokens.device) / math.sqrt(localization)
            points = [moving.center, *(moving.center + noise)]
            curvatures = [largest_curvature(model, moving, at, tokens, 3 if quick else 15) for at in points]
            wanted[f"{rise:g}"] = {"localization": localization, "curvature_at_center_and_perturbed": curvatures}
        out[weights] = {
            "moving_weights": moving.total,
            "rise_of_loss": {f"{at:g}": value for at, value in found.items()},
            "wanted": wanted,
        }
        say(weights, json.dumps(wanted))
    path.write_text(json.dumps(out))
    return out


def gradient_baselines(
    model: nn.Module, sets: dict[str, Sequences], types: dict[str, Types], evaluation: Evaluation, most: int
) -> dict[str, dict[str, float]]:
    moving = MovingWeights(model, "attention+mlp+embedding")
    parts = {}
    for weights in dict.fromkeys(setting.weights for setting in SETTINGS):
        names = set(MovingWeights(model, weights).names)
        parts[weights] = torch.zeros(moving.total, dtype=torch.bool, device=moving.center.device)
        for name, place in moving.slices.items():
            parts[weights][place] = name in names
    sides = {name: gradients_by_type(model, moving, parts, data, types[name], most=most) for name, data in sets.items()}
    out = {}
    for kind in sides["train"]:
        left, right = sides["train"][kind], sides["query"][kind]
        products = {
            given: (right[types["query"].rows(given)] @ left[types["train"].rows(wanted)].T).cpu().numpy()
            for given, wanted, *_ in evaluation.directions
        }
        weights, measure = kind.split("/")
        out[f"gradient {measure}, {weights}"] = evaluation.summary(products)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description="Does the per-token BIF find a word's translation?")
    parser.add_argument("--english", type=Path, required=True)
    parser.add_argument("--french", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="where model and samples are kept between calls")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--figure", type=Path, help=f"also draw the table (for example {FIGURE.name})")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no setting that would end after this")
    parser.add_argument("--pairs", type=int, default=512, help="observed pairs: as many trained on as held out")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--burn-in", type=int, default=16)
    parser.add_argument("--thin", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a small version that shows only that it runs")
    arguments = parser.parse_args()
    started = time.perf_counter()
    if arguments.quick:
        arguments.pairs, arguments.epochs, arguments.draws, arguments.chains = 48, 1, 6, 2
        arguments.burn_in, arguments.thin = 4, 2
        torch.set_num_threads(1)
    arguments.work.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    fewest = 2 if arguments.quick else 4

    paths = {"english": arguments.english, "french": arguments.french}
    corpus = Corpus.read(paths, 1200 if arguments.quick else None)
    dictionary = build_dictionary(corpus, fewest=5 if arguments.quick else 30)
    order = np.random.default_rng(0).permutation(len(corpus))
    query_pairs, trained_pairs = order[: arguments.pairs].tolist(), order[arguments.pairs :].tolist()
    train_pairs = trained_pairs[: arguments.pairs]
    sets = {"train": Sequences.of(corpus, train_pairs), "query": Sequences.of(corpus, query_pairs)}
    drawn_from = Sequences.of(corpus, trained_pairs[: 8 * arguments.pairs])
    types = {name: Types.of(data, corpus, fewest) for name, data in sets.items()}
    evaluation = Evaluation(corpus, dictionary, types["train"], types["query"])
    say(
        f"{len(corpus):,} pairs, {len(corpus.words):,} words; {dictionary.sum()} dictionary entries; "
        f"{evaluation.count} words asked of {[len(words) for words in types['train'].words.values()]} candidates, "
        f"{time.perf_counter() - started:.0f} s"
    )

    model = build_model(len(corpus.words), arguments.quick).to(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    stored, about_training = arguments.work / "model.safetensors", arguments.work / "training.json"
    if stored.exists():
        model.load_state_dict(load_file(stored), strict=False)  # the tied unembedding is stored once
        model.to(device)
        training = json.loads(about_training.read_text())
    else:
        training = train_model(model, Sequences.of(corpus, trained_pairs), sets["query"], arguments.epochs)
        unembedding = {"lm_head.weight"}
        state = {name: value.cpu() for name, value in model.state_dict().items() if name not in unembedding}
        about_training.write_text(json.dumps(training))
        save_file(state, stored)
    model.eval()
    say(f"{parameters:,} parameters, {training}")

    calibration = calibrate(
        model,
        drawn_from.tokens[: 16 if arguments.quick else 256].to(device),
        arguments.work / "calibration.json",
        arguments.quick,
    )
    record: dict[str, Any] = {
        "workload": "Multi30k English–French, Llama architecture, word-level vocabulary, both orders",
        "quick": arguments.quick, "parameters": parameters, "training": training, "pairs": len(corpus),
        "observed": f"{arguments.pairs} pairs trained on, {arguments.pairs} held out, each in both orders",
        "sampling_data": f"{len(drawn_from.tokens)} training sequences, batch 64",
        "sampler": "SGLD, step 0.4/localization, n_beta = 3·localization/largest curvature",
        "draws": f"{arguments.chains} chains × {arguments.draws}, thin {arguments.thin}, burn-in {arguments.burn_in}",
        "dictionary": "IBM model 1 both ways on all pairs, √(t(f|e)·t(e|f)) ≥ 0.3, content words",
        "dictionary_entries": int(dictionary.sum()), "words_asked": evaluation.count,
        "candidates": {language: len(words) for language, words in types["train"].words.items()},
        "chance": evaluation.chance(), "calibration": calibration, "baselines": {}, "settings": {}, "not_run": [],
    }  # fmt: skip
    say(line("chance", record["chance"]))
    baselines: dict[str, dict[str, float]] = record["baselines"]

    def store() -> None:
        write_record(arguments.record, record)
        if arguments.figure:
            draw(record, arguments.figure)

    everyone = {"observed training pairs": train_pairs, "both observed sets": [*train_pairs, *query_pairs]}
    for where, pairs in everyone.items():
        for name, scores in cooccurrence(corpus, pairs, evaluation).items():
            baselines[f"{name}, {where}"] = evaluation.summary(scores)
    network: Any = model
    unit = F.normalize(network.get_input_embeddings().weight.detach(), dim=1).cpu().numpy()
    by_side = {
        name: unit[np.concatenate([kind.words[language] for language in LANGUAGES])] for name, kind in types.items()
    }
    baselines["embedding cosine"] = evaluation.summary(evaluation.vectors(by_side["train"], by_side["query"]))
    stored_gradients = arguments.work / "gradients.json"
    if not stored_gradients.exists():
        begun = time.perf_counter()
        rows = gradient_baselines(model, sets, types, evaluation, most=4 if arguments.quick else 48)
        stored_gradients.write_text(json.dumps(rows))
        say(f"gradients: {time.perf_counter() - begun:.0f} s")
        if device == "cuda":
            torch.cuda.empty_cache()
    baselines |= json.loads(stored_gradients.read_text())
    record["baselines"] = baselines
    for name, row in baselines.items():
        say(line(name, row))
    store()

    longest = 0.0
    for setting in SETTINGS[: 2 if arguments.quick else None]:
        begun = time.perf_counter()
        is_new = not (arguments.work / setting.file).exists()
        if is_new and begun - started + longest > 60 * arguments.minutes:
            record["not_run"].append(setting.name)
            continue
        try:
            sampled = sample(setting, model, sets, drawn_from, types, calibration, arguments)
        except jostle.ChainsFailedError as error:
            record["settings"][setting.name] = {"failed": str(error)}
            say(f"{setting.name:52} {error}")
            continue
        row = score(setting, sampled, evaluation)
        record["settings"][setting.name] = row
        store()
        say(line(setting.name, row["correlation"]))
        say("    " + ", ".join(f"{kind} {row[kind]['precision_at_1']:.3f}" for kind in OTHERS))
        say(
            f"    loss {row['mean_loss']:.3f} ({row['mean_loss_at_center']:.3f} at w*), localization "
            f"{row['localization']:g}, n_beta {row['n_beta']:.3g}, effective draws {row['effective_draws']}, "
            f"{row['seconds']} s"
        )
        if is_new:
            longest = max(longest, time.perf_counter() - begun)
    if record["not_run"]:
        say("not run, for want of time (call again):", record["not_run"])
    store()


if __name__ == "__main__":
    main()
