"""What a command is asked to attribute: a language model and texts, or whatever a user's own ``build()`` returns."""

from __future__ import annotations

import copy
import difflib
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from jostle.config import require_whole
from jostle.data.texts import Example, read_records, tokenize
from jostle.errors import InputError
from jostle.losses import Loss, next_token
from jostle.presets import LANGUAGE_WEIGHTS
from jostle.runs.planning import require_room

log = logging.getLogger("jostle")


STATE_DICTS = (".pt", ".pth", ".bin", ".safetensors")
EXPECTED_MODEL = "a directory with a causal language model and its tokenizer, or a hub id"
EXPECTED_CHECKPOINT = (
    "the model's state dict as safetensors (safetensors.torch.save_model), or a language model's directory"
)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its data and its loss; `options` are further arguments of `jostle.attribute`.

    `decode` gives the text of tokens, where there are any.
    """

    model: nn.Module
    train: Any
    query: Any
    loss: Loss
    sampling_data: Any = None
    default_weights: str = "all"
    examples: Mapping[str, list[dict[str, Any]]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    decode: Callable[[list[int]], str] | None = None


def language_model(
    model: str,
    *,
    train: str | None,
    query: str | Sequence[str],
    sampling: str | None = None,
    max_length: int | None = None,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    spread: bool = False,
) -> Task:
    """Load a causal language model and the texts to attribute.

    Args:
        model: a directory or hub id for ``AutoModelForCausalLM``; of a directory with a PEFT adapter, the adapter alone
            moves.
        train: texts to score (see `jostle.data.texts`); None: they are known from elsewhere.
        query: texts or prompt–completion pairs on which influence is measured; of several files, one after another.
        sampling: what minibatches are drawn from, where it is more than ``train``.
        max_length: cut sequences after so many tokens; the model's context by default.
        device: ``"cuda"``, ``"cpu"``, ...; a GPU where there is one.
        dtype: of the weights; default: what the device is fast in.
        spread: leave the model in the memory of the host, from where it will be spread over several such devices.
    """
    _require_place(model)
    if max_length is not None:
        require_whole("max_length", max_length, at_least=1)
    files = {"query": [query] if isinstance(query, str) else query}
    files |= {name: [one] for name, one in (("train", train), ("sampling", sampling)) if one is not None}
    records = {
        name: [record for path in paths for record in read_records(path, name=name)] for name, paths in files.items()
    }
    network, tokenizer, adapted = _load(model, device, dtype=dtype, spread=spread, tokenized=True)
    context = getattr(network.config, "max_position_embeddings", None) or getattr(network.config, "n_positions", None)
    if max_length is not None and context is not None and max_length > context:
        raise InputError("max_length", got=max_length, expected=f"at most the model's context of {context} tokens")
    longest = max_length or context or 2048
    examples = {name: tokenize(part, tokenizer, name=name, longest=longest) for name, part in records.items()}
    _check_vocabulary(examples, network, model)
    return Task(
        model=network,
        train=_samples(examples["train"]) if "train" in examples else None,
        query=_samples(examples["query"]),
        sampling_data=_samples(examples["sampling"]) if "sampling" in examples else None,
        loss=next_token(),
        default_weights="all" if adapted else LANGUAGE_WEIGHTS,  # an adapter is its own restriction
        examples={
            name: [example.to_dict() for example in part] for name, part in examples.items() if name != "sampling"
        },
        decode=tokenizer.decode,
    )


def other_checkpoint(model: nn.Module, name: str, *, flag: str = "start") -> nn.Module:
    """The model at other weights, on the same device: of a file with a state dict, or of a causal language model."""
    if not Path(name).is_file() and Path(name).suffix not in STATE_DICTS:
        _require_place(name, flag)
        other = _load(name, str(next(model.parameters()).device), flag=flag)[0]
        theirs, ours = ({key: value.shape for key, value in one.state_dict().items()} for one in (other, model))
        for key in ours | theirs:
            if theirs.get(key) != ours.get(key):
                got, expected = (f"{key} {list(one[key])}" if key in one else f"no {key}" for one in (theirs, ours))
                raise InputError(flag, got=f"{name}, which has {got}", expected=f"{expected}, as the model")
        return other
    try:
        state = load_file(name)  # and no pickle, which may run whatever it likes
        other = copy.deepcopy(model)
        missing, unknown = other.load_state_dict(state, strict=False)
        places = {key: value.data_ptr() for key, value in other.state_dict().items()}
        known = {place for key, place in places.items() if key in state}
        # Of tensors that are one and the same, a file may have only one.
        lacking = [key for key in missing if places[key] not in known]
        if lacking or unknown:
            raise ValueError(f"it lacks {lacking[:3]}, and has {unknown[:3]} besides")
    except Exception as error:  # files fail in many ways, and so do weights of another shape
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        got = f"{name}, which could not be loaded ({reason})"
        raise InputError(flag, got=got, expected=EXPECTED_CHECKPOINT) from error
    return other


def _samples(examples: list[Example]) -> list[dict[str, list[int]]]:
    return [example.sample for example in examples]


def _require_place(name: str, flag: str = "model") -> None:
    """Refuse a path that is not there and can be no id, which would otherwise be asked of the hub, again and again."""
    if not Path(name).exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise InputError(flag, got=f"{name}, which does not exist", expected=_expected(flag), fix=_nearest(name))


def require_device(name: str | None) -> None:
    """Refuse a device that is not there."""
    expected = "cpu, or cuda or cuda:0 where there is such a GPU"
    try:
        device = torch.device(name or "cpu")
    except (RuntimeError, TypeError, ValueError) as error:  # in a config there may be anything
        raise InputError("device", got=name, expected=expected) from error
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise InputError("device", got=f"{name}, where PyTorch sees {count} GPUs", expected=expected)


def _nearest(name: str) -> str:
    """A word of the model's directory that may have been meant."""
    parent = Path(name).parent
    within = sorted(Path(name).glob("checkpoint-*/config.json"), key=lambda path: path.stat().st_mtime)
    if within:
        return f"there is {within[-1].parent}"
    beside = sorted(path.parent.name for path in parent.glob("*/config.json"))
    near = difflib.get_close_matches(Path(name).name, beside, n=1)
    return f"there is {parent / near[0]}" if near and near[0] != Path(name).name else ""


