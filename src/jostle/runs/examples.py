"""What is shown of examples, beside their losses: words and pictures, kept with the run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from jostle.errors import InputError
from jostle.files import replace_file, replacing


def write_examples(directory: Path, examples: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Keep what is shown of examples, each file whole or not at all."""
    for name, shown in examples.items():
        pixels = images_of(name, shown)  # refused before anything is written
        (directory / "examples").mkdir(exist_ok=True)
        words = [{key: value for key, value in example.items() if key != "image"} for example in shown]
        lines = [json.dumps(example, ensure_ascii=False, default=_plain) for example in words]
        replace_file(directory / "examples" / f"{name}.jsonl", "\n".join(lines) + "\n")
        if pixels is not None:
            path = directory / "examples" / f"{name}.images.npy"
            with replacing(path) as temporary, open(temporary, "wb") as file:
                np.save(file, pixels)


def images_of(name: str, shown: Sequence[Mapping[str, Any]]) -> UInt8[np.ndarray, "sample height width channel"] | None:
    """The ``image`` of every example, as bytes: of 0 to 255, of 0 to 1, or of whatever range they have."""
    if not shown or not all("image" in example for example in shown):
        return None
    arrays = [np.asarray(example["image"]) for example in shown]
    shapes = sorted({array.shape for array in arrays})
    first = shapes[0]
    if len(shapes) > 1 or len(first) not in (2, 3) or (len(first) == 3 and not {first[0], first[2]} & {1, 3}):
        raise InputError(
            "examples",
            got=f"images of {name} of shape {' and '.join(map(str, shapes[:3]))}",
            expected="one shape: (height, width), or with 1 or 3 channels first or last",
        )
    images = np.stack(arrays)
    if len(first) == 2:
        images = images[..., None]
    elif first[2] not in (1, 3):
        images = np.moveaxis(images, 1, -1)
    if images.dtype != np.uint8:
        images = np.nan_to_num(images.astype(np.float32))
        low, high = min(0.0, float(images.min())), float(images.max())
        # 0 to 1 and 0 to 255 mean what they usually do; anything else (standardized channels) is stretched.
        if low < 0 or high > 255:
            images = (images - low) / max(high - low, 1e-12)
            high = 1.0
        images = (images * (255 if high <= 1 else 1)).round().astype(np.uint8)
    return images


def _plain(value: Any) -> Any:
    """NumPy's and torch's numbers and arrays as JSON has them; anything else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
