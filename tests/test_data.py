"""Data sets in every form give the same batches; losses mask what they should."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import jostle
from jostle.data.datasets import Data
from test_posterior import Tied

X, Y = torch.randn(7, 3, generator=torch.Generator().manual_seed(0)), torch.arange(7)


class Lazy(Dataset):
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return X[index], int(Y[index])


FORMS = {
    "tensors": (X, Y),
    "arrays": (X.numpy(), Y.numpy()),
    "TensorDataset": TensorDataset(X, Y),
    "list of samples": [(X[i], Y[i]) for i in range(7)],
    "Dataset": Lazy(),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_batch(form: str) -> None:
    inputs, labels = Data(FORMS[form], "train").batch([4, 0, 4])
    torch.testing.assert_close(inputs, X[[4, 0, 4]])
    torch.testing.assert_close(labels, Y[[4, 0, 4]])


def test_mapping_of_tensors() -> None:
    batch = Data({"a": X, "b": Y}, "train").batch([1, 2])
    torch.testing.assert_close(batch["a"], X[1:3])


def fingerprint(source: object, **options: Any) -> str:
    return Data(source, "train", **options).fingerprint()


def test_fingerprints_know_contents_and_order() -> None:
    assert fingerprint((X, Y)) == fingerprint(TensorDataset(X, Y)) == fingerprint((X.clone(), Y.clone()))
    assert fingerprint(Lazy()) == fingerprint([(X[i], Y[i]) for i in range(7)])
    other = X.clone()
    other[6, 2] += 1e-6
    different = [(X, Y), (other, Y), (X[:6], Y[:6]), (X.flip(0), Y), (X.double(), Y), (X.bfloat16(), Y.bfloat16())]
    assert len({fingerprint(source) for source in different}) == 6
    tokens = [[{"input_ids": [1, 23]}], [{"input_ids": [12, 3]}], [{"input_ids": [1, 2, 3]}], [{"input_ids": [123]}]]
    assert len({fingerprint(source) for source in tokens}) == 4


def test_fingerprints_read_every_row() -> None:
    labels = torch.zeros(40_000, dtype=torch.long)
    changed = labels.clone()
    changed[12_347] = 1
    rows, changed_rows = ([{"input_ids": [0, int(label)]} for label in part[:20_000]] for part in (labels, changed))
    assert fingerprint((labels,)) != fingerprint((changed,))
    assert fingerprint(rows) != fingerprint(changed_rows)


class Picture:
    """Something whose representation holds its address, as PIL's does."""

    def __init__(self, value: int) -> None:
        self.value = value


def test_fingerprints_are_of_what_the_model_is_given() -> None:
    def collate(samples: list[Picture]) -> torch.Tensor:
        return torch.tensor([sample.value for sample in samples])

    one, same, other = ([Picture(value) for value in values] for values in ((1, 2), (1, 2), (1, 3)))
    assert fingerprint(one, collate=collate) == fingerprint(same, collate=collate)
    assert fingerprint(one, collate=collate) != fingerprint(other, collate=collate)


