"""`hf-kvtransfer doctor`: will this pair work, why not, and what is to be expected?"""

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import HubError
from . import loading, output


if TYPE_CHECKING:
    from ..diagnosis import Finding, Side

_MARKS = {"good": ("✓", "green"), "note": ("!", "yellow"), "bad": ("✗", "bold red")}


def doctor(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help=f"{loading.SOURCE_HELP}.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help=f"{loading.TARGET_HELP}.")],
    mapper: Annotated[
        str | None, typer.Argument(metavar="MAPPER", help="Folder or Hub id of a mapper to look at, too.")
    ] = None,
    config_only: Annotated[
        bool,
        typer.Option(
            "--config-only", help="Do not load the models' weights. So it is where there are none, in any case."
        ),
    ] = False,
    tokens: Annotated[int, typer.Option(min=1, help="Length of a context for which memory is told.")] = 4096,
    source_tokenizer: loading.SourceTokenizer = None,
    target_tokenizer: loading.TargetTokenizer = None,
    dtype: loading.DType = "auto",
    device_map: loading.DeviceMap = "auto",
    revision: loading.Revision = "main",
    as_json: loading.AsJson = False,
) -> None:
    """
    Tell whether a pair of models will work, why not, and what to expect.

    Compares what the two models cache, how they tell positions apart, and their tokenizers; tells the memory that
    caches and a mapper take; and holds a mapper, if one is named, and its evidence against the pair. With
    `--config-only` a pair is judged before anything large is downloaded: the models are built without weights.

    Examples:

    ```
    hf-kvtransfer doctor org/source org/target --config-only
    hf-kvtransfer doctor org/source org/target my-mapper
    hf-kvtransfer doctor small.gguf org/target --tokens 100000 --json
    ```

    Exit code: 0 if nothing speaks against the pair, 1 if something does, 2 after an error.
    """
    from ..diagnosis import Finding, diagnose

    loaded = None if mapper is None else loading.load_mapper(mapper, revision)
    findings: list[Finding] = []
    sides = {}
    for role, name, tokenizer in (("SOURCE", source, source_tokenizer), ("TARGET", target, target_tokenizer)):
        sides[role], problem = _side(role, name, tokenizer, config_only, dtype, device_map)
        if problem is not None:
            findings.append(Finding(role.lower(), "note", problem))
    findings += diagnose(sides["SOURCE"], sides["TARGET"], loaded, tokens)
    if loaded is None:
        findings.append(Finding("mappers", "note", _on_the_hub(source, target)))
    works = all(finding.level != "bad" for finding in findings)
    if as_json:
        output.print_object({"works": works, "findings": [dataclasses.asdict(finding) for finding in findings]})
    else:
        for finding in findings:
            mark, style = _MARKS[finding.level]
            output.print_line(f"{mark} {finding.topic}: {finding.text}", style)
        output.print_line(_verdict(findings, sides.values(), mapper), "bold green" if works else "bold red")
    raise typer.Exit(0 if works else 1)


def _side(
    role: str, name: str, tokenizer: str | None, config_only: bool, dtype: str, device_map: str
) -> tuple["Side", str | None]:
    """What can be loaded of a model, and what is missing."""
    from ..diagnosis import Side

    config, model, problem, found = loading.load_config(role, name), None, None, None
    try:
        option = role if tokenizer is None else f"--{role.lower()}-tokenizer"
        found = loading.load_tokenizer(option, tokenizer or name)
    except loading.LoadingError:
        if tokenizer is not None:
            raise
    if not config_only:
        try:
            model = loading.load_model(role, name, dtype, device_map)
        except loading.LoadingError as error:
            problem = f"Judged by its config alone. {' '.join(str(error).split())}"
    return Side(name, config, model, found), problem


def _on_the_hub(source: str, target: str) -> str:
    from ..hub.search import find_mappers

    try:
        found = find_mappers(source, target)
    except HubError:
        return "None given, and the Hub cannot be asked for one."
    if not found:
        return "None given, and none on the Hub under these names. Make one: hf-kvtransfer fit."
    return "On the Hub: " + "; ".join(
        f"{mapper.repo_id} ({'admitted' if mapper.verdict.admitted else 'refused'} on its evidence)"
        for mapper in found
    )


def _verdict(findings: "list[Finding]", sides: Iterable["Side"], mapper: str | None) -> str:
    what = "This pair" if mapper is None else "This mapper on this pair"
    against = {finding.topic for finding in findings if finding.level == "bad"}
    if against == {"evidence"}:
        return "This pair works, but the gate refuses this mapper."
    if against:
        return f"{what} will not work."
    if all(side.model is not None for side in sides):
        return f"{what} works."
    return f"Nothing speaks against {what[0].lower()}{what[1:]}, as far as configs tell."
