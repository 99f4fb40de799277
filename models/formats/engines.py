"""Which drafter goes to which engine: one table, what each engine takes from the target, and what it cannot compute.

"run": the engine itself ran such a folder on a CPU and proposed the same tokens as here. "read": the folder follows the rules in the source of the
engine's loader, which needs a GPU.
"""

from typing import Any, NamedTuple

import torch

from draftsmith.inference.expand import parse_tree_spec
from draftsmith.models.dflash import DflashConfig, DflashModel
from draftsmith.models.drafter import DrafterConfig, DrafterModel
from draftsmith.models.eagle import EagleConfig, EagleModel
from draftsmith.models.medusa import MedusaModel
from draftsmith.models.mlp import MlpConfig, MlpModel
from draftsmith.models.model_files import path_for_engines
from draftsmith.models.peagle import PeagleModel
from draftsmith.models.target import Target
from draftsmith.models.target_defaults import usual_taps

__all__ = [
    "ENGINES",
    "PARALLEL",
    "ROWS",
    "VLLM_METHODS",
    "Limit",
    "Row",
    "check_row",
    "eagle_limits",
    "family_of",
    "limits_of",
    "scales_embedding",
    "serving",
]

# What --to takes -> the engine's name.
ENGINES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "tgi": "TGI",
    "tensorrt-llm": "TensorRT-LLM",
    "speculators": "speculators",
    "eagle": "SafeAILab",
    "transformers": "transformers",
    "gguf": "llama.cpp",
}
# For --to: no engines, but other people's names of tensors -> the family that has them.
NAMES = {"checkpoint": "mtp", "hydra": "hydra"}
FAMILIES = {"medusa": "Medusa", "mlp": "an MLP speculator", "eagle1": "EAGLE-1", "eagle3": "EAGLE-3", "student": "a draft model"}
FAMILIES |= {"dflash": "DFlash", "dspark": "DSpark", "peagle": "P-EAGLE", "hydra": "Hydra", "kangaroo": "Kangaroo", "mtp": "an MTP layer"}


class Row(NamedTuple):
    """A family in an engine.

    Attributes:
        shared: what the engine takes from the target; everything else is in the folder.
        proof: run or read.
        serve: how to start it, with {target}, {folder} and {depth}.
    """

    shared: str
    proof: str
    serve: str


# The `method` of vLLM's speculative config, by family. Without one, words in the folder's path decide.
VLLM_METHODS = {"medusa": "medusa", "mlp": "mlp_speculator", "eagle1": "eagle", "eagle3": "eagle3", "student": "draft_model"}
VLLM_METHODS |= {"dflash": "dflash", "dspark": "dspark", "peagle": "eagle3"}
_VLLM = 'vllm serve {{target}} --speculative-config \'{{{{"method":"{}","model":"{{folder}}","num_speculative_tokens":{{depth}}}}}}\''
PARALLEL = {"parallel_drafting": True}  # of P-EAGLE, in vLLM's speculative config
_VLLM_PARALLEL = _VLLM.replace("{{depth}}", '{{depth}},"parallel_drafting":true')
_SGLANG = (
    "python -m sglang.launch_server --model-path {{target}} --speculative-algorithm {} --speculative-draft-model-path {{folder}} "
    "--speculative-num-steps {{depth}} --speculative-eagle-topk 1 --speculative-num-draft-tokens {{nodes}}"
)
_SGLANG_BLOCK = (
    "python -m sglang.launch_server --model-path {{target}} --speculative-algorithm {} --speculative-draft-model-path {{folder}}"
)
_TENSORRT = "trtllm-serve {target} --extra_llm_api_options {folder}/tensorrt-llm.yaml"

