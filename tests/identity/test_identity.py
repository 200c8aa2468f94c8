"""Copies of a model are that model, and whatever changes what it computes is noticed and named."""

import copy
import json

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from torch import nn
from transformers import AutoModelForCausalLM

from hf_kvtransfer.errors import UnsupportedModelError
from hf_kvtransfer.identity import Difference, ModelIdentity

from ..tiny_models import FAMILIES, random_ids, tiny_model
from ..tiny_tokenizers import byte_level_bpe


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def identity(model, tokenizer=None):
    """As read back from an artifact."""
    return ModelIdentity.from_dict(json.loads(json.dumps(ModelIdentity.from_model(model, tokenizer).to_dict())))


@pytest.fixture(scope="module")
def evidence(llama):
    return identity(llama)


@pytest.mark.parametrize("family", FAMILIES)
def test_copies_in_any_dtype_are_the_same(family):
    model = tiny_model(family)
    # `.to` casts the buffers of the rotary module too.
    identities = [identity(model), *(identity(copy.deepcopy(model).to(dtype)) for dtype in DTYPES)]
    assert all(one.differences(other) == [] for one in identities for other in identities)
    assert {sample.dtype for sample in identities[2].weights.values()} == {"bfloat16"}
    [difference] = identities[0].differences(ModelIdentity.from_model(tiny_model(family, seed=1)))
    assert (difference.part, difference.status) == ("weights", "changed")
    assert difference.detail.startswith("model.embed_tokens.weight and ")


def test_another_dtype_hides_no_change(evidence, llama):
    for dtype in DTYPES:
        model = copy.deepcopy(llama)
        model.model.layers[1].mlp.up_proj.weight.data *= 1.01
        detail = "model.layers.1.mlp.up_proj.weight differs"
        assert evidence.differences(identity(model.to(dtype))) == [Difference("weights", "changed", detail)]


def test_changes_in_place_are_seen(llama):
    model = copy.deepcopy(llama)
    before = identity(model)
    assert before.differences(identity(model)) == []
    model.model.layers[2].self_attn.o_proj.weight.data.add_(1e-6)
    [difference] = before.differences(identity(model))
    assert difference == Difference("weights", "changed", "model.layers.2.self_attn.o_proj.weight differs")
    model.model.norm.weight.data.mul_(2)
    [difference] = before.differences(identity(model))
    assert difference.detail == "model.layers.2.self_attn.o_proj.weight and 1 other differ"


def test_a_model_that_has_not_changed_is_not_sampled_again(llama):
    model = copy.deepcopy(llama)
    weights = [ModelIdentity.from_model(model).weights for _ in range(2)]
    model.model.layers[1].mlp.up_proj.weight.data[-1, -1] += 1  # leaves no trace, and is between the samples
    weights.append(ModelIdentity.from_model(model).weights)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[-1, -1] += 1  # leaves one
    weights.append(ModelIdentity.from_model(model).weights)
    assert [w is weights[0] for w in weights] == [True, True, True, False]