def _expected(flag: str) -> str:
    return EXPECTED_MODEL if flag == "model" else EXPECTED_CHECKPOINT


def _load(
    name: str,
    device: str | None,
    *,
    dtype: torch.dtype | None = None,
    spread: bool = False,
    tokenized: bool = False,
    flag: str = "model",
) -> tuple[Any, Any, bool]:
    """A causal language model, its tokenizer where that is asked for, and whether it is an adapter."""
    try:
        import transformers
    except ImportError as error:
        raise InputError(
            "model",
            got="no package 'transformers'",
            expected="the packages of the extra 'hf'",
            fix="pip install 'jostle[hf]'",
        ) from error
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    # bfloat16 is what GPUs are fast in; on a CPU without native support it is over a hundred times slower than float32.
    dtype = dtype or (torch.bfloat16 if place.startswith("cuda") else torch.float32)
    adapter = Path(name) / "adapter_config.json"
    files, tokenizer = _files(name, flag), None
    try:
        if adapter.is_file():
            network = _load_adapter(name, dtype)
        else:
            auto: Any = transformers.AutoModelForCausalLM
            network = auto.from_pretrained(files, dtype=dtype)
        if tokenized:
            tokenizer = transformers.AutoTokenizer.from_pretrained(files)
    except InputError:
        raise
    except Exception as error:  # files, formats and the network fail in many ways
        reason = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        raise _not_loaded(name, f"could not be loaded ({reason})", flag) from error
    if not spread:
        require_room(network, torch.device(place))
        network = network.to(place)
    return network, tokenizer, adapter.is_file()