ROWS: dict[tuple[str, str], Row] = {
    ("medusa", "vllm"): Row("nothing", "run", _VLLM.format(VLLM_METHODS["medusa"])),
    ("medusa", "tgi"): Row(
        "the head, where all heads share it", "read", "text-generation-launcher --model-id {folder} --speculate {depth}"
    ),
    ("medusa", "tensorrt-llm"): Row(
        "nothing",
        "read",
        "examples/medusa/convert_checkpoint.py --model_dir {target} --medusa_model_dir {folder} --num_medusa_heads {depth}",
    ),
    ("mlp", "vllm"): Row("nothing", "read", _VLLM.format(VLLM_METHODS["mlp"])),
    ("mlp", "tgi"): Row("nothing", "read", "text-generation-launcher --model-id {folder}"),  # --speculate would change w_s
    ("eagle1", "vllm"): Row("the head", "run", _VLLM.format(VLLM_METHODS["eagle1"])),
    ("eagle1", "sglang"): Row("the embedding and the head", "read", _SGLANG.format("EAGLE")),
    ("eagle1", "eagle"): Row(
        "the head", "run", "EaModel.from_pretrained(base_model_path='{target}', ea_model_path='{folder}', use_eagle3=False)"
    ),
    ("eagle3", "vllm"): Row("nothing", "run", _VLLM.format(VLLM_METHODS["eagle3"])),
    ("eagle3", "sglang"): Row("the embedding", "read", _SGLANG.format("EAGLE3")),
    ("eagle3", "tensorrt-llm"): Row("the embedding", "read", _TENSORRT),
    ("eagle3", "speculators"): Row("nothing", "run", "vllm serve {folder}"),
    ("eagle3", "eagle"): Row("nothing", "run", "EaModel.from_pretrained(base_model_path='{target}', ea_model_path='{folder}')"),
    ("eagle3", "gguf"): Row(
        "nothing", "run", "llama-server -m TARGET.gguf -md {folder}/model.gguf --spec-type draft-eagle3 --spec-draft-n-max {depth}"
    ),
    ("peagle", "vllm"): Row("nothing", "run", _VLLM_PARALLEL.format(VLLM_METHODS["peagle"])),
    ("dflash", "vllm"): Row("the embedding and the head", "read", _VLLM.format(VLLM_METHODS["dflash"])),
    ("dflash", "sglang"): Row("the embedding and the head", "read", _SGLANG_BLOCK.format("DFLASH")),
    ("dspark", "vllm"): Row("the embedding and the head", "read", _VLLM.format(VLLM_METHODS["dspark"])),
    ("student", "vllm"): Row("nothing", "run", _VLLM.format(VLLM_METHODS["student"])),
    ("student", "sglang"): Row("nothing", "read", _SGLANG.format("STANDALONE")),
    ("student", "tensorrt-llm"): Row("nothing", "read", _TENSORRT),
    ("student", "transformers"): Row(
        "nothing", "run", "target.generate(**prompt, assistant_model=AutoModelForCausalLM.from_pretrained('{folder}'))"
    ),
    ("student", "gguf"): Row(
        "nothing", "run", "llama-server -m TARGET.gguf -md {folder}/model.gguf --spec-type draft-simple --spec-draft-n-max {depth}"
    ),
}
# A PARD draft model needs no export: its own folder is what vLLM reads.
PARD = Row("nothing", "read", _VLLM_PARALLEL.format(VLLM_METHODS["student"]))

# Why a pair has no row, where more can be said than that.
_REASONS = {
    ("medusa", "sglang"): "it has no Medusa",
    ("medusa", "speculators"): "it has no Medusa",
    ("medusa", "gguf"): "llama.cpp has no Medusa",
    ("medusa", "transformers"): "its assistant is a causal LM",
    ("medusa", "eagle"): "the authors' code of EAGLE has no Medusa",
    ("eagle1", "tensorrt-llm"): "its PyTorch backend refuses EAGLE-1 checkpoints",
    ("eagle1", "speculators"): "how it writes EAGLE-1 is not known here; its own `speculators convert` reads the folder for `eagle`",
    ("eagle1", "gguf"): "llama.cpp has EAGLE-3 alone",
    ("eagle1", "transformers"): "its assistant is a causal LM",
    ("eagle3", "transformers"): "its assistant is a causal LM",
    ("peagle", "transformers"): "its assistant is a causal LM",
    ("student", "speculators"): "it trains heads; vLLM serves a draft model as it is",
}
NOT_TAPPED = ("gemma3", "gemma3_text", "glm4_moe", "qwen2_moe")  # targets that vLLM captures no taps of
# Words in a path by which vLLM overrides the method, whatever --speculative-config says, for methods but EAGLE's.
OVERRIDING = ("eagle-", "eagle3", "dflash", "dspark")


