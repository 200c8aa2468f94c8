"""The artifact: a config, one layer map for each target layer, and the evidence of what they are worth."""

import copy
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from huggingface_hub import CommitInfo
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from .errors import MapperFormatError
from .fidelity.report import FIDELITY_FILE, FidelityReport
from .hub.download import find_mapper_files
from .mapper_config import KVMapperConfig
from .maps import build_layer_map
from .maps.storage import check_storage, dequantized, in_dtype, num_bytes, quantized
from .whole_files import whole_folder


# What is said of where the files are, not of how they are loaded.
_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


class KVMapper(PreTrainedModel):
    """
    Maps a source model's position-free keys and values to a target model's, one target layer at a time.

    Save, load and share it as any transformers model: `save_pretrained`, `from_pretrained`, `push_to_hub`.

    Weights that are stored as codes, or in another dtype than the target computes in, are made dense in it when a
    layer is first translated, and kept beside what they are stored as, which is what is saved, counted and compared
    with the evidence. With `mapper.keep_dense = False` they are made anew in each request, a layer at a time: the
    mapper takes no more memory than its file, and each request takes longer.
    """

    keep_dense = True

    config_class = KVMapperConfig
    base_model_prefix = "mapper"
    main_input_name = "source_features"

    def __init__(self, config: KVMapperConfig):
        super().__init__(config)
        self.source_geometry, self.target_geometry = config.validate_layout()
        self.layers = nn.ModuleList(
            build_layer_map(spec, i, self.source_geometry, self.target_geometry, config.token_features, config.storage)
            if spec is not None
            else nn.Identity()
            for i, spec in enumerate(config.layers)
        )
        self._evidence: FidelityReport | None = None
        self._evidence_file: str | None = None  # read when it is first asked for
        self._digest: tuple[tuple, str] | None = None
        self.revision: str | None = None  # the commit it was loaded from
        self.post_init()

    def _init_weights(self, module: nn.Module):
        """Layer maps initialise themselves; a mapper is fitted or loaded, never used as initialised."""

    @property
    def name(self) -> str:
        """Where the mapper came from, for messages."""
        return self.config._name_or_path or f"{self.config.source['name']} -> {self.config.target['name']}"

    @property
    def dtype(self) -> torch.dtype:
        # An identity without a correction has no weights, and a native layer has none.
        return next((weight.dtype for weight in self.parameters()), torch.float32)

    @property
    def device(self) -> torch.device:
        return next((weight.device for weight in self.parameters()), torch.device("cpu"))

    def layer_on(self, layer_idx: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """
        The map of one target layer with plain weights, on the device where that layer runs and in its dtype.

        A map follows its layer: it is moved for the first request and is there for every later one, where features
        are others in each request and would have to be moved every time. A moved map takes the place of the one it was
        moved from, which is left as it is for requests in other threads that are using it.

        Args:
            layer_idx (`int`):
                The target's layer.
            device (`torch.device`), dtype (`torch.dtype`):
                Where and as what its keys and values are wanted.
        """
        layer_map = self._moved_to(device, layer_idx)
        return in_dtype(layer_map, dtype, keep=self.keep_dense)

    def _moved_to(self, device: torch.device, layer_idx: int) -> nn.Module:
        layer_map = self.layers[layer_idx]
        tensors = [*layer_map.parameters(), *layer_map.buffers()]
        device = torch.empty(0, device=device).device  # "cuda" is a device with a number
        if all(tensor.device == device for tensor in tensors):
            return layer_map
        moved: dict[int, torch.Tensor] = {}
        for tensor in tensors:
            other = tensor.detach().to(device)
            is_parameter = isinstance(tensor, nn.Parameter)
            moved[id(tensor)] = nn.Parameter(other, tensor.requires_grad) if is_parameter else other
        layer_map = copy.deepcopy(layer_map, moved)
        if device.type != "meta":  # where only shapes are
            self.layers[layer_idx] = layer_map
        return layer_map

    def num_bytes(self) -> int:
        """The number of bytes of its tensors, as they are saved."""
        return num_bytes(self)

    def quantize(self, bits: int = 8, group_size: int = 64) -> "KVMapper":
        """
        A new mapper with its weight matrices in 8 or 4 bits. They are made dense when a layer is first used.

        It is another mapper: what was measured with this one says nothing about it, so it has no evidence yet.

        Args:
            bits (`int`, *optional*, defaults to 8):
                8 or 4.
            group_size (`int`, *optional*, defaults to 64):
                Number of weights along the input that share a scale.

        Raises:
            `ValueError`: another number of bits, a group size that is not positive, or the mapper is quantised.
        """
        check_storage(bits, group_size)
        if self.config.storage is not None:
            raise ValueError(
                f"The mapper's weights have {self.config.storage['bits']} bits: rounding them again would lose more. "
                "Quantize the mapper that was fitted, or call `dequantize()` first."
            )
        maps = [quantized(layer_map, bits, group_size) for layer_map in self.layers]
        return self._with_layers(maps, {"bits": bits, "group_size": group_size})

    def dequantize(self, dtype: torch.dtype | None = None) -> "KVMapper":
        """
        A new mapper with plain weights of `dtype`, by default that of its biases. What was rounded stays rounded.
        """
        return self._with_layers([dequantized(layer_map, dtype or self.dtype) for layer_map in self.layers], None)

    def _with_layers(self, maps: list[nn.Module], storage: dict | None) -> "KVMapper":
        config = copy.deepcopy(self.config)
        config.storage = storage
        with torch.device("meta"):  # its own maps are thrown away
            other = type(self)(config)
        other.layers = nn.ModuleList(maps)
        other.config._name_or_path = ""  # what it was loaded from is another one
        return other.train(self.training)

    @property
    def evidence(self) -> FidelityReport | None:
        """
        What was measured with this mapper: the `fidelity.json` beside its weights, or a report that was set.

        Raises:
            `EvidenceError`: the file is damaged or was edited.
        """
        if self._evidence is None and self._evidence_file is not None:
            self._evidence = FidelityReport.load(self._evidence_file)
        return self._evidence

    @evidence.setter
    def evidence(self, report: FidelityReport | None) -> None:
        if report is not None:
            report.check()
        self._evidence, self._evidence_file = report, None

    def digest(self) -> str:
        """
        Says whether two mappers are the same: SHA-256 of what the config says about the pair and the layout, and of
        the weights rounded to bfloat16, so that a bfloat16 mapper has the same one in float32. Of quantised weights
        the codes count.

        It is computed anew when a weight was changed in place, but not after changes through `.data`, which leave no
        trace.
        """
        state = self.state_dict()
        sides = [[side["geometry"], side["tokenizer"]] for side in (self.config.source, self.config.target)]
        described = [sides, self.config.layers, self.config.token_features, self.config.sink_tokens]
        if self.config.storage is not None:  # plain mappers keep the digests they have always had
            described.append(self.config.storage)
        layout = json.dumps(described, sort_keys=True)
        version = (layout, *((tensor.data_ptr(), tensor._version) for tensor in state.values()))
        if self._digest is None or self._digest[0] != version:
            digest = hashlib.sha256(layout.encode())
            for name, tensor in sorted(state.items()):
                digest.update(name.encode())
                tensor = tensor.detach().to("cpu", torch.bfloat16 if tensor.is_floating_point() else tensor.dtype)
                digest.update(tensor.contiguous().view(torch.uint8).numpy())
            self._digest = version, digest.hexdigest()
        return self._digest[1]

    def save_pretrained(self, save_directory: str | Path, *args, **kwargs) -> None:
        """
        As [`~transformers.PreTrainedModel.save_pretrained`], and writes the evidence, if there is any, beside.

        Raises:
            `OSError`: the disk is full, or the folder cannot be written to. What is in it is left as it was.
            `ValueError`: with `push_to_hub`, which would upload the weights without their evidence.
        """
        if kwargs.pop("push_to_hub", False):
            raise ValueError("`push_to_hub=True` would leave the evidence behind: call `mapper.push_to_hub(repo_id)`.")
        evidence = self.evidence
        # What was there before is of another mapper.
        replaced = ("model*.safetensors", SAFE_WEIGHTS_INDEX_NAME, FIDELITY_FILE)
        with whole_folder(Path(save_directory), replaced) as folder:
            super().save_pretrained(folder, *args, **kwargs)
            if not self.state_dict():
                # transformers writes no file for a mapper of identities, and reads no folder without one.
                save_file({}, folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
            if evidence is not None:
                evidence.save(folder)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        base_models: tuple[str, str] | None = None,
        license: str | None = None,
        tags: Sequence[str] = (),
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: bool | str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        max_shard_size: int | str = "50GB",
    ) -> CommitInfo:
        """
        Upload the mapper, its evidence and a card made from both, in one commit.

        Args:
            repo_id (`str`):
                The repository, made if it is not there. What another mapper has left in it is replaced.
            base_models (`tuple[str, str]`, *optional*):
                Hub ids of the source and the target, by which [`find_mappers`] finds the mapper. By default the names
                that they were loaded by in the fit; needed if those were folders.
            license (`str`, *optional*):
                For the card, such as `"apache-2.0"`.
            tags (`Sequence[str]`, *optional*):
                Further ones for the card.
            commit_message (`str`, *optional*), commit_description (`str`, *optional*), private (`bool`, *optional*),
            token (`bool` or `str`, *optional*), revision (`str`, *optional*), create_pr (`bool`, *optional*),
            max_shard_size (`int` or `str`, *optional*):
                As for [`~transformers.PreTrainedModel.push_to_hub`].

        Returns:
            `CommitInfo`: The commit, with its `oid` and `commit_url`.

        Raises:
            `HubError`: the Hub cannot be reached, or does not take it.
        """
        from .hub.upload import push_mapper  # the card shows the gate's verdict, and the gate knows mappers

        return push_mapper(
            self,
            repo_id,
            card={"base_models": base_models, "license": license, "tags": tags},
            max_shard_size=max_shard_size,
            private=private,
            token=token,
            commit_message=commit_message,
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
        )

    def check_finite(self) -> "KVMapper":
        """Raise [`MapperFormatError`] if a weight is NaN or infinite, else return the mapper."""
        for key, tensor in self.state_dict().items():
            if not torch.isfinite(tensor).all():
                raise MapperFormatError(
                    f"Tensor {key!r} of mapper {self.name} holds NaN or Inf: the artifact is damaged, or the fit "
                    "overflowed. Download it or fit it again."
                )
        return self

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, *model_args, **kwargs):
        """
        Load a mapper from a folder or the Hub.

        Takes the arguments of [`~transformers.PreTrainedModel.from_pretrained`]: `revision`, `subfolder`, `token`,
        `cache_dir`, `local_files_only` and `dtype` among them, which leaves the codes of quantised weights as they
        are. In place of float16, which has no small bfloat16 numbers, weights are loaded in bfloat16.

        From the Hub, config, weights and evidence are of one commit, which `mapper.revision` names. With
        `HF_HUB_OFFLINE=1`, or without a network, what was downloaded before is used.

        Raises:
            `MapperFormatError`: it is no mapper or cannot be downloaded, a file or a tensor is missing, left over, of
                the wrong shape, NaN or Inf, or the format is unknown. transformers itself would fill what is missing
                with fresh weights.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        # Only safetensors: an artifact is data, nothing in it is unpickled.
        kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True, "use_safetensors": True}
        if kwargs.get("dtype") in (torch.float16, "float16"):
            kwargs["dtype"] = torch.bfloat16
        name = str(pretrained_model_name_or_path)
        hub = {key: value for key in _HUB_ARGUMENTS if (value := kwargs.pop(key, None)) is not None}
        try:
            folder, commit = find_mapper_files(name, **hub)
            mapper, info = super().from_pretrained(folder, *model_args, **kwargs)
        except (
            OSError,
            SafetensorError,
            ValueError,
            TypeError,
            LookupError,
            AttributeError,
            RuntimeError,
            OverflowError,
        ) as error:
            raise MapperFormatError(
                f"No mapper can be loaded from {name!r}: {type(error).__name__}: {error} "
                + " ".join(
                    getattr(error, "__notes__", None)
                    or [
                        "A mapper is a folder or Hub repository with config.json and model.safetensors: check the "
                        "name, or download it again."
                    ]
                )
            ) from error
        problems = {
            "missing": sorted(info["missing_keys"]),
            "unknown": sorted(info["unexpected_keys"]),
            "of another shape than config.json says": sorted(str(key) for key, *_ in info["mismatched_keys"]),
            "unreadable": list(info["error_msgs"]),
        }
        if any(problems.values()):
            found = "; ".join(f"{what}: {', '.join(keys[:4])}" for what, keys in problems.items() if keys)
            raise MapperFormatError(
                f"The tensors of mapper {name!r} do not fit its config ({found}). "
                "Its files are of different versions or damaged: download it or fit it again."
            )
        mapper.check_finite()
        mapper.config._name_or_path = name  # and not where it lies in a cache
        mapper.revision = commit
        if (folder / FIDELITY_FILE).is_file():
            mapper._evidence_file = str(folder / FIDELITY_FILE)
        return (mapper, info) if wants_info else mapper


def mapper_for(mapper: KVMapper | str | Path, target: PreTrainedModel, revision: str = "main") -> KVMapper:
    """
    A mapper, or the one in a folder or on the Hub in the dtype that a target computes in, so that no layer map is
    converted at every request.

    Args:
        mapper ([`KVMapper`], `str` or `Path`):
            Is returned as it is, or loaded.
        target (`PreTrainedModel`):
            The model that it is to be used on.
        revision (`str`, *optional*, defaults to `"main"`):
            Of a Hub id.

    Raises:
        `MapperFormatError`, `HubError`: it cannot be loaded.
    """
    if isinstance(mapper, KVMapper):
        return mapper
    return cast(KVMapper, KVMapper.from_pretrained(mapper, revision=revision, dtype=target.dtype))
