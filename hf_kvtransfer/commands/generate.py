"""`hf-kvtransfer generate`: a handoff from the shell."""

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from . import loading, output


if TYPE_CHECKING:
    from ..cache import TranslatedCache
    from ..effort import Effort


def generate(
    mapper: loading.MapperName,
    source: loading.Source,
    target: loading.Target,
    context: Annotated[str, typer.Option(metavar="FILE", help="Text that the source reads; - for standard input.")],
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="What follows the context, for the target only.")] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The most that the target writes.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 for the most probable tokens.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    capability: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Judge the mapper by this capability of its evidence. Repeat it for more."),
    ] = None,
    gate: Annotated[
        bool, typer.Option("--gate/--no-gate", help="Whether the mapper's evidence decides if it is used.")
    ] = True,
    effort: Annotated[
        str,
        typer.Option(
            metavar="SHARE",
            help="Let the target read this share of the translated tokens again; auto for the least with which the "
            "evidence admits the mapper.",
        ),
    ] = "0",
    on_refusal: Annotated[
        Literal["recompute", "fail"],
        typer.Option(help="Let the target read the context itself if the translation is refused, or write nothing."),
    ] = "recompute",
    source_tokenizer: loading.SourceTokenizer = None,
    target_tokenizer: loading.TargetTokenizer = None,
    dtype: loading.DType = "auto",
    device_map: loading.DeviceMap = "auto",
    revision: loading.Revision = "main",
    as_json: loading.AsJson = False,
) -> None:
    """
    Let the source read a text, and the target go on from its translated cache.

    What the target writes goes to stdout as it comes; on stderr stands whether the context was translated or read
    again by the target, and why. Both models read plain text: no chat template is applied.

    Examples:

    ```
    hf-kvtransfer generate my-mapper --source org/source --target org/target --context story.txt --prompt "The end:"
    cat log.txt | hf-kvtransfer generate me/source-to-target --source org/source --target org/target --context - \\
        --capability code --effort auto --on-refusal fail
    ```

    Exit code: 0, 1 if the translation is refused and the target is not to read the context itself, 2 after an error.
    """
    text = _read(context)

    import torch
    from transformers import TextStreamer, set_seed

    from ..cache import TranslatedCache
    from ..effort import check_effort
    from ..errors import RefusedError
    from ..fidelity.gate import FidelityGate
    from ..source import SourceKV

    try:
        share: Effort = "auto" if effort == "auto" else float(effort)
        check_effort(share, may_be_auto=True)
    except ValueError:
        raise typer.BadParameter(
            f"{effort!r} is neither a share from 0 to 1 nor auto.", param_hint="--effort"
        ) from None
    loaded = loading.load_mapper(mapper, revision)
    (source_model, target_model), tokenizers = loading.load_pair(
        source, target, source_tokenizer, target_tokenizer, dtype, device_map
    )
    tokenizer: Any = tokenizers["target_tokenizer"]
    inputs = tokenizer(text + prompt, return_tensors="pt", return_token_type_ids=False).to(target_model.device)
    if not inputs.input_ids.shape[1]:
        raise typer.BadParameter(f"{context!r} holds no text.", param_hint="--context")
    try:
        cache = TranslatedCache(
            SourceKV.prefill(source_model, tokenizers["source_tokenizer"], text),
            loaded,
            target_model,
            target_tokenizer=tokenizer,
            input_ids=inputs.input_ids,
            effort=share,
            gate=FidelityGate(capabilities=tuple(capability) if capability else None, strict=gate),
            on_refusal="raise" if on_refusal == "fail" else "recompute",
        )
    except RefusedError as error:
        if as_json:
            output.print_object({"outcome": "refused", "reason": str(error), "text": None})
        else:
            output.print_note(str(error))
        raise typer.Exit(1) from None
    streamer = None if as_json else TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    set_seed(seed)
    try:
        with torch.no_grad():
            ids = target_model.generate(
                **cache.prepare(inputs), max_new_tokens=max_new_tokens, streamer=streamer, **sampling
            )
    except KeyboardInterrupt:
        print()
        output.print_note("Interrupted.")
        raise typer.Exit(130) from None
    written = tokenizer.decode(ids[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    if as_json:
        output.print_object(_report(cache) | {"text": written})
    else:
        output.print_note(str(cache.report))


def _read(context: str) -> str:
    try:
        if context == "-":
            return sys.stdin.read()
        return Path(context).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{context!r} cannot be read as text: {error}", param_hint="--context") from error


def _report(cache: "TranslatedCache") -> dict[str, Any]:
    report = cache.report
    entries = {field.name: getattr(report, field.name) for field in dataclasses.fields(report)}
    entries["probe"] = None if report.probe is None else str(report.probe)
    entries["verdict"] = None if report.verdict is None else dataclasses.asdict(report.verdict)
    return entries