def _files(name: str, flag: str) -> str:
    """Where to load from: the name itself or, where the hub does not answer, what was downloaded before.

    The hub is asked once here; loading would ask six times for each file, and for a minute, before it gave up.
    """
    from huggingface_hub import constants, errors, get_hf_file_metadata, hf_hub_url, snapshot_download

    if Path(name).exists() or constants.HF_HUB_OFFLINE:
        return name
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except (errors.HfHubHTTPError, errors.HFValidationError):  # no such model, or name: loading says so in words
        return name
    except Exception as error:  # networks fail in many ways
        try:
            return snapshot_download(name, local_files_only=True)
        except errors.LocalEntryNotFoundError:
            raise _not_loaded(name, "is neither here nor downloaded, and the hub does not answer", flag) from error
    return name


def _not_loaded(name: str, reason: str, flag: str) -> InputError:
    fix = _nearest(name) or "without a network, download the model and pass its directory"
    return InputError(flag, got=f"{name}, which {reason}", expected=_expected(flag), fix=fix)


def _load_adapter(name: str, dtype: torch.dtype) -> Any:
    try:
        peft: Any = importlib.import_module("peft")
    except ImportError as error:
        raise InputError(
            "model", got="no package 'peft'", expected="it, for an adapter", fix="pip install peft"
        ) from error
    # Trainable, so that the adapter's weights are the ones that "all" moves; the base model is frozen and shared.
    return peft.AutoPeftModelForCausalLM.from_pretrained(name, dtype=dtype, is_trainable=True)


def _check_vocabulary(examples: dict[str, list[Example]], network: Any, model: str) -> None:
    size = network.get_input_embeddings().weight.shape[0]
    largest = max(max(example.input_ids) for part in examples.values() for example in part)
    if largest >= size:
        raise InputError(
            "model",
            got=f"a tokenizer that gives token {largest}, for a vocabulary of {size}",
            expected="the tokenizer that the model was trained with",
            fix=f"check the tokenizer files in {model}",
        )


class CompiledAnew(SourceFileLoader):
    """As `python FILE.py` has it: what was edited a moment ago is what runs, and nothing is left beside it."""

    def get_code(self, fullname: str) -> CodeType:
        """Compile the source, whatever was compiled of it before."""
        return self.source_to_code(self.get_data(self.path), self.path)


def from_file(reference: str, device: str | None = None) -> Task:
    """Call ``build()`` of a user's own file: ``my_file.py:build``, which may import what lies beside it.

    It returns a mapping with ``model``, ``train``, ``query`` and ``loss``, and whatever else `jostle.attribute` takes
    (``sampling_data``, ``collate``, ``potential_loss``, ``observables``, ``examples``).
    """
    path, _, name = reference.partition(":")
    if not Path(path).is_file():
        fix = "a run whose file has moved goes on by jostle run OUT --task NEW.py:FUNCTION"
        raise InputError("task", got=f"{path}, which does not exist", expected="FILE.py:FUNCTION", fix=fix)
    spec = importlib.util.spec_from_file_location("jostle_task", path, loader=CompiledAnew("jostle_task", path))
    if spec is None or spec.loader is None or Path(path).suffix != ".py":
        raise InputError("task", got=path, expected="a Python file")
    module = importlib.util.module_from_spec(spec)
    beside = str(Path(path).resolve().parent)
    if beside not in sys.path:  # for good, as `python FILE.py` has it: what it imports may import more later
        sys.path.insert(0, beside)
    spec.loader.exec_module(module)
    build = getattr(module, name or "build", None)
    if not callable(build):
        raise InputError("task", got=f"no function {name or 'build'!r} in {path}", expected="FILE.py:FUNCTION")
    returned = build()
    expected = "a mapping with model, train, query and loss"
    if not isinstance(returned, Mapping):
        raise InputError("task", got=f"a build() that returns a {type(returned).__name__}", expected=expected)
    built: dict[str, Any] = {str(key): value for key, value in returned.items()}
    missing = [key for key in ("model", "train", "query", "loss") if not isinstance(built, Mapping) or key not in built]
    if missing:
        raise InputError(
            "task",
            got=f"a build() without {', '.join(missing)}",
            expected="a mapping with model, train, query and loss",
        )
    rest = {key: value for key, value in built.items() if key not in ("model", "train", "query", "loss", "examples")}
    model = built["model"].to(device) if device else built["model"]
    return Task(
        model=model,
        train=built["train"],
        query=built["query"],
        loss=built["loss"],
        examples=built.get("examples", {}),
        options=rest,
    )
