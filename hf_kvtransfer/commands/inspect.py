"""`hf-kvtransfer inspect`: what is in a mapper, or what a model caches."""

import dataclasses
from itertools import groupby
from typing import Annotated

import typer

from . import loading, output


def inspect(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Folder or Hub id of a mapper or a model, or a GGUF file.")
    ],
    revision: loading.Revision = "main",
    as_json: loading.AsJson = False,
) -> None:
    """
    Show what is in a mapper, or what a model caches.

    Of a mapper: the pair, and for each target layer which source layers it reads, drawn, with its kind, its size and
    what it explains of held-out text; and what its evidence says. Of a model: what its layers cache for each token and
    how they tell positions apart, from its config alone, without its weights.

    Examples:

    ```
    hf-kvtransfer inspect my-mapper
    hf-kvtransfer inspect me/source-to-target --revision v2 --json
    hf-kvtransfer inspect org/source
    ```

    Exit code: 0, or 2 after an error.
    """
    from ..mapper_config import KVMapperConfig

    if _model_type(name, revision) == KVMapperConfig.model_type:
        _mapper(name, revision, as_json)
    else:
        _model(name, as_json)


def _model_type(name: str, revision: str) -> str | None:
    """As the config says; `None` for a GGUF file, and for what cannot be read at all."""
    from transformers import PreTrainedConfig

    try:
        config, _ = PreTrainedConfig.get_config_dict(name, revision=revision)
    except (OSError, ValueError):  # said better by what loads it
        return None
    return config.get("model_type")


def _mapper(name: str, revision: str, as_json: bool) -> None:
    from ..fidelity.gate import FidelityGate
    from ..layer_table import explained_variance, layer_table

    mapper = loading.load_mapper(name, revision)
    config, fit = mapper.config, mapper.config.fit or {}
    verdict = FidelityGate().admit(mapper, None, None)
    explained = explained_variance(mapper)
    if as_json:
        output.print_object(
            {
                "mapper": mapper.name,
                "revision": mapper.revision,
                "digest": mapper.digest(),
                "bytes": mapper.num_bytes(),
                "source": config.source,
                "target": config.target,
                "layers": config.layers,
                "native_layers": config.native_layers,
                "storage": config.storage,
                "explained_variance": explained,
                "fit": fit,
                "verdict": dataclasses.asdict(verdict),
            }
        )
        return
    output.print_line(f"{config.source['name']} to {config.target['name']}", "bold")
    output.print_line(f"Source: {mapper.source_geometry.describe()}")
    output.print_line(f"Target: {mapper.target_geometry.describe()}")
    storage = f"{config.storage['bits']}-bit weights" if config.storage else str(mapper.dtype).removeprefix("torch.")
    output.print_line(f"Size: {output.size(mapper.num_bytes())}, {storage}")
    if "train_tokens" in fit:
        output.print_line(f"Fitted on {fit['train_tokens']:,} tokens of {fit.get('num_texts', '?')} texts")
    if explained is not None:
        output.print_line(
            f"Explained variance, held out: {explained['keys']:.3f} of keys, {explained['values']:.3f} of values, "
            f"least in layer {explained['worst']['layer']}: {explained['worst']['value']:.3f}"
        )
    output.print_line("")
    output.print_table(layer_table(mapper))
    output.print_verdict(verdict)


def _model(name: str, as_json: bool) -> None:
    from ..fidelity.tables import Table
    from ..outline import ModelOutline

    outline = ModelOutline.from_config(loading.load_config("NAME", name))
    geometry = outline.geometry
    width = sum(map(geometry.num_features, range(len(geometry.layers))))
    if as_json:
        entries = dataclasses.asdict(outline) | {"geometry": geometry.to_dict()}
        output.print_object({"model": name, "bytes_per_token": 2 * width} | entries)
        return
    output.print_line(f"{name}: {outline.model_class}, {outline.num_parameters / 1e6:,.0f} M parameters", "bold")
    output.print_line(f"Positions: {outline.positions}")
    if outline.max_positions is not None:
        output.print_line(f"Reads up to {outline.max_positions:,} tokens")
    output.print_line(f"Caches {2 * width:,} bytes for a token in 16 bits\n")
    rows = []
    for layer, group in groupby(enumerate(geometry.layers), key=lambda entry: entry[1]):
        numbers = [number for number, _ in group]
        span = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
        if layer is None:
            rows.append([span, "-", "-", "-", "shares another's"])
        else:
            heads, keys, values, window = dataclasses.astuple(layer)
            rows.append([span, str(heads), str(keys), str(values), "all" if window is None else f"last {window:,}"])
    output.print_table(Table("Layers", ["layers", "KV heads", "key width", "value width", "tokens kept"], rows))
