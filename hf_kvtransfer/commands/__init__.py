"""The command line: one file for each subcommand. Nothing here imports torch before a command runs."""

import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..errors import KVTransferError
from .bench import bench
from .doctor import doctor
from .evaluate import evaluate
from .fit import fit
from .gate import gate
from .generate import generate
from .inspect import inspect
from .output import print_error
from .plan import plan
from .pull import pull
from .push import push


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
for command in (doctor, plan, fit, evaluate, gate, bench, inspect, generate, push, pull):
    app.command()(command)


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
    A second model continues from the first one's KV cache, translated.

    Will a pair work (`doctor`), and is it worth it (`plan`)? Make a mapper for it (`fit`), measure it on your own text
    (`evaluate`), ask whether it may be used (`gate`), how long it takes (`bench`), look at it (`inspect`), use it
    (`generate`), share it (`push`, `pull`).

    All exit with 0, or with 2 after an error. `doctor`, `evaluate` and `gate` exit with 1 if they advise against it.
    """
