"""Targets and drafters that are damaged, that say what is not so, or that want to do more than be read."""

import json
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bad_inputs import PLANTED, BadInput, Payload, both, changed, nothing, tensors, written

CONFIG, WEIGHTS, INDEX = "target/config.json", "target/model.safetensors", "target/model.safetensors.index.json"
GENERATE = ["generate", "Hello", "--target", "target", "--max-new-tokens", "2"]
TRAIN = "train medusa medusa.yaml"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LAYER = "model.layers.1.mlp.up_proj.weight"
NOT_JSON = {"cut off": '{"a": 1', "empty": "", "a list": "[1, 2]", "text": '"llama"', "not UTF-8": b"\xff\xfe{}", "deep": "[" * 200_000}
NOT_JSON_SAYS = {"a list": "expected an object", "text": "expected an object", "not UTF-8": "not UTF-8", "deep": "nested too deep"}


def gguf(tensors: int, entries: int, content: bytes = b"") -> bytes:
    """The beginning of a GGUF file that says it has so many tensors and entries."""
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, entries) + content


def key(name: str) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode()


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
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{side}.weight": torch.zeros(2, 32)
        if side == "A"
        else torch.zeros(32, 2)
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
    case(
        f"JSON of a drafter: config.json {word}",
        written("medusa/artifact/config.json", content),
        f"config.json.*{NOT_JSON_SAYS.get(word, 'not JSON')}",
        drafting("medusa/artifact"),
    )
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
    "rope_parameters": [
        5,
        {"rope_type": "unknown"},
        {"rope_theta": "x", "rope_type": "default"},
        {"rope_theta": 0, "rope_type": "default"},
        [],
    ],
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
    case(f"a wrong value in a target's config: {key} {json.dumps(value)}", changed(CONFIG, **{key: value}), r"(config\.json|target).*")
    for key, values in WRONG.items()
    for value in values
]
CASES = [*JSON_FILES, *KINDS]
SIZES = [
    case(f"sizes that are not the weights': {key} {value:,}", changed(CONFIG, **{key: value}), says)
    for key, value, says in (
        ("vocab_size", 10**9, r"misshapen tensors: lm_head.weight \[257, 32\] for \[1000000000, 32\]"),
        ("vocab_size", 2**62, "describes no model|misshapen"),
        ("hidden_size", 10**7, "misshapen tensors"),
        ("intermediate_size", 10**10, "misshapen tensors"),
        ("head_dim", 10**8, "misshapen tensors"),
        ("num_attention_heads", 10**6, "config.json: `num_attention_heads` is 1,000,000"),
        ("num_key_value_heads", 10**6, "config.json: `num_key_value_heads` is 1,000,000"),
        ("num_hidden_layers", 10**6, "config.json: `num_hidden_layers` is 1,000,000; expected at most"),
        ("num_hidden_layers", 9_999, "`num_hidden_layers` 9,999, its safetensors have 21 tensors"),
        ("num_labels", 10**9, "`num_labels` is 1,000,000,000"),
    )
]
SIZES += [
    case(
        "sizes that are not the weights': tables of positions",
        changed(CONFIG, model_type="gpt2", architectures=["GPT2LMHeadModel"], n_positions=10**9, n_embd=32, n_head=4, n_layer=2),
        "missing tensors",
    ),
    case("sizes that are not the weights': in training", changed(CONFIG, hidden_size=10**7), "misshapen tensors", TRAIN),
    case(
        "sizes that are not the weights': of a student",
        changed("student/artifact/config.json", intermediate_size=10**9),
        "misshapen",
        drafting("student/artifact"),
    ),
]
FILES = [
    case(
        "pickles: an index names one",
        both(index(**{LAYER: "weights.bin"}), lambda folder: pickled(folder, "target/weights.bin")),
        "index.json names pickled weights .'weights.bin'",
    ),
    case(
        "pickles: an index names a .pt",
        both(index(**{LAYER: "x.pt"}), lambda folder: pickled(folder, "target/x.pt")),
        "names pickled weights",
    ),
    case(
        "pickles: an index names one, in training",
        both(index(**{LAYER: "weights.bin"}), lambda folder: pickled(folder, "target/weights.bin")),
        "names pickled weights",
        TRAIN,
    ),
    case("pickles: under a safetensors' name", lambda folder: pickled(folder, WEIGHTS), "model.safetensors.*damaged or cut off"),
    case(
        "pickles: alone",
        both(lambda folder: pickled(folder, "target/pytorch_model.bin"), lambda folder: (folder / WEIGHTS).unlink()),
        "only pickled weights .pytorch_model.bin",
    ),
    case(
        "pickles: an adapter",
        both(
            adapter,
            lambda folder: (folder / "target/adapter_model.safetensors").unlink(),
            lambda folder: pickled(folder, "target/adapter_model.bin"),
        ),
        "no adapter_model.safetensors.*pickles are never loaded",
    ),
    case(
        "pickles: of a drafter",
        both(
            lambda folder: pickled(folder, "medusa/artifact/pytorch_model.bin"),
            lambda folder: (folder / "medusa/artifact/model.safetensors").unlink(),
        ),
        "only pickled weights",
        drafting("medusa/artifact"),
    ),
    case(
        "pickles: an index of a drafter",
        both(
            moved("medusa/artifact/model.safetensors", "medusa/artifact/part.safetensors"),
            lambda folder: pickled(folder, "medusa/artifact/w.bin"),
            written(
                "medusa/artifact/model.safetensors.index.json", json.dumps({"metadata": {}, "weight_map": {"0.0.linear.weight": "w.bin"}})
            ),
        ),
        "names pickled weights",
        drafting("medusa/artifact"),
    ),
    case(
        "pickles: named by the config",
        both(
            moved(WEIGHTS, "target/other.safetensors"),
            changed(CONFIG, transformers_weights="adapter_model.bin"),
            lambda folder: pickled(folder, "target/adapter_model.bin"),
        ),
        "`transformers_weights` names weights",
    ),
    case(
        "pickles: GGUF alone",
        both(written("target/model.gguf", b"GGUF\3\0\0\0"), lambda folder: (folder / WEIGHTS).unlink()),
        "holds only GGUF weights; name the file: target/model.gguf",
    ),
    *(
        case(f"GGUF: {name}", written("model.gguf", content), says, ["generate", "Hello", "--target", "model.gguf"])
        for name, content, says in [
            ("a pickle", b"\x80\4PK", "'model.gguf' is no GGUF file"),
            ("empty", b"", "'model.gguf' is no GGUF file"),
            ("magic alone", b"GGUF\3\0\0\0", "'model.gguf' cannot be dequantised"),
            ("no entries", gguf(0, 0), "'model.gguf' cannot be dequantised"),
            ("2^60 entries", gguf(0, 1 << 60), "'model.gguf' cannot be dequantised"),
            ("2^60 tensors", gguf(1 << 60, 0), "'model.gguf' cannot be dequantised"),
            ("a name of 2^60 bytes", gguf(0, 1, struct.pack("<Q", 1 << 60)), "'model.gguf' cannot be dequantised"),
            (
                "a list of 2^60 numbers",
                gguf(0, 1, key("a.list") + struct.pack("<IIQ", 9, 0, 1 << 60)),
                "'model.gguf' cannot be dequantised",
            ),
            (
                "lists 10^5 deep",
                gguf(0, 1, key("a.list") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 100_000),
                "'model.gguf' cannot",
            ),
            ("an unknown kind", gguf(0, 1, key("a.b") + struct.pack("<I", 99)), "'model.gguf' cannot be dequantised"),
        ]
    ),
    case("GGUF: missing", nothing, "no file 'model.gguf'", ["generate", "Hello", "--target", "model.gguf"]),
    case(
        "GGUF: not on the Hub",
        nothing,
        "no GGUF file 'm.gguf' of 'a/b' here or on the Hub",
        ["generate", "Hello", "--target", "a/b:m.gguf"],
    ),
    case(
        "GGUF: a recipe's target",
        written("m.gguf", b"x"),
        "target.path.* 'm.gguf' is no GGUF file",
        "train medusa medusa.yaml target.path=m.gguf",
    ),
    case(
        "weights elsewhere: ../",
        both(index(**{LAYER: "../x.safetensors"}), moved("target/model-00001-of-00002.safetensors", "x.safetensors")),
        "index.json names '../x.safetensors', which is outside",
    ),
    case(
        "weights elsewhere: sub/../../", index(**{LAYER: "a/../../target/model-00001-of-00002.safetensors"}), "which is outside its folder"
    ),
    case(
        "weights elsewhere: an absolute path",
        lambda folder: sharded(folder, **{LAYER: str(folder / "eagle/artifact/model.safetensors")}),
        "which is outside its folder",
    ),
    case("weights elsewhere: a link", linked, "model.safetensors.*is a link to .*elsewhere.safetensors', outside the folder"),
    case("weights elsewhere: a link, in training", linked, "outside the folder", TRAIN),
    case(
        "weights elsewhere: a shard is a link",
        both(
            index(),
            moved("target/model-00001-of-00002.safetensors", "x.safetensors"),
            lambda folder: (folder / "target/model-00001-of-00002.safetensors").symlink_to(folder / "x.safetensors"),
        ),
        "outside the folder",
    ),
    case(
        "weights elsewhere: of a drafter",
        both(
            moved("eagle/artifact/model.safetensors", "x.safetensors"),
            lambda folder: (folder / "eagle/artifact/model.safetensors").symlink_to("../../x.safetensors"),
        ),
        "outside the folder",
        drafting("eagle/artifact"),
    ),
    case(
        "weights elsewhere: a link that leads nowhere",
        both(lambda folder: (folder / WEIGHTS).unlink(), lambda folder: (folder / WEIGHTS).symlink_to("nowhere")),
        "no weights in 'target'",
    ),
    case("index: no map", both(index(), changed(INDEX, weight_map=...)), "index.json: `weight_map` should be an object, got nothing"),
    case("index: no metadata", both(index(), changed(INDEX, metadata=...)), "index.json: `metadata` should be an object"),
    case("index: a map of numbers", index(**{LAYER: 5}), f"`{LAYER}` should be text, got an integer"),
    case("index: a map of null", index(**{LAYER: None}), f"`{LAYER}` should be text, got null"),
    case("index: a list as map", both(index(), changed(INDEX, weight_map=[])), "`weight_map` should be an object, got a list"),
    case("index: empty", both(index(), changed(INDEX, weight_map={})), "missing tensors|safetensors have 0 tensors"),
    case(
        "index: a missing shard",
        both(index(), lambda folder: (folder / "target/model-00002-of-00002.safetensors").unlink()),
        "no model-00002-of-00002.safetensors in 'target', which model.safetensors.index.json names",
    ),
    case(
        "index: a shard without the tensor",
        both(index(), tensors("target/model-00001-of-00002.safetensors", lambda weights: weights.pop(sorted(weights)[0]))),
        "lacks .*, which model.safetensors.index.json names",
    ),
    case("index: another kind of file", index(**{LAYER: "config.json"}), "names 'config.json'; expected a safetensors file"),
    case("index: a folder's name", index(**{LAYER: ".."}), "which is outside its folder"),
    case("safetensors: empty", written(WEIGHTS, b""), "model.safetensors in 'target' is damaged or cut off"),
    case("safetensors: half", cut(WEIGHTS, 0.5), "damaged or cut off"),
    case("safetensors: a header that is cut off", cut(WEIGHTS, 0.01), "damaged or cut off"),
    case("safetensors: text", written(WEIGHTS, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"), "damaged or cut off"),
    case("safetensors: a huge header", written(WEIGHTS, (2**62).to_bytes(8, "little") + b"{}"), "damaged or cut off"),
    case("safetensors: a deep header", written(WEIGHTS, (100_000).to_bytes(8, "little") + b"[" * 100_000), "damaged or cut off"),
    case(
        "safetensors: a tensor longer than the file",
        written(WEIGHTS, (len(h := b'{"a":{"dtype":"F32","shape":[1000000000],"data_offsets":[0,4000000000]}}')).to_bytes(8, "little") + h),
        "damaged or cut off",
    ),
    case(
        "safetensors: a folder",
        both(lambda folder: (folder / WEIGHTS).unlink(), lambda folder: (folder / WEIGHTS).mkdir()),
        "no weights in 'target'",
    ),
    case("safetensors: no tensor", tensors(WEIGHTS, lambda weights: weights.clear()), "missing tensors|have 0 tensors"),
    case("safetensors: none", lambda folder: (folder / WEIGHTS).unlink(), "no weights in 'target': expected model.safetensors"),
    case("safetensors: of a drafter, half", cut("eagle/artifact/model.safetensors", 0.5), "damaged or cut off", drafting("eagle/artifact")),
    case(
        "safetensors: of a student, half",
        cut("student/artifact/model.safetensors", 0.5),
        "damaged or cut off",
        drafting("student/artifact"),
    ),
]
TENSORS = [
    case("tensors of a target: missing", tensors(WEIGHTS, drop(LAYER)), f"missing tensors: {LAYER}"),
    case("tensors of a target: missing head", tensors(WEIGHTS, drop(HEAD)), "missing tensors: lm_head.weight"),
    case(
        "tensors of a target: extra",
        tensors(WEIGHTS, lambda weights: weights.update(extra=weights[LAYER].clone())),
        "unexpected tensors: extra",
    ),
    case(
        "tensors of a target: another shape",
        tensors(WEIGHTS, alter(LAYER, lambda tensor: tensor.T.contiguous())),
        rf"misshapen tensors: {LAYER} \[32, 48\] for \[48, 32\]",
    ),
    case(
        "tensors of a target: int64",
        tensors(WEIGHTS, alter(LAYER, lambda tensor: tensor.long())),
        f"model.safetensors has {LAYER} in I64; expected floating point",
    ),
    case(
        "tensors of a target: int64 head, in training",
        tensors(WEIGHTS, alter(HEAD, lambda tensor: tensor.long())),
        "lm_head.weight in I64",
        TRAIN,
    ),
    case("tensors of a target: int8", tensors(WEIGHTS, alter(EMBEDDING, lambda tensor: tensor.char())), "in I8; expected floating point"),
    case("tensors of a target: bool", tensors(WEIGHTS, alter(EMBEDDING, lambda tensor: tensor > 0)), "in BOOL; expected floating point"),
    case(
        "tensors of a target: complex",
        tensors(WEIGHTS, alter(LAYER, lambda tensor: tensor.to(dtype=__import__("torch").complex64))),
        "in C64; expected floating point",
    ),
    case(
        "tensors of a target: int64 under a quantised config",
        both(tensors(WEIGHTS, alter(LAYER, lambda tensor: tensor.long())), changed(CONFIG, quantization_config={"quant_method": "mine"})),
        "`quant_method` 'mine', unknown to transformers",
    ),
    *(
        case(
            f"tensors of a target: {value} in {name}",
            tensors(WEIGHTS, alter(name, filled(float(value)))),
            f"NaN or infinite weights in {name}",
            command,
        )
        for value in ("nan", "inf", "-inf")
        for name, command in (
            (EMBEDDING, GENERATE),
            (LAYER, GENERATE),
            (HEAD, TRAIN),
            ("model.norm.weight", "data capture eagle.yaml features.store=new"),
        )
    ),
    case(
        "tensors of a drafter: NaN",
        tensors("medusa/artifact/model.safetensors", alter("1.0.linear.bias", filled(float("nan")))),
        "medusa/artifact' has NaN or infinite weights in 1.0.linear.bias",
        drafting("medusa/artifact"),
    ),
    case(
        "tensors of a drafter: Inf",
        tensors("eagle/artifact/model.safetensors", alter("fc.weight", filled(float("inf")))),
        "NaN or infinite weights in fc.weight",
        drafting("eagle/artifact"),
    ),
    case(
        "tensors of a drafter: NaN as eagle.start",
        tensors("eagle/artifact/model.safetensors", alter("fc.weight", filled(float("nan")))),
        "NaN or infinite weights in fc.weight",
        "train eagle eagle.yaml eagle.start=eagle/artifact",
    ),
    case(
        "tensors of a drafter: NaN of a student",
        tensors("student/artifact/model.safetensors", alter(EMBEDDING, filled(float("nan")))),
        "NaN or infinite weights in model.embed_tokens",
        drafting("student/artifact"),
    ),
    case(
        "tensors of a drafter: int64",
        tensors("medusa/artifact/model.safetensors", alter("0.0.linear.weight", lambda tensor: tensor.long())),
        "0.0.linear.weight in I64",
        drafting("medusa/artifact"),
    ),
    case(
        "tensors of a drafter: missing",
        tensors("medusa/artifact/model.safetensors", drop("1.0.linear.bias")),
        "missing tensors: 1.0.linear.bias",
        drafting("medusa/artifact"),
    ),
    case(
        "tensors of a drafter: extra",
        tensors("eagle/artifact/model.safetensors", lambda weights: weights.update(more=weights["fc.weight"].clone())),
        "unexpected tensors: more",
        drafting("eagle/artifact"),
    ),
    case(
        "tensors of a drafter: another shape",
        tensors("eagle/artifact/model.safetensors", alter("fc.weight", lambda tensor: tensor.T.contiguous())),
        "misshapen tensors: fc.weight",
        drafting("eagle/artifact"),
    ),
]
MAPS = [
    case(f"a draft vocabulary: {name}", partial(small_vocabulary, change=change), says, drafting("eagle/artifact"))
    for name, change, says in (
        ("d2t all zero", alter("d2t", lambda d2t: d2t * 0), "eagle/artifact': d2t and t2d disagree"),
        ("one token for all", alter("d2t", lambda d2t: -__import__("torch").arange(len(d2t))), "1 different ones of 20"),
        ("ids past V", alter("d2t", lambda d2t: d2t + 250), "different ids in 0..256"),
        ("negative ids", alter("d2t", lambda d2t: d2t - 50), "different ids in 0..256"),
        ("ids in place of offsets", alter("d2t", lambda d2t: d2t + __import__("torch").arange(len(d2t))), "d2t holds target ids"),
        ("t2d empty", alter("t2d", lambda t2d: t2d & False), "disagree on 20 tokens"),
        ("d2t of floats", alter("d2t", lambda d2t: d2t.float()), "d2t in F32; expected integers"),
        ("t2d of integers", alter("t2d", lambda t2d: t2d.long()), "t2d in I64; expected bool"),
    )
]
EAGLE, MEDUSA, STUDENT = (f"{method}/artifact/config.json" for method in ("eagle", "medusa", "student"))
deep_chain = [[0] * k for k in range(1, 300)]
SETTINGS = [
    case(f"a drafter's config: {Path(file).parts[0]} {name}", changed(file, **{key: value}), says, drafting(str(Path(file).parent)))
    for file, name, key, value, says in (
        (EAGLE, "num_layers 10**6", "num_layers", 10**6, "`num_layers` is 1,000,000; expected at most"),
        (EAGLE, "num_layers 9,999", "num_layers", 9999, "describes 79,992 tensors or more, model.safetensors has"),
        (EAGLE, "num_heads 10**6", "num_heads", 10**6, "`num_heads` is 1,000,000"),
        (EAGLE, "num_heads 0", "num_heads", 0, "`num_heads` is 0; expected a size"),
        (EAGLE, "num_kv_heads 0", "num_kv_heads", 0, "`num_kv_heads` is 0"),
        (EAGLE, "num_kv_heads 3", "num_kv_heads", 3, "config.json: got 4 heads for 3 KV heads"),
        (EAGLE, "draft_size 10**8", "draft_size", 10**8, "misshapen tensors"),
        (EAGLE, "vocab_size 10**9", "vocab_size", 10**9, "missing tensors: d2t, t2d"),
        (EAGLE, "draft_vocab_size -1", "draft_vocab_size", -1, "`draft_vocab_size` is -1"),
        (EAGLE, "intermediate_size 2**40", "intermediate_size", 2**40, "`intermediate_size` is 1099511627776"),
        (EAGLE, "head_dim 7", "head_dim", 7, "heads of 7 entries"),
        (EAGLE, "steps 10**6", "steps", 10**6, "steps 1000000; expected"),
        (EAGLE, "steps text", "steps", "many", "config.json: `steps` should be an integer, got text"),
        (EAGLE, "version 2", "version", 2, "config.json: got EAGLE version 2"),
        (EAGLE, "version true", "version", True, "`version` should be an integer, got true or false"),
        (EAGLE, "rope_theta 0", "rope_theta", 0, "`rope_theta` is 0; expected a number above 0"),
        (EAGLE, "rope_theta NaN", "rope_theta", float("nan"), "`rope_theta` is NaN"),
        (EAGLE, "rope_theta Infinity", "rope_theta", float("inf"), "`rope_theta` is inf"),
        (EAGLE, "rms_norm_eps -1", "rms_norm_eps", -1.0, "`rms_norm_eps` is -1"),
        (EAGLE, "fc_norm text", "fc_norm", "yes", "`fc_norm` should be true or false"),
        (EAGLE, "taps of text", "taps", ["0", "1"], "`taps` should be layer numbers"),
        (EAGLE, "taps negative", "taps", [-1, 1], "`taps` should be layer numbers"),
        (EAGLE, "taps past the end", "taps", [0, 7], r"reads taps \[0, 7\]"),
        (EAGLE, "taps an object", "taps", {"0": 1}, "`taps` should be a list"),
        (EAGLE, "target a list", "target", ["x"], "`target` should be an object"),
        (EAGLE, "target without hashes", "target", {"name": "target"}, "`target`: `revision` should be text, got nothing"),
        (EAGLE, "target of numbers", "target.config_hash", 5, "`config_hash` should be text, got an integer"),
        (EAGLE, "training text", "training", "long", "`training` should be an object"),
        (EAGLE, "training positions", "training.positions", "many", "`training`: `positions` should be an integer"),
        (EAGLE, "tree of 10**6 nodes", "tree", [[n] for n in range(10**6)], "`tree`: got 1,000,000 nodes; expected at most 1,024"),
        (EAGLE, "tree of 299 levels", "tree", deep_chain, "`tree`: got a path 65 deep; expected at most 64"),
        (EAGLE, "tree of 10**9 candidates", "tree", [[10**9]], "`tree`: a rank is an integer .1000000000.; expected"),
        (EAGLE, "tree without prefixes", "tree", [[0, 0], [0, 0, 0]], r"config.json.*without its prefix"),
        (EAGLE, "tree of negative ranks", "tree", [[-1]], "config.json.*ranks >= 0"),
        (EAGLE, "tree of text", "tree", [["0"]], "`tree`: a rank is text"),
        (EAGLE, "tree as text", "tree", "wide", "`tree` should be a list or an object"),
        (EAGLE, "tree of numbers", "tree", [0, 1], "`tree`: a rank path is an integer"),
        (
            EAGLE,
            "dynamic tree 10**6 deep",
            "tree",
            {"depth": 10**6, "width": 1, "nodes": 10**6},
            "`tree`: depth is an integer .1000000.; expected an integer, 1 to 64",
        ),
        (
            EAGLE,
            "dynamic tree 10**6 wide",
            "tree",
            {"depth": 2, "width": 10**6, "nodes": 100},
            "`tree`: width is an integer .1000000.; expected",
        ),
        (EAGLE, "dynamic tree of text", "tree", {"depth": "2", "width": 2, "nodes": 5}, "`tree`: depth is text"),
        (
            EAGLE,
            "dynamic tree with more",
            "tree",
            {"depth": 2, "width": 2, "nodes": 5, "x": 1},
            "`tree`: got a dynamic tree with 'depth', 'width', 'nodes', 'x'",
        ),
        (EAGLE, "dynamic tree of width 0", "tree", {"depth": 2, "width": 0, "nodes": 5}, "`tree`: width is an integer .0.; expected"),
        (EAGLE, "model_type unknown", "model_type", "eagle9", "eagle9"),
        (EAGLE, "model_type a list", "model_type", ["eagle"], "`model_type` should be text or null, got a list"),
        (MEDUSA, "num_heads 9,999", "num_heads", 9999, "num_heads 9999.*expected 1 to 64"),
        (MEDUSA, "num_heads 3", "num_heads", 3, "tensors"),
        (MEDUSA, "num_layers 9,999", "num_layers", 9999, "describes 39,996 tensors or more"),
        (MEDUSA, "hidden_size 10**9", "hidden_size", 10**9, "misshapen tensors"),
        (MEDUSA, "hidden_size 0", "hidden_size", 0, "`hidden_size` is 0"),
        (MEDUSA, "vocab_size -5", "vocab_size", -5, "`vocab_size` is -5"),
        (MEDUSA, "share_head text", "share_head", "no", "`share_head` should be true or false"),
        (MEDUSA, "tree deeper than its heads", "tree", [[0], [0, 0], [0, 0, 0]], "config.json: got a tree 3 deep for 2 heads"),
        (MEDUSA, "no biases", "medusa_fc_bias", False, "medusa_fc_bias false"),
        (MEDUSA, "num_labels 10**9", "num_labels", 10**9, "`num_labels` is 1,000,000,000"),
        (STUDENT, "entry text", "draftsmith", "yes", "`draftsmith` should be an object"),
        (STUDENT, "entry empty", "draftsmith", {}, "`draftsmith`: `tree` should be a list or an object, got nothing"),
        (STUDENT, "confidence text", "draftsmith.confidence", "high", "`confidence` should be a number"),
        (STUDENT, "confidence 2", "draftsmith.confidence", 2, "`confidence` is 2; expected a probability"),
        (STUDENT, "confidence NaN", "draftsmith.confidence", float("nan"), "`confidence` is NaN"),
        (STUDENT, "tree of 10**6 nodes", "draftsmith.tree", [[n] for n in range(10**6)], "`draftsmith`: `tree`: got 1,000,000 nodes"),
        (STUDENT, "target text", "draftsmith.target", "target", "`draftsmith`: `target` should be an object"),
        (STUDENT, "target without a name", "draftsmith.target.name", ..., "`name` should be text, got nothing"),
    )
]
CODE = (
    "import os\n" + PLANTED + "from transformers import LlamaConfig as Mine, LlamaForCausalLM as Model, PreTrainedTokenizerFast as Tokens\n"
)
planted_config = both(
    written("target/code.py", CODE), changed(CONFIG, auto_map={"AutoConfig": "code.Mine", "AutoModelForCausalLM": "code.Model"})
)
unknown_config = both(planted_config, changed(CONFIG, model_type="mine"))
planted_tokenizer = both(
    written("target/code.py", CODE),
    changed("target/tokenizer_config.json", auto_map={"AutoTokenizer": ["code.Tokens", None]}, tokenizer_class="Tokens"),
)


def yes() -> None:
    """`y` on stdin, as often as it is asked for."""
    import os

    read, write = os.pipe()
    os.write(write, b"y\n" * 100)
    os.dup2(read, 0)


CODE_CASES = [
    case("code of a folder: model", unknown_config, "runs model code of its own", inside=yes),
    case("code of a folder: model, in training", unknown_config, "runs model code of its own", TRAIN, inside=yes),
    case("code of a folder: model, as a plan", unknown_config, "runs model code of its own", "plan medusa.yaml --gpus 1", inside=yes),
    case("code of a folder: tokenizer", planted_tokenizer, "the tokenizer of 'target' runs model code of its own", inside=yes),
    case("code of a folder: tokenizer, as a plan", planted_tokenizer, "", "plan medusa.yaml --gpus 1", inside=yes, status=0),
    case(
        "code of a folder: tokenizer, in training",
        planted_tokenizer,
        "the tokenizer of 'target' runs model code of its own",
        TRAIN,
        inside=yes,
    ),
    case("code of a folder: attention from the Hub", changed(CONFIG, attn_implementation="someone/kernel"), "names code on the Hub"),
    case(
        "code of a folder: attention from the Hub, inner key",
        changed(CONFIG, _attn_implementation="someone/kernel:f"),
        "names code on the Hub",
    ),
    case(
        "code of a folder: experts from the Hub, of a drafter",
        changed(EAGLE, experts_implementation="someone/kernel"),
        "names code on the Hub",
        drafting("eagle/artifact"),
    ),
    case(
        "code of a folder: a module that an adapter names",
        lambda folder: adapter(folder, megatron_config={"a": 1}, megatron_core="code"),
        "`megatron_config` is set",
    ),
]
ADAPTERS = [
    case("an adapter: rank 10**9", lambda folder: adapter(folder, r=10**9), r"adapter_config.json: a rank of 1000000000; .* have \[2\]"),
    case("an adapter: rank by pattern", lambda folder: adapter(folder, rank_pattern={"q_proj": 10**8}), "a rank of 100000000"),
    case("an adapter: rank text", lambda folder: adapter(folder, r="2"), "`r` should be an integer, got text"),
    case("an adapter: another kind", lambda folder: adapter(folder, peft_type="LOHA"), "only LORA can be read"),
    case("an adapter: no kind", lambda folder: adapter(folder, peft_type=None), "`peft_type` should be text, got null"),
    case("an adapter: not JSON", both(adapter, written("target/adapter_config.json", "{")), "adapter_config.json: not JSON"),
    case(
        "an adapter: cut off", both(adapter, cut("target/adapter_model.safetensors", 0.5)), "adapter_model.safetensors.*damaged or cut off"
    ),
    case("an adapter: alone", both(adapter, lambda folder: (folder / WEIGHTS).unlink()), "no weights in 'target'"),
]
GENERATION = [
    case(
        f"a generation config: {key} {json.dumps(value)}",
        changed("target/generation_config.json", **{key: value}),
        f"generation_config.json.*`?{key}`?",
    )
    for key, value in (
        ("eos_token_id", "text"),
        ("eos_token_id", [[1]]),
        ("eos_token_id", -1),
        ("eos_token_id", 10**9),
        ("eos_token_id", [1, 300]),
        ("eos_token_id", 1.5),
        ("eos_token_id", {"a": 1}),
        ("eos_token_id", True),
        ("temperature", "hot"),
        ("temperature", [1]),
        ("temperature", float("nan")),
        ("top_k", "5"),
        ("top_k", 1.5),
        ("top_p", "all"),
        ("top_p", {}),
        ("do_sample", 1),
        ("repetition_penalty", "x"),
        ("min_p", True),
    )
]
TOKENIZERS = [
    case(f"a tokenizer: {name}", damage, says, command)
    for name, damage, says, command in (
        ("an unknown model", changed("target/tokenizer.json", **{"model.type": "Nothing"}), r"tokenizer\.json", GENERATE),
        ("no model", changed("target/tokenizer.json", model=...), r"tokenizer\.json", GENERATE),
        ("a vocabulary of text", changed("target/tokenizer.json", **{"model.vocab": "words"}), r"tokenizer\.json", GENERATE),
        ("negative ids", changed("target/tokenizer.json", **{"model.vocab": {"a": -1}}), r"tokenizer\.json", GENERATE),
        ("an unknown class", changed("target/tokenizer_config.json", tokenizer_class=5), "tokenizer", GENERATE),
        ("an eos_token of a number", changed("target/tokenizer_config.json", eos_token=5), "tokenizer", GENERATE),
        ("an eos_token of a list", changed("target/tokenizer_config.json", eos_token=["a"]), "tokenizer", GENERATE),
        (
            "none",
            both(*(lambda folder, name=name: (folder / "target" / name).unlink() for name in ("tokenizer.json", "tokenizer_config.json"))),
            "'target' has no tokenizer beside its weights",
            GENERATE,
        ),
        (
            "none, in training",
            both(*(lambda folder, name=name: (folder / "target" / name).unlink() for name in ("tokenizer.json", "tokenizer_config.json"))),
            "'target' has no tokenizer beside its weights",
            TRAIN,
        ),
        ("of a student, cut off", cut("student/artifact/tokenizer.json", 0.5), r"tokenizer\.json", drafting("student/artifact")),
        (
            "of a student, other tokens",
            changed("student/artifact/tokenizer.json", **{"model.vocab": {"a": 0, "b": 1}}),
            "another tokenizer",
            drafting("student/artifact"),
        ),
    )
]
PATHS = [
    case(f"paths: {name}", lambda folder: None, says, ["generate", "Hello", "--target", path])
    for name, path, says in (
        ("empty", "", "got ''; give a folder"),
        ("a blank", " ", "got ' '; give a folder"),
        ("of nobody", "~nobody/model", "no folder '~nobody/model'"),
        ("~ that is not there", "~/no/such/model", "no folder '~/no/such/model'"),
        ("a zero byte", "tar\0get", "got 'tar.x00get'"),
        ("a file", "target/config.json", "is a file; give the folder"),
        ("another folder", "medusa", "no config.json in 'medusa'"),
        ("a drafter as the target", "eagle/artifact", "eagle/artifact' is|architecture 'eagle'"),
    )
]
CASES = [*JSON_FILES, *KINDS, *SIZES, *FILES, *TENSORS, *MAPS, *SETTINGS, *CODE_CASES, *ADAPTERS, *GENERATION, *TOKENIZERS, *PATHS]
