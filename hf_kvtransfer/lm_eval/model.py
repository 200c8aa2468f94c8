"""Any task of lm-eval, with the context read by a source and answered by the target."""

from collections import Counter
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from ..alignment.spans import character_spans
from ..cache import TranslatedCache
from ..compat import model_name
from ..errors import RefusedError
from ..fidelity.gate import FidelityGate
from ..fidelity.scoring import continuation_logits
from ..mapper import KVMapper, mapper_for
from ..padding import unpad_rows
from ..source import SourceKV


@register_model("hf-kvtransfer")
class KVTransferLM(HFLM):
    """
    lm-eval's `hf` model, the target, which continues from what a source has read of each context.

    The answers to a context are scored, or generated, on a [`TranslatedCache`] of it. What the target reads itself in
    use, it reads itself here: the first tokens, the last one, and the whole context where the probe refuses a
    translation or there is no more than a token. The results count how often (`kvtransfer` in their `config`).

    Args:
        pretrained (`str` or `PreTrainedModel`):
            The target. It and all `kwargs`, such as `dtype`, `peft` and `batch_size`, are as for `hf`. All
            continuations of one context are scored in one batch; `batch_size` is for generation.
        source (`str` or `PreTrainedModel`, *optional*):
            The model that reads. It is loaded in `dtype`, on the target's device.
        mapper (`str` or [`KVMapper`], *optional*):
            From the source to the target.
        source_tokenizer (`str` or `PreTrainedTokenizerBase`, *optional*):
            The source's, by default of the same name.
        gate (`bool`, *optional*, defaults to `True`):
            Whether the default gate must admit the mapper. It need not for a measurement.
        probe_tokens (`int`, *optional*):
            As for [`TranslatedCache`].
        native (`bool`, *optional*, defaults to `False`):
            Let the target read everything itself: the numbers of `hf`, to compare with.

    Raises:
        `ValueError`: without `native` there is no source or no mapper, or an option of `hf` that does not go with it.
        `RefusedError`: the gate does not admit the mapper.

    Example:

    ```python
    >>> lm = KVTransferLM("org/target", source="org/source", mapper="org/source-to-target")
    >>> lm_eval.simple_evaluate(lm, tasks=["hellaswag"], limit=100)["results"]
    ```
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        *,
        source: str | PreTrainedModel | None = None,
        mapper: str | KVMapper | None = None,
        source_tokenizer: str | PreTrainedTokenizerBase | None = None,
        gate: bool = True,
        probe_tokens: int | None = None,
        native: bool = False,
        **kwargs: Any,
    ):
        if not native and (source is None or mapper is None):
            raise ValueError(
                f"`source` is {source!r} and `mapper` {mapper!r}: name the model that reads and the mapper from it to "
                "the target, or say `native=True` to let the target read everything itself."
            )
        super().__init__(pretrained, **kwargs)
        self.native = native
        self.outcomes: Counter[str] = Counter()
        if native:
            return
        if self.backend != "causal" or self.mixed_precision_dtype is not None:
            raise ValueError(
                f"A translated cache is for causal models in a dtype of their own, got backend {self.backend!r} and "
                f"`mixed_precision_dtype` {self.mixed_precision_dtype}. Leave both out, and choose a `dtype`."
            )
        reader: Any = source
        if isinstance(source, str):
            source_tokenizer = source_tokenizer or source
            reader = AutoModelForCausalLM.from_pretrained(
                source, dtype=kwargs.get("dtype", "auto"), trust_remote_code=kwargs.get("trust_remote_code", False)
            ).to(self.device)
        if isinstance(source_tokenizer, str):
            source_tokenizer = AutoTokenizer.from_pretrained(source_tokenizer)
        self.source, self.source_tokenizer = reader.eval(), source_tokenizer or self.tokenizer
        self.mapper = mapper_for(mapper, self.model)
        self.gate, self.probe_tokens = FidelityGate(strict=gate), probe_tokens
        verdict = self.gate.admit(
            self.mapper,
            self.source,
            self.model,
            source_tokenizer=self.source_tokenizer,
            target_tokenizer=self.tokenizer,
        )
        if not verdict.admitted:
            raise RefusedError(f"{verdict}\nTo measure it nevertheless, say `gate=False`.")

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        """As `hf`, if it is native. Else an error: a text that is scored as a whole has no context."""
        if not self.native:
            raise NotImplementedError(
                "This task scores whole texts, and there is no context that the source could read. Run it with "
                "`native=True`, or choose a task that has one."
            )
        return super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        if self.native:
            return super()._loglikelihood_tokens(requests, disable_tqdm=disable_tqdm, override_bs=override_bs)
        groups: dict[tuple[int, ...], list[int]] = {}
        for number, (_, context, continuation) in enumerate(requests):
            room = self.max_length + 1 - len(continuation)  # the last token is predicted, and not read
            if room < 1:
                raise ValueError(
                    f"A continuation has {len(continuation)} tokens, more than the {self.max_length} of `max_length`."
                )
            groups.setdefault(tuple(context[-room:]), []).append(number)
        answers: dict[int, tuple[float, bool]] = {}
        with tqdm(
            total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Scoring continuations"
        ) as progress:
            for ids, numbers in groups.items():
                scores = self._score(list(ids), [requests[number][2] for number in numbers])
                for number, answer in zip(numbers, scores, strict=True):
                    answers[number] = answer
                    self.cache_hook.add_partial("loglikelihood", requests[number][0], answer)
                progress.update(len(numbers))
        return [answers[number] for number in range(len(requests))]

    def _score(self, context: list[int], continuations: list[list[int]]) -> list[tuple[float, bool]]:
        """Log-probability of each continuation of a context, and whether it is the most probable one."""
        cache = self._read(torch.tensor([context]))
        tail = context[int(cache.get_seq_length()) :]
        logits = continuation_logits(self.model, cache, tail, continuations)
        scores = []
        for row, ids in zip(logits.log_softmax(-1, dtype=self.softmax_dtype), continuations, strict=True):
            wanted = torch.tensor(ids, device=row.device)
            row = row[: len(ids)]
            total = row.gather(-1, wanted[:, None]).sum().item()
            scores.append((total, bool((row.argmax(-1) == wanted).all())))
        return scores

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any):
        if not self.native:
            mask = generation_kwargs.pop("attention_mask", None)
            mask = torch.ones_like(context) if mask is None else mask
            cache = self._read(context, mask)
            inputs = {"input_ids": context, "attention_mask": mask}
            prepared = cache.prepare(inputs) if isinstance(cache, TranslatedCache) else inputs
            # The others are passed on by `hf` itself.
            generation_kwargs |= {key: prepared[key] for key in prepared.keys() - {"input_ids", "use_cache"}}
        return super()._model_generate(context=context, max_length=max_length, stop=stop, **generation_kwargs)

    def _read(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> DynamicCache:
        """A cache of contexts `[batch, tokens]` that the source has read; empty where the target is to read them."""
        if input_ids.shape[1] < 2:  # the last token is the target's anyway
            self.outcomes["too short"] += len(input_ids)
            return DynamicCache(config=self.model.config)
        if self.mapper.config.source["tokenizer"] == self.mapper.config.target["tokenizer"]:
            source_kv = SourceKV.prefill(self.source, None, input_ids, attention_mask=attention_mask)
        else:
            rows = unpad_rows(input_ids, attention_mask)
            texts = [character_spans(self.tokenizer, row.tolist())[0] for row in rows]
            source_kv = SourceKV.prefill(self.source, self.source_tokenizer, texts)
        cache = TranslatedCache(
            source_kv,
            self.mapper,
            self.model,
            target_tokenizer=self.tokenizer,
            input_ids=input_ids,
            attention_mask=attention_mask,
            probe_tokens=self.probe_tokens,
            gate=self.gate,
        )
        self.outcomes[cache.report.outcome] += len(input_ids)
        return cache

    def get_model_info(self) -> dict:
        """What goes into the `config` of the results, beside what `hf` says: the pair, and what became of contexts."""
        info: dict[str, Any] = {"native": self.native}
        if not self.native:
            info |= {
                "source": model_name(self.source),
                "mapper": self.mapper.name,
                "mapper_digest": self.mapper.digest(),
                "contexts": dict(self.outcomes),
            }
        return super().get_model_info() | {"kvtransfer": info}
