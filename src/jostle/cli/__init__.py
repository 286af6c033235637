"""The command line: a module for each kind of command.

A command imports what it needs when it runs, so that ``jostle --help`` does not wait for torch.
"""

from __future__ import annotations

# Commands stand in jostle --help in the order in which they are imported.
# isort: off
from jostle.cli import demo as demo
from jostle.cli import sampling as sampling
from jostle.cli import choosing as choosing
from jostle.cli import scoring as scoring
from jostle.cli import solving as solving
from jostle.cli import replaying as replaying
from jostle.cli import reading as reading
from jostle.cli import evaluating as evaluating
from jostle.cli import viewing as viewing
from jostle.cli.shell import ExitCode, app
# isort: on

__all__ = ["ExitCode", "app", "main"]


def main() -> None:
    """Run the command line."""
    app(prog_name="jostle")
