"""Does the per-token BIF find a word's translation?

    python -m experiments.word_alignment --english train.en --french train.fr --work DIR [--minutes 8]

A language model of 3 million parameters learns Multi30k as sentence pairs in both orders, so that either language
predicts the other. Then some of its weights are jostled, and the losses of 1,024 pairs are recorded token by token,
half of them trained on and half held out: in the order English, French as the training set of a run, and in the order
French, English as its query set. Two questions are asked of the correlations of these losses over the draws.

- **Alignment.** A word of a pair is given; which word of the other language, in the same pair, is its translation? Each
  word's loss is taken where its sentence comes second, and so knows the other one. The candidates' losses are those in
  the *other order*, where they come second too (two sequences: a block of `Run.token_influence`), or those in the
  *same sequence*, where they come first, or the *mean* of all four combinations of orders.
- **Lexicon.** A word of the held-out pairs is given; which word of the other language is its translation, by the mean
  correlation of its tokens in the training pairs with the given word's? No two of these tokens share a sentence.

Precision at 1 and mean reciprocal rank, ties counted against; *centered* scores are those less what a candidate gets on
average (from all words of the other sentence, or from all given words), since some tokens move with everything. Beside
them: no gradient (n_beta = 0), draws of one language shuffled, per-token gradients of the same weights, co-occurrence,
embeddings, and relative position.

What is right comes from all 29,000 pairs: IBM model 1 both ways, content words, confident entries alone. Candidates
are all words, function words included; identical strings and punctuation are left out.

Localizations are chosen by what they do: by how much an independent Gaussian perturbation with that precision raises
the mean training loss. n_beta is the localization over the largest curvature, at w* or at such perturbations of it,
for which Ornstein–Uhlenbeck steps of any length are stable: those of 4/localization make draws nearly independent.

Text files may be compressed by xz. Reduced results are kept in --work, and a second call goes on with what is missing.
"""

from __future__ import annotations

import argparse
import json
import logging
import lzma
import math
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.environment import write_record
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import jostle
from jostle.models.weights import MovingWeights

RECORD = Path(__file__).parent / "records" / "word_alignment.json"
LANGUAGES = ("english", "french")
WORDS = {"english": re.compile(r"'s|\w+|[^\w\s]"), "french": re.compile(r"\w+'|\w+|[^\w\s]")}
SPECIAL = ("<pad>", "<unk>", "<english>", "<french>", "<end>")
PAD, UNKNOWN, BEGIN, END = 0, 1, (2, 3), 4
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


@dataclass(frozen=True)
class Corpus:
    """Aligned sentences as word numbers, (English, French); one vocabulary, as a language model would have it."""

    pairs: list[tuple[list[int], list[int]]]
    words: list[str]

    @classmethod
    def read(cls, paths: Sequence[Path], most: int | None, fewest: int = 5) -> Corpus:
        texts = []
        for path, language in zip(paths, LANGUAGES, strict=True):
            opened: Any = lzma.open if path.suffix == ".xz" else open
            with opened(path, "rt", encoding="utf-8") as file:
                texts.append([WORDS[language].findall(line.lower().replace("’", "'")) for line in file][:most])
        counts = [Counter(word for sentence in text for word in sentence) for text in texts]
        words = [*SPECIAL, *sorted({word for count in counts for word, times in count.items() if times >= fewest})]
        number = {word: index for index, word in enumerate(words)}
        numbered = [[[number.get(word, UNKNOWN) for word in sentence] for sentence in text] for text in texts]
        pairs = [(e, f) for e, f in zip(*numbered, strict=True) if e and f and len(e) + len(f) <= LONGEST_PAIR]
        return cls(pairs, words)

    def sequence(self, pair: int, order: int) -> list[int]:
        """<english> … <french> … <end>, and with order 1 French first."""
        first, second = order, 1 - order
        sentences = self.pairs[pair]
        return [BEGIN[first], *sentences[first], BEGIN[second], *sentences[second], END]

    def padded(self, pairs: Sequence[int]) -> Tensor:
        """Each pair in both orders, padded on the right; attention is causal, so no mask is needed for it."""
        rows = [torch.tensor(self.sequence(pair, order)) for pair in pairs for order in (0, 1)]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


