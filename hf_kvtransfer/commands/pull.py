"""`hf-kvtransfer pull`: a mapper from the Hub, into a folder."""

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from . import loading, output


def pull(
    repo_id: Annotated[str, typer.Argument(metavar="REPO", help="Repository of the mapper on the Hub.")],
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="FOLDER", file_okay=False, help="Where to put it, by default its name, here."),
    ] = None,
    revision: loading.Revision = "main",
    subfolder: Annotated[str, typer.Option(help="Of the repository, if the mapper is in one.")] = "",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the folder if it is there.")] = False,
    as_json: loading.AsJson = False,
) -> None:
    """
    Pull a mapper from the Hub, check it, and put it into a folder.

    Config, weights, evidence and card of one commit, and nothing else of the repository. The folder is there whole or
    not at all. To use a mapper without a copy of it, give its Hub id where commands ask for a mapper.

    Examples:

    ```
    hf-kvtransfer pull me/source-to-target my-mapper
    hf-kvtransfer pull me/source-to-target --revision v2 --overwrite
    ```

    Exit code: 0, or 2 after an error.
    """
    folder = Path(repo_id.rpartition("/")[2]) if folder is None else folder
    if Path(repo_id).is_dir():
        raise typer.BadParameter(f"{repo_id!r} is a folder, not a repository on the Hub.", param_hint="REPO")
    if folder.exists() and not overwrite:
        raise typer.BadParameter(
            f"{str(folder)!r} is there already: replace it with --overwrite.", param_hint="FOLDER"
        )

    from ..fidelity.gate import FidelityGate
    from ..hub.download import MAPPER_FILES, find_mapper_files
    from ..mapper import KVMapper

    mapper = KVMapper.from_pretrained(repo_id, revision=revision, subfolder=subfolder)
    files, _ = find_mapper_files(repo_id, revision=mapper.revision, subfolder=subfolder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as unfinished:
        whole = Path(unfinished) / "mapper"
        whole.mkdir()
        for file in sorted(file for pattern in MAPPER_FILES for file in files.glob(pattern)):
            shutil.copyfile(file, whole / file.name)  # the cache holds links
        if folder.exists():
            folder.rename(Path(unfinished) / "replaced")
        whole.rename(folder)
    verdict = FidelityGate().admit(mapper, None, None)
    if as_json:
        entries = {"folder": str(folder), "revision": mapper.revision, "bytes": mapper.num_bytes()}
        output.print_object(entries | {"admitted": verdict.admitted, "reasons": list(verdict.reasons)})
    else:
        output.print_line(f"{repo_id} at {mapper.revision[:7]} is in {folder}, {output.size(mapper.num_bytes())}.")
        output.print_verdict(verdict, "Judged on its evidence. Hold it against your models: hf-kvtransfer gate.")
