"""Train a small language model from text: a target such as the shipped `tiny`, or a draft model for one. It reads the recipe's `data`, `train`
and `architecture` alone.

draftsmith train target target-tiny          (about an hour and a half on two CPU cores)
accelerate launch train/target.py recipes/target-tiny.yaml
"""

import sys

from pydantic import Field

from draftsmith.train.cli import prepare_script
from draftsmith.train.recipe import Recipe, Section, check_complete_sequences, load


class ArchitectureSection(Section):
    """the Llama that is trained"""

    vocab_size: int = Field(ge=300, le=2**20, description="entries of the byte-level BPE tokenizer, which is trained first")
    tokenizer: str | None = Field(
        default=None, description="folder of a model, or `tiny`, whose tokenizer is used instead; unset: a tokenizer is trained"
    )
    hidden_size: int = Field(ge=1, le=2**17, description="hidden size of the model")
    intermediate_size: int = Field(ge=1, le=2**20, description="inner size of the MLP")
    num_layers: int = Field(ge=1, le=1000, description="decoder layers")
    num_heads: int = Field(ge=1, le=2**12, description="query heads")
    num_kv_heads: int = Field(ge=1, le=2**12, description="key and value heads")
    compile: bool = Field(default=False, description="torch.compile the model: a minute at the start, a third faster after")


class TargetRecipe(Recipe):
    architecture: ArchitectureSection


if __name__ == "__main__":  # --help is answered before the imports below, which take seconds
    prepare_script(TargetRecipe, __doc__)

import math
import os
import platform
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.data import prepare
from draftsmith.data.conversations import SEPARATOR
from draftsmith.data.packing import TokenStream
from draftsmith.inference import durable, machine
from draftsmith.inference.errors import exit_on_error
from draftsmith.inference.progress import Bar
from draftsmith.models.model_files import read_tokenizer
from draftsmith.models.saving import save_model
from draftsmith.models.student import scale_residuals
from draftsmith.train import loop, publish, setup
from draftsmith.train.engine import checkpoint, output, processes
from draftsmith.train.engine.say import say
from draftsmith.train.losses.chunked import chunked_cross_entropy
from draftsmith.train.objective import Batch, Loss


def objective(model: LlamaForCausalLM, batch: Batch) -> Loss:
    """Σ_t CE(model(x_0 … x_t), x_{t+1}): next-token cross-entropy over the supervised tokens."""
    hidden = model.model(input_ids=batch["input_ids"]).last_hidden_state[:, :-1].flatten(0, 1)  # [B·(S−1),H]
    tokens, mask = batch["input_ids"][:, 1:].flatten(), batch["loss_mask"][:, 1:].flatten()
    loss = chunked_cross_entropy(hidden, model.lm_head.weight, tokens, mask)
    return Loss(loss.sum, mask.sum(), {"top1": loss.hits.sum()})


def train_tokenizer(size: int, texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `size` entries, trained on `texts`. `<|endoftext|>` is its first, last and padding token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[SEPARATOR], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    end = SEPARATOR
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=end, eos_token=end, pad_token=end, clean_up_tokenization_spaces=False
    )