def model_one(source: list[list[int]], target: list[list[int]], size: int, rounds: int = 8) -> np.ndarray:
    """t(target | source) by expectation maximization, IBM model 1 without the empty word: a source × target matrix.

    Reference: Brown et al., *The Mathematics of Statistical Machine Translation*, 1993.
    """
    keys, cells, done = [], [], 0
    for left, right in zip(source, target, strict=True):
        keys.append((np.array(left)[None] * size + np.array(right)[:, None]).ravel())
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
    texts = [[pair[language] for pair in corpus.pairs] for language in (0, 1)]
    right = model_one(texts[0], texts[1], size) * model_one(texts[1], texts[0], size).T >= 0.3**2
    for axis, language in enumerate(LANGUAGES):
        counts = Counter(word for sentence in texts[axis] for word in sentence)
        function_words = set(FUNCTION_WORDS[language].split())
        fit = np.array([
            counts[index] >= fewest and len(word) > 2 and word.isalpha() and word not in function_words
            for index, word in enumerate(corpus.words)
        ])  # fmt: skip
        right &= np.expand_dims(fit, 1 - axis)
    np.fill_diagonal(right, False)
    return right


def cooccurrence(corpus: Corpus, pairs: Sequence[int]) -> dict[str, np.ndarray]:
    """Dice coefficient and positive pointwise mutual information of (English, French) words over the given pairs."""
    both = np.zeros((len(corpus.words),) * 2, np.float32)
    alone = np.zeros((2, len(corpus.words)), np.float32)
    for pair in pairs:
        english, french = (list(set(sentence)) for sentence in corpus.pairs[pair])
        both[np.ix_(english, french)] += 1
        alone[0, english] += 1
        alone[1, french] += 1
    # Words that meet less often than by chance, or never, go with nothing.
    information = np.log(np.maximum(both * len(pairs) / np.maximum(alone[0][:, None] * alone[1], 1), 1))
    return {"Dice": 2 * both / np.maximum(alone[0][:, None] + alone[1], 1), "positive PMI": information}


# --------------------------------------------------------------------------------------------------------------- model


def build_model(vocabulary: int, hidden: int, layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 32, max_position_embeddings=LONGEST_PAIR + 3, tie_word_embeddings=True,
        pad_token_id=PAD, bos_token_id=None, eos_token_id=END, initializer_range=0.05,
    ))  # fmt: skip
    # Plain matmuls: sequences are short, and fused kernels run one after another under vmap.
    model.set_attn_implementation("eager")
    return model