def test_a_training_step_is_seen(evidence, llama):
    model = copy.deepcopy(llama)
    ids = random_ids(model, 2, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    [difference] = evidence.differences(identity(model))
    assert difference == Difference("weights", "changed", "model.embed_tokens.weight and 38 others differ")


def test_tokenizers(llama):
    tokenizer = byte_level_bpe()
    before = identity(llama, tokenizer)
    assert before.differences(identity(llama, byte_level_bpe())) == []
    tokenizer.add_tokens(["<call>"])
    [difference] = before.differences(identity(llama, tokenizer))
    assert (difference.part, difference.status) == ("tokenizer", "changed")
    assert before.tokenizer in difference.detail
    # Whether one is needed is not decided here.
    assert before.differences(identity(llama)) == identity(llama).differences(before) == []


def test_resized_embeddings(evidence, llama):
    model = copy.deepcopy(llama)
    model.resize_token_embeddings(408)
    [difference] = evidence.differences(identity(model))
    detail = "model.embed_tokens.weight and 1 other have another shape ([408, 64], not [400, 64])"
    assert difference == Difference("weights", "changed", detail)


def test_tied_parameters_count_once():
    tied = tiny_model("llama", tie_word_embeddings=True)
    before = identity(tied)
    assert "lm_head.weight" not in before.weights
    untied = copy.deepcopy(tied)
    untied.lm_head.weight = nn.Parameter(untied.lm_head.weight.detach().clone())
    assert before.differences(identity(untied)) == [Difference("weights", "changed", "lm_head.weight is new")]
    assert identity(untied).differences(before) == [Difference("weights", "changed", "lm_head.weight is missing")]


def test_rotary_parameters(llama):
    other = tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 20_000.0})
    config, buffers = identity(llama).differences(identity(other))
    detail = "of the config's rope_parameters rope_theta is 20000.0, not 10000.0"
    assert config == Difference("rotary", "changed", detail)
    detail = "model.rotary_emb.inv_freq and 1 other differ"
    assert buffers == Difference("rotary", "changed", detail)
    # The config of a live model is not what it computes with.
    changed = copy.deepcopy(llama)
    changed.model.rotary_emb.inv_freq /= 2
    [difference] = identity(llama).differences(identity(changed))
    assert difference == Difference("rotary", "changed", "model.rotary_emb.inv_freq differs")
    # Another device may compute the frequencies to another last bit.
    changed = copy.deepcopy(llama)
    changed.model.rotary_emb.inv_freq *= 1 + 2**-22
    assert identity(llama).differences(identity(changed)) == []
    assert identity(llama).differences(identity(changed.to(torch.bfloat16))) == []


def test_one_layer_type_turns_otherwise():
    rope = copy.deepcopy(tiny_model("gemma3").config.rope_parameters)
    rope["full_attention"] |= {"rope_type": "linear", "factor": 8.0}
    before, after = identity(tiny_model("gemma3")), identity(tiny_model("gemma3", rope_parameters=rope))
    config, buffers = before.differences(after)
    assert "full_attention.rope_type is linear, not default" in config.detail
    assert "full_attention.factor is 8.0, not None" in config.detail and "sliding" not in config.detail
    assert buffers.detail == "model.rotary_emb.full_attention_inv_freq and 1 other differ"


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 4.0},
        {
            "rope_type": "longrope",
            "factor": 2.0,
            "original_max_position_embeddings": 512,
            "short_factor": [1.0] * 8,
            "long_factor": [3.0] * 8,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_frequencies_that_follow_the_length_of_a_call(rope):
    model = tiny_model("llama", rope_parameters=rope | {"rope_theta": 10_000.0})
    before = identity(model)
    frequencies = model.model.rotary_emb.inv_freq.clone()
    position_ids = torch.arange(600, 608)[None]
    with torch.no_grad():
        model(input_ids=random_ids(model, 1, 8), position_ids=position_ids)
    if rope["rope_type"] == "dynamic":
        assert not torch.equal(frequencies, model.model.rotary_emb.inv_freq)
    assert before.differences(identity(model)) == []
    model.model.rotary_emb.original_inv_freq.mul_(2)
    assert [difference.part for difference in before.differences(identity(model))] == ["rotary"]


def test_geometry():
    [difference] = identity(tiny_model("gemma3")).differences(identity(tiny_model("gemma3", sliding_window=16)))
    assert (difference.part, difference.status) == ("geometry", "changed")
    assert "window 16" in difference.detail and "not 3 layers of 2 KV heads x 24, window 32" in difference.detail


def test_names_are_for_people_only(evidence, llama, tmp_path):
    llama.save_pretrained(tmp_path / "mine")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "mine", dtype=torch.bfloat16)
    found = identity(loaded)
    assert (found.name, evidence.name) == ("mine", "LlamaForCausalLM")
    assert evidence.differences(found) == []


