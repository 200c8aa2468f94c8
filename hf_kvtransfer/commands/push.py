"""`hf-kvtransfer push`: a mapper to the Hub."""

from typing import Annotated

import typer

from . import loading, output


def push(
    mapper: Annotated[str, typer.Argument(metavar="MAPPER", help="Folder of the mapper.")],
    repo_id: Annotated[str, typer.Argument(metavar="REPO", help="Repository on the Hub, made if it is not there.")],
    source: Annotated[
        str | None, typer.Option(metavar="ID", help="Hub id of the source, if it was fitted from a folder.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="ID", help="Hub id of the target, if it was fitted from a folder.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    license: Annotated[str | None, typer.Option(help="For the card, such as apache-2.0.")] = None,
    branch: Annotated[str | None, typer.Option(help="Push to this branch instead of main.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead.")] = False,
    message: Annotated[str | None, typer.Option(help="Of the commit.")] = None,
    as_json: loading.AsJson = False,
) -> None:
    """
    Push a mapper, its evidence and a card made from both to the Hub, in one commit.

    What another mapper has left in the repository is replaced. The card's tags name the pair: others find the mapper
    by them. Log in once with `hf auth login`.

    Examples:

    ```
    hf-kvtransfer push my-mapper me/source-to-target
    hf-kvtransfer push my-mapper me/source-to-target --source org/source --target org/target --private
    ```

    Exit code: 0, or 2 after an error.
    """
    if (source is None) != (target is None):
        given = "--source" if source else "--target"
        raise typer.BadParameter("name both models, or none: give the other one, too.", param_hint=given)

    loaded = loading.load_mapper(mapper, "main")
    commit = loaded.push_to_hub(
        repo_id,
        base_models=None if source is None else (source, target),
        license=license,
        commit_message=message,
        private=private or None,
        revision=branch,
        create_pr=create_pr,
    )
    if loaded.evidence is None:
        output.print_note("It has no evidence: nobody's gate will admit it. Measure it: hf-kvtransfer evaluate.")
    if as_json:
        output.print_object({"repo_id": repo_id, "revision": commit.oid, "url": commit.commit_url})
    else:
        output.print_line(f"Pushed: {commit.commit_url}")
