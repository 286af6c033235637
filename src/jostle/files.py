"""Files that are replaced whole or not at all, and are on the disk then."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file so that a crash or a power cut leaves the old one or the new one."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Put what is written meanwhile, under a name that is nobody else's, in the place of a file."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    temporary.touch(exist_ok=False)
    try:
        mode = temporary.stat().st_mode
        yield temporary
        with contextlib.suppress(OSError):  # on file systems that have no such thing
            temporary.chmod(mode)  # others may read it as they may any new file, which safetensors forbids
        to_disk(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    to_disk(path.parent)


def is_leftover(path: Path, name: str) -> bool:
    """Return whether a crash has left this, of a file of that name that was about to be replaced."""
    return path.match(f".{name}.*.partial")


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
