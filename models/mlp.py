"""MLP and LSTM speculators: K heads around one state, which takes in the drafted tokens one by one.

MLP: Wertheimer et al. 2024, https://arxiv.org/abs/2404.19124, and IBM's fms-extras. LSTM: Snowflake's ArcticTraining, "sum_lstm".

Head k, from 0, at position t predicts token t+2+k from the state s_k = cell(P_k s_(k−1) + (w_e / w_s) · E_k[token t+1+k]). The state before
head 0 is the target's hidden state at t (with scale_input divided by √2 and by its root mean square). In a round token t+1 is the root, the
later ones are drafted. w_s = 0.5^(1/(2K)) and w_e = √((1 − w_s²) · I/2), so that half of the last state is of the target's. The cells:

    mlp   s_k = GELU(norm_k(x))
    lstm  c_k = σ(forget) · c_(k−1) + σ(input) · GELU(norm(candidate)), s_k = σ(output) · GELU(norm'(c_k)): the four are the parts of P_k s_(k−1),
          to each of which the embedding is added; c before head 0 is 0

Tied weights are one E, head and norm for all heads, and one P for all but the first. Tensors have the authors' names: `emb.{i}`, `proj.{i}`,
`head.{i}`, `ln.{i}`; of an LSTM `cell_ln` and `state_ln`, and `proj` has the four parts in the order forget, input, output, candidate.

Letters: B rows · S positions · V vocabulary · H hidden size · I inner size · K heads · F nodes of the current level.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from draftsmith.inference.drafter import RoundContext, TargetOutput
from draftsmith.inference.expand import CurrentLevel
from draftsmith.inference.level_heads import draft_levels
from draftsmith.inference.tree import DraftTree
from draftsmith.models.artifact import DEEPEST
from draftsmith.models.drafter import DrafterConfig, Output, fill_tree
from draftsmith.models.hidden_state_drafter import HiddenStateDrafter

CELLS = ("mlp", "lstm")
EPS = 1e-6  # of the norms, fixed in every reader of these files

State = tuple[Tensor, ...]  # (s,) of an MLP, (s, c) of an LSTM


class MlpConfig(DrafterConfig):
    """Sizes of the heads.

    Attributes:
        cell: mlp or lstm.
        num_heads: K.
        inner_size: I; 0 is the hidden size.
        tie_weights: the heads share their weights; an LSTM's do always.
        scale_input: the hidden state is normed first.
    """

    model_type = "mlp"
    cell: str = "mlp"
    num_heads: int = 4
    inner_size: int = 0
    tie_weights: bool = True
    scale_input: bool = True

    def __post_init__(self, **kwargs) -> None:
        super().__post_init__(**kwargs)
        if self.cell not in CELLS:
            raise ValueError(f"got cell {self.cell!r}; expected one of {', '.join(CELLS)}")
        if not 1 <= self.num_heads <= DEEPEST:
            raise ValueError(f"got num_heads {self.num_heads}; expected 1 to {DEEPEST}")
        if self.cell == "lstm" and not self.tie_weights:
            raise ValueError("got an LSTM with tie_weights false; its heads share their weights: leave it out")
        self.inner_size = self.inner_size or self.hidden_size
        fill_tree(self, self.num_heads)

    @property
    def least_tensors(self) -> int:
        if not self.tie_weights:
            return 5 * self.num_heads
        return 4 + min(2, self.num_heads) + 2 * (self.cell == "lstm")

    @classmethod
    def tiny_settings(cls) -> dict[str, dict]:
        return {
            "mlp": {"num_heads": 3, "inner_size": 24},
            "mlp, own weights": {"num_heads": 4, "inner_size": 40, "tie_weights": False, "scale_input": False},
            "lstm": {"cell": "lstm", "num_heads": 4, "inner_size": 20},
        }


class Norm(nn.Module):
    """The weights of a norm by the root mean square, with a bias."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))


