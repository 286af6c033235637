"""Weight groups mean the same in every architecture."""

from __future__ import annotations

import pytest

import jostle
from architectures import CONFIGURATIONS, LAYERS, tiny
from jostle.models.weights import GROUPS, MovingWeights


@pytest.fixture(params=CONFIGURATIONS, scope="module")
def model(request: pytest.FixtureRequest):
    return tiny(request.param)


def names(model, selection: str) -> set[str]:
    return set(MovingWeights(model, selection).names)


def test_every_weight_is_in_one_group(model) -> None:
    groups = {group: {name for name, _ in model.named_parameters() if _belongs(model, name, group)} for group in GROUPS}
    everything = {name for name, _ in model.named_parameters()}
    assert set().union(*groups.values()) == everything
    # A tied unembedding answers to both its names; nothing else is in two groups.
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert sum(map(len, groups.values())) == len(everything) + tied


def _belongs(model, name: str, group: str) -> bool:
    try:
        return name in names(model, group)
    except jostle.InputError:  # an architecture without such weights: a tied head, norms without parameters
        return False


def test_groups_are_the_modules_they_are_named_after(model) -> None:
    """Found another way: by the class of the module that owns the weight."""
    owners = {
        f"{path}.{name}" if path else name: [type(model.get_submodule(p)).__name__.lower() for p in _ancestors(path)]
        for path, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
    }
    attention = {name for name, classes in owners.items() if any("attention" in c for c in classes)}
    assert names(model, "attention") == attention
    if not any("fc1" in name and "mlp" not in name for name in owners):  # OPT has no module around its two layers
        assert names(model, "mlp") == {name for name, classes in owners.items() if any("mlp" in c for c in classes)}
    assert names(model, "attention+mlp") == names(model, "attention") | names(model, "mlp")
    assert not names(model, "attention") & names(model, "mlp")


def _ancestors(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


def test_layers_restrict_a_group(model) -> None:
    by_layer = [names(model, f"layers.{layer}.attention") for layer in range(LAYERS)]
    assert set().union(*by_layer) == names(model, "attention")
    assert all(len(part) == len(by_layer[0]) > 0 for part in by_layer)
    assert not by_layer[0] & by_layer[1]
    assert names(model, "layers.1-2.attention") == by_layer[1] | by_layer[2]
    assert names(model, "layers.0.mlp,layers.2.attention+mlp") == (
        names(model, "layers.0.mlp") | by_layer[2] | names(model, "layers.2.mlp")
    )


def test_an_unknown_group_and_a_missing_layer() -> None:
    with pytest.raises(jostle.InputError, match=r"'attentoin', which matches no weight.*did you mean 'attention'"):
        MovingWeights(tiny("llama"), "attentoin")
    with pytest.raises(jostle.InputError, match="groups that this model has: attention, mlp, norm, embedding, head"):
        MovingWeights(tiny("llama"), "layers.7.attention")
