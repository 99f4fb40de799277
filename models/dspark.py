"""DSpark: DFlash's block, a head that reads the token before, and a confidence (DeepSeek 2026, DeepSpec; names as in its checkpoints).

All n rows predict: row k, from 0, of the block at anchor a predicts token a + 1 + k, so that K = n. To the target's logits comes a Markov head,
W2 · W1[x], a matrix [V,V] of rank r by the token x before the predicted one: the layers run once, and the tokens of a path are then drafted
one after the other, each at the cost of a product [r,V]. The confidence σ(w · [state; W1[x]]) estimates that a draft is accepted,
1 − ½ ‖p − q‖₁. It is known before the token is drafted. With `confidence` c > 0 a chain ends where the product of its confidences falls
below c.

`markov` names what W2 reads in the place of W1[x]; the confidence always reads W1[x]. Checkpoints of DeepSpec have both, with these names. No
recipe trains them, since on `tiny` they drafted no better than W1[x] (three seeds, LOG.md of 2026-11-29).

  gated  σ(g) · W1[x], a gate for each of the r entries: g = G · [state; W1[x]] + b
  rnn    tanh(o), and a memory m of the path, 0 at the anchor, becomes σ(g) · m + (1 − σ(g)) · tanh(c); [g; c; o] = J · [m; W1[x]; state] + b

Letters: B rows of a round · F nodes of a level · K draft depth · V vocabulary · H hidden size · r rank.
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
from draftsmith.models.drafter import Output
from draftsmith.models.target import Target

MARKOV = ("low-rank", "gated", "rnn")


class DsparkConfig(DflashConfig):
    """Sizes of the drafter, beside those of DFlash.

    Attributes:
        block_size: n = K.
        markov_rank: r.
        markov: low-rank, gated or rnn.
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
        if self.markov_rank < 1:
            raise ValueError(f"got markov_rank {self.markov_rank}; expected at least 1")
        if self.markov not in MARKOV:
            raise ValueError(f"got markov {self.markov!r}; expected one of {', '.join(MARKOV)}")
        self.check_confidence()

    def check_confidence(self) -> None:
        """Raises ValueError for values that `confidence` and `temperatures` cannot have."""
        if not isinstance(self.confidence, int | float) or not 0 <= self.confidence < 1:
            raise ValueError(f"got confidence {str(self.confidence)[:60]}; expected at least 0 and less than 1, a probability")
        given = self.temperatures
        if given is not None and (
            not isinstance(given, list)
            or len(given) != self.block_size
            or not all(isinstance(t, int | float) and 0 < t < 1e6 for t in given)
        ):
            raise ValueError(
                f"got temperatures {str(given)[:60]}; expected at least one number above 0 for each of {self.block_size} depths"
            )

    @property
    def depth(self) -> int:
        return self.block_size

    @property
    def least_tensors(self) -> int:
        return super().least_tensors + (4 if self.markov == "low-rank" else 6)

    @classmethod
    def tiny_settings(cls) -> dict[str, dict]:
        sizes = {"taps": [0, 1], "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "block_size": 4, "markov_rank": 8}
        return {
            "default": sizes,
            "gated": sizes | {"markov": "gated"},
            "rnn": sizes | {"markov": "rnn"},
            "causal": sizes | {"causal": True, "mask_token_id": 3, "block_size": 3},
        }


class MarkovHead(nn.Module):
    """Logits that depend on the token before, a matrix [V,V] of rank r; with a gate on the state too; with a memory on the path."""

    def __init__(self, vocab_size: int, rank: int, hidden_size: int, markov: str) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = Output(rank, vocab_size, bias=False)
        if markov == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        elif markov == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)


