"""What is wrong with a drafter's folder in an engine: one line for each thing, after the rules of the engines' loaders.

Most of these faults load, answer, and accept nothing: verification hides a drafter that was read wrongly.

Letters: V target vocabulary · D draft vocabulary · T taps · K heads.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.reading import read_json
from draftsmith.models import vocab
from draftsmith.models.formats import dflash, plain
from draftsmith.models.formats.eagle import ARCHITECTURES, BIAS, COUNT, INNER, MASK, MASK_TOKEN, PARALLEL, TAPS, VERSIONS
from draftsmith.models.formats.engines import OVERRIDING
from draftsmith.models.formats.layouts import EMBEDDING
from draftsmith.models.formats.medusa import HEADS, SHARED, SHARED_KEY, WEIGHTS
from draftsmith.models.formats.mlp import ARCHITECTURE, PREFIX
from draftsmith.models.formats.student import GENERATION
from draftsmith.models.model_files import TOKENIZER_FILES
from draftsmith.models.target import Target

__all__ = ["FAULTS", "Fault", "eagle_faults", "gguf_faults", "path_faults", "student_faults"]

Fault = tuple[str, str]  # engines of `engines.ENGINES`, with blanks between; what is wrong
_ALL3 = "vllm sglang tensorrt-llm speculators eagle"


def path_faults(family: str, folder: Path) -> Iterator[Fault]:
    """A path that makes vLLM take another method."""
    words = [word for word in OVERRIDING if word in str(folder).lower()]
    if family in ("medusa", "mlp", "student") and words:
        yield "vllm", f"the path has {words[0]!r} in it, by which vLLM takes another method than it was given; rename the folder"


def medusa_faults(raw: dict[str, Any], tensors: dict[str, Tensor], target: Target, folder: Path) -> Iterator[Fault]:
    """Faults of a folder of Medusa heads."""
    heads, blocks = (next((raw[key] for key in keys if key in raw), None) for keys in (HEADS, ("medusa_num_layers", "num_hidden_layers")))
    counted = {key: value for key, value in raw.items() if "num" in key and "heads" in key}
    if heads is None:
        yield "vllm tgi tensorrt-llm", "config.json lacks medusa_num_heads"
    elif len(set(counted.values())) > 1:
        yield "vllm", f"config.json counts heads twice, {counted}: the last one wins"
    for key, size in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if raw.get(key) != size:
            usual = {"hidden_size": 4096, "vocab_size": 32001}[key]
            yield "vllm", f"config.json has {key} {raw.get(key, f'missing, which is {usual}')}, target {target.name!r} has {size}"
    if "architectures" in raw:
        yield "tgi", "config.json has architectures, which TGI takes for a model of its own; leave it out"
        if raw["architectures"] != ["MedusaModel"]:
            yield "vllm", f"config.json has architectures {raw['architectures']}; vLLM knows MedusaModel alone: leave it out"
    for key in ("truncated_vocab_size", "token_map"):
        if raw.get(key) is not None:
            yield "vllm", f"config.json has {key}, which vLLM 0.32 cannot read; leave it out"
    for key in ("medusa_num_heads", "medusa_num_layers", "base_model_name_or_path"):
        if key not in raw:
            yield "tgi", f"config.json lacks {key}"
    if "num_medusa_heads" not in raw:
        yield "tensorrt-llm", "config.json lacks num_medusa_heads"
    if not (folder / WEIGHTS).is_file():
        yield "tgi tensorrt-llm", f"the weights are not in {WEIGHTS}, the only file that is read"
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        yield "tgi", "no tokenizer beside the heads"
    yield from _head_faults(raw, set(tensors), heads or 0, blocks or 1)


def _head_faults(raw: dict[str, Any], names: set[str], heads: int, blocks: int) -> Iterator[Fault]:
    """Faults of the tensors of K heads."""
    plain = {name.removeprefix("medusa_heads.") for name in names}
    linear = [(f"{i}.{j}.linear", f"blocks.{i}.layers.{j}") for i in range(heads) for j in range(blocks)]
    lacking = [pair[0] for pair in linear if not any(f"{name}.weight" in plain for name in pair)]
    if lacking:
        yield "vllm tgi tensorrt-llm", f"tensors are missing: {lacking[0]}.weight{_more(lacking)}"
    biases = [any(f"{name}.bias" in plain for name in pair) for pair in linear]
    if any(biases) and not raw.get("medusa_fc_bias"):
        yield "vllm", "config.json lacks medusa_fc_bias: true, so that the biases of the blocks are dropped without a word"
    if not all(biases):
        engines = "vllm tgi tensorrt-llm" if raw.get("medusa_fc_bias") else "tgi tensorrt-llm"
        yield engines, "biases of the blocks are missing, which must be there"
    own = [any(name in plain for name in (f"{i}.{blocks}.weight", f"lm_heads.{i}.weight")) for i in range(heads)]
    if raw.get(SHARED_KEY) and SHARED not in plain and "lm_heads.0.weight" not in plain:
        yield "vllm", f"{SHARED_KEY} is true and {SHARED} is missing: the target's head is not used, so that nothing is accepted"
    elif not raw.get(SHARED_KEY) and not all(own):
        yield "vllm", f"output layers of {own.count(False)} heads are missing: it loads, answers and accepts nothing"
    if not all(own):
        yield "tensorrt-llm", "each head needs an output layer of its own"
        if any(own) or blocks > 1:
            yield "tgi", "heads share the target's head only where all do, and have one block each"
    known = {f"{name}.{part}" for pair in linear for name in pair for part in ("weight", "bias")}
    known |= {f"{i}.{blocks}.weight" for i in range(heads)} | {f"lm_heads.{i}.weight" for i in range(heads)} | {SHARED}
    if unknown := sorted(plain - known):
        yield "vllm tgi tensorrt-llm", f"tensors that are read by nothing: {unknown[0]}{_more(unknown)}"


def mlp_faults(raw: dict[str, Any], tensors: dict[str, Tensor], target: Target, folder: Path) -> Iterator[Fault]:
    """Faults of a folder of an MLP speculator."""
    both, heads = "vllm tgi", raw.get("n_predict") or 0
    for key, size in (("emb_dim", target.hidden_size), ("vocab_size", target.vocab_size)):
        if raw.get(key) != size:
            yield both, f"config.json has {key} {raw.get(key, 'missing')}, target {target.name!r} has {size}"
    if raw.get("architectures") != [ARCHITECTURE]:
        yield "vllm", f"config.json has architectures {raw.get('architectures')}; vLLM knows {ARCHITECTURE} alone"
    for key in ("n_predict", "tie_weights", "scale_input"):
        if key not in raw:
            yield both, f"config.json lacks {key}: {'3' if key == 'n_predict' else 'false'} is taken"
    if not raw.get("inner_dim"):
        yield "tgi", "config.json has no inner_dim above 0, by which tokens are weighed; write the real one"
    if len(raw.get("top_k_tokens_per_head") or range(heads)) != heads:
        yield "vllm", f"top_k_tokens_per_head has {len(raw['top_k_tokens_per_head'])} numbers for {heads} heads: refused"
    if "base_model_name_or_path" not in raw:
        yield "tgi", "config.json lacks base_model_name_or_path"
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        yield "tgi", "no tokenizer beside the heads"
    plain = {name.removeprefix(PREFIX) for name in tensors}
    if any(not name.startswith(PREFIX) for name in tensors):
        yield "tgi", f"names do not begin with {PREFIX}"
    for part, kinds in {"emb": ("weight",), "proj": ("weight",), "head": ("weight",), "ln": ("weight", "bias")}.items():
        names = [f"{part}.{i}.{kind}" for i in range(heads) for kind in kinds]
        read = [name for name in names if not raw.get("tie_weights") or name.split(".")[1] in ("0", "1" if part == "proj" else "0")]
        if lacking := [name for name in read if name not in plain]:
            yield "vllm", f"tensors are missing, and are left random: {lacking[0]}{_more(lacking)}"
        if lacking := [name for name in names if name not in plain]:
            yield "tgi", f"tensors are missing: {lacking[0]}{_more(lacking)}; tied ones too are read at every index"
        plain -= set(names)
    if plain:
        yield both, f"tensors that are read by nothing: {min(plain)}{_more(sorted(plain))}"


def dflash_faults(raw: dict[str, Any], tensors: dict[str, Tensor], target: Target, folder: Path) -> Iterator[Fault]:
    """Faults of a folder of DFlash or DSpark."""
    both, inner, dspark = "vllm sglang", (raw.get(dflash.INNER) or {}) | raw, "markov_rank" in raw
    if raw.get("architectures") != [dflash.ARCHITECTURES["dspark" if dspark else "dflash"]]:
        yield (
            both,
            f"config.json has architectures {raw.get('architectures')}; expected [{dflash.ARCHITECTURES['dspark' if dspark else 'dflash']!r}]",
        )
    for key, size in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if raw.get(key) != size:
            yield both, f"config.json has {key} {raw.get(key, 'missing')}, target {target.name!r} has {size}"
    taps = inner.get("target_layer_ids")
    if not taps:
        yield both, "config.json names no target_layer_ids: other layers are read"
    elif not all(isinstance(tap, int) and 0 <= tap < target.num_layers for tap in taps):
        yield both, f"target_layer_ids {taps} are not the outputs of layers 0 to {target.num_layers - 1}"
    mask = inner.get("mask_token_id")
    if not isinstance(mask, int) or not 0 <= mask < target.vocab_size:
        yield both, f"mask_token_id is {mask}; masks need a token of the target"
    if "block_size" not in inner:
        yield both, "config.json lacks block_size: 16 is taken"
    if "rope_theta" not in raw and "rope_theta" not in (raw.get("rope_parameters") or {}):
        yield both, "config.json names no rope_theta: 1000000 is taken"
    if dspark and any(raw.get(key) != value for key, value in dflash.CONFIDENCE.items()):
        yield "vllm", f"config.json lacks one of {', '.join(dflash.CONFIDENCE)}: the confidence is dropped, or read at another width"
    if dspark and (kind := raw.get("markov_head_type", "vanilla")) != "vanilla":
        yield "vllm", f"markov_head_type is {kind!r}: the Markov head is read as 'vanilla'"
    if "mask_embedding" in tensors:
        yield "sglang", "mask_embedding is read by nothing: masks are the token's embedding"
    layers = raw.get("num_hidden_layers") or 0
    needed = [
        f"layers.{number}.{name}.weight" for number in range(layers) for name in ("self_attn.q_norm", "self_attn.k_norm", "mlp.down_proj")
    ]
    if lacking := [name for name in (*needed, "fc.weight", "hidden_norm.weight", "norm.weight") if name not in tensors]:
        yield both, f"tensors are missing: {lacking[0]}{_more(lacking)}"


# By family, for those whose files have one form.
FAULTS = {"medusa": medusa_faults, "mlp": mlp_faults, "dflash": dflash_faults, "dspark": dflash_faults}


def eagle_faults(family: str, raw: dict[str, Any], tensors: dict[str, Tensor], target: Target, folder: Path) -> Iterator[Fault]:
    """Faults of a folder of EAGLE-1, EAGLE-3 or P-EAGLE."""
    version = 1 if family == "eagle1" else 3
    library = "speculators_model_type" in raw
    flat = raw | {key: value for key, value in (raw.get("transformer_layer_config") or {}).items() if raw.get(key) is None}
    names = flat.get("architectures") or []
    if version == 1 and "LlamaForCausalLM" not in names:
        yield "vllm", f"architectures {names} are refused; write {ARCHITECTURES[1]}"
    if version == 3 and not any(VERSIONS.get(name) in (0, 3) for name in names):
        yield "vllm", f"architectures {names} are refused; write {ARCHITECTURES[3]}"
    prefixed = [name for name in tensors if name.startswith("model.")]
    if prefixed:
        yield "vllm", f"names begin with model., which is refused: {prefixed[0]}{_more(prefixed)}"
    if "rope_theta" not in flat and "rope_theta" not in (flat.get("rope_parameters") or {}):
        yield _ALL3, "config.json names no rope_theta: 10000 is taken"
    elif not library and not ("rope_theta" in raw and "rope_parameters" in raw):
        yield "vllm sglang eagle", "config.json should name rope_theta at the top level and in rope_parameters: each is read somewhere"
    if flat.get("max_position_embeddings", 0) < target.max_positions:
        given = flat.get("max_position_embeddings")
        yield "sglang", f"max_position_embeddings is {given}, less than the target's context {target.max_positions}: refused"
    if family == "peagle" and not isinstance(raw.get(MASK_TOKEN), int):
        yield "vllm", f"config.json lacks {MASK_TOKEN}, the token of drafts that are not there yet: refused"
    if family != "peagle" and raw.get(PARALLEL):
        yield "vllm", f"{PARALLEL} is true and {MASK} is missing: refused"
    if "fc.weight" not in tensors:
        yield _ALL3, "fc.weight is missing: vLLM does not notice, and nothing is accepted"
    if EMBEDDING in tensors and not _same_embedding(tensors[EMBEDDING], target):
        yield "vllm eagle speculators", f"{EMBEDDING} is not the target's: what the drafter was trained with, or random numbers?"
    yield from _faults3(raw, flat, tensors, target, library) if version == 3 else _faults1(raw, tensors)


def _faults1(raw: dict[str, Any], tensors: dict[str, Tensor]) -> Iterator[Fault]:
    if "bias" not in raw:
        yield "eagle", "config.json lacks bias, so that fc gets a random one; write false"
    if raw.get("bias"):
        yield "vllm", "bias is true: vLLM gives q, k and v biases that it leaves uninitialised; write false"
    if BIAS not in tensors:
        yield "sglang", "fc.bias is missing, and is left random; write zeros"
    elif bool(tensors[BIAS].any()):
        yield "vllm", "fc.bias is not zero, and is dropped: train without one"
    if "layers.0.input_layernorm.weight" in tensors:
        yield "vllm", "layers.0.input_layernorm.weight is refused: EAGLE-1's first layer has none"
    if extra := sorted(name for name in ("norm.weight", SHARED) if name in tensors):
        yield "vllm", f"tensors that EAGLE-1 has not are refused: {', '.join(extra)}"


def _faults3(raw: dict[str, Any], flat: dict[str, Any], tensors: dict[str, Tensor], target: Target, library: bool) -> Iterator[Fault]:
    yield from _map_faults(flat, tensors, target)
    yield from _tap_faults(raw, tensors, target, library)
    if "target_hidden_size" in raw and raw["target_hidden_size"] is None and not library:
        yield "vllm", "target_hidden_size is null, which is an error; leave it out"
    if raw.get("target_hidden_size") is not None and EMBEDDING not in tensors:
        yield "eagle", f"target_hidden_size is set, so that the target's embedding is not loaded, and {EMBEDDING} is missing"
    if SHARED not in tensors:
        yield "sglang tensorrt-llm speculators eagle", f"{SHARED} is missing, and is left random in some versions"
    if "speculators_model_type" in raw and "norm_before_residual" not in raw:
        yield "vllm speculators", "config.json lacks norm_before_residual: vLLM takes true, speculators false; write which one it is"
    midlayer = any(name.startswith("midlayer.") for name in tensors)
    layers = flat.get("num_hidden_layers", 1)
    if midlayer:
        yield "speculators", "the layer is named midlayer.: speculators makes a fresh one without a word; name it layers.0."
    elif layers == 1 and not library:
        yield "eagle", "the layer is named layers.0., and is not read; name it midlayer."
    if midlayer and layers > 1:
        yield _ALL3, "several layers are named layers.0., layers.1., …; midlayer. is the name of one alone"
    for number in range(1, layers):
        for norm, engines in (("input_layernorm", "vllm speculators"), ("hidden_norm", "sglang tensorrt-llm")):
            if f"layers.{number}.{norm}.weight" not in tensors:
                yield engines, f"layers.{number}.{norm}.weight is missing, and is left uninitialised"
    norms = {"fc_norm": "fc_norm.0.weight", "norm_before_fc": "input_norm.weight"}
    for key, name in norms.items():
        if bool(raw.get(key)) != (name in tensors):
            yield "vllm speculators", f"{key} is {raw.get(key, 'missing')} and {name} is {'there' if name in tensors else 'missing'}"


def _map_faults(flat: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> Iterator[Fault]:
    size, d2t, t2d = flat.get("draft_vocab_size") or target.vocab_size, tensors.get("d2t"), tensors.get("t2d")
    if size == target.vocab_size:
        if d2t is not None:
            yield "vllm", "d2t is there although the draft vocabulary is the target's: refused"
        return
    if d2t is None:
        yield _ALL3, f"draft_vocab_size is {size} of {target.vocab_size} and d2t is missing: it loads and accepts nothing"
        return
    try:
        if not vocab.from_tensors(d2t, t2d, target.vocab_size, size).ascending:
            yield _ALL3, "d2t is not in ascending order of target ids, by which engines take the target's logits"
    except ValueError as error:
        yield _ALL3, str(error)


def _tap_faults(raw: dict[str, Any], tensors: dict[str, Tensor], target: Target, library: bool) -> Iterator[Fault]:
    layers = target.num_layers
    usual, inputs = [2, layers // 2, layers - 3], raw.get(TAPS)
    outputs = (raw.get(INNER) or {}).get(TAPS)
    if inputs is None:
        if layers < 7:
            yield "vllm", f"{TAPS} is missing, and the usual layers {usual} are not three of a target of {layers}; name others"
        elif outputs is not None:
            yield (
                "vllm",
                f"{TAPS} is missing at the top level: it is read there, as the inputs of layers; write {[tap + 1 for tap in outputs]}",
            )
    elif inputs != sorted(set(inputs)) or not 0 <= inputs[0] <= inputs[-1] <= layers:
        yield "vllm", f"{TAPS} {inputs}: they are sorted, and none may be given twice; expected ascending layers of 0..{layers}"
    if not library and outputs is None and inputs not in (None, usual):
        yield (
            "sglang",
            f"{INNER}.{TAPS} is missing, so that layers {usual} are read; write {[tap - 1 for tap in inputs]}, the outputs of layers",
        )
    if inputs and outputs and [tap - 1 for tap in inputs] != outputs:
        yield "vllm sglang", f"{TAPS} {inputs} are inputs of layers, those in {INNER} {outputs} outputs: expected these one less"
    taps = inputs or [tap + 1 for tap in outputs or []] or usual
    width = tensors["fc.weight"].shape[1] if "fc.weight" in tensors else 0
    if width and width != len(taps) * target.hidden_size:
        yield _ALL3, f"fc.weight reads {width} numbers, {len(taps)} taps of {target.hidden_size} give {len(taps) * target.hidden_size}"
    if len(taps) != 3 and raw.get(COUNT) != len(taps) and outputs is None:
        yield "vllm", f"{COUNT} should be {len(taps)}, for as many taps"


def student_faults(raw: dict[str, Any], tensors: dict[str, Tensor], target: Target, folder: Path) -> Iterator[Fault]:
    """Faults of a draft model's folder."""
    size = raw.get("vocab_size")
    if size != target.vocab_size:
        yield (
            "vllm sglang transformers tensorrt-llm",
            f"vocab_size is {size}, the target's {target.vocab_size}: refused; pad or cut its rows",
        )
    generation = read_json(folder / "generation_config.json") if (folder / "generation_config.json").is_file() else {}
    defaults = dict(zip(GENERATION, ("20 tokens", "a constant number", "a threshold of 0.4"), strict=True))
    for key in (GENERATION[0], GENERATION[2]):
        if generation.get(key) is None:
            yield "transformers", f"generation_config.json lacks {key}: {defaults[key]} is taken"
    rope = raw.get("rope_parameters") or {}
    if "rope_theta" in rope and "rope_theta" not in raw:
        yield "sglang tensorrt-llm transformers", "config.json names rope_theta in rope_parameters alone: transformers 4 takes 10000"
    if "torch_dtype" not in raw:
        yield "sglang tensorrt-llm transformers", "config.json lacks torch_dtype: transformers 4 loads float32"
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        yield "vllm sglang transformers tensorrt-llm", "no tokenizer beside the weights"
    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    if settings.get("tokenizer_class") == "TokenizersBackend":
        yield (
            "sglang tensorrt-llm transformers",
            "tokenizer_class is TokenizersBackend, which transformers 4 refuses; write PreTrainedTokenizerFast",
        )
    wrong = [name for name in tensors if re.search(r"embed_tokens|lm_head", name) and len(tensors[name]) != size]
    if wrong:
        yield "vllm sglang transformers tensorrt-llm", f"{wrong[0]} has {len(tensors[wrong[0]])} rows, vocab_size is {size}"


