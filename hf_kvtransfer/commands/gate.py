"""`hf-kvtransfer gate`: may this mapper be used?"""

from typing import Annotated

import typer

from . import loading, output, report_page


EVIDENCE_ALONE = "Judged on the evidence alone. With --source and --target the models are checked, too."


def gate(
    mapper: loading.MapperName,
    source: Annotated[str | None, typer.Option(metavar="ID", help=f"{loading.SOURCE_HELP}, to be checked.")] = None,
    target: Annotated[str | None, typer.Option(metavar="ID", help=f"{loading.TARGET_HELP}, to be checked.")] = None,
    capability: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Judge by this capability of the evidence. Repeat it for more; default all."
        ),
    ] = None,
    effort: loading.Effort = 0.0,
    probe: Annotated[bool, typer.Option("--probe", help="Show the probe's operating curve, too.")] = False,
    page: report_page.ReportFile = None,
    source_tokenizer: loading.SourceTokenizer = None,
    target_tokenizer: loading.TargetTokenizer = None,
    dtype: loading.DType = "auto",
    device_map: loading.DeviceMap = "auto",
    revision: loading.Revision = "main",
    as_json: loading.AsJson = False,
) -> None:
    """
    Show a mapper's evidence, and tell whether it may be used.

    Reads the `fidelity.json` that `evaluate` wrote and holds it against the gate's thresholds. With `--source` and
    `--target` it also loads the two models and checks that they are those that were measured: weights, adapters,
    tokenizers, rotary embeddings.

    Examples:

    ```
    hf-kvtransfer gate my-mapper
    hf-kvtransfer gate me/source-to-target --revision v2 --probe
    hf-kvtransfer gate my-mapper --effort 0.15
    hf-kvtransfer gate my-mapper --capability code --capability dialogue --report report.html
    hf-kvtransfer gate my-mapper --source org/source --target org/target && ./deploy
    ```

    Exit code: 0 admitted, 1 refused, 2 error.
    """
    if (source is None) != (target is None):
        given = "--source" if source else "--target"
        raise typer.BadParameter("both models are checked, or none: give the other one, too.", param_hint=given)
    report_page.check(page)

    from ..errors import EvidenceError
    from ..fidelity.effort_advice import effort_advice
    from ..fidelity.gate import FidelityGate

    loaded = loading.load_mapper(mapper, revision)
    try:
        report = loaded.evidence
    except EvidenceError:  # the verdict will say so
        report = None
    models: tuple = (None, None)
    tokenizers: dict = {}
    if source is not None:
        models, tokenizers = loading.load_pair(source, target, source_tokenizer, target_tokenizer, dtype, device_map)
    judge = FidelityGate(capabilities=tuple(capability) if capability else None)
    verdict = judge.admit(loaded, *models, **tokenizers, effort=effort)
    if page is not None and report is not None:
        report_page.write(page, loaded, judge)
    if as_json:
        output.print_json(verdict, report, models_checked=source is not None)
    else:
        if report is not None:
            output.print_report(report, probe)
        remarks = [effort_advice(judge, verdict, report), EVIDENCE_ALONE if source is None else None]
        output.print_verdict(verdict, " ".join(filter(None, remarks)))
    raise typer.Exit(0 if verdict.admitted else 1)
