"""DSpark: DFlash's block, a head that reads the token before, and a confidence (DeepSeek 2026, DeepSpec; names as in its checkpoints).

All n rows predict: row k, from 0, of the block at anchor a predicts token a + 1 + k, so that K = n. To the target's logits comes a Markov head,
W2 · W1[x], a matrix [V,V] of rank r by the token x before the predicted one: the layers run once, and the tokens of a path are then drafted
one after the other, each at the cost of a product [r,V]. The confidence σ(w · [state; W1[x]]) estimates that a draft is accepted,
1 − ½ ‖p − q‖₁. It is known before the token is drafted. With `confidence` c > 0 a chain ends where the product of its confidences falls
below c.

`markov: gated` multiplies W1[x] by a gate in each of its r entries, σ(G · [state; W1[x]] + b), before W2 (DeepSpec's gated head; names as there).
The confidence reads W1[x] without the gate.

Letters: B rows of a round · K draft depth · V vocabulary · H hidden size · r rank.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.inference.drafter import RoundContext
from draftsmith.inference.expand import CurrentLevel, DynamicTree
from draftsmith.inference.level_heads import draft_levels
from draftsmith.inference.tree import DraftTree
from draftsmith.models.dflash import DflashConfig, DflashModel
from draftsmith.models.target import Target

MARKOV = ("low-rank", "gated")


class DsparkConfig(DflashConfig):
    """Sizes of the drafter, beside those of DFlash.

    Attributes:
        block_size: n = K.
        markov_rank: r.
        markov: low-rank, or gated.
        confidence: least probability, by the confidences, that a chain is accepted up to a token; 0 drafts always.
        temperatures: K numbers by which the log-odds of the confidences are divided, one for each depth; None for 1.
    """

    model_type = "dspark"
    block_size: int = 7
    markov_rank: int = 64
    markov: str = "low-rank"
    confidence: float = 0.0
    temperatures: list | None = None

    def __post_init__(self, **kwargs) -> None:
        super().__post_init__(**kwargs)
        if self.markov_rank < 1 or not 0 <= self.confidence < 1:
            raise ValueError(
                f"got markov_rank {self.markov_rank} and confidence {self.confidence}; expected at least 1, and a probability below 1"
            )
        if self.markov not in MARKOV:
            raise ValueError(f"got markov {self.markov!r}; expected one of {', '.join(MARKOV)}")
        given = self.temperatures
        if given is not None and (len(given) != self.block_size or not all(isinstance(t, int | float) and 0 < t < 1e6 for t in given)):
            raise ValueError(
                f"got temperatures {str(given)[:60]}; expected at least one number above 0 for each of {self.block_size} depths"
            )

    @property
    def depth(self) -> int:
        return self.block_size

    @property
    def least_tensors(self) -> int:
        return super().least_tensors + (6 if self.markov == "gated" else 4)

    @classmethod
    def tiny_settings(cls) -> dict[str, dict]:
        sizes = {"taps": [0, 1], "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "block_size": 4, "markov_rank": 8}
        return {
            "default": sizes,
            "gated": sizes | {"markov": "gated"},
            "causal": sizes | {"causal": True, "mask_token_id": 3, "block_size": 3},
        }


class MarkovHead(nn.Module):
    """Logits that depend on one token alone, a matrix [V,V] of rank r; with a gate, on the state too."""

    def __init__(self, vocab_size: int, rank: int, gated_size: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)
        if gated_size:
            self.gate_proj = nn.Linear(gated_size + rank, rank)


class Confidence(nn.Module):
    """One number of a state and the vector of the token before."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(size, 1)


class DsparkModel(DflashModel):
    """What the head reads is a state and the vector W1[x] of the token before, [...,H+r]."""

    can_stop = True
    config_class = DsparkConfig
    config: DsparkConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: DsparkConfig) -> None:
        super().__init__(config)
        gated = config.hidden_size if config.markov == "gated" else 0
        self.markov_head = MarkovHead(config.vocab_size, config.markov_rank, gated)
        self.confidence_head = Confidence(config.hidden_size + config.markov_rank)
        self.post_init()

    @torch.no_grad()
    def init_from_target(self, target: Target) -> None:
        """As DFlash; the Markov head and the confidence start at 0."""
        super().init_from_target(target)
        self.markov_head.markov_w2.weight.zero_()
        self.confidence_head.proj.weight.zero_()

    def before_head(self, states: Tensor, previous: Tensor) -> Tensor:
        return torch.cat((states, self.markov_head.markov_w1(previous).to(states.dtype)), -1)

    def head_logits(self, states: Tensor) -> Tensor:
        """What the head reads [...,H+r] -> logits [...,V]."""
        size = self.config.hidden_size
        vector = states[..., size:]
        # Read by name: under ZeRO-3 a weight that its own module reads is there for the module's forward alone.
        if self.config.markov == "gated":
            vector = F.linear(states, self.markov_head.gate_proj.weight, self.markov_head.gate_proj.bias).sigmoid() * vector
        return super().head_logits(states[..., :size]) + F.linear(vector, self.markov_head.markov_w2.weight)

    def confidence_logits(self, states: Tensor) -> Tensor:
        """What the head reads [...,H+r] -> log-odds [...] that a draft is accepted."""
        return self.confidence_head.proj(states).squeeze(-1)

    @torch.no_grad()
    def propose(self, round: RoundContext) -> DraftTree:
        """One forward for the states, then a level of the tree by the tokens of the level above; a doubtful chain ends early."""
        tree_spec, states, survival, sizes = self._state.tree_spec, None, 1.0, torch.ones_like(round.last_tokens)
        if tree_spec.max_depth == 0:
            return DraftTree.root(round.last_tokens)
        states, survivals = self.draft_states(round), [torch.ones_like(round.last_tokens, dtype=torch.float32)]

        def logits_of(k: int, level: CurrentLevel | None) -> Tensor:
            nonlocal survival, sizes
            previous = round.last_tokens[:, None] if level is None else level.tokens
            read = self.before_head(states[:, k, None].expand(-1, previous.shape[1], -1), previous)
            temperature = self.config.temperatures[k] if self.config.temperatures else 1.0
            survival = survival * (self.confidence_logits(read[:, 0]).float() / temperature).sigmoid()
            sizes = sizes + (survival >= self.config.confidence)
            survivals.append(survival)
            return self.head_logits(read)

        tree = self._ready(draft_levels(tree_spec, self.config.depth, round, logits_of, self.stop), round)
        if isinstance(tree_spec, DynamicTree) or tree_spec.num_nodes > 1 + tree_spec.max_depth:
            return tree
        if round.scored:  # the confidences say more than the probabilities of drafts
            tree.survival = torch.stack(survivals[: tree.tokens.shape[1]], 1)
        if not self.config.confidence:
            return tree
        return replace(tree, size=torch.minimum(tree.size, sizes), full=False, _deepest=None)


Config = DsparkConfig
Model = DsparkModel
