"""`hf-kvtransfer evaluate`: measure a mapper, and write what was found beside its weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from . import loading, output, report_page


WORK_FILE = "fidelity.partial.jsonl"


def evaluate(
    mapper: loading.MapperName,
    source: Annotated[str, typer.Option(metavar="ID", help=f"{loading.SOURCE_HELP}.")],
    target: Annotated[str, typer.Option(metavar="ID", help=f"{loading.TARGET_HELP}.")],
    data: Annotated[
        list[str],
        typer.Option(
            metavar="[CAPABILITY=]FILE",
            help="Text that the mapper was not fitted on. Repeat it for further files. The figures are given for each "
            "capability: the one named here, or in a row, or the kind of row.",
        ),
    ],
    folder: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="FOLDER",
            file_okay=False,
            help="Where to write fidelity.json, if not with the mapper.",
        ),
    ] = None,
    page: report_page.ReportFile = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Discard what an interrupted run has measured, and begin anew.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use at most so many documents of each file, spread over it.")
    ] = None,
    context_tokens: Annotated[int, typer.Option(min=2, help="Target tokens of a text that are context.")] = 256,
    continuation_tokens: Annotated[int, typer.Option(min=1, help="Target tokens behind it that are scored.")] = 64,
    tail_tokens: Annotated[
        int, typer.Option(min=1, help="Last tokens of each context that the target reads itself.")
    ] = 1,
    effort: Annotated[
        list[float] | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Measure, too, what it is worth that the target reads this share of the translated tokens again. "
            "Repeat it for more.",
        ),
    ] = None,
    max_length: Annotated[int, typer.Option(min=2, help="Leave out longer contexts, in target tokens.")] = 2048,
    false_alarm_rate: Annotated[
        float, typer.Option(min=0.001, max=0.5, help="Share of right translations that the probe may refuse.")
    ] = 0.05,
    source_tokenizer: loading.SourceTokenizer = None,
    target_tokenizer: loading.TargetTokenizer = None,
    dtype: loading.DType = "auto",
    device_map: loading.DeviceMap = "auto",
    revision: loading.Revision = "main",
    as_json: loading.AsJson = False,
) -> None:
    """
    Measure how well the target continues on what a mapper translates.

    The target scores held-out text after its own prefill, on the translated cache, and on controls: another document's
    cache, no context, a random map. The result, `fidelity.json`, is the evidence without which no mapper is used. A
    run that was interrupted goes on where it stopped when the same command is given again.

    Files are JSON Lines, with rows of these kinds, or plain text:

    ```
    {"text": "..."}
    {"messages": [{"role": "user", "content": "..."}, ...]}
    {"context": "...", "endings": ["...", "..."], "label": 0}
    {"question": "...", "answer": "..."}
    ```

    Examples:

    ```
    hf-kvtransfer evaluate my-mapper --source org/source --target org/target \\
        --data held_out.jsonl --data code=our_code.jsonl --data dialogues.jsonl
    hf-kvtransfer evaluate me/source-to-target --source org/source --target org/target \\
        --data held_out.jsonl --output evidence --report evidence.html
    ```

    Exit code: 0 if the gate admits the mapper, 1 if it refuses it, 2 after an error.
    """
    files = parse_data(data)
    report_page.check(page)
    if max_length < context_tokens:
        raise typer.BadParameter(f"must be at least --context-tokens, {context_tokens}.", param_hint="--max-length")
    efforts = effort or []
    if folder is None:
        folder = Path(mapper)
        if not folder.is_dir():
            raise typer.BadParameter(
                f"there is no folder {mapper!r}. For a mapper on the Hub, say where fidelity.json is to be written.",
                param_hint="--output",
            )
    work_file = folder / WORK_FILE
    if restart:
        work_file.unlink(missing_ok=True)

    from ..effort import check_efforts
    from ..fidelity.effort_advice import effort_advice
    from ..fidelity.evaluate import evaluate_mapper
    from ..fidelity.gate import FidelityGate

    try:
        check_efforts(efforts)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--effort") from None
    try:
        loaded = loading.load_mapper(mapper, revision)
        models, tokenizers = loading.load_pair(source, target, source_tokenizer, target_tokenizer, dtype, device_map)
        loaded.evidence = evaluate_mapper(
            loaded,
            *models,
            files,
            **tokenizers,
            context_tokens=context_tokens,
            continuation_tokens=continuation_tokens,
            max_length=max_length,
            limit=limit,
            tail_tokens=tail_tokens,
            efforts=efforts,
            false_alarm_rate=false_alarm_rate,
            work_file=work_file,
        )
    except KeyboardInterrupt:
        if work_file.exists():
            output.print_note(
                f"Interrupted. The same command goes on where it stopped ({work_file} has what is done); with "
                "--restart it begins anew."
            )
        raise typer.Exit(130) from None
    file = loaded.evidence.save(folder)
    work_file.unlink(missing_ok=True)
    gate = FidelityGate()
    verdict = gate.admit(loaded, *models, **tokenizers)
    if page is not None:
        report_page.write(page, loaded, gate)
    if as_json:
        output.print_json(verdict, loaded.evidence, file=str(file))
    else:
        output.print_report(loaded.evidence)
        advice = effort_advice(gate, verdict, loaded.evidence)
        output.print_verdict(verdict, f"{f'{advice} ' if advice else ''}The evidence is in {file}.")
    raise typer.Exit(0 if verdict.admitted else 1)


def parse_data(arguments: Sequence[str]) -> dict[str | None, list[Path]]:
    """
    Sort files by the capability that was named with them, `None` where none was.

    Args:
        arguments (`Sequence[str]`):
            `FILE`, or `CAPABILITY=FILE` if there is no file of that whole name.
    """
    files: dict[str | None, list[Path]] = {}
    for argument in arguments:
        capability: str | None
        capability, equals, name = argument.partition("=")
        if not equals or Path(argument).is_file() or {"/", "\\"} & set(capability):
            capability, name = None, argument
        path = Path(name).expanduser()
        if capability is not None and not capability.strip():
            raise typer.BadParameter(f"there is no capability before the = of {argument!r}.", param_hint="--data")
        if not path.is_file():
            raise typer.BadParameter(f"there is no file {name!r}.", param_hint="--data")
        files.setdefault(capability, []).append(path)
    return files