def build(recipe: TargetRecipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama with random weights, the same for the same train.seed."""
    sizes = recipe.architecture
    end = tokenizer.eos_token_id
    assert isinstance(end, int), "train_tokenizer sets it"
    config = LlamaConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads,
        max_position_embeddings=recipe.data.seq_len,
        tie_word_embeddings=True,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
    )
    setup.check_memory(lambda: LlamaForCausalLM(config), "architecture.*", torch.device("cpu"), recipe.train)
    torch.manual_seed(recipe.train.seed)
    model = LlamaForCausalLM(config)
    scale_residuals(model)
    return model


@torch.no_grad()
def bits_per_byte(model: LlamaForCausalLM, valid: TokenStream, tokenizer: PreTrainedTokenizerFast) -> float:
    """Mean loss over all held-out sequences, in bits per byte of the text of the predicted tokens."""
    nats = num_bytes = 0.0
    model.eval()
    with Bar("held-out text", len(valid)) as bar:
        for start in range(0, len(valid), 8):
            batch = valid.batch(torch.arange(start, min(start + 8, len(valid))))
            nats += objective(model, batch).sum.item()
            for row, supervised in zip(batch["input_ids"], batch["loss_mask"].bool(), strict=True):
                num_bytes += len(str(tokenizer.decode(row[1:][supervised[1:]], skip_special_tokens=True)).encode())
            bar.update(start + len(batch["input_ids"]))
    return nats / math.log(2) / num_bytes


def write_card(folder: Path, recipe: TargetRecipe, model: nn.Module, bits: float) -> None:
    """Write README.md beside the weights: the data, the length of training, the quality, and how to repeat it."""
    tokens = recipe.train.steps * recipe.train.batch_size * recipe.data.seq_len
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    output, stdlib = recipe.train.output, recipe.data.train == "stdlib"
    about = f"A Llama of {size:.1f}M parameters"
    if stdlib:
        about += " that continues Python source"
    if recipe.architecture.tokenizer:
        about += f", with the tokenizer of `{recipe.architecture.tokenizer}`, to draft for it"
    data = f"`{recipe.data.train}`"
    if stdlib:
        data = f"the source of the standard library of CPython {platform.python_version()} (PSF licence)"
        data += "; one module in twelve held out, by the hash of its path (`data/stdlib.py`)"
    lines = [
        "---",
        *(["license: apache-2.0"] if stdlib else []),  # of other data the licence is not known
        "library_name: transformers",
        "---",
        "",
        f"# {Path(output).name}",
        "",
        f"{about}. It knows nothing else, and what it writes is not to be run.",
        "",
        f"- Data: {data}.",
        f"- Training: {recipe.train.steps:,} steps, {tokens:,} tokens, {recipe.train.optimizer}, on {device}; stored as bf16.",
        f"- Held-out text: {bits:.3f} bits per byte, all of its supervised tokens, of the stored weights.",
        f"- Make it again: `accelerate launch train/target.py {output}/recipe.yaml`, then copy `{output}/artifact`.",
    ]
    (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def prepare_tokenizer(recipe: TargetRecipe) -> PreTrainedTokenizerFast:
    """The recipe's tokenizer: copied or trained until there is a checkpoint, then read from `<output>/tokenizer`. The main process calls it first."""
    folder, section = Path(recipe.train.output) / "tokenizer", recipe.architecture
    # Without a checkpoint that folder may be of another recipe, whose run ended before it had one.
    if not folder.is_dir() or (processes.join().is_main_process and not checkpoint.latest(folder.with_name("checkpoints"))):
        if section.tokenizer:
            tokenizer = read_tokenizer(section.tokenizer, key="architecture.tokenizer")
            if tokenizer is None:
                raise ValueError(
                    f"architecture.tokenizer={section.tokenizer}: no tokenizer.json there; give a folder or Hub id that has one"
                )
        else:
            tokenizer = train_tokenizer(section.vocab_size, prepare.training_texts(recipe.data.plan()))
        durable.replace_folder(folder, tokenizer.save_pretrained)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    if len(tokenizer) > section.vocab_size:
        raise ValueError(
            f"architecture.vocab_size={section.vocab_size} is less than the {len(tokenizer)} entries of the tokenizer in {folder}; raise it, or "
            "delete that folder, where it is of an earlier run"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer in {folder} has no token that ends a text (eos_token); give another architecture.tokenizer")
    recipe.data.give_template(tokenizer)
    return tokenizer


def check(recipe: TargetRecipe) -> None:
    """Check that the keys fit together. Raises ValueError, naming the keys."""
    check_complete_sequences(recipe)
    recipe.data.refuse_unread("data", ["pack"], "`train target`, which cuts a stream of texts")
    if any(source.weight is not None for source in recipe.data.plan().train):
        raise ValueError("`train target` reads each text once in an epoch, whatever the weights in data.train; leave them out")
    recipe.train.refuse_unread("train", ["tau_prompts", "normalise"], "`train target`, which trains no drafter")
    recipe.train.refuse_unread("train", ["compile"], "`train target`, which has architecture.compile")
    sizes = recipe.architecture
    if sizes.hidden_size % (2 * sizes.num_heads):
        raise ValueError(
            f"architecture.hidden_size={sizes.hidden_size} is no multiple of twice architecture.num_heads={sizes.num_heads}; make it one"
        )
    if sizes.num_heads % sizes.num_kv_heads:
        raise ValueError(
            f"architecture.num_kv_heads={sizes.num_kv_heads} does not divide architecture.num_heads={sizes.num_heads}; change one"
        )


def main(arguments: list[str]) -> None:
    recipe = load(TargetRecipe, arguments[0], arguments[1:])
    check(recipe)
    machine.threads()
    processes.on_main(lambda: output.check(recipe))
    with output.claimed(recipe):
        train_and_publish(recipe)


def train_and_publish(recipe: TargetRecipe) -> None:
    """The tokenizer, the data, the training and the folder to publish."""
    data = recipe.data
    tokenizer = processes.main_first(lambda: prepare_tokenizer(recipe))
    corpora = processes.main_first(lambda: prepare.load(data.plan(), tokenizer, data.cache, data.num_proc))
    train, valid = (TokenStream(corpora[part], data.seq_len) for part in ("train", "valid"))
    model = build(recipe, tokenizer)
    if recipe.architecture.compile:
        model.model.compile()
    accelerator, _ = loop.fit(recipe, model, objective, train, valid, {"data": train.key})
    if not accelerator.is_main_process:
        return
    model.cpu().bfloat16()
    model.generation_config = GenerationConfig(bos_token_id=model.config.bos_token_id, eos_token_id=model.config.eos_token_id)
    bits = 0.0

    def write(part: Path) -> None:
        nonlocal bits
        save_model(model, part)
        tokenizer.save_pretrained(part)
        bits = bits_per_byte(model.float(), valid, tokenizer)
        write_card(part, recipe, model, bits)

    artifact, _ = publish.replace_artifact(recipe, write)
    say(f"{artifact}: {recipe.train.steps} steps, held out {bits:.3f} bits per byte")


if __name__ == "__main__":
    exit_on_error(main, sys.argv[1:])
