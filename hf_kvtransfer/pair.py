"""Is this the pair of models that a mapper was fitted for?"""

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .compat import model_name
from .errors import PairMismatchError, TokenizerMismatchError
from .geometry import KVGeometry
from .identity.tokenizer import tokenizer_fingerprint
from .mapper import KVMapper
from .source import SourceKV


def check_pair(
    mapper: KVMapper,
    source_kv: SourceKV,
    target: PreTrainedModel,
    target_geometry: KVGeometry,
    target_tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    """
    Check that a mapper was fitted for the models and tokenizers that it is to be used with.

    Raises:
        `PairMismatchError`: a model caches something of another shape, or its embeddings are of another width.
        `TokenizerMismatchError`: a tokenizer is another one, or is needed and was not given.
    """
    config, name = mapper.config, mapper.name
    sides = (
        ("source", source_kv.geometry, mapper.source_geometry, source_kv.identity.name),
        ("target", target_geometry, mapper.target_geometry, model_name(target)),
    )
    for side, found, expected, name_found in sides:
        if found != expected:
            raise PairMismatchError(
                f"Mapper {name} was fitted for a {side} of {expected.describe()} "
                f"({getattr(config, side)['name']}), but the {side} given ({name_found}) caches "
                f"{found.describe()}. Use the mapper of this pair, or fit one with `fit_mapper`."
            )
    if config.native_layers is None:
        check_token_features(mapper, target, target.get_input_embeddings().embedding_dim)
    target_id = None if target_tokenizer is None else tokenizer_fingerprint(target_tokenizer)
    expected_ids = config.source["tokenizer"], config.target["tokenizer"]
    for side, found_id, expected_id in zip(
        ("source", "target"), (source_kv.identity.tokenizer, target_id), expected_ids, strict=True
    ):
        if found_id is None and expected_ids[0] == expected_ids[1]:
            continue  # one tokenizer on both sides: token ids are enough
        if found_id is None:
            way = "target_tokenizer=" if side == "target" else "tokenizer= to SourceKV"
            raise TokenizerMismatchError(
                f"Mapper {name} is for models with different tokenizers: pass the {side}'s tokenizer ({way})."
            )
        if expected_id is not None and found_id != expected_id:
            raise TokenizerMismatchError(
                f"The {side}'s tokenizer (fingerprint {found_id}) is not the one that mapper {name} was fitted "
                f"with ({expected_id}): its vocabulary, merges, normalisation or added tokens differ. Load the "
                f"tokenizer of {getattr(config, side)['name']}, or fit a mapper for this one."
            )


def check_token_features(mapper: KVMapper, target: PreTrainedModel, width: int) -> None:
    """
    Check that what the maps read of the target itself is as wide as in the fit.

    Args:
        mapper ([`KVMapper`]):
            The mapper.
        target (`PreTrainedModel`):
            The target, for its name.
        width (`int`):
            Of its embeddings. With native layers of the hidden states that they leave, which is known once they have
            run: some models project their embeddings.

    Raises:
        `PairMismatchError`: it is another width, and the maps read it.
    """
    config = mapper.config
    if config.token_features not in (0, width):
        read = "token embeddings" if config.native_layers is None else f"hidden states of layer {config.native_layers}"
        raise PairMismatchError(
            f"Mapper {mapper.name} reads {read} of width {config.token_features}, those of the target "
            f"({model_name(target)}) are {width} wide. Use the mapper of this pair."
        )
