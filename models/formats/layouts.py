"""How other people's files name the tensors of drafters: data, read in both directions.

A layout maps patterns of our names (those of the state dict) to patterns of theirs. In a pattern {i} and {j} are numbers, {n} is a number from 1, and
{rest} is whatever follows; of our patterns the first that fits counts. A tensor of ours may have several names in a file.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

__all__ = [
    "GGUF_EAGLE3",
    "GGUF_LLAMA",
    "MEDUSA",
    "MIDLAYER",
    "NUMBERED",
    "Layout",
    "hydra_heads",
    "medusa_blocks",
    "mtp_layouts",
    "speculator",
]

_PARTS = {"i": r"\d+", "j": r"\d+", "n": r"[1-9]\d*", "rest": r".+"}


@dataclass(frozen=True)
class Layout:
    """The names of a format.

    Attributes:
        names: (a pattern of ours, patterns of theirs).
        optional: their names of tensors that the format may also have and our state dict has not.
    """

    names: tuple[tuple[str, tuple[str, ...]], ...]
    optional: tuple[str, ...] = ()

    def theirs(self, name: str) -> tuple[str, ...]:
        """Their names of a tensor of ours; none where the format has no such tensor."""
        for pattern, stored in self.names:
            if (parts := _parts(pattern, name)) is not None:
                return tuple(each.format(**parts) for each in stored)
        return ()

    def ours(self, stored: str) -> str | None:
        """Our name of a tensor of theirs; None where we have none."""
        for pattern, patterns in self.names:
            for each in patterns:
                if (parts := _parts(each, stored)) is not None and stored in self.theirs(name := pattern.format(**parts)):
                    return name
        return None

    def table(self, names: Iterable[str]) -> dict[str, str]:
        """Their name -> ours, for these names of ours."""
        return {stored: name for name in names for stored in self.theirs(name)}


@cache
def _regex(pattern: str) -> re.Pattern[str]:
    pieces = re.split(r"\{(\w+)\}", pattern)
    return re.compile("".join(f"(?P<{piece}>{_PARTS[piece]})" if i % 2 else re.escape(piece) for i, piece in enumerate(pieces)))


def _parts(pattern: str, name: str) -> dict[str, str] | None:
    match = _regex(pattern).fullmatch(name)
    return match.groupdict() if match else None


EMBEDDING = "embed_tokens.weight"
_SAME = ("{rest}", ("{rest}",))

# EAGLE-3 of one layer: SafeAILab's name of it, which vLLM, SGLang and TensorRT-LLM read too.
MIDLAYER = Layout((("layers.0.{rest}", ("midlayer.{rest}",)), _SAME), (EMBEDDING,))
# EAGLE-3 of several layers, and speculators' of any number. Further layers have one norm before attention, under two names: vLLM and speculators
# read it as input_layernorm, SGLang and TensorRT-LLM as hidden_norm.
NUMBERED = Layout(
    (("layers.{n}.input_layernorm.weight", ("layers.{n}.input_layernorm.weight", "layers.{n}.hidden_norm.weight")), _SAME), (EMBEDDING,)
)
EAGLE1 = Layout((_SAME,), (EMBEDDING, "fc.bias"))

# Medusa's own names, which vLLM, TGI and TensorRT-LLM read; ours are the same. The one head of all is vLLM's `original_lm_head`.
MEDUSA = Layout((_SAME,), ("lm_head.weight",))


def medusa_blocks(num_layers: int) -> Layout:
    """vLLM's own names of Medusa heads with this many blocks. It reads `MEDUSA` too."""
    names = (
        (f"{{i}}.{num_layers}.weight", ("lm_heads.{i}.weight",)),
        ("{i}.{j}.linear.{rest}", ("blocks.{i}.layers.{j}.{rest}",)),
    )
    return Layout(names, ("lm_head.weight",))


def hydra_heads(num_layers: int, prefix: bool) -> Layout:
    """The authors' names of Hydra heads with this many blocks. With a prefix layer their dropouts stand between the blocks and are counted."""
    copies = ("input_embed_fn.weight", "prefix_embeding_layer.embed_tokens.weight")  # of the target's embedding
    if not prefix:
        return Layout((_SAME,), copies)
    blocks = ((f"hydra_mlp.{{i}}.{j}.{{rest}}", (f"hydra_mlp.{{i}}.{2 * j + 1}.{{rest}}",)) for j in range(num_layers))
    return Layout((*blocks, ("hydra_lm_head.{i}.{rest}", ("hydra_lm_head.{i}.1.{rest}",)), _SAME), copies)


def speculator(heads: int, tied: bool) -> Layout:
    """IBM's names of an MLP speculator with this many heads: tied weights stand at every head's index."""
    every = "speculator.{0}.{1}.{{rest}}"
    copies = {name: tuple(every.format(name, i) for i in range(heads)) for name in ("emb", "head", "ln")}
    shared = tuple((f"{name}.0.{{rest}}", stored) for name, stored in copies.items())
    shared += (("proj.1.{rest}", tuple(every.format("proj", i) for i in range(1, heads))),)
    return Layout((*(shared if tied else ()), ("{rest}", ("speculator.{rest}",))))


def mtp_layouts(layers: int) -> dict[str, Layout]:
    """The names of an MTP layer in checkpoints of targets with so many decoder layers, by the keys of `models.mtp.LAYOUTS`.

    DeepSeek's counts as one more decoder layer; its copies of the target's embedding and head are `optional`.
    """

    def named(prefix: str, fc: str, embedding: str, hidden: str, last: str, layer: str, copies: tuple[str, ...] = ()) -> Layout:
        parts = (("fc", fc), ("embedding_norm", embedding), ("hidden_norm", hidden), ("norm", last))
        names = tuple((f"{ours}.weight", (f"{prefix}{theirs}.weight",)) for ours, theirs in parts)
        return Layout((*names, ("layers.0.{rest}", (f"{prefix}{layer}{{rest}}",))), tuple(prefix + name for name in copies))

    return {
        "mimo": named("model.mtp_layers.0.", "input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm", ""),
        "deepseek": named(
            f"model.layers.{layers}.", "eh_proj", "enorm", "hnorm", "shared_head.norm", "", (EMBEDDING, "shared_head.head.weight")
        ),
        "qwen3-next": named("mtp.", "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "layers.0."),
    }


_ENDS = (("{0}embed_tokens.weight", "token_embd.weight"), ("{0}norm.weight", "output_norm.weight"), ("lm_head.weight", "output.weight"))
_LAYER = (
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
)


def _gguf(
    prefix: str, layers: tuple[tuple[str, str], ...], more: tuple[tuple[str, str], ...] = ()
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    named = [(ours.replace("{0}", prefix), theirs) for ours, theirs in _ENDS]
    named += [(f"{prefix}layers.{{i}}.{ours}.weight", f"blk.{{i}}.{theirs}.weight") for ours, theirs in layers]
    return tuple((ours, (theirs,)) for ours, theirs in (*named, *more))


# llama.cpp. EAGLE-3's d2t holds target ids there, and has no t2d beside it.
GGUF_LLAMA = Layout(_gguf("model.", _LAYER))
GGUF_EAGLE3 = Layout(_gguf("", (*_LAYER, ("hidden_norm", "attn_norm_2")), (("fc.weight", "fc.weight"), ("d2t", "d2t"))))