def gguf_faults(entries: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> Iterator[Fault]:
    """Faults of a GGUF file."""
    kind, tokens = entries.get("general.architecture"), entries.get("tokenizer.ggml.tokens") or []
    if kind not in plain.GGUF_KINDS:
        yield "gguf", f"general.architecture is {kind!r}; expected {' or '.join(plain.GGUF_KINDS)}"
        return
    if len(tokens) > target.vocab_size:
        yield "gguf", f"{len(tokens)} tokens, the target has {target.vocab_size}: llama.cpp accepts that, and then aborts"
    elif len(tokens) < target.vocab_size - 128:
        yield "gguf", f"{len(tokens)} tokens, the target has {target.vocab_size}: more than 128 fewer, so that it serves without drafts"
    texts = {} if target.tokenizer is None else {index: token for token, index in target.tokenizer.get_vocab().items()}
    differing = [index for index in range(5, len(tokens)) if index in texts and tokens[index] != texts[index]]
    if differing:
        yield "gguf", f"token {differing[0]} is {tokens[differing[0]]!r}, the target's {texts[differing[0]]!r}: it serves without drafts"
    if kind == "eagle3":
        taps, d2t = entries.get("eagle3.target_layers") or [], tensors.get("d2t")
        if len(taps) != 3 or not all(0 <= tap <= target.num_layers for tap in taps):
            yield "gguf", f"eagle3.target_layers is {taps}; expected three layers of 0..{target.num_layers}"
        if entries.get("eagle3.target_hidden_size") != target.hidden_size:
            yield "gguf", f"eagle3.target_hidden_size is {entries.get('eagle3.target_hidden_size')}, the target has {target.hidden_size}"
        size = len(tensors["lm_head.weight"]) if "lm_head.weight" in tensors else target.vocab_size
        if d2t is None and size != target.vocab_size:
            yield "gguf", f"the head has {size} rows and d2t is missing"
        if d2t is not None and (not bool((d2t.diff() > 0).all()) or int(d2t.min()) < 0 or int(d2t.max()) >= target.vocab_size):
            yield "gguf", f"d2t is not ascending ids of 0..{target.vocab_size - 1}: here it holds target ids, no offsets"


def _same_embedding(stored: Tensor, target: Target) -> bool:
    with torch.no_grad():
        ids = torch.arange(min(target.vocab_size, 4096))
        theirs = target.embed(ids.to(target.head_weight.device)).float().cpu()
    return stored.shape == (target.vocab_size, theirs.shape[1]) and torch.allclose(
        stored[: len(ids)].float(), theirs, rtol=2**-7, atol=1e-6
    )


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
