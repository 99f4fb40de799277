"""Where block drafters are trained: at anchors drawn from a sequence, on the tokens behind each.

Letters: B sequences · S positions · A anchors · K draft depth.
"""

import torch
from torch import Tensor

from draftsmith.inference.sampler import uniform
from draftsmith.train.losses.mixture import mix
from draftsmith.train.objective import Batch
from draftsmith.train.recipe import Recipe, check_complete_sequences

__all__ = ["chain_rows", "check_blocks", "draw_anchors", "draw_chains", "per_sequence", "retained", "states_before", "tokens_behind"]

_ANCHORS = 1 << 20  # sets these draws apart from others of the same example and position


def check_blocks(recipe: Recipe, loss: str, method: str, size: str, reach: int) -> None:
    """Check, before anything is loaded, what recipes of block drafters have in common. Raises ValueError, naming the keys.

    Args:
        recipe: of any of them.
        loss: what `mix` reads.
        method: its section's name.
        size: the section's key that says how long a block is.
        reach: positions from an anchor to the end of its block.
    """
    mix(loss, f"{method}.loss")
    check_complete_sequences(recipe)
    if reach >= recipe.data.seq_len:
        raise ValueError(f"{method}.{size} looks {reach} positions ahead, data.seq_len={recipe.data.seq_len} has fewer; lower it")


def draw_anchors(batch: Batch, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw positions of each sequence whose next token is supervised, keyed by example and position: a resumed run draws the same.

    A document's first token is no anchor, since nothing comes before it.

    Args:
        batch: loss_mask, position_ids, document and sample_id [B,S].
        count: A; where a sequence has fewer such positions, the last one is repeated.
        seed: of the run.

    Returns:
        anchors [B,A] int64 in order, drawn [B,A] bool: False for repeated ones.
    """
    mask, position, document = batch["loss_mask"].bool(), batch["position_ids"], batch["document"]
    fits = torch.zeros_like(mask)
    fits[:, 1:-1] = mask[:, 2:] & (document[:, 2:] == document[:, 1:-1]) & (position[:, 1:-1] > 0)
    anchors, drawn, _ = _draw(batch, fits, count, seed)
    return anchors, drawn


def draw_chains(batch: Batch, shares: list[float], seed: int, ahead: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Draw positions that masks follow, and how many: those with i masks have i − 1 too (COD, of PARD and P-EAGLE).

    A position can have masks where the token that it predicts itself and that of its first mask are supervised.

    The depths of a sequence add up to as many rows as all its positions would have, whatever is supervised: the last position is repeated,
    not drawn, with what is missing.

    Args:
        batch: as for `draw_anchors`.
        shares: of these positions, how many have a mask at level 1, 2, …, at least one; they never rise.
        seed: of the run.
        ahead: a position predicts the token so far after it.

    Returns:
        anchors [B,A] int64 in order, depths [B,A] int64, and drawn [B,A] bool, False for repeated ones.
    """
    mask, document = batch["loss_mask"].bool(), batch["document"]
    fits = torch.zeros_like(mask)
    reach = ahead + 1
    fits[:, :-reach] = mask[:, ahead:-1] & mask[:, reach:] & (document[:, reach:] == document[:, :-reach])
    positions, levels = mask.shape[1], len(shares)
    rows = chain_rows(shares, positions)
    anchors, drawn, order = _draw(batch, fits, max(1, int(positions * shares[0])), seed)
    fitting = fits.sum(1, keepdim=True)
    own_counts = (fitting * torch.tensor(shares, dtype=torch.float64, device=mask.device)).long().maximum(fitting.clamp(max=1))  # [B,K−1]
    depths = (own_counts[:, :, None] > torch.arange(anchors.shape[1], device=mask.device)).sum(1).gather(1, order)
    repeats = torch.arange(-(-rows // levels), device=mask.device)
    missing = (rows - depths.sum(1, keepdim=True) - levels * repeats).clamp(min=0, max=levels)
    anchors = torch.cat((anchors, anchors[:, -1:].expand_as(missing)), 1)
    return anchors, torch.cat((depths, missing), 1), torch.cat((drawn & (depths > 0), torch.zeros_like(missing, dtype=torch.bool)), 1)


def retained(retention: float, least: float, levels: int) -> list[float]:
    """COD's share of positions that have a mask at level 1 … K − 1: r^i, and at least `least`."""
    return [max(retention**level, least) for level in range(1, levels + 1)]


def chain_rows(shares: list[float], positions: int) -> int:
    """The masks of a sequence, those of repeated positions included."""
    return sum(max(1, int(positions * share)) for share in shares)


def _draw(batch: Batch, fits: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw `count` of the positions where fits [B,S] -> anchors and drawn as `draw_anchors`, and the rank of each draw."""
    key, at = batch["sample_id"].clamp(min=0), batch["position_ids"].clamp(min=0)
    chance = uniform(seed, key, at, torch.full_like(at, _ANCHORS)).masked_fill(~fits, 2.0)
    least, anchors = chance.topk(min(count, fits.shape[1]), 1, largest=False)
    drawn = least < 2
    last = torch.where(drawn, anchors, 0).amax(1, keepdim=True)
    anchors = torch.where(drawn, anchors, last)
    order = (2 * anchors + ~drawn).argsort(dim=1, stable=True)
    return anchors.gather(1, order), drawn.gather(1, order), order


def tokens_behind(batch: Batch, anchors: Tensor, drawn: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens that blocks predict.

    Args:
        batch: input_ids, loss_mask and document [B,S].
        anchors, drawn: as `draw_anchors`.
        depth: K.

    Returns:
        All [B,A,K]: positions of the tokens (clamped to the sequence), the tokens, and whether each is supervised; a token is, while
        it and all before it in the block are in the anchor's document and in the loss mask.
    """
    length = batch["loss_mask"].shape[1]
    at = anchors[..., None] + 1 + torch.arange(depth, device=anchors.device)
    inside, at = at < length, at.clamp(max=length - 1)

    def of(name: str, positions: Tensor) -> Tensor:
        return batch[name].gather(1, positions.flatten(1)).view(positions.shape)

    supervised = inside & of("loss_mask", at).bool() & (of("document", at) == of("document", anchors[..., None]))
    return at, of("input_ids", at), supervised.cumprod(2).bool() & drawn[..., None]


def per_sequence(weights: Tensor, batch: Batch) -> Tensor:
    """Weights [B,A,K] scaled so that those of a sequence add up to its supervised tokens; 0 where they are all 0."""
    total = weights.sum((1, 2), keepdim=True)
    tokens = batch["loss_mask"].sum(1)[:, None, None]
    return torch.where(total > 0, weights * (tokens / total.clamp(min=1e-9)), 0)


def states_before(hidden: Tensor, at: Tensor) -> Tensor:
    """hidden [B,S,H] of the target -> the states that it predicts the tokens at positions `at` [B,…] from, [B·…,H]."""
    index = (at - 1).flatten(1)[..., None].expand(-1, -1, hidden.shape[2])
    return hidden.gather(1, index).flatten(0, 1)
