"""The models and mappers that commands are given by name, and the options that they share."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..errors import KVTransferError


if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from ..mapper import KVMapper

SOURCE_HELP = "Folder, GGUF file or Hub id of the model that has read the context"
TARGET_HELP = "Folder, GGUF file or Hub id of the model that continues"

MapperName = Annotated[str, typer.Argument(metavar="MAPPER", help="Folder or Hub id of the mapper.")]
Source = Annotated[str, typer.Option(metavar="ID", help=f"{SOURCE_HELP}.")]
Target = Annotated[str, typer.Option(metavar="ID", help=f"{TARGET_HELP}.")]
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
Effort = Annotated[
    float,
    typer.Option(min=0.0, max=1.0, help="Share of the translated tokens that the target is to read again."),
]
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
            Folders, GGUF files or Hub ids.
        source_tokenizer (`str`, *optional*), target_tokenizer (`str`, *optional*):
            The same of their tokenizers, by default the models'.
        dtype (`str`), device_map (`str`):
            As for `AutoModelForCausalLM.from_pretrained`.

    Returns:
        `tuple`: The source and the target, and the arguments `source_tokenizer` and `target_tokenizer`.

    Raises:
        `LoadingError`: one of them is not there, damaged, of an unknown kind, or needs a missing package.
    """
    # Tokenizers first: if one is missing, nobody waits for the models.
    tokenizers = {
        f"{side}_tokenizer": load_tokenizer(f"--{side}", model)
        if tokenizer is None
        else load_tokenizer(f"--{side}-tokenizer", tokenizer)
        for side, model, tokenizer in (("source", source, source_tokenizer), ("target", target, target_tokenizer))
    }
    source_model, target_model = (
        load_model(option, name, dtype, device_map) for option, name in (("--source", source), ("--target", target))
    )
    return (source_model, target_model), tokenizers


def load_model(option: str, name: str, dtype: str, device_map: str) -> "PreTrainedModel":
    """Load a model that an option names, in eval mode. Raises [`LoadingError`]."""
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = _load(AutoModelForCausalLM, "model", option, name, dtype=dtype, device_map=device_map)
    return model.eval()


def load_tokenizer(option: str, name: str) -> "PreTrainedTokenizerBase":
    """Load a tokenizer that an option names. Raises [`LoadingError`]."""
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = _load(AutoTokenizer, "tokenizer", option, name)
    return tokenizer


def load_config(option: str, name: str) -> "PreTrainedConfig":
    """Load the config of a model that an option names. Raises [`LoadingError`]."""
    from transformers import AutoConfig

    config: PreTrainedConfig = _load(AutoConfig, "config", option, name)
    return config


def _load(auto_class: Any, what: str, option: str, name: str, **kwargs: Any) -> Any:
    from safetensors import SafetensorError

    try:
        return auto_class.from_pretrained(**_location(name), **kwargs)
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise LoadingError(f"No {what} can be loaded from {option} {name!r}: {error}") from error


def _location(name: str) -> dict[str, str]:
    """A folder or Hub id, or a GGUF file in one of them, as transformers wants to be told."""
    if not name.lower().endswith(".gguf") or Path(name).is_dir():
        return {"pretrained_model_name_or_path": name}
    file = Path(name).expanduser()
    parts = name.split("/")
    if file.is_file() or len(parts) < 3:
        return {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    return {"pretrained_model_name_or_path": "/".join(parts[:2]), "gguf_file": "/".join(parts[2:])}