class Limit(NamedTuple):
    """What an engine does otherwise with a drafter; `refused`: it proposes other tokens, or loads nothing."""

    engine: str
    why: str
    refused: bool


def family_of(drafter: Any) -> str:
    """eagle1 or eagle3, else the method of a drafter; student for a draft model. (3.1 and speculators' variants are eagle3 with more norms.)"""
    if isinstance(drafter, EagleModel) and not isinstance(drafter, PeagleModel):
        return f"eagle{drafter.config.version}"
    return drafter.method if isinstance(drafter, DrafterModel) else "student"


def check_row(family: str, engine: str, limits: list[Limit]) -> Row:
    """The row of the table.

    Raises:
        ValueError: the engine does not serve this drafter; the line says why, and which engines do.
    """
    refusing = {limit.engine for limit in limits if limit.refused}
    left = [each for each, name in ENGINES.items() if (family, each) in ROWS and name not in refusing]
    left += [each for each, named in NAMES.items() if family == named]
    nearest = f"nearest: --to {', '.join(left)}" if left else "no engine does; it runs here alone"
    name, about = ENGINES[engine], FAMILIES.get(family, family)
    if (family, engine) not in ROWS:
        reason = _REASONS.get((family, engine), "it reads one in the target's checkpoint" if family == "mtp" else "it has no such drafter")
        raise ValueError(f"--to {engine}: {name} does not serve {about} ({reason}); {nearest}")
    if why := [limit.why for limit in limits if limit.refused and limit.engine == name]:
        raise ValueError(f"--to {engine}: {name} would not draft as this drafter does: it {'; '.join(why)}; {nearest}")
    return ROWS[family, engine]


def serving(row: Row, target: str, folder: str, depth: int) -> str:
    """The line that starts the engine."""
    return row.serve.format(target=path_for_engines(target), folder=folder, depth=depth, nodes=depth + 1)


def served_depth(config: DrafterConfig) -> int:
    """Tokens that an engine is set to draft at a time: the depth of the tree. In DFlash's block all rows see each other unless it is causal,
    and an engine makes as many rows as it drafts tokens, so that it has to draft those of the block."""
    complete = isinstance(config, DflashConfig) and not config.causal
    return config.depth if complete else chain_depth(config.tree)


def chain_depth(tree: Any) -> int:
    """The depth of a tree as configs have it, 1 at least: engines refuse a draft length of 0, that of the tree where no draft pays."""
    return max(1, parse_tree_spec(tree).max_depth)


def scales_embedding(target: Target) -> bool:
    """Whether the target scales its embeddings (Gemma)."""
    weight = target.model.get_input_embeddings().get_parameter("weight")[:64]
    return not torch.equal(target.embed(torch.arange(len(weight), device=weight.device)), weight)


def limits_of(drafter: Any, target: Target) -> list[Limit]:
    """What engines do otherwise with a drafter, in the order of the engines."""
    if isinstance(drafter, EagleModel):
        return eagle_limits(drafter.config, target)
    if isinstance(drafter, DflashModel):
        return _dflash_limits(drafter.config, target)
    if isinstance(drafter, MedusaModel):
        capped = drafter.config.share_head and target.soft_cap
        why = "applies the target's head without its soft-capping: equal first choices, other probabilities"
        return [Limit(engine, why, False) for engine in ("vLLM", "TensorRT-LLM")] if capped else []
    return _mlp_limits(drafter.config) if isinstance(drafter, MlpModel) else []