class TokenLosses(nn.Module):
    """−log p of each token after the first, 0 for padding."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens[:, :-1], use_cache=False).logits
        losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=PAD, reduction="none")
        return losses.view(len(tokens), -1)


@torch.no_grad()
def loss_by_half(model: nn.Module, tokens: Tensor) -> dict[str, float]:
    """Mean loss of first and of second sentences: how much a translation helps."""
    losses = torch.cat([TokenLosses(model)(part) for part in tokens.split(256)])
    seen = ((tokens == BEGIN[0]) | (tokens == BEGIN[1])).cumsum(1)[:, 1:]
    is_word = tokens[:, 1:] >= len(SPECIAL)
    halves = {"first sentence": 1, "second sentence": 2}
    return {name: round(losses[is_word & (seen == half)].mean().item(), 3) for name, half in halves.items()}


def train_model(model: nn.Module, tokens: Tensor, held_out: Tensor, epochs: int) -> dict[str, Any]:
    """AdamW with warm-up and cosine decay; TF32 matmuls while training."""
    batch = 256 if len(tokens) > 10_000 else 32
    steps, step = epochs * (len(tokens) // batch), 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    started = time.perf_counter()
    torch.set_float32_matmul_precision("high")
    for epoch in range(epochs):
        model.train()
        total = torch.zeros((), device=tokens.device)
        for chosen in torch.randperm(len(tokens), generator=generator).split(batch)[: len(tokens) // batch]:
            optimizer.param_groups[0]["lr"] = (
                2e-3 * min(1.0, (step + 1) / 200) * 0.5 * (1 + math.cos(math.pi * step / steps))
            )
            part = tokens[chosen.to(tokens.device)]
            value = TokenLosses(model)(part).sum() / (part[:, 1:] != PAD).sum()
            optimizer.zero_grad()
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total += value.detach()
            step += 1
        model.eval()
        mean, seconds = total.item() / (len(tokens) // batch), time.perf_counter() - started
        say(f"epoch {epoch + 1}: {mean:.3f}, held out {loss_by_half(model, held_out)}, {seconds:.0f} s")
    torch.set_float32_matmul_precision("highest")
    return {
        "epochs": epochs, "seconds": round(time.perf_counter() - started, 1),
        "held_out_loss": loss_by_half(model, held_out), "trained_loss": loss_by_half(model, tokens[:1024]),
    }  # fmt: skip


# --------------------------------------------------------------------------------------------------------- calibration


def calibrate(model: nn.Module, weights: str, rise: float, tokens: Tensor, quick: bool) -> dict[str, float]:
    """The localization at which a Gaussian perturbation raises the mean loss by ``rise``, and the largest curvature."""
    moving, losses = MovingWeights(model, weights), TokenLosses(model)
    torch.manual_seed(0)
    noise = torch.randn(2 if quick else 4, moving.total, device=tokens.device)

    def mean_loss(flat: Tensor, part: Tensor) -> Tensor:  # as in the potential: of each sequence, then of all
        values = functional_call(losses, {f"model.{k}": v for k, v in moving.unflatten(flat).items()}, (part,))
        return (values.sum(1) / (part[:, 1:] != PAD).sum(1)).mean()

    @torch.no_grad()
    def rise_at(localization: float) -> float:
        perturbed = [mean_loss(moving.center + part / math.sqrt(localization), tokens).item() for part in noise]
        return float(np.mean(perturbed)) - mean_loss(moving.center, tokens).item()

    def gradient(flat: Tensor, part: Tensor) -> Tensor:
        leaf = flat.detach().requires_grad_()
        return torch.autograd.grad(mean_loss(leaf, part), leaf)[0]

    def largest_curvature(at: Tensor, part: Tensor, reach: float = 0.05) -> float:
        """By power iteration on differences of gradients."""
        direction, value = torch.randn_like(at), 0.0
        for _ in range(4 if quick else 15):
            direction = direction / direction.norm()
            image = gradient(at + reach * direction, part) - gradient(at - reach * direction, part)
            value, direction = float(direction @ image) / (2 * reach), image
        return abs(value)

    low, high = 0.0, 8.0  # of log10: the loss falls as the localization grows
    for _ in range(6 if quick else 12):
        middle = (low + high) / 2
        low, high = (low, middle) if rise_at(10**middle) < rise else (middle, high)  # also where it is not finite
    localization = 10 ** ((low + high) / 2)
    # A model that fits its data well is flat there and nowhere else; chains live around it, and see 64 sequences.
    points = [moving.center, *(moving.center + part / math.sqrt(localization) for part in noise)]
    batches = [tokens.roll(-64 * index, 0)[:64] for index in range(len(points))]
    curvature = max(largest_curvature(at, part) for at, part in zip(points, batches, strict=True))
    return {
        "moving_weights": moving.total, "localization": localization, "largest_curvature": curvature,
        "rise_of_loss": rise_at(localization),
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- questions


class Observed:
    """The pairs that are observed: their words, where these stand in both orders, and what is asked of them."""

    def __init__(self, corpus: Corpus, trained: Sequence[int], held_out: Sequence[int], fewest: int) -> None:
        self.corpus, self.pairs = corpus, [*trained, *held_out]
        self.is_trained = np.arange(len(self.pairs)) < len(trained)
        is_word = np.array([index >= len(SPECIAL) and word[0].isalpha() for index, word in enumerate(corpus.words)])
        self.words: list[tuple[np.ndarray, ...]] = []
        self.places: list[list[list[np.ndarray]]] = []
        """Of each pair, by order and language: the positions of its words in that order's sequence."""
        for pair in self.pairs:
            sentences = [np.array(sentence) for sentence in corpus.pairs[pair]]
            found = [np.flatnonzero(is_word[sentence]) for sentence in sentences]
            after = [len(sentences[1]) + 2, len(sentences[0]) + 2]  # where a sentence starts that comes second
            self.words.append(tuple(sentence[at] for sentence, at in zip(sentences, found, strict=True)))
            self.places.append(
                [[found[lang] + (1 if lang == order else after[lang]) for lang in (0, 1)] for order in (0, 1)]
            )
        self.types = [
            [self._frequent(language, np.flatnonzero(self.is_trained == is_trained), fewest) for language in (0, 1)]
            for is_trained in (False, True)
        ]
        """By (held out, trained) and language: the words of the lexicon."""

    def _frequent(self, language: int, rows: np.ndarray, fewest: int) -> np.ndarray:
        counts = Counter(word for row in rows for word in set(self.words[row][language].tolist()))
        return np.array(sorted(word for word, times in counts.items() if times >= fewest))

    def by_pair(self, block: Callable[[int], np.ndarray], fill: Any) -> np.ndarray:
        """(…, English, French) blocks of all pairs, padded to one array with the pair in front."""
        blocks = [block(row) for row in range(len(self.pairs))]
        size = [max(len(words[language]) for words in self.words) for language in (0, 1)]
        out = np.full((len(blocks), *blocks[0].shape[:-2], *size), fill, blocks[0].dtype)
        for row, values in enumerate(blocks):
            out[row, ..., : values.shape[-2], : values.shape[-1]] = values
        return out

    def look_up(self, table: np.ndarray, fill: Any = 0) -> dict[str, Scores]:
        """Scores of both tasks from a table of English × French words."""
        blocks = self.by_pair(lambda row: table[np.ix_(*self.words[row])], fill)
        given_english = table[np.ix_(self.types[0][0], self.types[1][1])]
        given_french = table[np.ix_(self.types[1][0], self.types[0][1])].T
        return {"alignment": (blocks, blocks.swapaxes(1, 2)), "lexicon": (given_english[None], given_french[None])}

    def closeness(self) -> Scores:
        """How close two words of a pair stand, relative to the length of their sentences."""

        def block(row: int) -> np.ndarray:
            english, french = ((np.arange(len(words)) + 0.5) / len(words) for words in self.words[row])
            return -np.abs(english[:, None] - french)

        blocks = self.by_pair(block, 0)
        return blocks, blocks.swapaxes(1, 2)


