"""The models and mappers that commands are given by name, and the options that they share."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..errors import KVTransferError


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..mapper import KVMapper

SOURCE_HELP = "Folder or Hub id of the model that has read the context"
TARGET_HELP = "Folder or Hub id of the model that continues"

MapperName = Annotated[str, typer.Argument(metavar="MAPPER", help="Folder or Hub id of the mapper.")]
Revision = Annotated[str, typer.Option(help="Branch, tag or commit of a mapper on the Hub.")]
SourceTokenizer = Annotated[
    str | None,
    typer.Option(metavar="ID", help="Folder or Hub id of the source's tokenizer, if not the model's."),
]
TargetTokenizer = Annotated[
    str | None,
    typer.Option(metavar="ID", help="Folder or Hub id of the target's tokenizer, if not the model's."),
]
DType = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(help="Of the models' weights; auto is what they were saved in."),
]
DeviceMap = Annotated[str, typer.Option(help="Where the models run: auto, cpu, cuda:1 and so on.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else on stdout.")]


class LoadingError(KVTransferError):
    """A model or tokenizer that cannot be loaded from where an option says."""


def load_mapper(name: str, revision: str) -> "KVMapper":
    """Load a mapper from a folder or the Hub."""
    from ..mapper import KVMapper

    return KVMapper.from_pretrained(name, revision=revision)


def load_pair(
    source: str,
    target: str,
    source_tokenizer: str | None,
    target_tokenizer: str | None,
    dtype: str,
    device_map: str,
) -> tuple[tuple["PreTrainedModel", "PreTrainedModel"], dict[str, "PreTrainedTokenizerBase"]]:
    """
    Load both models of a pair, in eval mode, and their tokenizers.

    Args:
        source (`str`), target (`str`):
            Folders or Hub ids.
        source_tokenizer (`str`, *optional*), target_tokenizer (`str`, *optional*):
            The same of their tokenizers, by default the models'.
        dtype (`str`), device_map (`str`):
            As for `AutoModelForCausalLM.from_pretrained`.

    Returns:
        `tuple`: The source and the target, and the arguments `source_tokenizer` and `target_tokenizer`.

    Raises:
        `LoadingError`: one of them is not there, damaged, of an unknown kind, or needs a missing package.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Tokenizers first: if one is missing, nobody waits for the models.
    tokenizers = {
        f"{side}_tokenizer": _load(AutoTokenizer, f"--{side}", model)
        if tokenizer is None
        else _load(AutoTokenizer, f"--{side}-tokenizer", tokenizer)
        for side, model, tokenizer in (("source", source, source_tokenizer), ("target", target, target_tokenizer))
    }
    source_model, target_model = (
        _load(AutoModelForCausalLM, option, name, dtype=dtype, device_map=device_map).eval()
        for option, name in (("--source", source), ("--target", target))
    )
    return (source_model, target_model), tokenizers


def _load(auto_class: Any, option: str, name: str, **kwargs: Any) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoTokenizer

    try:
        return auto_class.from_pretrained(name, **kwargs)
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        what = "tokenizer" if auto_class is AutoTokenizer else "model"
        raise LoadingError(f"No {what} can be loaded from {option} {name!r}: {error}") from error
