"""A mapper's model card, made from its config and its evidence."""

import re
from collections.abc import Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..fidelity.effort_advice import effort_advice
from ..fidelity.gate import FidelityGate, Verdict
from ..fidelity.report import FidelityReport
from ..fidelity.tables import tables
from ..layer_table import explained_variance, layer_table
from ..mapper import KVMapper


LIBRARY = "hf-kvtransfer"

# The Hub's form of a model's id. A folder's name is none, and would be refused as a base model.
_MODEL_ID = re.compile(r"[\w.-]+/[\w.-]+")

_TEMPLATE = """---
{{ card_data }}
---

# {{ source }} to {{ target }}

A KV cache mapper: {{ target }} continues from what {{ source }} has read, without reading it again. Keys and values
are translated layer by layer inside `generate`, with [hf-kvtransfer](https://pypi.org/project/hf-kvtransfer).

## Use

```python
from hf_kvtransfer import SourceKV, TranslatedCache

source_kv = SourceKV.prefill(source, source_tokenizer, context)
cache = TranslatedCache(source_kv, "{{ repo_id }}", target, target_tokenizer=target_tokenizer)
output = target.generate(**cache.prepare(target_tokenizer(context + question, return_tensors="pt")))
```

`source` and `target` are the two models, `print(cache.report)` says what became of the request. If the translation
cannot be trusted, the cache is empty, and the target reads the context itself.

## What it is worth

{{ verdict }}

{{ evidence }}

## What it is

{{ description }}

<details>
<summary>Layer by layer</summary>

{{ layers }}

</details>

## Limits

- A translated cache is an approximation: fluent text from it can be wrong, most of all where details far back in the
  context matter.
- It is for these two checkpoints and their tokenizers. Other weights, a fine-tune, an adapter or a quantised copy are
  refused, until they are measured themselves: `hf-kvtransfer evaluate`.
- What was measured holds for text of the kinds and lengths that were measured.
- It is of use with both models only, and made from what they compute: the licences of both apply.
"""


def pair_tags(source: str, target: str) -> list[str]:
    """The tags by which a mapper for a pair, in this direction, is found."""
    return [LIBRARY, f"kv-source:{source}", f"kv-target:{target}"]


def mapper_card(
    mapper: KVMapper,
    repo_id: str,
    base_models: tuple[str, str] | None = None,
    license: str | None = None,
    tags: Sequence[str] = (),
) -> ModelCard:
    """
    Make the card that a mapper is pushed with.

    Args:
        mapper ([`KVMapper`]):
            With its evidence, if it has any.
        repo_id (`str`):
            Where it is going to be.
        base_models (`tuple[str, str]`, *optional*):
            Hub ids of source and target, by default their names in the config.
        license (`str`, *optional*):
            As the Hub names it.
        tags (`Sequence[str]`, *optional*):
            Further tags.

    Raises:
        `ValueError`: `base_models` are not two ids.
        `EvidenceError`: the evidence is damaged.
    """
    config, report = mapper.config, mapper.evidence
    if base_models is not None and not (len(base_models) == 2 and all(map(_MODEL_ID.fullmatch, base_models))):
        raise ValueError(f"`base_models` must be the two Hub ids of source and target, got {base_models!r}.")
    source, target = base_models or (config.source["name"], config.target["name"])
    metadata = ModelCardData(
        library_name=LIBRARY,
        license=license,
        base_model=[name for name in dict.fromkeys((source, target)) if _MODEL_ID.fullmatch(name)] or None,
        tags=list(dict.fromkeys([*pair_tags(source, target), "kv-cache", *tags])),
        model_name=repo_id.rpartition("/")[2],
        eval_results=_eval_results(report) or None,
    )
    gate = FidelityGate()
    verdict = gate.admit(mapper, None, None)
    return ModelCard.from_template(
        metadata,
        template_str=_TEMPLATE,
        source=source,
        target=target,
        repo_id=repo_id,
        verdict=_describe_verdict(verdict, effort_advice(gate, verdict, report)),
        evidence=_describe_evidence(report),
        description=_describe_mapper(mapper),
        layers=f"```\n{layer_table(mapper).to_markdown()}\n```",
    )


def _eval_results(report: FidelityReport | None) -> list[EvalResult]:
    """Of the whole evaluation and of each capability, where they could be measured."""
    if report is None:
        return []
    groups = {"all of the evidence": report.figures} | report.figures["capabilities"]
    results = []
    for name, group in groups.items():
        translated = group["arms"]["translated"]
        metrics = {
            "gap_recovered": ("Gap recovered", (translated["gap_recovered"] or {}).get("value")),
            "agreement": ("Next token as after its own prefill", translated["agreement"]),
        }
        results += [
            EvalResult(
                task_type="text-generation",
                dataset_type=re.sub(r"\W+", "-", name.lower()).strip("-"),
                dataset_name=name,
                metric_type=metric,
                metric_name=title,
                metric_value=round(value, 4),
            )
            for metric, (title, value) in metrics.items()
            if value is not None
        ]
    return results


def _describe_verdict(verdict: Verdict, advice: str | None) -> str:
    if verdict.admitted:
        return "The default gate admits it."
    reasons = "\n".join(f"- {reason}" for reason in verdict.reasons)
    return (
        f"**The default gate refuses it** for general use, because:\n\n{reasons}\n\n{f'{advice} ' if advice else ''}"
        "A use that asks for less can say so, see `FidelityGate`."
    )


def _describe_evidence(report: FidelityReport | None) -> str:
    if report is None:
        return "Nothing was measured yet."
    data = ", ".join(f"{source.get('name')} ({source.get('documents')} documents)" for source in report.data)
    head = f"Measured {report.created} on {data}. All of it is in `fidelity.json`."
    return "\n\n".join([head, *(table.to_markdown() for table in tables(report))])


def _describe_mapper(mapper: KVMapper) -> str:
    config = mapper.config
    facts: dict[str, Any] = {
        "Source": mapper.source_geometry.describe(),
        "Target": mapper.target_geometry.describe(),
        "Size": f"{mapper.num_bytes() / 1e6:.1f} MB"
        + (f", weights of {config.storage['bits']} bits" if config.storage else ""),
    }
    if config.native_layers is not None:
        facts["The target computes itself"] = f"layers 0 to {config.native_layers}"
    fit = config.fit or {}
    if "train_tokens" in fit:
        facts["Fitted on"] = f"{fit['train_tokens']:,} tokens of {fit.get('num_texts', '?')} texts"
    if (explained := explained_variance(mapper)) is not None:
        facts["Explained variance, held out"] = f"{explained['keys']:.3f} of keys, {explained['values']:.3f} of values"
    return "\n".join(f"- {name}: {fact}" for name, fact in facts.items())