class TestOffloaded:
    @pytest.mark.parametrize("tied", [False, True])
    @pytest.mark.parametrize("family", ["llama", "gemma3"])
    def test_parts_on_disk(self, family, tied, tmp_path):
        model = tiny_model(family, tie_word_embeddings=tied)
        places = {name: "cpu" for name, _ in model.named_modules() if name.count(".") == 1 and "layers" not in name}
        places |= {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(4)} | {"lm_head": "cpu"}
        offloaded = dispatch_model(copy.deepcopy(model), places, main_device="cpu", offload_dir=str(tmp_path))
        assert identity(offloaded) == identity(model)

    @pytest.mark.parametrize("buffers", [False, True])
    @pytest.mark.parametrize("tied", [False, True])
    def test_everything_on_disk(self, tied, buffers, tmp_path):
        model = tiny_model("llama", tie_word_embeddings=tied)
        offloaded = disk_offload(copy.deepcopy(model), str(tmp_path), torch.device("cpu"), offload_buffers=buffers)
        assert {parameter.device.type for parameter in offloaded.parameters()} == {"meta"}
        for _ in range(2):
            assert identity(offloaded) == identity(model)
            offloaded(input_ids=random_ids(model, 1, 5))  # ends with other tensors, and parts the tied ones

    def test_untied_by_hand(self, tmp_path):
        model = tiny_model("llama", tie_word_embeddings=True)
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 2)
        offloaded = disk_offload(copy.deepcopy(model), str(tmp_path), torch.device("cpu"))
        assert identity(offloaded) == identity(model)
        assert "lm_head.weight" in identity(model).weights

    def test_as_loaded_from_a_checkpoint(self, tmp_path):
        model = tiny_model("mixtral")
        model.save_pretrained(tmp_path / "model")
        loaded = AutoModelForCausalLM.from_pretrained(
            tmp_path / "model", device_map={"": "disk"}, offload_folder=tmp_path / "offload", dtype=torch.bfloat16
        )
        assert {parameter.device.type for parameter in loaded.parameters()} == {"meta"}
        found = identity(loaded)
        assert found.weights == identity(copy.deepcopy(model).to(torch.bfloat16)).weights
        assert identity(model).differences(found) == []

    def test_in_memory(self, llama, evidence):
        offloaded = cpu_offload(copy.deepcopy(llama), torch.device("cpu"))
        assert evidence.differences(identity(offloaded)) == []
        offloaded.model.layers[1].mlp.up_proj._hf_hook.weights_map["weight"].mul_(2)
        [difference] = evidence.differences(identity(offloaded))
        assert difference.detail == "model.layers.1.mlp.up_proj.weight differs"

    def test_without_data(self, llama):
        model = copy.deepcopy(llama)
        ModelIdentity.from_model(model)
        model.lm_head.to("meta")
        with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight of the model holds no data"):
            ModelIdentity.from_model(model)


