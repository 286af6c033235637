"""Where traces may be: in a run's directory, or in a store elsewhere, which has faults and secrets of its own."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zarr
import zarr.errors

from jostle.errors import InputError, StorageError

_PREFIX = re.compile(r"[^/]+/.+")
"""A bucket, and a place in it."""

Place = Path | str
"""A directory, or the URL of a store elsewhere (``s3://bucket/prefix``), by whatever file systems fsspec has."""


def check_url(url: str) -> str:
    """Return the URL of a store; refuses secrets in it, which would be kept, and ways back to this machine."""
    url = str(url)
    scheme, _, rest = url.partition("://")
    expected = "a URL such as s3://bucket/prefix"
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme) or not _PREFIX.fullmatch(rest.strip("/")) or "::" in url:
        raise InputError("traces", got=_without_secrets(url), expected=expected)
    if scheme in ("file", "local", "reference"):
        raise InputError("traces", got=f"a {scheme} URL", expected=expected, fix="a local run is all in its directory")
    if "@" in rest or "?" in rest:
        # Not shown: it would be in a log then.
        raise InputError(
            "traces",
            got=f"a {scheme} URL with a user, a key or a query in it",
            expected=expected,
            fix="credentials belong into the environment (AWS_ACCESS_KEY_ID, ...) or into a profile",
        )
    return url.rstrip("/")


def require_free(url: str) -> None:
    """Refuse a place elsewhere that cannot be reached, or holds something already."""
    import fsspec

    with reaching(url):
        try:
            # Not a Zarr group alone: a layout that is cut off is cleared away with everything under its prefix.
            system, path = fsspec.core.url_to_fs(url, **options(url)["storage_options"])
            if not system.exists(path) or not system.find(path):
                return
        except (ImportError, ValueError) as error:
            extra = "pip install 'jostle[s3]'" if url.startswith("s3") else "install the package that fsspec names"
            raise InputError(
                "traces", got=f"{url} ({_first_line(error)})", expected="a store that fsspec can open", fix=extra
            ) from error
    raise occupied(url)


def occupied(place: Place) -> InputError:
    """Return what is said of a place where traces are already."""
    return InputError("traces", got=f"{place}, which holds something already", expected="a place of the run's own")


def options(place: Place) -> dict[str, Any]:
    """Return how zarr is to open a place."""
    # What is there may be written by others: nothing of a listing is kept.
    return {"storage_options": {"use_listings_cache": False}} if isinstance(place, str) else {}


@contextlib.contextmanager
def reaching(place: Place) -> Iterator[None]:
    """Say in one line what a store elsewhere refuses; those of this machine say it themselves."""
    try:
        yield
    except (InputError, StorageError):
        raise
    except Exception as error:  # every service has errors of its own
        if isinstance(place, Path):
            raise
        raise StorageError(
            f"traces: got {type(error).__name__} ({_first_line(error)}) from {place}; what was recorded is kept: see "
            "that it can be reached and written to, and the same command or call goes on"
        ) from error


def _first_line(error: Exception) -> str:
    return _without_secrets(str(error).partition("\n")[0])[:200]


def _without_secrets(text: str) -> str:
    """A text without what URLs in it may hold of users, keys and signatures."""
    return re.sub(r"\?[^\s\"']*", "", re.sub(r"//[^/\s@]*@", "//", text))


def require_reachable(place: Place) -> None:
    """Tell damage from a store elsewhere that does not answer."""
    if isinstance(place, str):
        with reaching(place), contextlib.suppress(ValueError, KeyError, TypeError):  # damage
            zarr.open_group(place, mode="r", **options(place))