def _dflash_limits(config: DflashConfig, target: Target) -> list[Limit]:
    """`limits_of` DFlash and DSpark."""
    own_mask, dspark = config.mask_token_id is None, config.model_type == "dspark"
    kind = getattr(target.config, "model_type", "")
    markov, unscaled = getattr(config, "markov", "low-rank"), target.head_scale != 1
    rules = (
        (markov != "low-rank", "vLLM", f"has no {markov} Markov head", True),
        (own_mask and dspark, "vLLM", "reads no mask embedding of its own: train with dspark.mask_token", True),
        (own_mask, "SGLang", "reads no mask embedding of its own: train with dflash.mask_token", True),
        (config.causal, "SGLang", "lets the rows of a block see all of it", True),
        (kind in NOT_TAPPED, "vLLM", f"captures no taps of {kind} targets", True),
        (unscaled and not dspark, "vLLM SGLang", f"applies the target's head without its scale {target.head_scale:.4g}", False),
        (unscaled and dspark, "vLLM", f"adds the Markov head to the target's head without its scale {target.head_scale:.4g}", True),
        (scales_embedding(target), "vLLM SGLang", "shares the target's embedding without its scaling", True),
    )
    return [Limit(engine, why, refused) for holds, names, why, refused in rules if holds for engine in names.split()]


def _mlp_limits(config: MlpConfig) -> list[Limit]:
    lstm, tied = config.cell == "lstm", config.tie_weights and config.num_heads > 1
    rules = (
        (lstm, "vLLM TGI", "has no LSTM: Snowflake's ArcticInference has, by names of its own", True),
        (not lstm, "vLLM", "registers this class in versions before its V1 engine; 0.32 has it and refuses the folder", False),
        (not tied, "TGI", "reads heads wrongly that do not share their weights", True),
    )
    return [Limit(engine, why, refused) for holds, names, why, refused in rules if holds for engine in names.split()]


def eagle_limits(config: EagleConfig, target: Target) -> list[Limit]:
    """`limits_of` an EAGLE drafter."""
    three, taps, usual = config.version == 3, list(config.taps or ()), list(usual_taps(target.num_layers))
    kind = getattr(target.config, "model_type", "")
    engines = ("vLLM", "SGLang", "TensorRT-LLM", "SafeAILab", "llama.cpp")
    cap = "its soft-capping" if target.head_scale == 1 else f"its scale {target.head_scale:.4g}"
    probe = torch.full((1, 2, target.hidden_size), 100.0, device=target.head_weight.device, dtype=target.dtype)
    bare = three or torch.allclose(target.logits(probe), target.head(probe), rtol=0.01)
    rules = (
        (not three, "TensorRT-LLM llama.cpp", "loads no EAGLE-1", True),
        (not bare, "vLLM SGLang SafeAILab", f"applies the target's head without {cap}: equal first choices, other probabilities", False),
        (
            config.draft_size != target.hidden_size,
            " ".join(engines),
            "reads an embedding as wide as the drafter, ours is the target's",
            True,
        ),
        (three and config.num_layers > 1, "SafeAILab llama.cpp", f"has one layer, not {config.num_layers}", True),
        (config.head_dim != config.draft_size / config.num_heads, "SafeAILab", f"has no head_dim, here {config.head_dim}", True),
        (three and taps != usual, "SafeAILab", f"reads the outputs of layers {usual}, not {taps}", True),
        (three and taps != usual, "TensorRT-LLM", f"needs eagle3_layers_to_capture: {taps} in its YAML", False),
        (three and len(taps) == 1, "SGLang TensorRT-LLM", "leaves fc out with one tap", True),
        (three and len(taps) != 3, "llama.cpp", f"reads three taps, not {len(taps)}", True),
        (config.fc_norm or config.norm_output, "SafeAILab llama.cpp", "has neither fc_norm nor norm_output", True),
        (config.norm_before_fc, "SGLang TensorRT-LLM SafeAILab llama.cpp", "has no norm_before_fc", True),
        (config.norm_before_residual, "SGLang TensorRT-LLM SafeAILab", "has no norm_before_residual", True),
        (three and kind in NOT_TAPPED, "vLLM", f"captures no taps of {kind} targets", True),
        (scales_embedding(target), "SGLang TensorRT-LLM", "shares the target's embedding without its scaling", True),
    )
    return [Limit(engine, why, refused) for engine in engines for holds, names, why, refused in rules if holds and engine in names.split()]
