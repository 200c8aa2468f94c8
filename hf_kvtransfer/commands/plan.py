"""`hf-kvtransfer plan`: is a mapper worth it for this pair, on this machine, with this traffic?"""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import loading, output


if TYPE_CHECKING:
    from ..policy import Traffic


def plan(
    source: loading.Source,
    target: loading.Target,
    traffic: Annotated[
        list[str],
        typer.Option(
            metavar="TOKENS=PER_DAY",
            help="Target tokens of a context, and how many such contexts are handed over in a day. Repeat it.",
        ),
    ],
    mapper: Annotated[
        str | None,
        typer.Argument(metavar="MAPPER", help="Folder or Hub id of the mapper, if there is one already."),
    ] = None,
    days: Annotated[
        float, typer.Option(help="How long the mapper will be of use, until a model of the pair is exchanged.")
    ] = 30.0,
    fit_minutes: Annotated[
        float | None, typer.Option(min=0.0, help="What fitting takes; estimated by default.")
    ] = None,
    evaluate_minutes: Annotated[
        float | None, typer.Option(min=0.0, help="What measuring the mapper takes once; estimated by default.")
    ] = None,
    evaluations: Annotated[
        int, typer.Option(min=1, help="How often it is measured in its lifetime, as when weights change.")
    ] = 1,
    wrong_answer_seconds: Annotated[
        float, typer.Option(min=0.0, help="How long a user would rather wait than get a wrong answer.")
    ] = 0.0,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests that wait for the target at a time.")] = 1,
    capability: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Judge the mapper by this capability of its evidence. Repeat it for more."),
    ] = None,
    effort: loading.Effort = 0.0,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure prefills and handoffs again, whatever was measured before.")
    ] = False,
    source_tokenizer: loading.SourceTokenizer = None,
    target_tokenizer: loading.TargetTokenizer = None,
    dtype: loading.DType = "auto",
    device_map: loading.DeviceMap = "auto",
    revision: loading.Revision = "main",
    as_json: loading.AsJson = False,
) -> None:
    """
    Tell whether a mapper is worth it, for your own pair, machine and traffic.

    Measures how long the target takes to read contexts of some lengths, and to take them over (once: later runs read
    what was measured), and weighs it for each kind of context: recompute exposure, what prefills take in a day;
    adaptation cost, what fitting takes, shared by all handoffs of the mapper's lifetime; validation burden, the same
    of measuring it; what its wrong answers cost; and by default transfer or re-prefill. Without a mapper one of the
    default layout is timed, and taken to be as good as the gate asks for.

    Examples:

    ```
    hf-kvtransfer plan --source org/source --target org/target --traffic 500=2000 --traffic 8000=150
    hf-kvtransfer plan my-mapper --source org/source --target org/target --traffic 3000=400 --days 90 \\
        --wrong-answer-seconds 20 --capability code --effort 0.15 --concurrency 4
    ```

    Exit code: 0, or 2 after an error.
    """
    kinds = [_parse(argument) for argument in traffic]

    from ..fidelity.gate import FidelityGate
    from ..mapper import mapper_for
    from ..policy import TransferPlan, TransferPolicy, estimates, measure_costs

    (source_model, target_model), tokenizers = loading.load_pair(
        source, target, source_tokenizer, target_tokenizer, dtype, device_map
    )
    gate = FidelityGate(capabilities=tuple(capability) if capability else None)
    options: dict[str, Any] = {"wrong_answer_seconds": wrong_answer_seconds, "concurrency": concurrency}
    measuring: dict[str, Any] = {"fresh": fresh, **tokenizers}
    loaded = None
    if mapper is None:
        timed, verdict = estimates.unfitted_mapper(source_model, target_model, **tokenizers), None
        costs = measure_costs(timed, source_model, target_model, **measuring)
        policy = TransferPolicy(costs, error_rate=1 - gate.min_gap_recovered, **options)
    else:
        loaded = mapper_for(mapper, target_model, revision)
        verdict = gate.admit(loaded, source_model, target_model, **tokenizers, effort=effort)
        policy = TransferPolicy.calibrate(
            loaded, source_model, target_model, capabilities=capability, **options, **measuring
        )
    fitting = estimates.fit_seconds(policy.costs, loaded) if fit_minutes is None else 60 * fit_minutes
    once = estimates.validation_seconds(policy.costs, loaded) if evaluate_minutes is None else 60 * evaluate_minutes
    made = TransferPlan.make(
        policy,
        kinds,
        days=days,
        fit_seconds=fitting,
        validation_seconds=evaluations * once,
        verdict=verdict,
        effort=effort,
    )
    if as_json:
        output.print_object(
            dataclasses.asdict(made)
            | {"days_until_paid": made.days_until_paid, "pays": made.pays, "costs": dataclasses.asdict(policy.costs)}
        )
    else:
        output.print_table(made.table())
        output.print_line(made.summary(), "bold green" if made.pays else "bold yellow")


def _parse(argument: str) -> "Traffic":
    from ..policy import Traffic

    tokens, _, per_day = argument.partition("=")
    try:
        return Traffic(int(tokens), float(per_day))
    except ValueError as error:
        raise typer.BadParameter(
            f"{argument!r} is not TOKENS=PER_DAY, two positive numbers such as 2000=150.", param_hint="--traffic"
        ) from error
