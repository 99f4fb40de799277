"""Targets and drafters that are damaged, that say what is not so, or that want to do more than be read."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bad_inputs import PLANTED, BadInput, Payload, both, changed, tensors, written

CONFIG, WEIGHTS, INDEX = "target/config.json", "target/model.safetensors", "target/model.safetensors.index.json"
GENERATE = ["generate", "Hello", "--target", "target", "--max-new-tokens", "2"]
TRAIN = "train medusa medusa.yaml"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LAYER = "model.layers.1.mlp.up_proj.weight"
NOT_JSON = {"cut off": '{"a": 1', "empty": "", "a list": "[1, 2]", "text": '"llama"', "not UTF-8": b"\xff\xfe{}", "deep": "[" * 200_000}
NOT_JSON_SAYS = {"a list": "expected an object", "text": "expected an object", "not UTF-8": "not UTF-8", "deep": "nested too deep"}


def drafting(drafter: str) -> list[str]:
    return [*GENERATE, "--drafter", drafter]


def sharded(folder: Path, **entries: str | None) -> None:
    """Store the target in two shards with an index; `entries` are other files for these tensors (dots as in their names)."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(weights)
    files = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: weights[name] for name in names if files[name] == file}, folder / "target" / file, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": files | entries}))


def index(**entries: Any) -> Callable[[Path], object]:
    """A damage: the target in shards, its index with these entries in the map."""
    return lambda folder: sharded(folder, **entries)


def pickled(folder: Path, name: str) -> None:
    import pickle

    (folder / name).write_bytes(pickle.dumps(Payload()))


def moved(source: str, name: str) -> Callable[[Path], object]:
    return lambda folder: shutil.move(folder / source, folder / name)


def linked(folder: Path) -> None:
    shutil.move(folder / WEIGHTS, folder / "elsewhere.safetensors")
    (folder / WEIGHTS).symlink_to("../elsewhere.safetensors")


def cut(name: str, share: float) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * share)])

    return damage


def drop(*names: str) -> Callable[[dict[str, Any]], None]:
    return lambda weights: [weights.pop(name) for name in names] and None


def alter(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    return lambda weights: weights.__setitem__(name, change(weights[name]))


def filled(value: float) -> Callable[[Any], Any]:
    def change(tensor: Any) -> Any:
        tensor.view(-1)[-1] = value
        return tensor

    return change


def adapter(folder: Path, **entries: Any) -> None:
    """Put a LoRA adapter beside the target's weights."""
    import torch
    from safetensors.torch import save_file

    config = {"peft_type": "LORA", "base_model_name_or_path": "target", "r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (folder / "target" / "adapter_config.json").write_text(json.dumps(config | entries))
    weights = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{side}.weight": torch.zeros(2, 32) if side == "A" else torch.zeros(32, 2)
        for layer in range(2)
        for side in "AB"
    }
    save_file(weights, folder / "target" / "adapter_model.safetensors")


def small_vocabulary(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """The EAGLE artifact with a draft vocabulary of 20 tokens, its maps changed."""
    import torch

    targets = torch.arange(20) * 3 + 1

    def cut_head(weights: dict[str, Any]) -> None:
        weights["lm_head.weight"] = weights["lm_head.weight"][targets].contiguous()
        weights["d2t"] = targets - torch.arange(20)
        weights["t2d"] = torch.zeros(257, dtype=torch.bool).index_fill_(0, targets, True)
        change(weights)

    tensors("eagle/artifact/model.safetensors", cut_head)(folder)
    changed("eagle/artifact/config.json", draft_vocab_size=20)(folder)


def case(name: str, damage: Callable[[Path], object], says: str, command: str | list[str] = GENERATE, **more: Any) -> BadInput:
    return BadInput(name, damage, command, says, **more)


JSON_FILES = [
    case(f"JSON of a target: {file} {word}", written(f"target/{file}", content), f"{file}.*{NOT_JSON_SAYS.get(word, 'not JSON|cannot')}")
    for file in ("config.json", "generation_config.json", "tokenizer_config.json")
    for word, content in NOT_JSON.items()
]
JSON_FILES += [
    case(f"JSON of a target: tokenizer.json {word}", written("target/tokenizer.json", content), r"tokenizer\.json")
    for word, content in NOT_JSON.items()
]
JSON_FILES += [
    case(f"JSON of a target: index {word}", both(index(), written(INDEX, content)), "index.json.*" + NOT_JSON_SAYS.get(word, "not JSON"))
    for word, content in NOT_JSON.items()
]
JSON_FILES += [
    case(f"JSON of a drafter: config.json {word}", written("medusa/artifact/config.json", content), f"config.json.*{NOT_JSON_SAYS.get(word, 'not JSON')}", drafting("medusa/artifact"))
    for word, content in NOT_JSON.items()
]

# value -> what the line must name
WRONG = {
    "vocab_size": ["many", 1.5, None, -1, 0, [257]],
    "hidden_size": ["32", None, -32, 0, 33],
    "num_hidden_layers": ["2", None, -1, 0, 3, 1],
    "num_attention_heads": ["4", 0, 5, -4],
    "num_key_value_heads": [3, 0, "2"],
    "head_dim": [7, -8, "8"],
    "intermediate_size": [-1, "48", 0],
    "max_position_embeddings": ["128", -5, 0, None, 1.5],
    "rms_norm_eps": ["small", float("nan"), -1.0],
    "rope_parameters": [5, {"rope_type": "unknown"}, {"rope_theta": "x", "rope_type": "default"}, {"rope_theta": 0, "rope_type": "default"}, []],
    "eos_token_id": ["text", [[1]], -1, 257, 1.5, True],
    "tie_word_embeddings": ["no"],
    "hidden_act": ["nothing", 5],
    "model_type": [5, None, "", "../llama", ["llama"], "unheard-of"],
    "architectures": [5],
    "dtype": ["float33", 5, "int64"],
    "auto_map": [5, {"AutoConfig": 5}],
    "layer_types": [5, ["full_attention"], ["nothing", "nothing"]],
    "quantization_config": [5, {}, {"quant_method": "nothing"}, {"quant_method": "gptq"}, {"load_in_8bit": "x"}, {"quant_method": 5}],
}
KINDS = [
    case(f"a wrong value in a target's config: {key} {json.dumps(value)}", changed(CONFIG, **{key: value}), rf"(config\.json|target).*")
    for key, values in WRONG.items()
    for value in values
]
CASES = [*JSON_FILES, *KINDS]