Scores = tuple[np.ndarray, np.ndarray]
"""Given English and given French: each (block, given, candidate). A block is a pair, or the whole lexicon."""


class Task:
    """Ranks the candidates of each given word, and says how often the translation comes first."""

    def __init__(self, right: Scores, allowed: Scores, *, whole_blocks: bool) -> None:
        self.right, self.allowed = right, allowed
        self.asked = [values.any(2) for values in right]
        blocks = [np.nonzero(asked)[0] for asked in self.asked]
        # Words of one pair are not independent, and count as one when errors are estimated.
        self.owner = np.concatenate(blocks) if whole_blocks else np.arange(sum(map(len, blocks)))
        self.count = len(self.owner)
        sizes = zip(right, allowed, self.asked, strict=True)
        self.chance = float(np.concatenate([(r.sum(2) / a.sum(2).clip(1))[q] for r, a, q in sizes]).mean())

    def ranks(self, scores: Scores) -> np.ndarray:
        out = []
        for values, right, allowed, asked in zip(scores, self.right, self.allowed, self.asked, strict=True):
            best = np.where(right, values, -np.inf).max(2, keepdims=True)
            out.append(1 + (allowed & ~right & (values >= best)).sum(2)[asked])
        return np.concatenate(out)

    def summary(self, scores: Scores, among: np.ndarray | None = None) -> dict[str, float]:
        """Precision at 1 and mean reciprocal rank, plain and centered; ``among`` restricts it to some owners."""
        kept = np.ones(self.count, bool) if among is None else among[self.owner]
        counts = [allowed.sum(1, keepdims=True).clip(1) for allowed in self.allowed]
        means = [
            np.where(a, s, 0).sum(1, keepdims=True) / n for s, a, n in zip(scores, self.allowed, counts, strict=True)
        ]
        centered = (scores[0] - means[0], scores[1] - means[1])
        out = {}
        for kind, used in (("", scores), ("_centered", centered)):
            ranks = self.ranks(used)[kept]
            for name, values in (("precision_at_1", ranks == 1), ("mean_reciprocal_rank", 1 / ranks)):
                off = np.bincount(self.owner[kept], values - values.mean())
                out[name + kind] = float(values.mean())
                out[name + kind + "_error"] = math.sqrt(np.square(off).sum()) / len(values)
        return out


def build_tasks(observed: Observed, dictionary: np.ndarray) -> dict[str, Task]:
    right = observed.look_up(dictionary, False)
    allowed = observed.look_up(~np.eye(len(dictionary), dtype=bool), False)
    return {name: Task(right[name], allowed[name], whole_blocks=name == "alignment") for name in right}


# ------------------------------------------------------------------------------------------------------- token vectors

Reduced = dict[str, dict[str, np.ndarray]]
"""Arrays by kind and name."""

Vectors = Callable[[int], dict[str, tuple[Tensor, Tensor]]]
"""Of a pair: for each kind a vector for every English and every French word, (order, word, component) each."""


