"""Files that are replaced whole or not at all, and are on the disk then."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file so that a crash or a power cut leaves the old one or the new one."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def replacing(path: Path, temporary: Path | None = None) -> Iterator[Path]:
    """Put what is written meanwhile, under another name, in the place of a file.

    Args:
        path: what is replaced.
        temporary: the other name, in the same directory; of its own where several processes may write at once.
    """
    temporary = temporary or path.with_suffix(".partial")
    temporary.touch()
    mode = temporary.stat().st_mode
    yield temporary
    with contextlib.suppress(OSError):  # on file systems that have no such thing
        temporary.chmod(mode)  # others may read it as they may any new file, which safetensors forbids
    to_disk(temporary)
    os.replace(temporary, path)
    to_disk(path.parent)


def to_disk(path: Path) -> None:
    """See that a file, or the names in a directory, are on the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError:
        if not path.is_dir():  # which not every file system can do
            raise
    finally:
        os.close(opened)
