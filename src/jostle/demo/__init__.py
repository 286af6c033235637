"""The embedded example: something to look at a minute after installation, with no data or model of one's own."""

import importlib.util

from jostle.errors import InputError


def require_packages(*packages: str) -> None:
    """Refuse to start a demo whose packages are not installed."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise InputError(
            "demo",
            got=f"no {' and no '.join(missing)}",
            expected="the packages of the extra 'demo'",
            fix="pip install 'jostle[demo]'",
        )