class Confidence(nn.Module):
    """One number of a state and the vector of the token before."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(size, 1)


class DsparkModel(DflashModel):
    """What the head reads is [...,H+r] or [...,H+2r]: the state, W1[x] of the token before, and what W2 reads where that is not W1[x]."""

    can_stop = True
    config_class = DsparkConfig
    config: DsparkConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: DsparkConfig) -> None:
        super().__init__(config)
        self.markov_head = MarkovHead(config.vocab_size, config.markov_rank, config.hidden_size, config.markov)
        self.confidence_head = Confidence(config.hidden_size + config.markov_rank)
        self.post_init()

    @torch.no_grad()
    def init_from_target(self, target: Target) -> None:
        """As DFlash; the Markov head and the confidence start at 0."""
        super().init_from_target(target)
        self.markov_head.markov_w2.weight.zero_()
        self.confidence_head.proj.weight.zero_()

    def before_head(self, states: Tensor, previous: Tensor) -> Tensor:
        """Along blocks: states [...,K,H] and the tokens before those that they predict [...,K] -> what the head reads [...,K,·]."""
        tokens = self.markov_head.markov_w1(previous).to(states.dtype)
        if self.config.markov != "rnn":
            return self.read_next(states, tokens, tokens)[0]
        rows, memory = [], torch.zeros_like(tokens[..., 0, :])
        for k in range(states.shape[-2]):
            row, memory = self.read_next(states[..., k, :], tokens[..., k, :], memory)
            rows.append(row)
        return torch.stack(rows, -2)

    def read_next(self, states: Tensor, tokens: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """states [...,H], W1 of the tokens before [...,r] and the memory of their paths [...,r] -> what the head reads [...,·], the memory after."""
        if self.config.markov == "low-rank":
            return torch.cat((states, tokens), -1), memory
        if self.config.markov == "gated":
            vector = self.markov_head.gate_proj(torch.cat((states, tokens), -1)).sigmoid() * tokens
        else:
            gate, candidate, output = self.markov_head.joint_proj(torch.cat((memory, tokens, states), -1)).chunk(3, -1)
            share = gate.sigmoid()
            memory, vector = share * memory + (1 - share) * candidate.tanh(), output.tanh()
        return torch.cat((states, tokens, vector.to(states.dtype)), -1), memory

    def head_logits(self, states: Tensor) -> Tensor:
        """What the head reads [...,·] -> logits [...,V]."""
        return super().head_logits(states[..., : self.config.hidden_size]) + self.markov_logits(states)

    def markov_logits(self, states: Tensor) -> Tensor:
        """What the head reads [...,·] -> what the Markov head adds to the target's logits of the state [...,V]."""
        # Read by name: under ZeRO-3 a weight that its own module reads is there for the module's forward alone.
        return F.linear(states[..., -self.config.markov_rank :], self.markov_head.markov_w2.weight)

    def confidence_logits(self, states: Tensor) -> Tensor:
        """What the head reads [...,·] -> log-odds [...] that a draft is accepted."""
        return self.confidence_head.proj(states[..., : self.config.hidden_size + self.config.markov_rank]).squeeze(-1)

    @torch.no_grad()
    def propose(self, round: RoundContext) -> DraftTree:
        """One forward for the states, then a level of the tree by the tokens of the level above; a doubtful chain ends early."""
        tree_spec, states, survival, sizes = self._state.tree_spec, None, 1.0, torch.ones_like(round.last_tokens)
        if tree_spec.max_depth == 0:
            return DraftTree.root(round.last_tokens)
        states, survivals = self.draft_states(round), [torch.ones_like(round.last_tokens, dtype=torch.float32)]
        of_states = super().head_logits(states[:, : min(round.depth, tree_spec.max_depth)])  # [B,K,V] at once: a level's nodes share a row
        memory = states.new_zeros(len(states), 1, self.config.markov_rank)  # [B,F,r], of the path to each node

        def logits_of(k: int, level: CurrentLevel | None) -> Tensor:
            nonlocal survival, sizes, memory
            previous = round.last_tokens[:, None]
            if level is not None:
                previous, memory = level.tokens, memory.gather(1, level.parent_index[..., None].expand(-1, -1, memory.shape[2]))
            tokens = self.markov_head.markov_w1(previous).to(states.dtype)
            read, memory = self.read_next(states[:, k, None].expand(-1, previous.shape[1], -1), tokens, memory)
            temperature = self.config.temperatures[k] if self.config.temperatures else 1.0
            survival = survival * (self.confidence_logits(read[:, 0]).float() / temperature).sigmoid()
            sizes = sizes + (survival >= self.config.confidence)
            survivals.append(survival)
            return of_states[:, k, None] + self.markov_logits(read)

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
