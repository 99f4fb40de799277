"""What cannot be decoded is refused by name, in one line, before anything runs."""

import ast
import re
import sys
from pathlib import Path

import pytest
from planting import PlantingDrafter
from transformers import AutoConfig, AutoModelForCausalLM
from zoo import CONFIGS, VOCAB

from draftsmith.inference.attention import check_supported, tree_attention
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.support import has_experts

REFUSED = {
    "falcon": ({}, "attention interface"),
    "bloom": ({}, "attention interface"),
    "llama4": ({}, "chunked_attention"),
    "llama4_text": ({}, "chunked_attention"),
    "t5": ({}, "encoder-decoder"),
    "mamba": ({}, "linear_attention|recurrent state"),
    "jamba": ({}, "linear_attention|mamba|recurrent state"),
    "qwen3_next": ({}, "linear_attention"),
    "recurrent_gemma": ({}, "linear_attention|recurrent"),
    "phi3": (
        {
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
            "original_max_position_embeddings": 64,
        },
        "'longrope'",
    ),
    "llama": ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "'dynamic'"),
    "gemma3_text": ({"use_bidirectional_attention": True}, "bidirectional"),
}


def test_experts_are_seen_in_every_config():
    """The config of aria_text names their number moe_num_experts. A number may be a list, one for each layer."""
    names = {"mixtral": True, "qwen3_moe": True, "deepseek_v3": True, "gpt_oss": True, "aria_text": True, "llama": False, "qwen3": False}
    assert {name: has_experts(AutoConfig.for_model(name)) for name in names} == names
    config = AutoConfig.for_model("llama")
    for count, expected in ((0, False), (None, False), ([0, 0], False), ([0, 8], True)):
        config.num_experts = count
        assert has_experts(config) == expected, count


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_architectures_are_refused_from_the_config(name):
    options, reason = REFUSED[name]
    with pytest.raises(ValueError, match=reason) as error:
        check_supported(AutoConfig.for_model(name, **options))
    assert f"'{name}'" in str(error.value) and "\n" not in str(error.value) and "choose another model" in str(error.value)


def test_longrope_of_one_layer_type_is_found():
    config = AutoConfig.for_model("gemma3_text")
    config.rope_parameters = {"full_attention": {"rope_type": "longrope"}, "sliding_attention": {"rope_type": "default"}}
    with pytest.raises(ValueError, match="longrope"):
        check_supported(config)


def test_supported_architectures_pass():
    for name in CONFIGS:
        check_supported(CONFIGS[name]())
    for name in ("gpt2", "gpt_neox", "phi", "phi3", "cohere", "granite", "olmo2", "qwen2", "qwen3_moe", "gemma3"):
        check_supported(AutoConfig.for_model(name))
    yarn = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    check_supported(AutoConfig.for_model("llama", rope_parameters=yarn))


@pytest.mark.parametrize("name", ["falcon", "bloom"])
def test_models_that_ignore_the_setting_are_refused_and_left_alone(name):
    size = (
        {"hidden_size": 32, "n_layer": 1, "n_head": 4}
        if name == "bloom"
        else {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    )
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, vocab_size=VOCAB, bos_token_id=0, eos_token_id=0, **size))
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=f"(?i){name}.* ignores the attention setting"), tree_attention(model):
        raise AssertionError("never entered")
    assert model.config._attn_implementation == before
    with pytest.raises(ValueError, match=name):
        check_supported(model.config, model)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1], []], {}, "prompt 1: got no tokens"),
        ([[1, VOCAB]], {}, f"prompt 0: got token id {VOCAB}; expected 0..{VOCAB - 1}"),
        ([[1, -1]], {}, "prompt 0: got token id -1"),
        ([[1] * 20], {}, "prompt 0: got 20 tokens; expected fewer than the context of 20"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens 0"),
        ([[1]], {"requests": [1, 2]}, "2 requests for 1 prompts"),
        ([[1]], {"requests": [2**32]}, "request 4294967296"),
        ([[1]], {"requests": [1.5]}, "prompt 0: expected integers for its tokens and its request ('float' object"),
        ([[1], [2, 1.5]], {}, "prompt 1: expected integers"),
        ([["a"]], {}, "prompt 0: expected integers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_requests_are_checked_before_anything_runs(target, prompts, options, message):
    decoder = Decoder(target, context=20)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        decoder.stream(prompts, **options)
    assert "\n" not in str(error.value) and decoder.counters.target_forwards == 0


def test_decoders_are_checked(target):
    for options, message in (
        ({"slots": 0}, "slots 0"),
        ({"context": 0}, "context 0"),
        ({"chunk": 0}, "chunk 0"),
        ({"context": 129}, "128 positions"),
    ):
        with pytest.raises(ValueError, match=message):
            Decoder(target, **options)
    assert Decoder(target).generate([]) == []


def test_one_stream_at_a_time(target):
    decoder = Decoder(target)
    stream = decoder.stream([[1, 2]], max_new_tokens=4)
    next(stream)
    with pytest.raises(ValueError, match="second stream"):
        decoder.generate([[3]])
    stream.close()
    assert len(decoder.generate([[3]], max_new_tokens=4, stop_ids=())[0].tokens) == 4


def test_a_drafter_that_fails_leaves_the_decoder_usable(target):
    expected = Decoder(target).generate([[1, 2]], max_new_tokens=5, stop_ids=())[0].tokens
    drafter = PlantingDrafter([[1, 2]], [[0] * 9], VOCAB)
    decoder = Decoder(target, drafter)
    with pytest.raises(KeyError):
        decoder.generate([[9, 9, 4, 3, 2, 1]])  # a prompt that this drafter does not know; its slots are written already
    assert target.model.config._attn_implementation == "eager"
    assert decoder.generate([[1, 2]], max_new_tokens=5, stop_ids=())[0].tokens == expected


def test_the_package_imports_only_what_it_may():
    """At import nothing from the packages above, no kernel compiler, no process group: read off the files, not off one machine."""
    allowed = set(sys.stdlib_module_names) | {"torch", "transformers", "tokenizers"}
    files = sorted((Path(__file__).resolve().parents[1] / "inference").glob("*.py"))
    files = [file for file in files if file.stem != "progress"]  # the one file that draws for people
    assert {"tree.py", "drafter.py", "cache.py", "attention.py", "sampler.py", "verify.py", "decoder.py"} <= {file.name for file in files}
    for file in files:
        for node in ast.parse(file.read_text()).body:
            for name in imported(node):
                assert name.split(".")[0] in allowed or name.startswith("draftsmith.inference."), f"{file.name} imports {name}"
                assert not name.startswith("torch.distributed"), f"{file.name} imports {name}"


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or "."] if isinstance(node, ast.ImportFrom) else []