def test_columns_with_a_collate_function_are_rows() -> None:
    def collate(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.stack([x for x, _ in samples]) * 2, torch.stack([y for _, y in samples])

    data = Data((X, Y), "train", collate=collate)
    assert len(data) == 7
    torch.testing.assert_close(data.batch([5, 2])[0], X[[5, 2]] * 2)


def test_only_what_fits_is_kept_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(Lazy):
        reads = 0

        def __getitem__(self, index: int) -> Any:
            self.reads += 1
            return np.zeros((3, 100)), 0

    for limit, reads in ((10**6, 8), (10_000, 1)):
        monkeypatch.setattr("jostle.data.datasets.KEPT_IN_MEMORY", limit)
        source = Counting()
        Data(source, "train")
        assert source.reads == reads


def test_sequences_are_padded_and_masked() -> None:
    sequences = [{"input_ids": [1, 2, 3]}, {"input_ids": [4]}]
    batch = Data(sequences, "train").batch([0, 1])
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    # Reading does not change the caller's samples.
    assert sequences[0] == {"input_ids": [1, 2, 3]}


def test_next_token_loss_is_minus_log_probability_of_the_token() -> None:
    torch.manual_seed(0)
    model, loss = Tied(), jostle.losses.next_token()
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    probabilities = model(tokens).softmax(-1)
    expected = [-probabilities[0, s - 1, tokens[0, s]].log() for s in range(1, 5)]
    torch.testing.assert_close(loss(model, {"input_ids": tokens})[0, 1:], torch.stack(expected))


def test_token_mask_with_padding_on_either_side() -> None:
    mask = jostle.losses.next_token().token_mask  # type: ignore[attr-defined]
    tokens = torch.ones(3, 4, dtype=torch.long)
    attention = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1], [1, 1, 1, 1]])
    labels = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [-100, -100, 1, 1]])
    expected = [[0, 1, 1, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
    batch = {"input_ids": tokens, "attention_mask": attention, "labels": labels}
    assert mask(batch).int().tolist() == expected


def test_positions_count_from_the_first_real_token() -> None:
    positions = jostle.losses.next_token().token_positions  # type: ignore[attr-defined]
    batch = {"input_ids": torch.ones(2, 4), "attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])}
    real = batch["attention_mask"].bool()
    assert positions(batch)[real].tolist() == [0, 1, 0, 1, 2]


def test_confident_examples_keep_their_small_losses() -> None:
    """In float32 the usual form of cross-entropy is 0 from a margin of about 17 on."""
    logits = torch.tensor([[20.0, 0.0, -3.0], [40.0, 0.0, 1.0], [0.3, 0.1, -0.2], [-30.0, 5.0, 9.0]])
    labels = torch.zeros(4, dtype=torch.long)
    model = nn.Identity()
    values = jostle.losses.classification()(model, (logits, labels))
    exact = torch.log1p((logits[:, 1:] - logits[:, :1]).double().exp().sum(1))
    torch.testing.assert_close(values.double(), exact, rtol=1e-5, atol=0)
    assert values[:2].min() > 0 == nn.functional.cross_entropy(logits, labels, reduction="none")[0]


def test_sequences_as_people_have_them() -> None:
    forms = [[[1, 2, 3], [4, 5]], [{"input_ids": torch.tensor([[1, 2, 3]])}, {"input_ids": torch.tensor([[4, 5]])}]]
    for form in forms:
        assert Data(form, "train").batch([0, 1])["input_ids"].tolist() == [[1, 2, 3], [4, 5, 0]]


def test_regression_loss_is_the_gaussian_likelihood() -> None:
    model = nn.Linear(3, 2)
    targets = torch.randn(7, 2)
    values = jostle.losses.regression(noise_variance=0.5)(model, (X, targets))
    normal = torch.distributions.Normal(model(X), 0.5**0.5)
    constant = 2 * 0.5 * np.log(2 * np.pi * 0.5)
    torch.testing.assert_close(values, -normal.log_prob(targets).sum(1) - constant)


def test_regression_refuses_to_broadcast() -> None:
    with pytest.raises(jostle.InputError, match=r"predictions of shape \(7, 1\) for targets of shape \(7,\)"):
        jostle.losses.regression()(nn.Linear(3, 1), (X, torch.randn(7)))


def test_label_smoothing_drives_the_chain_while_plain_losses_are_recorded() -> None:
    """A paper's setting: the potential differs from what is observed."""
    torch.manual_seed(0)
    model = nn.Linear(3, 7)
    plain = jostle.losses.classification()
    settings = {"chains": 2, "draws": 3, "progress": False}
    smooth = jostle.attribute(
        model, (X, Y), (X, Y), potential_loss=jostle.losses.classification(label_smoothing=0.5), **settings
    )
    usual = jostle.attribute(model, (X, Y), (X, Y), **settings)
    np.testing.assert_allclose(smooth.traces.center_losses("train"), plain(model, (X, Y)).detach().numpy(), rtol=1e-6)
    assert np.abs(np.asarray(smooth.traces.losses("train")[:, 1:]) - usual.traces.losses("train")[:, 1:]).min() > 0