# vllm#44250, vllm#30931, LMCache#2961
# PEFT 0.21 asks transformers 5.24 for it.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
class TestAdapters:
    @pytest.fixture
    def peft(self):
        return pytest.importorskip("peft")

    def wrap(self, peft, model, adapter="default", seed=0, **options):
        config = peft.LoraConfig(target_modules=["q_proj", "embed_tokens"], r=4, **options)
        model = peft.get_peft_model(copy.deepcopy(model), config, adapter_name=adapter).eval()
        self.randomize(model, seed)
        return model

    def randomize(self, model, seed=0):
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter, std=0.1)

    def test_active_ones_count(self, peft, llama, evidence):
        model = self.wrap(peft, llama)
        assert evidence.differences(identity(model)) == [
            Difference("adapters", "changed", "adapter default is active")
        ]
        tuned = identity(model)
        [difference] = tuned.differences(evidence)
        assert difference == Difference("adapters", "changed", "adapter default is not active")
        assert tuned.differences(identity(self.wrap(peft, llama))) == []
        assert tuned.differences(identity(copy.deepcopy(model).to(torch.bfloat16))) == []
        with model.disable_adapter():
            assert evidence.differences(identity(model)) == []
        assert evidence.differences(identity(model.unload())) == []

    def test_other_weights_scaling_or_name(self, peft, llama):
        tuned = identity(self.wrap(peft, llama))
        [difference] = tuned.differences(identity(self.wrap(peft, llama, seed=1)))
        assert difference.detail == "adapter default: model.embed_tokens.lora_embedding_A and 9 others differ"
        [difference] = tuned.differences(identity(self.wrap(peft, llama, lora_alpha=32)))
        assert difference.detail == "adapter default: model.embed_tokens.scaling and 4 others differ"
        differences = tuned.differences(identity(self.wrap(peft, llama, adapter="mine")))
        assert [difference.part for difference in differences] == ["adapters", "adapters"]

    def test_of_several_the_active_ones_count(self, peft, llama):
        model = self.wrap(peft, llama)
        tuned = identity(model)
        model.add_adapter("second", peft.LoraConfig(target_modules=["v_proj"], r=2))
        assert tuned.differences(identity(model)) == []
        model.base_model.set_adapter(["default", "second"])
        assert [difference.detail for difference in tuned.differences(identity(model))] == ["adapter second is active"]
        model.set_adapter("second")
        assert len(tuned.differences(identity(model))) == 2

    def test_merged_ones_are_weights(self, peft, llama, evidence):
        model = self.wrap(peft, llama)
        model.merge_adapter()
        detail = "model.embed_tokens.weight and 4 others differ"
        assert evidence.differences(identity(model)) == [Difference("weights", "changed", detail)]
        merged = identity(model)
        assert merged.differences(identity(self.wrap(peft, llama).merge_and_unload())) == []

    def test_trained_modules_and_tokens(self, peft, llama, evidence):
        options = {"modules_to_save": ["norm", "self_attn"], "trainable_token_indices": {"lm_head": [3, 5]}}
        model = self.wrap(peft, llama, **options)
        before = identity(model)
        assert [difference.part for difference in evidence.differences(before)] == ["adapters"]
        model.base_model.model.model.norm.modules_to_save["default"].weight.data.mul_(2)
        model.base_model.model.lm_head.token_adapter.trainable_tokens_delta["default"].data.add_(1)
        [difference] = before.differences(identity(model))
        assert "and 1 other differ" in difference.detail
        with model.disable_adapter():
            assert evidence.differences(identity(model)) == []

    def test_fused_experts(self, peft):
        model = tiny_model("mixtral")
        experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        wrapped = self.wrap(peft, model, target_parameters=experts)
        adapter = identity(wrapped).adapters["default"]
        assert len([name for name in adapter if "layers.0.mlp" in name and "lora_" in name]) == 4
        with wrapped.disable_adapter():
            assert identity(model).differences(identity(wrapped)) == []

    def test_put_into_the_model_itself(self, peft, llama, evidence):
        """As `load_adapter` and `add_adapter` of transformers do."""
        model = copy.deepcopy(llama)
        peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj", "embed_tokens"], r=4), model)
        self.randomize(model)
        assert identity(self.wrap(peft, llama)).differences(identity(model)) == []
        assert [difference.part for difference in evidence.differences(identity(model))] == ["adapters"]
        for module in model.modules():
            if isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer):
                module.enable_adapters(False)
        assert evidence.differences(identity(model)) == []

    def test_virtual_tokens(self, peft, llama, evidence):
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
        model = peft.get_peft_model(copy.deepcopy(llama), config)
        assert evidence.differences(identity(model)) == [
            Difference("adapters", "changed", "adapter default is active")
        ]
        before = identity(model)
        model.prompt_encoder["default"].embedding.weight.data.add_(1)
        [difference] = before.differences(identity(model))
        assert difference.detail == "adapter default: prompt_encoder.embedding.weight differs"

    def test_offloaded(self, peft, llama, tmp_path):
        model = copy.deepcopy(llama)
        peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4), model)
        self.randomize(model)
        offloaded = disk_offload(copy.deepcopy(model), str(tmp_path), torch.device("cpu"))
        assert {parameter.device.type for parameter in offloaded.parameters()} == {"meta"}
        assert identity(offloaded) == identity(model)


