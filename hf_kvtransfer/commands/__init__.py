"""The command line: one file for each subcommand. Nothing here imports torch before a command runs."""

import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..errors import KVTransferError
from .evaluate import evaluate
from .gate import gate
from .output import print_error


class _Group(TyperGroup):
    """Errors that a user can do something about are one line on stderr, not a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # whoever read the output has gone, there is nobody to tell
        except (KVTransferError, OSError) as error:
            print_error(error)
            raise typer.Exit(2) from error
        except Exception as error:
            # Typer's own: bad usage, exits. Some versions bring a copy of click with them.
            if type(error).__module__.partition(".")[0] in ("typer", "click"):
                raise
            traceback.print_exc()  # a bug, or memory that ran out: Python's own exit code would say "refused"
            raise typer.Exit(2) from error


app = typer.Typer(
    name="hf-kvtransfer",
    cls=_Group,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,  # they print local variables: whole tensors
)
app.command()(evaluate)
app.command()(gate)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """
    Is a translated KV cache good enough, and who says so?

    `evaluate` measures a mapper on your own text and writes what it found beside its weights. `gate` tells from that
    whether the mapper may be used. Both exit with 0 if it may, 1 if it is refused, and 2 after an error.
    """
