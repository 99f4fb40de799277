"""A load policy: which draft tree pays at which batch, as `draftsmith eval` predicted it. A server or the decoder reads it.

The file is JSON: format 1, kind "load policy", target and drafter (whose policy it is), setting (label of the sampling), context (C), and
entries in ascending order, each for the batches `from` to `to`:

    {"from": 1, "to": 3, "tree": [[0], [1], [0, 0]], "nodes": 4, "depth": 2, "num_speculative_tokens": 2, "tau": 1.8, "speedup": 1.3,
     "low": 1.2, "high": 1.4}

`tree` has the rank paths, or depth, width and nodes of a dynamic tree; it is empty, with depth 0, where plain decoding is predicted to be as
fast. `num_speculative_tokens` is the chain that pays most, for engines that draft chains; 0 is off, null not known. τ and the speedup with its 95 % interval (null with too few prompts) are predictions
at the batch `to`. A larger batch than any entry's was not measured: drafting is off there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.inference.adaptive import AdaptiveDepth
from draftsmith.inference.expand import TreeSpec, parse_tree_spec
from draftsmith.inference.reading import field, read_json
from draftsmith.inference.tree import StaticTree
from draftsmith.inference.verify import HostResult

__all__ = ["FORMAT", "KIND", "LoadPolicy", "PolicyDepth", "PolicyEntry"]

FORMAT, KIND = 1, "load policy"


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """What to draft for some batches.

    Attributes:
        largest: the largest of them.
        tree: the draft tree; of the root alone where drafting is off.
        chain: K of the chain that pays most; 0 is off, None not known.
    """

    largest: int
    tree: TreeSpec
    chain: int | None


OFF = PolicyEntry(0, StaticTree(()), 0)


class LoadPolicy:
    """The entries of a policy, by batch.

    Attributes:
        entries: in ascending order.
        drafter: whose policy it is, as an evaluation records it: method, name and hash; {} where the file does not say.

    Args:
        content: of the file.
        source: its name, for errors.

    Raises:
        ValueError: not a load policy, or entries that leave a batch out.
    """

    def __init__(self, content: dict[str, Any], source: str = "policy") -> None:
        if content.get("kind") != KIND or content.get("format") != FORMAT:
            raise ValueError(f"{source}: not a load policy of format {FORMAT}; give the file that draftsmith eval wrote")
        drafter = content.get("drafter")
        self.drafter: dict[str, Any] = drafter if isinstance(drafter, dict) else {}
        self.entries: list[PolicyEntry] = []
        for entry in field(content, "entries", list, source):
            if type(entry) is not dict:
                raise ValueError(f"{source}: an entry is no object; write the policy anew")
            first, last = (field(entry, name, int, source) for name in ("from", "to"))
            expected = self.entries[-1].largest + 1 if self.entries else 1
            if first != expected or last < first:
                raise ValueError(f"{source}: got an entry for the batches {first} to {last}; expected one from {expected} on; correct it")
            tree = parse_tree_spec(field(entry, "tree", (list, dict), source))
            self.entries.append(PolicyEntry(last, tree, field(entry, "num_speculative_tokens", (int, type(None)), source)))

    @classmethod
    def read(cls, path: Path) -> "LoadPolicy":
        """The policy in a file.

        Raises:
            ValueError: not a load policy.
            OSError: the file cannot be read.
        """
        return cls(read_json(path), str(path))

    def policy_for(self, batch: int) -> PolicyEntry:
        """What to draft while this many requests decode; nothing for more than were measured."""
        return next((entry for entry in self.entries if batch <= entry.largest), OFF)


class PolicyDepth(AdaptiveDepth):
    """Drafts as deep as a policy says for the slots in use: `Decoder(…, adaptive=PolicyDepth(policy))`. It learns nothing from rounds.

    The tree stays the drafter's, cut at that depth: give the drafter the tree of the smallest load.
    """

    def __init__(self, policy: LoadPolicy) -> None:
        super().__init__()
        self.policy = policy

    def depth(self, slots: Sequence[int]) -> int:
        return min(self.max_depth, self.policy.policy_for(len(slots)).tree.max_depth)

    def learn(self, slots: Sequence[int], results: Sequence[HostResult], seconds: float) -> None:
        pass
