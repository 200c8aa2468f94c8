"""Models of the benchmarks: the demo models, and what is made of them by a LoRA trained on a CPU, once."""

import functools
import random
from collections.abc import Callable

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    get_cosine_schedule_with_warmup,
)
from transformers.utils import logging

from hf_kvtransfer.demo_models import demo_model_path, load_demo_model


SMOLLM2, GEMMA = "smollm2-135m-instruct", "gemma-3-270m"

STEPS = {"finetuned": 120, "pruned": 240}  # 5 and 8 minutes on two cores
BLOCK = 512  # tokens in a step
PRUNED_LAYERS = 6  # of 30


def demo(name: str, **options):
    """Loader of a demo model."""
    return lambda rows: load_demo_model(name, **options)


def smollm2_4bit(rows: list[dict]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The same checkpoint in 4 bits of bitsandbytes, computing in float32."""
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    return load_demo_model(SMOLLM2, quantization_config=quantization)


def smollm2_finetuned(rows: list[dict]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2 after some minutes on word problems: what a new version of a model is to the old one."""
    texts = [row["text"] for row in rows if row["source"] == "gsm8k"]
    return _made("finetuned", functools.partial(merged_lora, texts=texts, steps=STEPS["finetuned"]))


def smollm2_pruned(rows: list[dict]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2 without the layers that change least, healed on text of all kinds."""
    texts = [row["text"] for row in rows]

    def make(model, tokenizer):
        drop_layers(model, least_needed_layers(model, tokenizer, texts[:8], PRUNED_LAYERS))
        return merged_lora(model, tokenizer, texts, STEPS["pruned"])

    return _made("pruned", make)


def _made(
    name: str, make: Callable[[PreTrainedModel, PreTrainedTokenizerBase], PreTrainedModel]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """What `make` makes of SmolLM2, from the folder beside it, in which it is saved the first time."""
    folder = demo_model_path(SMOLLM2).with_name(f"{SMOLLM2}-{name}")
    if not folder.is_dir():
        model, tokenizer = load_demo_model(SMOLLM2)
        unfinished = folder.with_name(f".{folder.name}.partial")
        make(model, tokenizer).save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        unfinished.rename(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def merged_lora(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str], steps: int
) -> PreTrainedModel:
    """A model into whose weights a LoRA was merged."""
    return train_lora(model, tokenizer, texts, steps).merge_and_unload()


def train_lora(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: list[str],
    steps: int,
    target_modules: str | list[str] = "all-linear",
    layers: list[int] | None = None,
) -> PeftModel:
    """Train a LoRA on blocks of text, in a fixed order: of some modules, of some layers."""
    torch.manual_seed(0)
    texts = random.Random(0).sample(texts, len(texts))
    ids = [i for text in texts for i in (*tokenizer(text).input_ids, tokenizer.eos_token_id)]
    blocks = [ids[start : start + BLOCK] for start in range(0, len(ids) - BLOCK + 1, BLOCK)]
    config = LoraConfig(r=16, lora_alpha=32, target_modules=target_modules, layers_to_transform=layers)
    adapted = get_peft_model(model, config).train()
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-4)
    schedule = get_cosine_schedule_with_warmup(optimizer, min(10, steps // 2), steps)
    with logging.tqdm(range(steps), desc="Training a LoRA") as progress:
        for step in progress:
            input_ids = torch.tensor([blocks[step % len(blocks)]])
            loss = adapted(input_ids=input_ids, labels=input_ids, use_cache=False).loss
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            progress.set_postfix(loss=f"{loss.item():.3f}")
    return adapted.eval()


@torch.no_grad()
def least_needed_layers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str], count: int
) -> list[int]:
    """Layers whose output is most similar to their input, but neither the first nor the last."""
    similarity = torch.zeros(model.config.num_hidden_layers)
    for text in texts:
        input_ids = torch.tensor([tokenizer(text).input_ids[:BLOCK]])
        states = model(input_ids, output_hidden_states=True, use_cache=False, logits_to_keep=1).hidden_states
        similarity += torch.stack(
            [nn.functional.cosine_similarity(*pair, dim=-1).mean() for pair in zip(states, states[1:], strict=False)]
        )
    return (similarity[1:-1].topk(count).indices + 1).sort().values.tolist()


def drop_layers(model: PreTrainedModel, dropped: list[int]):
    """Take layers out of a Llama model, in place."""
    kept = [layer for i, layer in enumerate(model.model.layers) if i not in dropped]
    model.model.layers = nn.ModuleList(kept)
    for i, layer in enumerate(kept):
        layer.self_attn.layer_idx = i
    model.config.num_hidden_layers = len(kept)
