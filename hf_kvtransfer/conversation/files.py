"""A conversation on disk: one JSON file, and one safetensors file for each model's cache."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import DynamicCache, PreTrainedModel

from ..errors import ConversationError
from ..fidelity.chat import Message
from ..identity import ModelIdentity
from ..whole_files import whole_file
from .log import ModelLog
from .prompt import ReadText


CONVERSATION_FORMAT = "hf-kvtransfer-conversation-1"
CONVERSATION_FILE = "conversation.json"


def save_logs(folder: Path, messages: list[Message], logs: Mapping[str, ModelLog], num_turns: int) -> None:
    """Write all that a conversation holds. The JSON file comes last, and names the others."""
    folder.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = {"format": CONVERSATION_FORMAT, "messages": messages, "num_turns": num_turns, "models": {}}
    for number, (name, log) in enumerate(logs.items()):
        # Names of files of the last save are others: it stays whole until the JSON file is replaced.
        file = f"cache-{num_turns}-{number}.safetensors"
        tensors = {
            f"{kind}.{i}": states.contiguous()
            for i, layer in enumerate(log.cache.layers)
            for kind in ("keys", "values")
            if (states := getattr(layer, kind, None)) is not None
        }
        save_file(tensors, folder / file)
        state["models"][name] = {
            "file": file,
            "ids": log.read.ids,
            "text": log.read.text,
            "spans": log.read.spans,
            "messages": log.read.messages,
            "places": log.read.places,
            "readers": log.readers,
            "identity": log.identity.to_dict(),
            "turn": log.turn,
        }
    with whole_file(folder / CONVERSATION_FILE) as unfinished:
        unfinished.write_text(json.dumps(state, ensure_ascii=False), encoding="utf-8")
    kept = {model["file"] for model in state["models"].values()}
    for old in folder.glob("cache-*-*.safetensors"):
        if old.name not in kept:
            old.unlink()


def load_logs(
    folder: Path, models: Mapping[str, tuple[PreTrainedModel, Any]]
) -> tuple[list[Message], dict[str, ModelLog], int]:
    """
    What [`save_logs`] wrote: messages, logs and the number of turns.

    Raises:
        `ConversationError`: a file is missing, damaged or of another format, or a model is not there.
    """
    try:
        state = json.loads((folder / CONVERSATION_FILE).read_text(encoding="utf-8"))
        if not isinstance(state, dict) or state.get("format") != CONVERSATION_FORMAT:
            raise ValueError(f"its format is not {CONVERSATION_FORMAT!r}")
        missing = sorted(set(state["models"]) - set(models))
        if missing:
            raise ConversationError(
                f"The conversation in {folder} was saved with models {missing}, which are not among those given, "
                f"{sorted(models)}. Pass them under the same names."
            )
        messages = [_message(message) for message in state["messages"]]
        logs = {name: _log(folder, name, log, models[name][0]) for name, log in state["models"].items()}
        # Of another model, which begins anew.
        logs = {name: log for name, log in logs.items() if log.is_complete(models[name][0])}
        return messages, logs, int(state["num_turns"])
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise ConversationError(
            f"{folder} cannot be read as a saved conversation: {error!r}. Save it again."
        ) from error


def _log(folder: Path, name: str, state: dict[str, Any], model: PreTrainedModel) -> ModelLog:
    file = state["file"]
    if Path(file).name != file:
        raise ValueError(f"{file!r} is no name of a file beside it")
    spans = [(int(start), int(end)) for start, end in state["spans"]]
    places = [None if place is None else (int(place[0]), int(place[1])) for place in state["places"]]
    ids, readers = [int(token) for token in state["ids"]], [str(reader) for reader in state["readers"]]
    messages = [_message(message) for message in state["messages"]]
    read = ReadText(ids, str(state["text"]), spans, messages, places)
    if not len(ids) == len(spans) == len(readers) or len(messages) != len(places):
        raise ValueError(f"{file} stands for {len(ids)} tokens, {len(spans)} spans and {len(readers)} readers")
    cache = _read_cache(folder / file, model, len(ids))
    # As of a `TranslatedCache`: what is a translation is no source.
    cache.translated_mask = torch.tensor([[reader != name for reader in readers]])
    return ModelLog(read, readers, cache, ModelIdentity.from_dict(state["identity"]), int(state["turn"]))


def _message(message: dict[str, Any]) -> Message:
    return {"role": str(message["role"]), "content": str(message["content"])}


def _read_cache(path: Path, model: PreTrainedModel, num_tokens: int) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    with safe_open(path, framework="pt", device=str(model.device)) as file:
        for i, layer in enumerate(cache.layers):
            if f"keys.{i}" in file.keys():  # noqa: SIM118
                keys, values = file.get_tensor(f"keys.{i}"), file.get_tensor(f"values.{i}")
                if {keys.shape[2], values.shape[2]} != {num_tokens}:
                    raise ValueError(f"layer {i} has {keys.shape[2]} tokens, and not {num_tokens}")
                layer.update(keys, values)
    return cache