class Scaled(torch.Tensor):
    """8-bit codes and a scale in one tensor, as torchao makes them."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    @classmethod
    def quantize(cls, weight):
        scale = weight.abs().max() / 127
        return nn.Parameter(cls((weight / scale).round().to(torch.int8), scale), requires_grad=False)

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        args = [arg.codes * arg.scale if isinstance(arg, cls) else arg for arg in args]
        return function(*args, **kwargs or {})


class TestQuantized:
    def check(self, plain, quantized, again, retrained):
        """A model, two quantised copies of it, and one of a model with another weight in `up_proj` of layer 1."""
        before, after = identity(plain), identity(quantized)
        for differences in (before.differences(after), after.differences(before)):
            assert {(difference.part, difference.status) for difference in differences} == {("weights", "unverified")}
            assert "and cannot be compared" in differences[0].detail
        assert after.differences(identity(again)) == after.differences(identity(quantized)) == []
        [difference] = after.differences(identity(retrained))
        assert (difference.part, difference.status) == ("weights", "changed")
        assert "model.layers.1.mlp.up_proj.weight" in difference.detail
        # What is not quantised can be compared, also between models that are quantised in two ways.
        retrained.model.norm.weight.data.mul_(2)
        changed = [
            difference for difference in before.differences(identity(retrained)) if difference.status == "changed"
        ]
        assert changed == [Difference("weights", "changed", "model.norm.weight differs")]

    @pytest.mark.parametrize(
        "options",
        [
            {"load_in_8bit": True},
            {"load_in_4bit": True},
            {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
            {"load_in_4bit": True, "bnb_4bit_quant_storage": torch.bfloat16},
        ],
        ids=["int8", "fp4", "nf4-nested", "fp4-in-bfloat16"],
    )
    def test_bitsandbytes(self, options, tmp_path):
        pytest.importorskip("bitsandbytes")
        from transformers import BitsAndBytesConfig

        model = tiny_model("llama", intermediate_size=128)
        model.save_pretrained(tmp_path / "model")
        retrained = copy.deepcopy(model)
        retrained.model.layers[1].mlp.up_proj.weight.data *= 1.05
        retrained.save_pretrained(tmp_path / "retrained")

        def load(name):
            config = BitsAndBytesConfig(**options)
            return AutoModelForCausalLM.from_pretrained(
                tmp_path / name, quantization_config=config, device_map="cpu", dtype=torch.float16
            )

        self.check(model, load("model"), load("model"), load("retrained"))

    @pytest.mark.parametrize("kind", ["float8", "subclass"])
    def test_other_kinds(self, kind, llama):
        def quantize(model):
            model = copy.deepcopy(model)
            # Probed while it can still compute: float8 needs layers of its own, which scale.
            ModelIdentity.from_model(model)
            for layer in model.model.layers:
                weight = layer.mlp.up_proj.weight.detach()
                if kind == "float8":
                    weight = nn.Parameter(weight.to(torch.float8_e4m3fn), requires_grad=False)
                    layer.mlp.up_proj.weight_scale_inv = nn.Parameter(torch.ones(1))
                else:
                    weight = Scaled.quantize(weight)
                layer.mlp.up_proj.weight = weight
            return model

        retrained = copy.deepcopy(llama)
        retrained.model.layers[1].mlp.up_proj.weight.data *= 1.2
        self.check(llama, quantize(llama), quantize(llama), quantize(retrained))


@pytest.mark.parametrize(
    "damage",
    [
        lambda identity: "identity",
        lambda identity: identity | {"format": "hf-kvtransfer-identity-0"},
        lambda identity: {key: value for key, value in identity.items() if key != "weights"},
        lambda identity: identity | {"checkpoint": 1},
        lambda identity: identity | {"name": None},
        lambda identity: identity | {"tokenizer": 5},
        lambda identity: identity | {"adapters": []},
        lambda identity: identity | {"adapters": {"default": None}},
        lambda identity: identity | {"rope_parameters": "default"},
        lambda identity: identity | {"geometry": {"layers": [[2, 16, 0, None]]}},
        lambda identity: identity | {"weights": [*identity["weights"]]},
        *(
            lambda identity, sample=sample: identity | {"weights": {"model.norm.weight": sample}}
            for sample in (
                None,
                [],
                ["float32", [64], None],
                ["float32", [64], None, 5],
                ["float32", [64], None, "?" * 88],
                ["float32", [64], None, "AAAA"],
                ["float32", [64.0], None, "A" * 86 + "=="],
                ["float32", [True, 64], None, "A" * 86 + "=="],
                ["float32", [-64], None, "A" * 86 + "=="],
                ["float32", 64, None, "A" * 86 + "=="],
                ["bfloat16", [64], None, "A" * 86 + "=="],
                ["load", [64], None, "A" * 86 + "=="],
                [None, [64], None, "A" * 86 + "=="],
                ["float32", [64], 4, "A" * 86 + "=="],
            )
        ),
    ],
)
def test_a_damaged_identity_is_refused(damage, evidence):
    assert ModelIdentity.from_dict(evidence.to_dict()) == evidence
    with pytest.raises(ValueError):
        ModelIdentity.from_dict(damage(evidence.to_dict()))
