"""A mapper to the Hub, in one commit."""

import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi

from ..errors import HubError
from ..fidelity.report import FIDELITY_FILE
from ..mapper import KVMapper
from .card import LIBRARY, mapper_card
from .download import HUB_ERRORS, advice


# Of another mapper that was there: shards, or evidence that is not about this one.
_REPLACED = ["*.safetensors", "*.safetensors.index.json", FIDELITY_FILE]


def push_mapper(
    mapper: KVMapper,
    repo_id: str,
    *,
    card: dict[str, Any],
    max_shard_size: int | str,
    private: bool | None,
    token: bool | str | None,
    **commit: Any,
) -> CommitInfo:
    """
    Upload config, weights, evidence and card. Everything is made before anything is sent.

    Args:
        mapper ([`KVMapper`]), repo_id (`str`), max_shard_size (`int` or `str`), private (`bool`, *optional*),
        token (`bool` or `str`, *optional*):
            As for [`KVMapper.push_to_hub`].
        card (`dict`):
            Arguments of [`mapper_card`].
        commit:
            `commit_message`, `commit_description`, `revision` and `create_pr`.

    Raises:
        `HubError`: the Hub cannot be reached, or does not take it.
    """
    api = HfApi(token=token, library_name=LIBRARY)
    with tempfile.TemporaryDirectory() as folder:
        mapper.save_pretrained(folder, max_shard_size=max_shard_size)
        try:
            if "/" not in repo_id:
                repo_id = f"{api.whoami()['name']}/{repo_id}"
            mapper_card(mapper, repo_id, **card).save(Path(folder) / "README.md")
            api.create_repo(repo_id, private=private, exist_ok=True)
            revision = commit.get("revision")
            if revision is not None and not revision.startswith("refs/"):
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            commit["commit_message"] = commit.get("commit_message") or f"Upload mapper {mapper.digest()[:12]}"
            return api.upload_folder(repo_id=repo_id, folder_path=folder, delete_patterns=_REPLACED, **commit)
        except HUB_ERRORS as error:
            todo = advice(error) or "Check the name, the network and `hf auth whoami`."
            raise HubError(f"The mapper cannot be pushed to {repo_id!r}: {error} {todo}") from error
