"""EK-FAC influence, through kronfluence: the strongest classical rival, on the same model, data and weights.

    values[i, j] = −∇ℓᵢᵀ(H + λI)⁻¹∇ℓⱼ,   H ≈ the Fisher information in its Kronecker-factored eigenbasis.

Reference: Grosse et al., *Studying Large Language Model Generalization with Influence Functions*, 2023.
"""

from __future__ import annotations

import copy
import importlib
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jostle.data import Collate, Data, collate_samples
from jostle.errors import InputError
from jostle.functional import eval_mode, sample_means, token_mask
from jostle.losses import Batch, Loss, at_least_float32
from jostle.losses import classification as classification_loss
from jostle.scores import Scores
from jostle.weights import MovingWeights, WeightSelection

DEFAULT_DAMPING = 1e-8
"""Of the paper's comparison. None is kronfluence's own: a tenth of the mean eigenvalue of each layer."""


def ekfac(
    model: nn.Module,
    train: Any,
    query: Any,
    *,
    fit_data: Any = None,
    loss: Loss | None = None,
    weights: WeightSelection = "all",
    damping: float | None = DEFAULT_DAMPING,
    batch_size: int = 32,
    collate: Collate | None = None,
    factor_arguments: dict[str, Any] | None = None,
    score_arguments: dict[str, Any] | None = None,
    directory: str | Path | None = None,
    seed: int = 0,
) -> Scores:
    """Score every training example on every query by EK-FAC influence; negative helps.

    Only linear and convolutional layers can be factored: a layer takes part when its weight is among ``weights``. What
    moves and cannot be factored is named in ``provenance["left_out"]``.

    Args:
        model: the trained model, at w*. It is left as it was; a copy is analysed.
        train: the training examples.
        query: the query examples.
        fit_data: what the factors are fitted on; default ``train``.
        loss: ``losses.classification()`` or ``losses.next_token()``, whose labels can be sampled from the model as the
            Fisher information wants; with any other loss the labels of the data are used (the empirical Fisher).
        weights: which weights move, as for `jostle.Posterior`.
        damping: λ; None for kronfluence's own choice.
        batch_size: examples in one pass.
        collate: makes a batch of a list of samples.
        factor_arguments: further arguments of kronfluence's ``FactorArguments`` (types, partitions, offloading).
        score_arguments: the same of its ``ScoreArguments``.
        directory: where factors go; default: a temporary one. Factors that are there already are used again.
        seed: of the sampled labels.

    Raises:
        InputError: kronfluence is missing, or no layer that it can factor moves.
    """
    try:
        analyzer_module, argument_module, task_module, dataset_module = (
            importlib.import_module(f"kronfluence.{name}")
            for name in ("analyzer", "arguments", "task", "utils.dataset")
        )
    except ImportError as error:
        raise InputError(
            "ekfac",
            got=f"no package {error.name!r}",
            expected="kronfluence and what it imports",
            fix="pip install kronfluence; where its torchvision is unwanted: pip install --no-deps kronfluence einconv "
            "opt_einsum einops accelerate",
        ) from error
    loss = loss or classification_loss()
    layers = _layers(model, weights)
    task = _task(task_module.Task, loss, layers)
    device = next(model.parameters()).device
    data = {
        name: Data(source, name, collate=collate, device=torch.device("cpu"))
        for name, source in (("train", train), ("query", query), ("fit_data", train if fit_data is None else fit_data))
    }
    sets = {name: _Samples(one) for name, one in data.items()}
    torch.manual_seed(seed)
    copied = copy.deepcopy(model)
    # Of a classification and of next tokens, labels can be drawn from what the model predicts.
    sampled = hasattr(loss, "label_smoothing") or hasattr(loss, "token_mask")
    factors = argument_module.FactorArguments(
        strategy="ekfac", use_empirical_fisher=not sampled, **(factor_arguments or {})
    )
    scoring = argument_module.ScoreArguments(damping_factor=damping, **(score_arguments or {}))
    with tempfile.TemporaryDirectory() as temporary, eval_mode(copied):
        with torch.no_grad():  # a loss may look at a model before it first uses it, which hooks would not stand
            loss(copied, Data([sets["train"][0]], "train", collate=collate, device=device).batch([0]))
        prepared = analyzer_module.prepare_model(copied, task)
        analyzer = analyzer_module.Analyzer(
            "ekfac", prepared, task, cpu=device.type == "cpu", disable_tqdm=True, log_level=40,
            output_dir=str(directory or temporary),
        )  # fmt: skip
        analyzer.set_dataloader_kwargs(dataset_module.DataLoaderKwargs(collate_fn=collate or collate_samples))
        analyzer.fit_all_factors("factors", sets["fit_data"], per_device_batch_size=batch_size, factor_args=factors)
        analyzer.compute_pairwise_scores(
            "scores", "factors", query_dataset=sets["query"], train_dataset=sets["train"],
            per_device_query_batch_size=batch_size, per_device_train_batch_size=batch_size, score_args=scoring,
            overwrite_output_dir=True,
        )  # fmt: skip
        scores = analyzer.load_pairwise_scores("scores")["all_modules"]
    return Scores(
        # kronfluence's rows are queries, and what helps is positive there.
        values=-scores.T.float().cpu().numpy(),
        method="EK-FAC",
        scale=None,
        provenance={
            "damping": damping,
            "layers": len(layers),
            "left_out": _left_out(model, weights, layers),
            "fitted_on": len(sets["fit_data"]),
            "seed": seed,
            "fingerprints": {name: data[name].fingerprint() for name in ("train", "query")},
        },
    )


