"""How far an adapted target (Medusa-2) is from the target without adapters: drafts are verified by the adapted one, so its output is another.

Letters: S positions · V target vocabulary.
"""

import math

import torch

from draftsmith.eval.answers import EncodedPrompt
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.progress import Bar
from draftsmith.inference.sampler import Sampling
from draftsmith.models.target import Target

ADAPTED = "lossless with respect to the adapted model only"
SLOTS = 8  # prompts that are decoded at a time
AT_ONCE = 64  # positions whose logits [64,V] exist at a time


@torch.inference_mode()
def measure(original: Target, adapted: Target, prompts: list[EncodedPrompt], max_new_tokens: int) -> dict[str, float]:
    """The drift of a target from the one that it was made of.

    Args:
        original: without adapters.
        adapted: with them.
        prompts: are decoded greedily, and, with the answers that a log has, are the held-out text of which the perplexity is.
        max_new_tokens: of an answer.

    Returns:
        prompts, how many; answer_tokens and text_tokens, how many were compared; kl, KL(original ‖ adapted) in nats a token along the
        original's answers; perplexity and adapted_perplexity of the text; changed, the share of answers that are not equal.
    """
    ids = [prompt.ids for prompt in prompts]
    answers = [
        [text.tokens for text in Decoder(each, slots=SLOTS).generate(ids, Sampling(), max_new_tokens)] for each in (original, adapted)
    ]
    kl = 0.0
    losses, tokens = [0.0, 0.0], 0
    with Bar("drift of the adapted target", len(prompts)) as bar:
        for number, (prompt, answer) in enumerate(zip(prompts, answers[0], strict=True)):
            kl += _kl(original, adapted, prompt.ids, answer)
            text = [*prompt.ids, *prompt.continuation[:max_new_tokens]]
            losses = [loss + _loss(each, text) for loss, each in zip(losses, (original, adapted), strict=True)]
            tokens += len(text) - 1
            bar.update(number + 1)
    answered = sum(map(len, answers[0]))
    return {
        "prompts": len(prompts),
        "answer_tokens": answered,
        "text_tokens": tokens,
        "kl": kl / max(1, answered),
        "perplexity": math.exp(losses[0] / max(1, tokens)),
        "adapted_perplexity": math.exp(losses[1] / max(1, tokens)),
        "changed": sum(before != after for before, after in zip(*answers, strict=True)) / len(prompts),
    }


def _kl(original: Target, adapted: Target, prompt: list[int], answer: list[int]) -> float:
    """Σ KL(original ‖ adapted) over the tokens of an answer."""
    ids = torch.tensor([prompt + answer], device=original.device)
    states = [each.forward(ids).hidden[0, len(prompt) - 1 : -1] for each in (original, adapted)]
    total = 0.0
    for rows in zip(*(each.split(AT_ONCE) for each in states), strict=True):
        log_p, log_q = (each.float32_logits(part).log_softmax(-1) for each, part in zip((original, adapted), rows, strict=True))
        total += torch.where(log_p > -torch.inf, log_p.exp() * (log_p - log_q), 0).sum().item()
    return total


def _loss(target: Target, text: list[int]) -> float:
    """Σ −log p of the tokens of a text but the first."""
    ids = torch.tensor(text, device=target.device)
    states, total = target.forward(ids[None]).hidden[0, :-1], 0.0
    for part, labels in zip(states.split(AT_ONCE), ids[1:].split(AT_ONCE), strict=True):
        total -= target.float32_logits(part).log_softmax(-1).gather(-1, labels[:, None]).sum().item()
    return total


def lines(drift: dict[str, float]) -> list[str]:
    """What was measured, in sentences; none where nothing was."""
    if not drift:
        return []
    return [
        f"drift from the target without adapters: KL {drift['kl']:.4f} nats a token over {drift['answer_tokens']:,} tokens of its greedy answers; "
        f"{drift['changed']:.0%} of {drift['prompts']} greedy answers change",
        f"perplexity of the prompts ({drift['text_tokens']:,} tokens) {drift['adapted_perplexity']:.2f}, without adapters {drift['perplexity']:.2f}",
    ]
