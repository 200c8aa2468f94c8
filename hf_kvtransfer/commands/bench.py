"""`hf-kvtransfer bench`: how long a handoff takes on this machine, against the prefill that it replaces."""

from typing import Annotated

import typer

from . import loading, output


LENGTHS = (256, 1024, 4096)


def bench(
    mapper: loading.MapperName,
    source: loading.Source,
    target: loading.Target,
    length: Annotated[
        list[int] | None,
        typer.Option(min=2, metavar="TOKENS", help="Target tokens of a context: 256, 1024 and 4096. Repeat it."),
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Prefills and handoffs of each length, in turn.")] = 5,
    source_tokenizer: loading.SourceTokenizer = None,
    target_tokenizer: loading.TargetTokenizer = None,
    dtype: loading.DType = "auto",
    device_map: loading.DeviceMap = "auto",
    revision: loading.Revision = "main",
    as_json: loading.AsJson = False,
) -> None:
    """
    Measure how long a handoff takes on this machine, against the target's own prefill.

    Both end with the target's first logits, of one context at a time. A handoff begins with the source's cache in
    hand, and is everything that a cache does by default: holding the models against the evidence, aligning, reading
    the first tokens, the probe, and all layers. Medians of runs that take turns, and their ratio.

    Examples:

    ```
    hf-kvtransfer bench my-mapper --source org/source --target org/target
    hf-kvtransfer bench my-mapper --source org/source --target org/target --length 8192 --dtype bfloat16 --json
    ```

    Exit code: 0, or 2 after an error.
    """
    lengths = sorted(set(length or LENGTHS))

    import torch

    from ..fidelity.tables import Table
    from ..mapper import mapper_for
    from ..policy.measuring import longest_context, time_lengths

    models, tokenizers = loading.load_pair(source, target, source_tokenizer, target_tokenizer, dtype, device_map)
    if lengths[-1] > longest_context(*models):
        raise typer.BadParameter(
            f"these models read contexts of up to {longest_context(*models)} tokens, not {lengths[-1]}.",
            param_hint="--length",
        )
    loaded = mapper_for(mapper, models[1], revision)
    rows = time_lengths(loaded, *models, **tokenizers, lengths=lengths, runs=runs)
    found = [
        {
            "tokens": row["tokens"],
            "prefill_seconds": row["prefill"],
            "handoff_seconds": row["handoff"],
            "ratio": row["prefill"] / row["handoff"],
        }
        for row in rows
    ]
    dtype_name = str(models[1].dtype).removeprefix("torch.")
    if as_json:
        setting = {"device": str(models[1].device), "dtype": dtype_name, "threads": torch.get_num_threads()}
        output.print_object(setting | {"mapper_bytes": loaded.num_bytes(), "runs": runs, "lengths": found})
        return
    output.print_table(
        Table(
            f"{models[1].device}, {dtype_name}, medians of {runs}",
            ["tokens", "prefill", "handoff", "ratio"],
            [
                [
                    f"{row['tokens']:,}",
                    f"{row['prefill_seconds']:.3f} s",
                    f"{row['handoff_seconds']:.3f} s",
                    f"{row['ratio']:.1f}x",
                ]
                for row in found
            ],
            "",
        )
    )
