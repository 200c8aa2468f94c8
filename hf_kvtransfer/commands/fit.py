"""`hf-kvtransfer fit`: calibration text to mapper."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from . import loading, output


if TYPE_CHECKING:
    from ..mapper import KVMapper

# Sums and states of an interrupted run, in the mapper's folder.
WORK_FOLDER = "fit.partial"


def fit(
    folder: Annotated[
        Path, typer.Argument(metavar="MAPPER", file_okay=False, help="Folder that the mapper is written to.")
    ],
    source: loading.Source,
    target: loading.Target,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[SHARE=]FILE",
            help="Text to fit on: JSON Lines with a text or messages in each row, plain text, or the name of a "
            "dataset. Repeat it for a mixture, each with its share. By default FineWeb-Edu, streamed.",
        ),
    ] = None,
    kind: Annotated[
        Literal["linear", "head_matched", "low_rank", "identity", "residual_mlp"], typer.Option(help="Of the maps.")
    ] = "linear",
    budget: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="What the mapper may take: 45MB, or 20000tokens/s."),
    ] = None,
    num_source_layers: Annotated[
        int | None, typer.Option(min=1, help="Source layers that each target layer reads, if there is no budget.")
    ] = None,
    previous_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Of how many tokens before a token the maps read the target's view of it, too. By default none; with "
            "a budget at most 3, where they tell more than source layers.",
        ),
    ] = None,
    native_layers: Annotated[
        int, typer.Option(min=-1, help="The target layer up to which the target computes its own; -1 for none.")
    ] = 0,
    storage_bits: Annotated[int | None, typer.Option(help="8 or 4, to quantise the mapper's weights.")] = None,
    rank: Annotated[int | None, typer.Option(help="Of low_rank maps, or of the correction of identity maps.")] = None,
    max_tokens: Annotated[
        int, typer.Option(min=0, help="Target tokens after which no more text is read; 0 for all of it.")
    ] = 200_000,
    max_length: Annotated[int, typer.Option(min=1, help="Target tokens to which each text is cut.")] = 1024,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts read at once.")] = 8,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="What sums and solves may take: 16GB. Where it is too little for all layers at once, the states of "
            "both models are written to the mapper's folder meanwhile.",
        ),
    ] = None,
    keep_states: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            file_okay=False,
            help="What the models make of the text is kept here, so that another fit on it need not read it again.",
        ),
    ] = None,
    residuals: Annotated[
        int, typer.Option(min=0, metavar="TEXTS", help="Texts to train the MLPs of kind residual_mlp on.")
    ] = 0,
    readout: Annotated[
        int, typer.Option(min=0, metavar="TEXTS", help="Texts to calibrate value maps on, for what attention reads.")
    ] = 0,
    distill: Annotated[
        int, typer.Option(min=0, metavar="TEXTS", help="Texts to train the maps on, through the frozen target.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a mapper that is in the folder.")] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Discard what an interrupted run has done, and begin anew.")
    ] = False,
    source_tokenizer: loading.SourceTokenizer = None,
    target_tokenizer: loading.TargetTokenizer = None,
    dtype: loading.DType = "auto",
    device_map: loading.DeviceMap = "auto",
    as_json: loading.AsJson = False,
) -> None:
    """
    Fit a mapper from one model's cache to another's.

    Both models read the text once, and each layer's map is solved in closed form. What --residuals, --readout and
    --distill name are further steps, in this order, on the first texts of the data: they take longer, and cost nothing
    in use. A run that was interrupted goes on where it stopped when the same command is given again.

    Examples:

    ```
    hf-kvtransfer fit my-mapper --source org/source --target org/target --data calibration.jsonl
    hf-kvtransfer fit my-mapper --source org/source --target org/target \\
        --data 0.7=web.jsonl --data 0.3=dialogues.jsonl --budget 45MB --storage-bits 8 --distill 400
    ```

    Exit code: 0, or 2 after an error.
    """
    texts = parse_texts(data or [])
    if (folder / "config.json").exists() and not overwrite:
        raise typer.BadParameter(f"there is a mapper in {folder}: replace it with --overwrite.", param_hint="MAPPER")
    steps = {"residuals": residuals, "readout": readout, "distill": distill}
    if residuals and kind != "residual_mlp":
        raise typer.BadParameter("only maps of --kind residual_mlp have MLPs to train.", param_hint="--residuals")
    work = folder / WORK_FOLDER
    if restart:
        shutil.rmtree(work, ignore_errors=True)
    options = {
        "kind": kind,
        "native_layers": None if native_layers < 0 else native_layers,
        "num_source_layers": num_source_layers,
        "previous_tokens": previous_tokens,
        "budget": int(budget) if budget is not None and budget.isdigit() else budget,
        "storage_bits": storage_bits,
        "rank": rank,
        "max_tokens": max_tokens or None,
        "max_length": max_length,
        "batch_size": batch_size,
        "memory": memory,
        "seed": seed,
    }

    from ..fidelity.gate import FidelityGate
    from .fit_steps import fit_in_steps

    try:
        models, tokenizers = loading.load_pair(source, target, source_tokenizer, target_tokenizer, dtype, device_map)
        mapper = fit_in_steps(models, tokenizers, texts, options, steps, work, keep_states)
        mapper.save_pretrained(folder)
    except KeyboardInterrupt:
        if work.exists():
            output.print_note(
                f"Interrupted. The same command goes on where it stopped ({work} has what is done); with --restart it "
                "begins anew."
            )
        raise typer.Exit(130) from None
    shutil.rmtree(work, ignore_errors=True)
    admitted = FidelityGate().admit(mapper, *models).admitted
    _print(mapper, admitted, folder, source, target, as_json)


def _print(mapper: "KVMapper", admitted: bool, folder: Path, source: str, target: str, as_json: bool) -> None:
    from ..layer_table import explained_variance

    explained = explained_variance(mapper)
    upcoming = f"hf-kvtransfer evaluate {folder} --source {source} --target {target} --data HELD_OUT.jsonl"
    if as_json:
        entries = {"folder": str(folder), "bytes": mapper.num_bytes(), "digest": mapper.digest(), "admitted": admitted}
        output.print_object(entries | {"explained_variance": explained, "fit": mapper.config.fit, "next": upcoming})
        return
    output.print_line(f"{folder}: {output.size(mapper.num_bytes())}", "bold green")
    if explained is not None:
        output.print_line(
            f"Of held-out text it explains {explained['keys']:.1%} of the keys' and {explained['values']:.1%} of the "
            f"values' variance, least in layer {explained['worst']['layer']} ({explained['worst']['value']:.1%})."
        )
    advice = (
        "It copies layers that are the same in both models: the default gate sees that, and admits it without evidence"
        if admitted
        else "Without evidence the default gate refuses it"
    )
    output.print_line(f"{advice}. Measure it on other text:\n  {upcoming}", "dim")


def parse_texts(arguments: Sequence[str]) -> Any:
    """
    What [`fit_mapper`] takes as `texts`: `None` without any, one file or name, or a mixture with shares.

    Args:
        arguments (`Sequence[str]`):
            `FILE`, or `SHARE=FILE` with a number.
    """
    parts: list[tuple[str, float]] = []
    shares = 0
    for argument in arguments:
        share, equals, name = argument.partition("=")
        weight = 1.0
        if equals and not Path(argument).is_file():
            try:
                weight, shares = float(share), shares + 1
            except ValueError:
                name = argument
            if not 0 < weight < float("inf"):
                raise typer.BadParameter(f"the share of {argument!r} must be a positive number.", param_hint="--data")
        else:
            name = argument
        file = Path(name).expanduser()
        if not file.is_file() and (file.suffix or not name):
            raise typer.BadParameter(f"there is no file {name!r}.", param_hint="--data")
        parts.append((str(file) if file.is_file() else name, weight))
    if shares not in (0, len(parts)):
        raise typer.BadParameter("give each file its share, as 0.7=FILE, or none.", param_hint="--data")
    if len(parts) < 2:
        return parts[0][0] if parts else None
    return parts
