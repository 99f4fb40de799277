"""Tokenizers of other kinds and merges, and tiny random models with them."""

import json

import torch
from conftest import byte_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.inference.byte_vocabulary import ByteVocabulary
from draftsmith.models.target import Target

FAMILY = "👩‍👩‍👧‍👦"  # seven characters of 25 bytes
TEXTS = [
    "The cat sat on the mat, and the dog sat on the cat.",
    "Größe, naïve café, coöperate — “quoted” … 100 €",
    f"emoji {FAMILY} 😀😃 and flags 🇫🇷🇯🇵, then text again",
    "日本語の文章と、中文句子。한국어 문장.",
    "def f(x):\n    if x:\n\treturn  x + 1\n\n\n# 2024-01-02\n",
    " leading and trailing spaces  ",
    "numbers 1234567 and <|endoftext|> spelled out </s>",
]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
END = "<|endoftext|>"


def byte_level(size: int, texts: list[str] = TEXTS, words: bool = True, **special: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE of about `size` entries, as of GPT-2; words: merges stay within words."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    backend.decoder = decoders.ByteLevel()
    tokens = list(dict.fromkeys(special.values())) or [END]
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=tokens, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(texts * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **(special or {"eos_token": END}))


def sentencepiece(size: int = 340, fallback: bool = True, legacy: bool = False) -> PreTrainedTokenizerFast:
    """BPE of characters with ▁ for a space, as of Llama-2: a space before every text, <s> too, and byte fallback or an unknown token.

    legacy: the space is written by a normalizer, before every part of a text.
    """
    backend = Tokenizer(models.BPE(byte_fallback=fallback, unk_token="<unk>", fuse_unk=True))
    if not legacy:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    words = [piece for text in TEXTS[:2] + TEXTS[4:6] for piece in text.replace(" ", " ▁" if legacy else " ").split(" ") if piece]
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=list("▁\n"), show_progress=False
    )
    backend.train_from_iterator(words * 4, trainer)
    if legacy:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    if fallback:
        state = json.loads(backend.to_str())
        vocab = state["model"]["vocab"]
        vocab |= {token: len(vocab) + number for number, token in enumerate(BYTES)}
        backend = Tokenizer.from_str(json.dumps(state))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def unigram() -> PreTrainedTokenizerFast:
    """A unigram tokenizer with ▁ for a space, and no tokens for characters that it has not seen."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=80, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(TEXTS[:1] * 8 + TEXTS[5:6] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")


KINDS = {
    "bytes": byte_tokenizer,
    "bpe": lambda: byte_level(400),
    "phrases": lambda: byte_level(330, words=False),
    "sentencepiece": sentencepiece,
    "legacy": lambda: sentencepiece(legacy=True),
    "unigram": unigram,
}


def model_of(tokenizer: PreTrainedTokenizerFast, seed: int = 0, layers: int = 2, positions: int = 256, name: str = "") -> Target:
    """A random Llama with this tokenizer, initialised wide."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), num_hidden_layers=layers, max_position_embeddings=positions, **sizes)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
    return Target.wrap(model, tokenizer, name or "random")


def vocabulary(model: Target) -> ByteVocabulary:
    return ByteVocabulary.of(model.tokenizer, model.name, model.vocab_size)
