"""What a mapper's config.json says: the pair, and the kind of every layer's map."""

from transformers import PreTrainedConfig

from .errors import MapperFormatError
from .geometry import KVGeometry
from .maps.storage import check_storage


FORMAT_VERSION = 1


class KVMapperConfig(PreTrainedConfig):
    """
    What a mapper was fitted for, and how it is built.

    Args:
        source (`dict`), target (`dict`):
            For each side `name`, `geometry` (see [`KVGeometry`]) and `tokenizer` (a fingerprint, `None` if the mapper
            was fitted on token ids alone).
        layers (`list[dict | None]`):
            For each target layer the `kind` of its map, the `source_layers` it reads and what else the kind needs,
            `None` for a layer that caches nothing of its own. The target's first layers may be `{"kind": "native"}`:
            it computes them itself.
        token_features (`int`, *optional*, defaults to 0):
            Width of the target's own view of a token if the maps read it, else 0: its embedding, or with native
            layers the input of the last one's attention.
        sink_tokens (`int`, *optional*, defaults to 4):
            First tokens of a context, left out of the fit and read by the target itself.
        fit (`dict`, *optional*):
            How the mapper was fitted: data, number of tokens, ridge strengths, held-out explained variance.
        storage (`dict`, *optional*):
            `bits` and `group_size` of quantised weights, `None` if they are plain numbers.
        format_version (`int`, *optional*, defaults to 1):
            Version of this layout.
    """

    model_type = "kv_mapper"

    source: dict | None = None
    target: dict | None = None
    layers: list | None = None
    token_features: int = 0
    sink_tokens: int = 4
    fit: dict | None = None
    storage: dict | None = None
    format_version: int = FORMAT_VERSION

    @property
    def native_layers(self) -> int | None:
        """The last of the target's layers that it computes itself, `None` if all are mapped."""
        native = [i for i, spec in enumerate(self.layers or []) if spec is not None and spec.get("kind") == "native"]
        return native[-1] if native else None

    @property
    def mapped_layers(self) -> list[int]:
        """The target's layers that are mapped: those that cache something of their own, but for native ones."""
        return [i for i, spec in enumerate(self.layers or []) if spec is not None and spec.get("kind") != "native"]

    @property
    def previous_tokens(self) -> int:
        """Of how many tokens before a token the maps read the token features, at most."""
        return max((spec.get("previous_tokens", 0) for spec in self.layers or [] if spec is not None), default=0)

    @property
    def copies_layers(self) -> bool:
        """Whether each target layer gets what the source layer of its number holds, as it is."""
        return all(
            spec is None or spec == {"kind": "identity", "source_layers": [i], "rank": 0}
            for i, spec in enumerate(self.layers or [])
        )

    def validate_layout(self) -> tuple[KVGeometry, KVGeometry]:
        """
        Check that the config describes a mapper that this version can build.

        Returns:
            `tuple[KVGeometry, KVGeometry]`: Geometry of the source and of the target.

        Raises:
            `MapperFormatError`: a field is missing, of the wrong type or of an unknown format version, or native
                layers stand behind others.
        """
        if self.format_version != FORMAT_VERSION:
            raise MapperFormatError(
                f"The mapper's `format_version` is {self.format_version!r}, this version of hf-kvtransfer reads "
                f"{FORMAT_VERSION}. Update hf-kvtransfer or use another revision of the mapper."
            )
        try:
            for side in (self.source, self.target):
                if not isinstance(side["name"], str) or not isinstance(side["tokenizer"], str | None):
                    raise ValueError(f"name {side['name']!r}, tokenizer {side['tokenizer']!r}")
            for name in ("token_features", "sink_tokens"):
                number = getattr(self, name)
                if type(number) is not int or number < 0:
                    raise ValueError(f"`{name}` must be an integer of 0 or more, got {number!r}")
            source, target = (KVGeometry.from_dict(side["geometry"]) for side in (self.source, self.target))
            consistent = len(self.layers) == len(target.layers) and all(
                (spec is None) == (layer is None) for spec, layer in zip(self.layers, target.layers, strict=True)
            )
            native = [spec["kind"] == "native" for spec in self.layers if spec is not None]
            if self.storage is not None:
                check_storage(**self.storage)
        except (TypeError, KeyError, ValueError) as error:
            raise MapperFormatError(f"The mapper's config.json is incomplete or damaged: {error!r}.") from error
        if not consistent:
            raise MapperFormatError(
                f"The mapper's config lists {len(self.layers)} layer maps for a target of {target.describe()}."
            )
        if native != sorted(native, reverse=True):
            layers = [i for i, spec in enumerate(self.layers) if spec is not None and spec["kind"] == "native"]
            raise MapperFormatError(
                f"The mapper's config leaves layers {layers} to the target, which can run its first layers without "
                "the others, but no later ones. Let the `native` layers be its first."
            )
        return source, target
