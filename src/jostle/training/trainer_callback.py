"""Records a training of the Hugging Face Trainer, so that it can be repeated."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from jostle.errors import InputError
from jostle.losses import Batch, Loss
from jostle.training.loaders import Watched, innermost
from jostle.training.recorder import Recorder, Taken
from jostle.training.records import Recorded, TrainerLoss


class RecordingCallback(TrainerCallback):
    """Records what a Hugging Face Trainer does: pass it in ``Trainer(callbacks=[...])``.

    The Trainer reads ahead, and tells its callbacks of no batch: which one it is that goes into the model is seen at
    the model, in the order in which the loader gave them.

    Args:
        loss: what the Trainer minimizes, one loss a sample or a token. Default: that of a causal language model with
            its labels.

    Attributes:
        training: what was recorded, once the Trainer has finished.

    Example:
        >>> recording = RecordingCallback()
        >>> Trainer(model, arguments, train_dataset=texts, data_collator=collate, callbacks=[recording]).train()
        >>> print(jostle.training.repeat_check(recording.training))
    """

    def __init__(self, loss: Loss | None = None) -> None:
        self._loss = loss
        self._recorder: Recorder | None = None
        self._training: Recorded | None = None
        self._problem: InputError | None = None
        self._ahead: deque[Taken] = deque()
        self._in_step = 0

    @property
    def training(self) -> Recorded:
        """Return what was recorded."""
        if self._problem is not None:
            raise self._problem
        if self._training is None:
            raise InputError("training", got="one that has not come to its end", expected="it after trainer.train()")
        return self._training

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Keep what the training begins with, and look on."""
        model, loader = kwargs["model"], kwargs["train_dataloader"]
        self._stop()
        _check_arguments(args, state, self._loss)
        loss = self._loss or _loss_of(model)
        alike = "tokens" if hasattr(loss, "token_mask") else "sequences"
        optimizer = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])  # accelerate's holds PyTorch's
        base = innermost(loader)
        if "base_dataloader" not in loader.__dict__:
            raise InputError("train_dataloader", got=f"a {type(loader).__name__}", expected="one made by accelerate")
        self._training, self._problem, self._in_step = None, None, 0
        self._recorder = recorder = Recorder(
            model, optimizer, loss=loss, count_alike=alike, clip_norm=args.max_grad_norm or None
        )
        recorder.use(base)
        self._loader, self._base = loader, loader.base_dataloader
        loader.base_dataloader = Watched(self._base, self._given, self._ahead.clear)
        self._hooks = [
            model.register_forward_pre_hook(self._forward, with_kwargs=True),
            model.register_forward_hook(self._forwarded),
        ]

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look whether the model saw the batch once."""
        self._count(state)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look whether the model saw the batch once."""
        self._count(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the record. What is wrong with it is said to whoever asks for it: the Trainer has its own to do."""
        recorder = self._recorder
        self._stop()
        if recorder is not None and self._problem is None:
            try:
                self._training = recorder.finish()
            except InputError as error:
                self._problem = error

    def _stop(self) -> None:
        if self._recorder is not None:
            self._recorder.stop()
            self._loader.base_dataloader = self._base
            for hook in self._hooks:
                hook.remove()
            self._recorder = None
        self._ahead.clear()

    def _given(self, examples: np.ndarray, batch: Batch) -> None:
        assert self._recorder is not None
        self._ahead.append(self._recorder.taken(examples, batch))

    def _forward(self, model: nn.Module, inputs: Any, named: Mapping[str, Any]) -> None:
        if self._recorder is None or not (model.training and torch.is_grad_enabled()):
            return
        self._in_step += 1
        if self._ahead:
            counted: Tensor | int | None = named.get("num_items_in_batch")
            self._recorder.take(self._ahead.popleft()._replace(counted=counted))

    def _forwarded(self, model: nn.Module, inputs: Any, outputs: Any) -> None:
        """Keep what the model says of the first batch."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
        recorder = self._recorder
        if recorder is not None and recorder.first_loss is None and self._in_step and isinstance(loss, Tensor):
            recorder.first_loss = loss.detach()

    def _count(self, state: TrainerState) -> None:
        if self._in_step != 1 and self._problem is None:
            self._problem = InputError(
                f"step {state.global_step}",
                got=f"{self._in_step} passes through the model for one batch",
                expected="one",
                fix="record a loop of your own with jostle.training.Recorder",
            )
        self._in_step = 0


def _loss_of(model: Any) -> Loss:
    """What the Trainer minimizes where the user does not say."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    network = model.get_base_model() if hasattr(model, "get_base_model") else model
    scored = getattr(network, "loss_function", None) is ForCausalLMLoss and hasattr(
        network, "prepare_inputs_for_generation"
    )
    if not scored or network.config.is_encoder_decoder:
        raise InputError(
            "loss",
            got=f"none, for a {type(network).__name__}",
            expected="its loss of each example, RecordingCallback(loss=...): only causal language models' is known",
        )
    return TrainerLoss()


def _check_arguments(args: TrainingArguments, state: TrainerState, loss: Loss | None) -> None:
    """Refuse what could not be repeated."""
    refused = {
        "fp16=True": (args.fp16, "bf16=True or neither: steps are skipped where gradients overflow"),
        f"{args.world_size} processes": (args.world_size > 1, "one"),
        f"{args.n_gpu} GPUs": (args.n_gpu > 1, "one"),
        "load_best_model_at_end=True": (args.load_best_model_at_end, "False: the record ends with the last step"),
        "a training that goes on from a checkpoint": (state.global_step > 0, "one from its beginning"),
        "torch_compile=True": (args.torch_compile, "False: other kernels give other rounding"),
        "label_smoothing_factor": (args.label_smoothing_factor and loss is None, "RecordingCallback(loss=...) with it"),
    }
    for got, (found, expected) in refused.items():
        if found:
            raise InputError("Trainer", got=got, expected=expected)
