"""`distill_mapper`: train the maps of a fitted mapper end to end, through the frozen target."""

import copy
import hashlib
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, get_cosine_schedule_with_warmup
from transformers.utils import logging

from ..compat import input_device, unwrap
from ..errors import CalibrationError
from ..identity import ModelIdentity
from ..mapper import KVMapper
from .arguments import check_numbers
from .continuations import Continuations, ReadText
from .long_texts import long_texts
from .states import PairedStates
from .text import calibration_texts
from .trained_maps import TrainedMaps
from .training_state import TrainingState


# Steps until the learning rate is reached: gradients of the first are dominated by a few texts.
WARMUP_STEPS = 10


def distill_mapper(
    mapper: KVMapper,
    source: PreTrainedModel,
    target: PreTrainedModel,
    texts: str | Path | Mapping | Iterable,
    *,
    source_tokenizer: PreTrainedTokenizerBase | None = None,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    epochs: int = 1,
    batch_size: int = 2,
    max_length: int = 1024,
    continuation_length: int = 64,
    continuations: int = 6,
    train_weights: bool = False,
    learning_rate: float = 0.01,
    held_out_texts: int = 8,
    evaluate_every: int = 25,
    checkpoint: str | Path | None = None,
    seed: int = 0,
) -> KVMapper:
    """
    Train a mapper on what it is for: the target's predictions on a translated cache are to be those on its own.

    The closed form makes every error in a key or a value equally bad, and what is uncertain small. Here the target
    goes on at several places of each text, on the translation of what stands before, and the maps follow the gradient
    of the Kullback-Leibler divergence (knowledge distillation, Hinton et al., 2015, arXiv:1503.02531) through the
    frozen model. The parameters that did best on held-out texts are kept: the result is never worse there than what it
    began with. Nothing is added to the mapper: corrections are folded into its weights.

    Args:
        mapper ([`KVMapper`]):
            As [`fit_mapper`] made it; it is not changed. If it is quantised, so is the result: its weights are rounded
            once more.
        source (`PreTrainedModel`), target (`PreTrainedModel`):
            The two models. The target's output head is exchanged for a part of it while this runs.
        texts (`str`, `Path`, `Mapping` or `Iterable`):
            As in [`fit_mapper`], and of an end.
        source_tokenizer (`PreTrainedTokenizerBase`, *optional*),
        target_tokenizer (`PreTrainedTokenizerBase`, *optional*):
            The models' tokenizers. One is enough if they share it.
        epochs (`int`, *optional*, defaults to 1):
            How often each text is read, by both models.
        batch_size (`int`, *optional*, defaults to 2):
            Texts in a step. Their gradients are summed one by one, so memory is that of one text.
        max_length (`int`, *optional*, defaults to 1024):
            Target tokens to which each text is cut.
        continuation_length (`int`, *optional*, defaults to 64):
            Tokens that the target reads on each translation, and is compared at.
        continuations (`int`, *optional*, defaults to 6):
            Places in a text where it does.
        train_weights (`bool`, *optional*, defaults to `False`):
            Whether all weights of the maps are trained, or only corrections of what they put out: scales and shifts,
            and mixes within a head, see [`OutputCorrection`]. Maps that cannot be corrected so, identities and MLPs
            of `"residual_mlp"`, are always trained themselves.
        learning_rate (`float`, *optional*, defaults to 0.01):
            The largest change of an output's scale in one step, relative to it. Other parameters follow.
        held_out_texts (`int`, *optional*, defaults to 8):
            Texts that are not trained on here, at even distances. If the mapper was fitted on them, the divergence on
            them is lower than on others, before and after.
        evaluate_every (`int`, *optional*, defaults to 25):
            Steps from one look at the held-out texts to the next.
        checkpoint (`str` or `Path`, *optional*):
            A folder in which the state of the training is kept, each time the held-out texts were looked at. A second
            call with the same arguments goes on from there. Deleted at the end.
        seed (`int`, *optional*, defaults to 0):
            Of the order of texts and of the places in them.

    Returns:
        [`KVMapper`]: In `mapper`'s dtype, with no evidence yet. Its config's `fit["distillation"]` holds the settings
        and the held-out divergence at each look.

    Raises:
        `CalibrationError`: too few texts, or none long enough for a continuation.
        `ValueError`: an argument that is not positive.
    """
    settings = {
        "epochs": epochs,
        "batch_size": batch_size,
        "max_length": max_length,
        "continuation_length": continuation_length,
        "continuations": continuations,
        "learning_rate": learning_rate,
        "held_out_texts": held_out_texts,
        "evaluate_every": evaluate_every,
    }
    check_numbers(**settings)
    settings["train_weights"] = train_weights
    source_tokenizer, target_tokenizer = source_tokenizer or target_tokenizer, target_tokenizer or source_tokenizer
    min_length = mapper.config.sink_tokens + 2 * continuation_length
    kept = long_texts(
        PairedStates(source, target, source_tokenizer, target_tokenizer, False, 0, max_length),
        calibration_texts(texts, target_tokenizer, seed),
        min_length,
    )
    if len(kept) <= held_out_texts:
        raise CalibrationError(
            f"{len(kept)} of the `texts` have at least {min_length} tokens, room for a context and a continuation, "
            f"and {held_out_texts} are held out: give more or longer texts, or lower `held_out_texts` or "
            "`continuation_length`."
        )
    held_out = {i * len(kept) // held_out_texts for i in range(held_out_texts)}
    train = [i for i in range(len(kept)) if i not in held_out]
    dtype, storage, digest = mapper.dtype, mapper.config.storage, mapper.digest()
    mapper = (
        mapper.dequantize(torch.promote_types(dtype, torch.float32)).to(input_device(target)).requires_grad_(False)
    )
    reader = Continuations(
        mapper,
        source,
        target,
        source_tokenizer,
        target_tokenizer,
        continuation_length,
        continuations,
        token_ids=torch.cat([ids for _, ids in kept]).unique().tolist(),
    )

    def read(number: int, draw: int) -> ReadText:
        text, ids = kept[number]
        return reader.read(text, reader.places(len(ids), seed, draw))

    # Each time that a text is read has a number of its own, for the draw of places; held-out ones have theirs.
    watched = [read(number, number) for number in sorted(held_out)]
    trained = TrainedMaps(reader, watched, train_weights)
    num_steps = -(-len(train) * epochs // batch_size)
    optimizer = torch.optim.Adam(trained.groups(learning_rate), betas=(0.9, 0.98))
    schedule = get_cosine_schedule_with_warmup(optimizer, min(WARMUP_STEPS, num_steps // 2), num_steps)
    depends_on = settings | {
        "seed": seed,
        "mapper": digest,
        "texts": hashlib.sha256(json.dumps([ids.tolist() for _, ids in kept]).encode()).hexdigest(),
        "source": ModelIdentity.from_model(source, source_tokenizer).to_dict(),
        "target": ModelIdentity.from_model(target, target_tokenizer).to_dict(),
    }
    state = TrainingState(checkpoint, trained.parameters, optimizer, schedule, depends_on)

    with ExitStack() as stack:
        stack.enter_context(_frozen(target))
        progress = stack.enter_context(logging.tqdm(desc="Distilling", total=num_steps, initial=state.num_steps))
        if not state.history:
            state.look(_mean_divergence(reader, watched))
        order = [i for epoch in range(epochs) for i in random.Random(f"{seed} {epoch}").sample(train, len(train))]
        for first in range(state.num_steps * batch_size, len(order), batch_size):
            batch = order[first : first + batch_size]
            for draw, number in enumerate(batch, start=first):
                (reader.divergence(read(number, 2**32 + draw)) / len(batch)).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            state.num_steps += 1
            progress.update()
            if state.num_steps % evaluate_every == 0 or state.num_steps == num_steps:
                state.look(_mean_divergence(reader, watched))
                progress.set_postfix(held_out=f"{state.history[-1][1]:.4f}", best=f"{state.best_score:.4f}")
                state.save()
    state.restore_best()
    trained.finish()
    config = copy.deepcopy(mapper.config)
    config.fit = (config.fit or {}) | {
        "distillation": settings | {"seed": seed, "train_texts": len(train), "held_out_divergence": state.history}
    }
    mapper.config = config
    state.remove()
    if storage is not None:
        mapper = mapper.quantize(**storage)  # before its vectors are rounded, too
    return (mapper if mapper.dtype == dtype else mapper.to(dtype)).eval().requires_grad_(False)


@torch.no_grad()
def _mean_divergence(reader: Continuations, texts: Sequence[ReadText]) -> float:
    return sum(reader.divergence(text).item() for text in texts) / len(texts)


class _frozen:
    """While it is entered, a model's parameters have no gradients."""

    def __init__(self, model: PreTrainedModel):
        self._parameters = [p for p in unwrap(model).parameters() if p.requires_grad]

    def __enter__(self) -> None:
        for parameter in self._parameters:
            parameter.requires_grad_(False)

    def __exit__(self, *exception) -> None:
        for parameter in self._parameters:
            parameter.requires_grad_(True)
