"""Small EAGLE drafters of every variant, and such as are right often and wrong often."""

import random

import torch
from decoding_cases import PROMPTS, texts
from zoo import VOCAB

from draftsmith.data.corpus import Corpus
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.expand import DynamicTree
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import StaticTree
from draftsmith.models import vocab
from draftsmith.models.drafter import new_drafter
from draftsmith.models.eagle import EagleModel
from draftsmith.models.target import Target

VARIANTS = {
    "3": {"taps": [0, 1], "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 40},
    "3, small": {"taps": [0, 1], "draft_size": 24, "num_layers": 2, "num_heads": 3, "head_dim": 6, "draft_vocab_size": 19},
    "3.1": {"taps": [0, 1], "fc_norm": True, "norm_output": True, "draft_size": 40, "num_heads": 4, "num_kv_heads": 4},
    "3, norms of speculators": {
        **{"taps": [0, 1], "num_heads": 4, "num_kv_heads": 2, "draft_vocab_size": 19},
        **dict.fromkeys(("norm_before_fc", "norm_before_residual", "norm_output"), True),
    },
    "3.1, deep": {"taps": [1], "fc_norm": True, "norm_output": True, "num_layers": 2, "num_heads": 2, "draft_vocab_size": 31},
    "1": {"version": 1, "num_heads": 4, "num_kv_heads": 2},
    "1, deep": {"version": 1, "num_layers": 2, "num_heads": 4},
}


TREES = {
    "chain": StaticTree.chain(3),
    "static": StaticTree.from_paths([(0,), (1,), (2,), (0, 0), (0, 2), (1, 1), (2, 0), (0, 0, 0), (1, 1, 1), (1, 1, 0)]),
    "dynamic": DynamicTree(3, 3, 14),
}


def vocabulary(size: int, seed: int = 7) -> vocab.DraftVocabulary:
    return vocab.choose(torch.randint(1, 99, (VOCAB,), generator=torch.Generator().manual_seed(seed)), size)


def redraw(drafter: EagleModel, std: float = 0.18, seed: int = 1) -> EagleModel:
    """Wide weights, norms away from 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(drawn * std if parameter.ndim > 1 else 1 + 0.3 * drawn)
    return drafter


def make(target: Target, name: str = "3", seed: int = 1, **arch) -> EagleModel:
    arch = VARIANTS[name] | arch
    dtype = arch.pop("dtype", torch.float32)
    drafter = new_drafter("eagle", target, dtype=dtype, **arch)
    assert isinstance(drafter, EagleModel)
    if drafter.config.draft_vocab_size < VOCAB:
        drafter.take(vocabulary(drafter.config.draft_vocab_size))
    return redraw(drafter, seed=seed)


def allowed(drafter: EagleModel) -> torch.Tensor:
    """Target ids in the order of the draft ids, from t2d alone."""
    buffers = dict(drafter.named_buffers())
    return buffers["t2d"].nonzero()[:, 0] if "t2d" in buffers else torch.arange(drafter.config.vocab_size)


def lines_corpus(lines: list[list[int]], starts: list[int], seq_len: int) -> Corpus:
    """Samples whose answer begins at index starts[n]."""
    mask = torch.cat([torch.arange(len(line)) >= start for line, start in zip(lines, starts, strict=True)])
    ids, offsets = torch.tensor(sum(lines, []), dtype=torch.int32), torch.tensor([0, *map(len, lines)]).cumsum(0)
    epoch_samples, domain = torch.arange(len(lines)), torch.zeros(len(lines), dtype=torch.int16)
    return Corpus(ids, mask, offsets, domain, epoch_samples, ("all",), 0, seq_len, "key", {})


def random_lines(count: int = 6, seed: int = 2) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(12, 24))] for _ in range(count)]


NEW = 14


HOWS = {
    "greedy": Sampling(),
    "target-sample": Sampling(0.9, top_k=20, top_p=0.95, seed=11, rule="target-sample"),
    "shared-noise": Sampling(0.8, top_p=0.95, seed=5, rule="shared-noise"),
}


def fit(drafter: EagleModel, target: Target, lines: list[list[int]], depth: int = 3) -> EagleModel:
    """An own head that says the next tokens of `lines`, as well as one matrix can: right often, wrong often."""
    place = {token: i for i, token in enumerate(allowed(drafter).tolist())}
    inputs, wanted = [], []
    with torch.no_grad():
        for line in lines:
            ids = torch.tensor([line])
            feature = drafter.feature_of(target.forward(ids, taps=drafter.taps))
            outputs = drafter.training_time_test(feature, ids, torch.arange(len(line))[None], torch.zeros_like(ids), depth)
            for k, output in enumerate(outputs):
                for row in range(len(line) - 2 - k):
                    inputs.append(drafter.before_head(output)[0, row].double())
                    label = torch.zeros(drafter.config.draft_vocab_size, dtype=torch.float64)
                    if line[row + 2 + k] in place:
                        label[place[line[row + 2 + k]]] = 8.0
                    wanted.append(label)
        x = torch.stack(inputs)
        gram = x.T @ x + 1e-3 * torch.eye(x.shape[1], dtype=torch.float64)
        drafter.lm_head.weight.copy_(torch.linalg.solve(gram, x.T @ torch.stack(wanted)).T)
    return drafter


def answers_of(target: Target, prompts: list[list[int]] = PROMPTS, new: int = NEW) -> dict[str, list[list[int]]]:
    return {name: texts(Decoder(target, slots=3).generate(prompts, how, new, ())) for name, how in HOWS.items()}


def fitted(target: Target, answers, name: str = "3", prompts: list[list[int]] = PROMPTS, **arch) -> EagleModel:
    lines = [prompt + answer for one in answers.values() for prompt, answer in zip(prompts, one, strict=True)]
    return fit(make(target, name, draft_size=96, num_heads=4, head_dim=8, steps=4, **arch), target, lines).eval()