def normed(x: Tensor) -> Tensor:
    """x [...,n] over its root mean square, computed in float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


class MlpModel(HiddenStateDrafter):
    """K heads, drafted with level by level."""

    can_stop = True
    config_class = MlpConfig
    config: MlpConfig

    @property
    def recurrent(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.config.tie_weights

    def __init__(self, config: MlpConfig) -> None:
        super().__init__(config)
        inner, tied, lstm = config.inner_size, config.tie_weights, config.cell == "lstm"
        copies = 1 if tied else config.num_heads
        inputs = [config.hidden_size, *[inner] * (config.num_heads - 1)]
        self.emb = nn.ModuleList(nn.Embedding(config.vocab_size, inner) for _ in range(copies))
        self.proj = nn.ModuleList(nn.Linear(size, (4 if lstm else 1) * inner, bias=False) for size in (inputs[:2] if tied else inputs))
        self.head = nn.ModuleList(Output(inner, config.vocab_size, bias=False) for _ in range(copies))
        for name in ("cell_ln", "state_ln") if lstm else ("ln",):
            self.add_module(name, nn.ModuleList(Norm(inner) for _ in range(copies)))
        weight = 0.5 ** (0.5 / config.num_heads)
        self.token_weight = ((1 - weight**2) * inner / 2) ** 0.5 / weight  # w_e / w_s; the norm takes care of the rest
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            init.normal_(module.weight, 0.0, min(*module.weight.shape, self.config.inner_size) ** -0.5)
        elif isinstance(module, Norm):
            init.ones_(module.weight)
            init.zeros_(module.bias)

    # The network

    def first_state(self, hidden: Tensor) -> State:
        """The target's hidden states [...,H] -> the state before head 0, in the drafter's dtype."""
        hidden = hidden.to(self.dtype)
        state = normed(hidden) / 2**0.5 if self.config.scale_input else hidden
        return (state, state.new_zeros(*state.shape[:-1], self.config.inner_size)) if self.config.cell == "lstm" else (state,)

    def next_state(self, k: int, state: State, tokens: Tensor, given: Mapping[str, Tensor] | None = None) -> State:
        """The state of head k, tensors [...,I], from the one before it and the tokens [...] that it takes in.

        given: weights in the place of its own, by the names of `head_parameters`.
        """
        weight: Callable[[str], Tensor] = given.__getitem__ if given else self.get_parameter
        own, proj = (0, min(k, 1)) if self.config.tie_weights else (k, k)

        def activated(x: Tensor, norm: str) -> Tensor:
            return F.gelu(normed(x) * weight(f"{norm}.{own}.weight") + weight(f"{norm}.{own}.bias"))

        x = F.linear(state[0], weight(f"proj.{proj}.weight"))
        token = self.token_weight * F.embedding(tokens, weight(f"emb.{own}.weight"))
        if self.config.cell == "mlp":
            return (activated(x + token.to(x.dtype), "ln"),)
        forget, write, read, candidate = (x.unflatten(-1, (4, -1)) + token.to(x.dtype)[..., None, :]).unbind(-2)
        c = forget.sigmoid() * state[1] + write.sigmoid() * activated(candidate, "cell_ln")
        return read.sigmoid() * activated(c, "state_ln"), c

    def states_along(self, hidden: Tensor, tokens: Tensor, given: Mapping[str, Tensor] | None = None) -> list[Tensor]:
        """What the K heads read along a text: hidden [...,H], and the K tokens after each [...,K] -> K times s [...,I]."""
        state, states = self.first_state(hidden), []
        for k in range(self.config.num_heads):
            state = self.next_state(k, state, tokens[..., k], given)
            states.append(state[0])
        return states

    def outputs(self, given: Mapping[str, Tensor]) -> list[Tensor]:
        """The heads' output layers [V,I] of `given`: one for all where they are tied."""
        return [given[f"head.{i}.weight"] for i in range(len(self.head))]

    def logits_of(self, k: int, s: Tensor) -> Tensor:
        """A state s [...,I] -> head k's logits [...,V]."""
        return self.head[0 if self.config.tie_weights else k](s)

    def logits_along(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """As `states_along` -> logits [...,K,V]. For few positions; training goes through the chunked losses."""
        return torch.stack([self.logits_of(k, s) for k, s in enumerate(self.states_along(hidden, tokens))], -2)

    forward = logits_along

    def head_parameters(self) -> dict[str, Tensor]:
        """All parameters by name. ZeRO-3 gathers what is read by name, as here."""
        return {name: self.get_parameter(name) for name, _ in self.named_parameters()}

    @property
    def activations(self) -> int:
        """About how many numbers training keeps of a position until its backward pass.

        Of each head some vectors of I of its cell, the state beside the others' for each of two losses, and the gradients of these.
        """
        config, each = self.config, 20 if self.config.cell == "lstm" else 10
        return config.hidden_size + config.num_heads * each * config.inner_size

    # Drafting

    @torch.no_grad()
    def propose(self, round: RoundContext) -> DraftTree:
        """One head per level of the tree, on the states of its nodes; the root alone where a slot has no hidden state."""
        hidden, has_state = self.hidden_states(round)
        state = self.first_state(hidden[:, None])

        def logits_of(k: int, level: CurrentLevel | None) -> Tensor:
            nonlocal state
            if level is not None:
                state = tuple(part.gather(1, level.parent_index[:, :, None].expand(-1, -1, part.shape[2])) for part in state)
            state = self.next_state(k, state, level.tokens if level is not None else round.last_tokens[:, None])
            return self.logits_of(k, state[0])

        return draft_levels(self._state.tree_spec, self.config.num_heads, round, logits_of, self.stop).only(has_state)

    # Position records

    @property
    def depth_limit(self) -> int:
        return self.config.num_heads

    def position_features(self, ids: Tensor, out: TargetOutput) -> Tensor:
        """ids [S] and the target's output along them [1,S,H] -> [S,H+1]: hidden states beside the tokens, in float32, which is exact for both."""
        return torch.cat((out.hidden[0].float(), ids[:, None].float()), -1)

    def position_logits(self, features: Tensor, roots: Tensor) -> Tensor:
        """features [S,H+1], roots [R] -> [R,K,V]: a round whose root is at i reads the hidden state at i − 1 and the tokens from i on."""
        with torch.inference_mode():
            read = (roots[:, None] + torch.arange(self.config.num_heads, device=roots.device)).clamp(max=len(features) - 1)
            return self.logits_along(features[roots - 1, :-1], features[:, -1].long()[read])


Config = MlpConfig
Model = MlpModel
