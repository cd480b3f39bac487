"""Parse, run, and turn errors into one sentence and a status."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from meshplan.cli._parser import make_parser
from meshplan.core import MemoryLimitError, MeshplanError

HOLDS, DOES_NOT_HOLD, WRONG = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Status: 0; 1 where what was asked does not hold; 2 for an error, said in one sentence."""
    try:
        arguments = make_parser().parse_args(argv)
    except MeshplanError as error:
        print(error, file=sys.stderr)
        return WRONG
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    try:
        from meshplan.cli import _commands

        return getattr(_commands, arguments.command)(arguments)
    except MemoryLimitError as error:
        print(f"meshplan {arguments.command}: {error}", file=sys.stderr)
        return DOES_NOT_HOLD
    except MeshplanError as error:
        print(f"meshplan {arguments.command}: {error}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        print(f"meshplan {arguments.command}: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe has seen enough; nothing more may be written at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return HOLDS