def reduce(observed: Observed, vectors: Vectors, size: int, device: str) -> Reduced:
    """Dot products of token vectors, for each kind: of a pair's words in all orders, and of words' mean vectors."""
    types = observed.types
    counts = [[torch.zeros(len(words), device=device) for words in side] for side in types]
    kinds = list(vectors(0))
    sums = {
        kind: [[torch.zeros(2, len(words), size, device=device) for words in side] for side in types] for kind in kinds
    }

    def block(row: int) -> np.ndarray:
        side, found, products = int(observed.is_trained[row]), vectors(row), []
        for language, words in enumerate(observed.words[row]):
            kept = types[side][language]
            at = np.searchsorted(kept, words).clip(max=len(kept) - 1)
            known = np.flatnonzero(kept[at] == words)
            into, taken = torch.from_numpy(at[known]).to(device), torch.from_numpy(known).to(device)
            counts[side][language].index_add_(0, into, torch.ones(len(known), device=device))
            for kind in kinds:
                sums[kind][side][language].index_add_(1, into, found[kind][language][:, taken])
        for kind in kinds:
            english, french = (values.flatten(0, 1) for values in found[kind])
            products.append((english @ french.T).view(2, len(english) // 2, 2, len(french) // 2).transpose(1, 2))
        return torch.stack(products).cpu().numpy()

    blocks = observed.by_pair(block, 0)
    out = {}
    for number, kind in enumerate(kinds):
        out[kind] = {"alignment": blocks[:, number]}
        for given in (0, 1):
            for reading in READINGS["lexicon"]:
                means = []
                for side, language in ((0, given), (1, 1 - given)):
                    total = sums[kind][side][language]
                    # English comes second in order 1, French in order 0.
                    chosen = total.mean(0) if reading == "all tokens" else total[1 - language]
                    means.append(chosen / counts[side][language][:, None])
                out[kind][f"{reading}, given {LANGUAGES[given]}"] = (means[0] @ means[1].T).cpu().numpy()
    return out


READINGS = {
    "alignment": {"other order": "o", "same sequence": "s", "mean": "D"},
    "lexicon": {"all tokens": "o", "second sentences": "s"},
}
"""What is read off reduced results for each task, and its mark in the figure."""


def readings(reduced: dict[str, np.ndarray]) -> list[tuple[str, str, Scores]]:
    """Task, reading and scores."""
    blocks = reduced["alignment"]  # (pair, order of the English, order of the French, English, French)
    pairs = {
        "other order": (blocks[:, 1, 0], blocks[:, 1, 0]),
        "same sequence": (blocks[:, 1, 1], blocks[:, 0, 0]),
        "mean": (blocks.mean((1, 2)),) * 2,
    }
    return [("alignment", name, (english, french.swapaxes(1, 2))) for name, (english, french) in pairs.items()] + [
        ("lexicon", name, (reduced[f"{name}, given english"][None], reduced[f"{name}, given french"][None]))
        for name in READINGS["lexicon"]
    ]


def standard_traces(run: jostle.Run, name: str, device: str) -> Tensor:
    """The losses of a set, (token, draw), each token's with mean 0 and norm 1: dot products are correlations."""
    losses = run.traces.losses(name)
    _, draws, tokens = losses.shape
    healthy = [chain for chain in range(run.config["chains"]) if chain not in run.failed_chains]
    out = torch.empty(tokens, len(healthy) * draws, device=device)
    for place, chain in enumerate(healthy):
        for start in range(0, draws, losses.chunks[1]):
            part = torch.from_numpy(np.asarray(losses[chain, start : start + losses.chunks[1]])).to(device)
            out[:, place * draws + start :][:, : len(part)] = part.T
    out -= out.mean(1, keepdim=True)
    norm = out.norm(dim=1, keepdim=True)
    return out.div_(norm.where(norm > 0, torch.inf))


def reduce_run(run: jostle.Run, observed: Observed, device: str) -> Reduced:
    """Posterior correlations; and the same with the draws of the English losses shuffled."""
    names = ("train", "query")
    traces = [standard_traces(run, name, device) for name in names]
    offsets = [np.asarray(run.traces.columns(name).offsets) for name in names]
    draws = traces[0].shape[1]
    shuffled = torch.randperm(draws, generator=torch.Generator().manual_seed(0)).to(device)

    def vectors(row: int) -> dict[str, tuple[Tensor, Tensor]]:
        english, french = (
            # The first token of a sequence has no loss, so position s is entry s − 1.
            torch.stack([
                traces[order][torch.from_numpy(offsets[order][row] + observed.places[row][order][language] - 1)]
                for order in (0, 1)
            ])
            for language in (0, 1)
        )  # fmt: skip
        return {"correlation": (english, french), "shuffled draws": (english[:, :, shuffled], french)}

    return reduce(observed, vectors, draws, device)


def difference(run: jostle.Run, observed: Observed, blocks: np.ndarray, row: int) -> float:
    """How far a pair's reduced correlations are from what the run itself says, at most."""
    found = -run.token_influence(train=row, query=row, normalize=True).values
    (english, french), (english_second, french_first) = ([at - 1 for at in at_] for at_ in observed.places[row])
    expected = [found[np.ix_(english, french_first)], found[np.ix_(french, english_second)].T]
    size = expected[0].shape
    reduced = [blocks[row, order, 1 - order, : size[0], : size[1]] for order in (0, 1)]
    return float(max(np.abs(a - b).max() for a, b in zip(reduced, expected, strict=True)))


def reduce_gradients(model: nn.Module, weights: str, observed: Observed, device: str) -> Reduced:
    """Dot products and cosines of the gradients of token losses at w*."""
    moving = MovingWeights(model, weights)
    named = dict(model.named_parameters())
    parameters = [named[name] for name in moving.names]

    def vectors(row: int) -> dict[str, tuple[Tensor, Tensor]]:
        tokens = torch.tensor([observed.corpus.sequence(observed.pairs[row], order) for order in (0, 1)], device=device)
        losses = TokenLosses(model)(tokens)
        chosen = torch.cat([losses[order, np.concatenate(observed.places[row][order]) - 1] for order in (0, 1)])
        each = torch.eye(len(chosen), device=device)
        found = torch.autograd.grad(chosen, parameters, each, is_grads_batched=True)
        gradients = torch.cat([part.flatten(1) for part in found], 1).view(2, -1, moving.total)
        count = len(observed.words[row][0])
        unit = F.normalize(gradients, dim=2)
        return {"dot": (gradients[:, :count], gradients[:, count:]), "cosine": (unit[:, :count], unit[:, count:])}

    return reduce(observed, vectors, moving.total, device)


# ----------------------------------------------------------------------------------------------------------------- all


@dataclass(frozen=True)
class Setting:
    weights: str
    rise: float
    has_gradient: bool
    seed: int = 0

    def __str__(self) -> str:
        kind = "BIF" if self.has_gradient else "no gradient"
        return f"{kind}, {self.weights}, rise {self.rise:g}" + (f", seed {self.seed}" if self.seed else "")


CHOICES = [("attention", 0.3), ("embedding", 0.3), ("attention+mlp", 0.3), ("attention", 1.0), ("attention", 0.1)]
SETTINGS = [
    Setting("attention", 0.3, True), Setting("attention", 0.3, False),
    *(Setting(*choice, True) for choice in CHOICES[1:]), *(Setting(*choice, False) for choice in CHOICES[1:]),
]  # fmt: skip
"""The most important first; a second seed of the best comes last."""


def kept(path: Path, make: Callable[[], tuple[Reduced, dict[str, Any]]]) -> tuple[Reduced, dict[str, Any]]:
    """Arrays and what is to be said of them: as an earlier call left them, or as made now."""
    if not path.exists():
        made, about = make()
        arrays: Any = {f"{kind}/{name}": values for kind, named in made.items() for name, values in named.items()}
        np.savez(path.with_suffix(".unfinished.npz"), about=np.array(json.dumps(about)), **arrays)
        path.with_suffix(".unfinished.npz").rename(path)
    out: Reduced = {}
    with np.load(path) as stored:
        for kind, _, name in (key.partition("/") for key in stored.files if key != "about"):
            out.setdefault(kind, {})[name] = stored[f"{kind}/{name}"]
        return out, json.loads(str(stored["about"]))


def sample(setting: Setting, model: nn.Module, corpus: Corpus, observed: Observed, drawn_from: Sequence[int],
           known: dict[str, float], directory: Path, arguments: argparse.Namespace) -> Any:  # fmt: skip
    """Sample one setting, or go on where it was interrupted, and reduce its traces."""
    device, localization = next(model.parameters()).device.type, known["localization"]
    started = time.perf_counter()
    run = jostle.attribute(
        model,
        *([corpus.sequence(pair, order) for pair in observed.pairs] for order in (0, 1)),
        sampling_data=[corpus.sequence(pair, order) for pair in drawn_from for order in (0, 1)],
        loss=jostle.losses.next_token(),
        posterior=jostle.Posterior(
            n_beta=localization / known["largest_curvature"] if setting.has_gradient else 0.0,
            localization=localization, weights=setting.weights,
        ),
        sampler=jostle.OrnsteinUhlenbeck(step_size=4 / localization) if setting.has_gradient else jostle.Gaussian(),
        chains=arguments.chains, draws=arguments.draws // arguments.chains, thin=1,
        burn_in=8 if setting.has_gradient else 1, batch_size=64, seed=setting.seed, out=directory, progress=False,
        precision="bfloat16" if device == "cuda" else "model",
    )  # fmt: skip
    sampled = time.perf_counter()
    reduced = reduce_run(run, observed, device)
    diagnostics = run.diagnostics()
    told = ("mean_loss_at_center", "mean_loss", "effective_draws", "autocorrelation_time")
    about = {
        **known, "n_beta": run.config["posterior"]["n_beta"], **{key: diagnostics[key] for key in told},
        "draws": f"{arguments.chains} × {arguments.draws // arguments.chains}", "failed_chains": run.failed_chains,
        "execution": run.manifest["execution"], "sampling_seconds": round(sampled - started, 1),
        "reducing_seconds": round(time.perf_counter() - sampled, 1),
        "difference_from_token_influence": difference(run, observed, reduced["correlation"]["alignment"], 0),
    }  # fmt: skip
    return reduced, about


def line(name: str, row: dict[str, float]) -> str:
    return (
        f"{name:60} {row['precision_at_1']:.3f} ± {row['precision_at_1_error']:.3f}   "
        f"centered {row['precision_at_1_centered']:.3f} ± {row['precision_at_1_centered_error']:.3f}   "
        f"MRR {row['mean_reciprocal_rank']:.3f}, {row['mean_reciprocal_rank_centered']:.3f}"
    )


def draw(record: dict[str, Any], path: Path) -> None:
    """Precision at 1 of centered scores, a panel for each task, a mark for each reading."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(13, 7), layout="constrained")
    for axis, (task, marks) in zip(axes, READINGS.items(), strict=True):
        rows: dict[str, dict[str, Any]] = {}
        for name, row in record["baselines"][task].items():
            base, _, reading = name.rpartition(": ")
            rows.setdefault(base or name, {})[reading if base else ""] = row
        for name, setting in record["settings"].items():
            rows[name] = {reading: setting["correlation"][f"{task}: {reading}"] for reading in marks}
        for height, (name, by_reading) in enumerate(reversed(rows.items())):
            color = "0.4" if name not in record["settings"] else "tab:orange" if "no gr" in name else "tab:blue"
            for reading, row in by_reading.items():
                axis.errorbar(
                    row["precision_at_1_centered"], height, xerr=row["precision_at_1_centered_error"],
                    fmt=marks.get(reading, "o"), color=color, markersize=5,
                )  # fmt: skip
        for reading, mark in marks.items():
            axis.plot([], [], mark, color="0.4", label=reading)
        axis.axvline(record["chance"][task], color="black", linewidth=0.8, linestyle=":", label="chance")
        axis.set_yticks(range(len(rows)), list(reversed(rows)), fontsize=8)
        axis.set_xlabel(f"{task}: translation found first, of {record['words_asked'][task]} words")
        axis.grid(axis="y", alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Does the per-token BIF find a word's translation?")
    parser.add_argument("--english", type=Path, required=True)
    parser.add_argument("--french", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="where model and results are kept between calls")
    parser.add_argument("--record", type=Path, help=f"default: {RECORD.name} among the records; with --quick in --work")
    parser.add_argument("--figure", type=Path, help="also draw everything (needs matplotlib)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no setting that would end after this")
    parser.add_argument("--draws", type=int, default=8000, help="of all chains together")
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=512, help="observed pairs: as many trained on as held out")
    parser.add_argument("--corpus", type=int, help="use only so many pairs of the files")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--hidden", type=int, default=192, help="the model's width, a multiple of 64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="a small version that shows only that it runs")
    arguments = parser.parse_args()
    started, quick = time.perf_counter(), arguments.quick
    if quick:
        arguments.corpus, arguments.pairs, arguments.epochs, arguments.draws = 1000, 24, 1, 24
        arguments.hidden, arguments.layers = 64, 2
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arguments.work.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(format="    %(message)s")
    logging.getLogger("jostle").setLevel(logging.INFO)

    def file(name: str) -> Path:
        return arguments.work / (re.sub(r"[^\w+]+", "-", name) + ".npz")

    def clock() -> str:
        return f"[{time.perf_counter() - started:.0f} s]"

    corpus = Corpus.read([arguments.english, arguments.french], arguments.corpus)
    translations, _ = kept(
        file("dictionary"), lambda: ({"": {"": build_dictionary(corpus, fewest=5 if quick else 30)}}, {})
    )
    dictionary = translations[""][""]
    order = np.random.default_rng(0).permutation(len(corpus.pairs)).tolist()
    held_out, trained = order[: arguments.pairs], order[arguments.pairs :]
    drawn_from = trained[: 8 * arguments.pairs]
    observed = Observed(corpus, trained[: arguments.pairs], held_out, fewest=2 if quick else 4)
    tasks = build_tasks(observed, dictionary)
    entries = [f"{corpus.words[e]} {corpus.words[f]}" for e, f in np.argwhere(dictionary)]
    entries_shown = entries[:: -(-len(entries) // 24)]
    say(clock(), f"{len(corpus.pairs):,} pairs, {len(corpus.words):,} words, {len(entries)} dictionary entries:")
    say("   ", ", ".join(entries_shown))
    for name, task in tasks.items():
        say(f"{name}: {task.count} words asked, chance {task.chance:.4f}")

    model = build_model(len(corpus.words), arguments.hidden, arguments.layers).to(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    stored, about_training = arguments.work / "model.safetensors", arguments.work / "training.json"
    if not stored.exists():
        tokens, others = (corpus.padded(pairs).to(device) for pairs in (trained, held_out))
        about_training.write_text(json.dumps(train_model(model, tokens, others, arguments.epochs)))
        # The tied unembedding is stored once.
        save_file({name: v.cpu() for name, v in model.state_dict().items() if name != "lm_head.weight"}, stored)
    model.load_state_dict(load_file(stored), strict=False)
    model.to(device).eval()
    training = json.loads(about_training.read_text())
    say(clock(), f"{parameters:,} parameters, {training}")

    record: dict[str, Any] = {
        "workload": "Multi30k English–French, Llama architecture, word-level vocabulary, both orders",
        "quick": quick, "parameters": parameters, "training": training, "pairs": len(corpus.pairs),
        "observed": f"{arguments.pairs} pairs trained on, {arguments.pairs} held out, each in both orders",
        "sampling_data": f"{len(drawn_from)} training pairs in both orders, batch 64",
        "sampler": "Ornstein–Uhlenbeck, step 4/localization, n_beta = localization/largest curvature, thin 1",
        "dictionary": "IBM model 1 both ways on all pairs, √(t(f|e)·t(e|f)) ≥ 0.3, content words",
        "dictionary_entries": len(entries), "some_entries": entries_shown,
        "words_asked": {name: task.count for name, task in tasks.items()},
        "chance": {name: task.chance for name, task in tasks.items()},
        "baselines": {"alignment": {}, "lexicon": {}}, "settings": {}, "failed": {}, "not_run": [],
    }  # fmt: skip
    baselines: dict[str, dict[str, Any]] = record["baselines"]

    def add_baseline(task: str, name: str, scores: Scores) -> None:
        baselines[task][name] = tasks[task].summary(scores)
        say(line(f"{task}: {name}", baselines[task][name]))

    network: Any = model
    unit = F.normalize(network.get_input_embeddings().weight.detach(), dim=1).cpu().numpy()
    tables = {"embedding cosine": unit @ unit.T}
    for where, pairs in {"observed pairs": observed.pairs, "all pairs": range(len(corpus.pairs))}.items():
        tables |= {f"{name}, {where}": table for name, table in cooccurrence(corpus, pairs).items()}
    for name, table in tables.items():
        for task, scores in observed.look_up(table).items():
            add_baseline(task, name, scores)
    add_baseline("alignment", "relative position", observed.closeness())

    tokens = corpus.padded(drawn_from[:128]).to(device)
    longest = 0.0

    def run_setting(setting: Setting) -> None:
        nonlocal longest
        begun, weights = time.perf_counter(), setting.weights
        stored = file(str(setting))
        is_new = not stored.exists()
        if is_new and begun - started + longest > 60 * arguments.minutes:
            record["not_run"].append(str(setting))
            return
        _, known = kept(
            file(f"calibration, {weights}, {setting.rise}"),
            lambda: ({}, calibrate(model, weights, setting.rise, tokens, quick)),
        )
        say(clock(), f"{setting}: {known}")
        try:
            kinds, about = kept(
                stored,
                lambda: sample(setting, model, corpus, observed, drawn_from, known, stored.with_suffix(""), arguments),
            )
        except jostle.ChainsFailedError as error:
            record["failed"][str(setting)] = str(error)
            say(clock(), f"{setting}: {error}")
            return
        shutil.rmtree(stored.with_suffix(""), ignore_errors=True)  # gigabytes of traces, of which enough is kept now
        row: dict[str, Any] = dict(about)
        for kind, reduced in kinds.items():
            row[kind] = {}
            for task, reading, scores in readings(reduced):
                found: dict[str, Any] = dict(tasks[task].summary(scores))
                row[kind][f"{task}: {reading}"] = found
                if task == "alignment":
                    for half, among in (("trained", observed.is_trained), ("held out", ~observed.is_trained)):
                        found[f"{half} pairs"] = tasks[task].summary(scores, among)
                say(line(f"{task}: {setting}: {reading}" + (f", {kind}" if kind != "correlation" else ""), found))
        record["settings"][str(setting)] = row
        say(clock(), json.dumps(about))
        write_record(record_path, record)
        if f"gradient cosine, {weights}: mean" not in baselines["alignment"]:
            gradients, _ = kept(
                file(f"gradients, {weights}"), lambda: (reduce_gradients(model, weights, observed, device), {})
            )
            for kind, reduced in gradients.items():
                for task, reading, scores in readings(reduced):
                    add_baseline(task, f"gradient {kind}, {weights}: {reading}", scores)
            torch.cuda.empty_cache()
            say(clock(), f"gradients of {weights}")
            write_record(record_path, record)
        if is_new:
            longest = max(longest, time.perf_counter() - begun)

    record_path = arguments.record or (arguments.work / "record.json" if quick else RECORD)
    for setting in SETTINGS if not quick else (SETTINGS[0], Setting("embedding", 0.3, False)):
        run_setting(setting)
    if record["settings"] and not quick:

        def headline(setting: Setting) -> float:
            found = record["settings"].get(str(setting), {"correlation": {}})["correlation"]
            marks = [
                found[f"alignment: {reading}"]["precision_at_1_centered"] for reading in READINGS["alignment"] if found
            ]
            return max(marks, default=-1.0)

        run_setting(replace(max(SETTINGS, key=headline), seed=1))
    if record["not_run"]:
        say("not run, for want of time (call again):", record["not_run"])
    write_record(record_path, record)
    if arguments.figure:
        draw(record, arguments.figure)


if __name__ == "__main__":
    main()
