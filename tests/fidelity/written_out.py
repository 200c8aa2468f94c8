"""What an evaluation computes, written out plainly: whole sequences, no cache, no batch, softmax by hand."""

import torch

from hf_kvtransfer import KVMapper, SourceKV
from hf_kvtransfer.fidelity.data import Passage

from ..tiny_models import identity_mapper, random_ids


def id_passage(ids, context, label=0, **changes) -> Passage:
    """Token ids cut into a context and what follows."""
    continuation = ids[context:]
    return Passage(None, ids[:context], ids[:context], [continuation], [len(continuation)], label, **changes)


@torch.no_grad()
def log_probs(model, read, continuation):
    """Of the continuation's tokens behind those that are read: all of the vocabulary's, `[positions, vocab_size]`."""
    logits = model(torch.tensor([read + continuation])).logits[0].double()
    scored = logits[len(read) - 1 : -1]
    return scored - scored.exp().sum(-1, keepdim=True).log()


def loss(rows, continuation) -> float:
    return -sum(row[token].item() for row, token in zip(rows, continuation, strict=True))


@torch.no_grad()
def attention(model, read, continuation):
    """Attention outputs where the continuation is predicted, for each layer `[positions, hidden_size]`."""
    outputs = []
    hooks = [
        layer.self_attn.register_forward_hook(lambda module, args, output: outputs.append(output[0][0]))
        for layer in model.model.layers
    ]
    model(torch.tensor([read + continuation]))
    for hook in hooks:
        hook.remove()
    return [output[len(read) - 1 : -1] for output in outputs]


@torch.no_grad()
def planted_mapper(source, target) -> KVMapper:
    """The exact mapper to a target that `plant` has made of `source`: layer by layer a linear change of basis."""
    mapper = identity_mapper(source)
    ids = random_ids(source, 4, 100, seed=11)
    source_kv, target_kv = (SourceKV.prefill(model, None, ids) for model in (source, target))
    for i, layer in enumerate(mapper.layers):
        x, y = (kv.features[i].flatten(0, 1).double() for kv in (source_kv, target_kv))
        layer.weight.copy_(torch.linalg.lstsq(x, y).solution.T)
    return mapper
