"""A random target with a tokenizer on disk, and random drafters for it: what exports, checks and imports are tried on."""

import json
import shutil
from pathlib import Path

import torch
from conftest import byte_tokenizer
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.models import vocab
from draftsmith.models.drafter import new_drafter
from draftsmith.models.saving import save_student
from draftsmith.models.target import Target

V, D, H, L, K = 257, 60, 32, 8, 4
IDS = "eagle_aux_hidden_state_layer_ids"
CHAIN = [[0] * k for k in range(1, K + 1)]
SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 44, "steps": K, "tree": CHAIN}
THREE = SIZES | {"taps": [1, L // 2 - 1, L - 4], "draft_vocab_size": D}

BLOCK = {name: SIZES[name] for name in ("num_heads", "num_kv_heads", "head_dim", "intermediate_size", "tree")}
BLOCK |= {"taps": [0, 3, 6], "block_size": K + 1, "num_layers": 2}

# By name: the architecture and its settings. The first words are the family of models/formats/engines.py.
DRAFTERS = {
    "medusa": ("medusa", {"num_heads": 3}),
    "medusa of two blocks": ("medusa", {"num_heads": 2, "num_layers": 2}),
    "medusa that shares the head": ("medusa", {"num_heads": 3, "share_head": True}),
    "medusa that shares, two blocks": ("medusa", {"num_heads": 2, "num_layers": 2, "share_head": True}),
    "mlp": ("mlp", {"num_heads": 3, "inner_size": 20}),
    "mlp of own weights": ("mlp", {"num_heads": 3, "tie_weights": False, "scale_input": False}),
    "mlp of one head": ("mlp", {"num_heads": 1, "inner_size": 40, "tree": [[0], [1]]}),
    "mlp with an LSTM": ("mlp", {"num_heads": 3, "cell": "lstm"}),
    "eagle1": ("eagle", SIZES | {"version": 1}),
    "eagle1 of two layers": ("eagle", SIZES | {"version": 1, "num_layers": 2}),
    "eagle3": ("eagle", THREE),
    "eagle3 of all tokens": ("eagle", THREE | {"draft_vocab_size": V}),
    "eagle3 with other taps": ("eagle", THREE | {"taps": [0, 3, 6]}),
    "eagle3 with two taps": ("eagle", THREE | {"taps": [0, 6]}),
    "eagle3 of two layers": ("eagle", THREE | {"num_layers": 2}),
    "eagle3.1": ("eagle", THREE | {"fc_norm": True, "norm_output": True}),
    "eagle3 of speculators": ("eagle", THREE | {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True}),
    "dflash": ("dflash", BLOCK | {"mask_token_id": 3}),
    "dflash with its own mask": ("dflash", BLOCK | {"causal": True}),
    "peagle": ("peagle", THREE | {"mask_token_id": 3}),
    "dspark": ("dspark", BLOCK | {"mask_token_id": 3, "block_size": K, "markov_rank": 6, "num_layers": 1}),
    "dspark with its own mask": ("dspark", BLOCK | {"block_size": K, "markov_rank": 6}),
    "hydra": ("hydra", {"num_heads": 3}),
    "kangaroo": ("kangaroo", {"exit_layer": 2, "num_heads": 4, "num_kv_heads": 2, "tree": CHAIN}),
    "mtp": ("mtp", {"layer": {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 44}}),
    "student": ("student", {}),
    "student with more rows": ("student", {"vocab_size": V + 7}),
}


def family(name):
    return name.split(".")[0].split()[0]


def wide(model, std=0.18):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=std) if parameter.ndim > 1 else parameter.normal_(mean=1.0, std=0.3)
    return model


def save_target(folder: Path) -> Path:
    """A Llama of eight layers over bytes, float32."""
    sizes = {"hidden_size": H, "intermediate_size": 48, "num_hidden_layers": L, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=V, max_position_embeddings=96, bos_token_id=None, eos_token_id=256, **sizes))
    wide(model).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A target\n")
    (folder / "LICENSE").write_text("Do as you like.\n")
    return folder


def save_drafter(name: str, target: Target, folder: Path, **changes) -> Path:
    """An artifact as training leaves it, with changed settings of `DRAFTERS`."""
    method, settings = DRAFTERS[name][0], DRAFTERS[name][1] | changes
    torch.manual_seed(1)
    if method == "student":
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
        sizes |= {"vocab_size": V} | settings
        config = LlamaConfig(max_position_embeddings=96, eos_token_id=256, bos_token_id=None, **sizes)
        entry = {"target": target.identity.to_dict(), "tree": CHAIN, "confidence": 0.0, "training": None}
        save_student(wide(LlamaForCausalLM(config)), folder, entry, K)
    else:
        drafter = new_drafter(method, target, **settings)
        if settings.get("draft_vocab_size", V) < V:
            drafter.take(vocab.choose(torch.randint(1, 100, (V,)), D, [256]))
        wide(drafter).eval().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A drafter\n")
    return folder


def edited(folder: Path, copy: Path, change) -> Path:
    """A copy of a folder, without its note, in which change(config, tensors) had its way."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    (copy / "draftsmith.json").unlink(missing_ok=True)
    (file,) = copy.glob("*.safetensors")
    config, tensors = json.loads((copy / "config.json").read_text()), load_file(file)
    change(config, tensors)
    (copy / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, file)
    return copy