def _layers(model: nn.Module, weights: WeightSelection) -> list[str]:
    """The layers whose weight moves and that can be factored."""
    moving = set(MovingWeights(model, weights).names)
    layers = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d) and f"{name}.weight" in moving
    ]
    if not layers:
        raise InputError(
            "weights",
            got=f"{weights!r}, without a linear or convolutional layer",
            expected="one that EK-FAC can factor",
        )
    return layers


def _left_out(model: nn.Module, weights: WeightSelection, layers: list[str]) -> list[str]:
    """The weights that move and are in no layer that can be factored: EK-FAC takes them for fixed."""
    factored = {f"{layer}.{name}" for layer in layers for name in ("weight", "bias")}
    return [name for name in MovingWeights(model, weights).names if name not in factored]


class _Samples(torch.utils.data.Dataset):
    """A data set as kronfluence reads it: one sample at a time."""

    def __init__(self, data: Data) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        return self._data.sample(index)


def _task(base: type, loss: Loss, layers: list[str]) -> Any:
    """What kronfluence asks of a task, answered by one of our losses."""

    class Task(base):
        def compute_train_loss(self, batch: Batch, model: nn.Module, sample: bool = False) -> Tensor:
            if sample:
                return _sampled_loss(model, batch, loss)
            return sample_means(loss(model, batch), loss, batch).sum()

        def compute_measurement(self, batch: Batch, model: nn.Module) -> Tensor:
            return sample_means(loss(model, batch), loss, batch).sum()

        def get_influence_tracked_modules(self) -> list[str]:
            return layers

        def get_attention_mask(self, batch: Batch) -> Tensor | None:
            return batch.get("attention_mask") if isinstance(batch, dict) else None

    return Task()


def _sampled_loss(model: nn.Module, batch: Batch, loss: Loss) -> Tensor:
    """The loss of labels drawn from the model itself: the covariance of its gradients is the Fisher information."""
    if isinstance(batch, dict):
        mask = token_mask(loss, batch)
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        output = model(**inputs)
        logits = at_least_float32(output if isinstance(output, Tensor) else output.logits)[:, :-1]
        with torch.no_grad():
            labels = torch.distributions.Categorical(logits=logits).sample()
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
        real = torch.ones_like(losses, dtype=torch.bool) if mask is None else mask[:, 1:]
        # Independent tokens of a sum over √length have the Hessian of the sequence's mean loss as their covariance.
        return (torch.where(real, losses, 0).sum(1) / real.sum(1).sqrt()).sum()
    logits = at_least_float32(model(batch[0]))
    with torch.no_grad():
        labels = torch.distributions.Categorical(logits=logits).sample()
    return F.cross_entropy(logits, labels, reduction="sum")
