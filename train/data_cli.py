"""From conversations to features and datastores: prepare conversations, look at them, let the target answer them, capture its features.

draftsmith data prepare medusa-smollm2-135m data.train=chats.jsonl                 # tokenise, mask, deduplicate, mix; print a report
draftsmith data show medusa-smollm2-135m data.train=chats.jsonl                    # print samples, the supervised tokens coloured
draftsmith data regenerate chats.jsonl answers.jsonl --target org/model            # the same prompts, answered by the target
draftsmith data regenerate chats.jsonl answers.jsonl --server http://localhost:8000/v1 --model Qwen/Qwen3-8B
draftsmith data synthesise chats.jsonl --target org/model --conversations 1000     # the target writes questions and answers itself
draftsmith data capture recipes/medusa-tiny.yaml features.store=runs/features      # run the target once, store its features
draftsmith data datastore runs/store chats.jsonl --target org/model                # texts to draft from: --drafter rest:runs/store

The recipe may be that of any method; each of its keys can follow it as key=value. `draftsmith data <command> --help` lists the options.
In several processes, on a GPU or a core each: `accelerate launch [options] -m draftsmith.train.data_cli {regenerate,synthesise,capture} ...`.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.eval.options import new_parser
from draftsmith.inference.errors import exit_on_error

if TYPE_CHECKING:  # the commands import what they need, so that --help is quick
    from transformers import PreTrainedTokenizerBase

    from draftsmith.data.corpus import Corpus
    from draftsmith.models.target import Target

# Options of `regenerate` that become regenerate.Settings, with their defaults there.
SETTINGS = {
    "temperature": (0.0, "0 takes the most likely token"),
    "top_k": (0, "draw among this many of the most likely tokens; 0: among all"),
    "top_p": (1.0, "draw among the most likely tokens that together have this probability"),
    "min_p": (0.0, "draw among tokens with at least this share of the highest probability"),
    "repetition_penalty": (1.0, "divide the positive logits of tokens that have occurred by this, and multiply the negative ones"),
    "seed": (0, "of the draws"),
    "max_new_tokens": (1024, "most tokens of an answer"),
    "prompt_tokens": (64, "tokens of a text that are given where it has no prompt of its own"),
}
# The same for the answers and the questions of `synthesise`. min_p 0.05 keeps the questions of a small target sensible at temperature 1.
ANSWERS = SETTINGS | {"temperature": (0.7, SETTINGS["temperature"][1])}
QUESTIONS = SETTINGS | {
    "temperature": (1.0, SETTINGS["temperature"][1]),
    "min_p": (0.05, SETTINGS["min_p"][1]),
    "max_new_tokens": (256, "most tokens of a question; one that reaches it is dropped"),
}


def run_prepare(arguments: list[str]) -> None:
    """Make the corpora of a recipe and print what is in them."""
    options = _recipe_parser("prepare", run_prepare).parse_intermixed_args(arguments)
    from draftsmith.data import report

    tokenizer, corpora = _corpora(options)
    console = report.console()
    for part, corpus in corpora.items():
        console.print(report.contents(part, corpus))
    console.print(report.draft_vocabularies(corpora["train"], len(tokenizer)))
    for line in report.preparation(corpora["train"]):
        console.print(line)


def run_show(arguments: list[str]) -> None:
    """Print samples of a recipe's data, with the supervised tokens coloured."""
    parser = _recipe_parser("show", run_show)
    parser.add_argument("--examples", type=int, default=4, help="samples to print (default: 4)")
    parser.add_argument("--domain", help="print samples of this domain only")
    parser.add_argument("--part", choices=["train", "valid"], default="train", help="training or held-out samples (default: train)")
    options = parser.parse_intermixed_args(arguments)
    if options.examples < 1:
        raise ValueError(f"--examples {options.examples}: expected 1 or more")
    import torch

    from draftsmith.data import report
    from draftsmith.inference.terminal import printable

    tokenizer, corpora = _corpora(options)
    corpus = corpora[options.part]
    if options.domain is not None and options.domain not in corpus.domains:
        raise ValueError(f"--domain {options.domain}: expected one of {printable(', '.join(corpus.domains), '')}")
    order = torch.randperm(len(corpus), generator=torch.Generator().manual_seed(0)).tolist()
    domains = [corpus.domains[number] for number in corpus.domain.tolist()]
    samples = [n for n in order if options.domain in (None, domains[n])]
    console = report.console()
    for n in samples[: options.examples]:
        ids, mask = corpus.sample(n)
        console.rule(f"sample {n} of {len(corpus)}, {printable(domains[n], '')}: {len(ids)} tokens, {int(mask.sum())} supervised")
        console.print(report.marked_text(ids.tolist(), mask.tolist(), tokenizer, console.is_terminal))
    console.rule()
    console.print("green tokens are supervised" if console.is_terminal else "tokens between ⟦ and ⟧ are supervised")


def run_capture(arguments: list[str]) -> None:
    """Run the target over a recipe's data and store its features in features.store."""
    options = _recipe_parser("capture", run_capture).parse_intermixed_args(arguments)
    from accelerate import PartialState

    from draftsmith.data import capture
    from draftsmith.models.parallel import COLLECTIVE
    from draftsmith.train import recipe, setup

    chosen = recipe.load(recipe.Recipe, _recipe_file(options), options.overrides, shared=True)
    section = chosen.features
    if section.store is None:
        raise ValueError("draftsmith data capture needs features.store=<folder>, the folder to store the features in")
    if chosen.target.parallel in COLLECTIVE:
        raise ValueError(
            f"target.parallel={chosen.target.parallel} makes each forward one of all ranks, and a capture gives each its own; "
            "take target.parallel=layers in one process, or target.quantise"
        )
    target, corpora = setup.load_target_and_data(chosen, training=False)
    state = PartialState()
    capture.capture(
        target,
        corpora.values(),
        Path(os.path.expanduser(section.store)),
        section.precision,
        section.taps,
        section.batch_tokens,
        state.process_index,
        state.num_processes,
        state.wait_for_everyone,
    )


def run_regenerate(arguments: list[str]) -> None:
    """Answer conversations anew, with the target or with a server of it."""
    parser = _regenerate_parser()
    options = parser.parse_args(arguments)
    _check_writer(parser, options, ["target", "drafter", "slots", "kernels", "dtype", "trust_remote_code"])
    from draftsmith.data import conversations, regenerate
    from draftsmith.data.conversations import Source
    from draftsmith.data.shared_decoding import SharedDecoder
    from draftsmith.eval.options import check_numbers
    from draftsmith.inference.terminal import printable
    from draftsmith.models import ranks

    check_numbers(options)
    settings = regenerate.Settings(**{name: getattr(options, name) for name in SETTINGS})
    examples, out = (
        conversations.read(Source(path=options.source, split=options.split, subset=options.subset)),
        Path(os.path.expanduser(options.out)),
    )
    if out.parent.resolve() == Path(os.path.expanduser(options.source)).resolve():
        raise ValueError(f"{out} would be one of the files of {options.source} when the command is run again; give an output elsewhere")
    if options.server:
        summary = regenerate.with_server(
            examples,
            out,
            options.server,
            options.model,
            settings,
            concurrency=options.concurrency,
            timeout=options.timeout,
            omit=tuple(options.omit),
        )
    else:
        names = [] if options.drafter == "none" else [options.drafter]
        target, drafters = _open(options, names, out)
        if target.identity.adapter_hash:
            raise ValueError(
                f"--drafter {options.drafter} adapts {target.name!r}, so that the answers would not be its own; take a drafter of Medusa-1, or none"
            )
        decoding = {"drafter": drafters[0] if drafters else None, "slots": options.slots, "kernels": options.kernels}
        if not ranks.state().is_main_process:
            SharedDecoder(target, **decoding).help()
            return
        summary = regenerate.with_decoder(examples, out, target, settings, **decoding)
    print(f"{printable(str(out), '')}: {summary.report()}")
    if summary.status:
        raise SystemExit(summary.status)


def run_synthesise(arguments: list[str]) -> None:
    """Let the target write conversations, questions and answers, without any data."""
    parser = _synthesise_parser()
    options = parser.parse_args(arguments)
    _check_writer(parser, options, ["slots", "kernels", "dtype"])
    from draftsmith.data import openings, report, synthesise
    from draftsmith.data.regenerate import Settings
    from draftsmith.data.selection import Plan
    from draftsmith.data.shared_decoding import SharedDecoder
    from draftsmith.eval.options import check_numbers, check_sampling
    from draftsmith.inference.terminal import printable
    from draftsmith.models import ranks
    from draftsmith.models.model_files import read_tokenizer, require_tokenizer

    check_numbers(options)
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        check_sampling(name, getattr(options, f"question_{name}"), f"--question-{name.replace('_', '-')}")
    own = [name for name in SETTINGS if name not in ("seed", "prompt_tokens")]
    questions, answers = (
        Settings(**{name: getattr(options, part + name) for name in own}, seed=options.seed) for part in ("question_", "")
    )
    plan = Plan(options.conversations, tuple(openings.load(options.openings)), questions, answers, options.turns, tuple(options.exclude))
    out = Path(os.path.expanduser(options.out))
    if options.server:
        tokenizer = read_tokenizer(options.target, trust_remote_code=options.trust_remote_code, key="--target")
        tokenizer = require_tokenizer(tokenizer, options.target)
        summary = synthesise.with_server(
            plan,
            out,
            tokenizer,
            options.server,
            options.model,
            concurrency=options.concurrency,
            timeout=options.timeout,
            omit=tuple(options.omit),
        )
    else:
        target, _ = _open(options, [], out)
        decoding = {"slots": options.slots, "kernels": options.kernels}
        if not ranks.state().is_main_process:
            SharedDecoder(target, **decoding).help()
            return
        summary = synthesise.with_decoder(plan, out, target, **decoding)
    report.console().print(summary.table())
    for line in (f"{out}:", *summary.report()):
        print(printable(line, ""))


def _open(options: argparse.Namespace, drafters: list[str], out: Path) -> "tuple[Target, list[Any]]":
    """Join the other processes of a launch and load the models, in the dtype in which `out` was begun."""
    from draftsmith.data.resumable import begun_dtype
    from draftsmith.eval import loading
    from draftsmith.train.engine import processes

    processes.join()
    dtype = loading.chosen_dtype(options.dtype, lambda: begun_dtype(out))
    return loading.open_models(options.target, drafters, dtype, options.trust_remote_code)


def run_datastore(arguments: list[str]) -> None:
    """Make a datastore to draft from (--drafter rest:FOLDER), of texts, conversations or the answers that an evaluation recorded."""
    options = _datastore_parser().parse_args(arguments)
    from draftsmith.data import datastore
    from draftsmith.eval.loading import command
    from draftsmith.inference.progress import Bar
    from draftsmith.inference.terminal import printable
    from draftsmith.models.identity import tokenizer_hash
    from draftsmith.models.model_files import read_tokenizer, require_tokenizer

    tokenizer = read_tokenizer(options.target, trust_remote_code=options.trust_remote_code, key="--target")
    tokenizer = require_tokenizer(tokenizer, options.target)
    folder = Path(os.path.expanduser(options.out))

    def sequences() -> Iterator[list[int]]:
        done = 0
        with Bar("sequences", None) as bar:
            for name in options.files:
                answers = _recorded_answers(Path(os.path.expanduser(name)), tokenizer_hash(tokenizer))
                for ids in datastore.read(name, tokenizer) if answers is None else answers:
                    yield ids
                    done += 1
                    bar.update(done, f"{done:,}")

    built = datastore.build(folder, sequences(), tokenizer, options.target)
    print(printable(f"{folder}: {built.report()}", ""))
    print(printable(f"{command()} generate --target {options.target} --drafter rest:{folder} ...", ""))


def _recorded_answers(path: Path, tokenizer_hash: str) -> Iterator[list[int]] | None:
    """The answers that an evaluation recorded in a folder, or in its records.jsonl; None where `path` is neither.

    Raises:
        ValueError: damaged records, or those of another tokenizer.
    """
    from draftsmith.eval import record_store

    folder = path.parent if path.name == record_store.RECORDS else path
    if not (folder / record_store.RECORDS).is_file():
        return None
    records = record_store.read(folder)
    if records.header["target"].get("tokenizer_hash") != tokenizer_hash:
        name = records.header["target"].get("name")
        raise ValueError(f"{str(folder)!r} has answers of {name!r}, which has another tokenizer; give --target {name}, or leave them out")
    return (request.tokens for request in records.requests)


def _datastore_parser() -> argparse.ArgumentParser:
    parser = new_parser("data datastore", run_datastore.__doc__)
    parser.add_argument("out", help="folder of the datastore; one that is there is replaced when the new one is complete")
    parser.add_argument("files", nargs="+", help="texts or conversations: files, folders or Hub data sets; or folders that eval wrote into")
    parser.add_argument("--target", default="tiny", help="folder or Hub id of the target whose tokenizer is taken (default: tiny)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the tokenizer's own code from the Hub")
    return parser


def _synthesise_parser() -> argparse.ArgumentParser:
    parser = new_parser("data synthesise", run_synthesise.__doc__)
    parser.add_argument("out", help="JSONL file to write; the same command continues a run that was stopped, more --conversations a file")
    parser.add_argument("--conversations", type=int, required=True, help="rows of the file; what is dropped on the way does not count")
    parser.add_argument("--turns", type=int, default=1, help="questions of a conversation, at most (default: 1)")
    parser.add_argument(
        "--openings",
        default="tasks",
        help="text or JSONL file with beginnings of questions, taken in turn, perhaps with `system` and `domain`; tasks: those that ship "
        "here, for the seven tasks of Spec-Bench; none: no beginning (default: tasks)",
    )
    parser.add_argument(
        "--exclude",
        nargs="*",
        default=[],
        help="files of evaluation prompts, or chat for the shipped ones; conversations that contain one are dropped",
    )
    _add_writer(parser, "writes", target=None)
    for prefix, settings in (("", ANSWERS), ("question-", QUESTIONS)):
        for name, (default, text) in settings.items():
            if name != "prompt_tokens" and (name != "seed" or not prefix):
                option = f"--{prefix}{name.replace('_', '-')}"
                parser.add_argument(option, type=type(default), default=default, help=f"{text} (default: {default})")
    return parser


def _regenerate_parser() -> argparse.ArgumentParser:
    parser = new_parser("data regenerate", run_regenerate.__doc__)
    parser.add_argument("source", help="conversations or texts: a file, a folder or a Hub data set")
    parser.add_argument("out", help="JSONL file to write; the same command continues a run that was stopped")
    parser.add_argument("--split", default="train", help="split of a Hub data set (default: train)")
    parser.add_argument("--subset", help="configuration of a Hub data set")
    parser.add_argument("--drafter", default="none", help="a drafter for it, as for `draftsmith generate`; the answers stay the target's")
    _add_writer(parser, "answers", target="tiny")
    for name, (default, text) in SETTINGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=f"{text} (default: {default})")
    return parser


def _add_writer(parser: argparse.ArgumentParser, writes: str, target: str | None) -> None:
    """What writes: the target in this process, or a server of it. Without a default `target` it must be given."""
    parser.add_argument(
        "--target",
        default=target,
        required=target is None,
        help=f"folder or Hub id of the target that {writes}, in this process"
        + (f" (default: {target})" if target else "; a server needs it for its chat template"),
    )
    parser.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        help="of the target (default: auto; a file that is continued stays in its own)",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run the target's model code from the Hub")
    parser.add_argument("--slots", type=int, default=32, help="conversations at the same time, in each process (default: 32)")
    parser.add_argument(
        "--kernels",
        action="store_true",
        help="decode with the Triton kernels and CUDA graphs, on a GPU; then give --slots 512, or as many as the cache has memory for",
    )
    parser.add_argument(
        "--server", help=f"base address of an OpenAI-compatible server that {writes} instead, such as http://localhost:8000/v1"
    )
    parser.add_argument("--model", help="the model's name on the server; its key is read from OPENAI_API_KEY")
    parser.add_argument("--concurrency", type=int, default=16, help="requests to the server at the same time (default: 16)")
    parser.add_argument("--omit", nargs="*", default=[], help="settings not to send where they have their default: TGI refuses top_p=1")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that a request may take (default: 120)")


def _check_writer(parser: argparse.ArgumentParser, options: argparse.Namespace, in_process: list[str]) -> None:
    """Raise ValueError for options of `_add_writer` that would do nothing, those `in_process` beside a server, and for a server without a model."""
    unread, remedy = (in_process, "leave it out") if options.server else (["model", "concurrency", "omit", "timeout"], "give --server too")
    for name in unread:
        if getattr(options, name) != parser.get_default(name):
            where = "the target in this process" if options.server else "a server"
            raise ValueError(f"--{name.replace('_', '-')} is for {where}; {remedy}")
    if options.server and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("--server needs one process; leave `accelerate launch` out, and raise --concurrency")
    if options.server and not options.model:
        raise ValueError("--server needs --model, the name by which the server knows it")


def _recipe_parser(command: str, run: Callable[[list[str]], None]) -> argparse.ArgumentParser:
    """A parser of a recipe and its overrides; further options may stand among them."""
    parser = new_parser(f"data {command}", run.__doc__)
    parser.add_argument("recipe", nargs="?", help="YAML file of any method, such as recipes/medusa-tiny.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the recipe, such as data.train=chats.jsonl")
    return parser


def _recipe_file(options: argparse.Namespace) -> str:
    if options.recipe is None:
        raise ValueError("expected a recipe first, for example recipes/medusa-tiny.yaml")
    return options.recipe


def _corpora(options: argparse.Namespace) -> "tuple[PreTrainedTokenizerBase, dict[str, Corpus]]":
    """The target's tokenizer and the recipe's corpora; the target's weights are not read."""
    from draftsmith.data import prepare
    from draftsmith.models.model_files import read_tokenizer, require_tokenizer
    from draftsmith.train import recipe

    chosen = recipe.load(recipe.Recipe, _recipe_file(options), options.overrides, shared=True)
    target, data = chosen.target, chosen.data
    tokenizer = read_tokenizer(target.path, revision=target.revision, trust_remote_code=target.trust_remote_code, key="target.path")
    tokenizer = require_tokenizer(tokenizer, target.path)
    data.give_template(tokenizer)
    return tokenizer, prepare.load(data.plan(), tokenizer, data.cache, data.num_proc)


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "prepare": run_prepare,
    "show": run_show,
    "regenerate": run_regenerate,
    "synthesise": run_synthesise,
    "capture": run_capture,
    "datastore": run_datastore,
}


def main(arguments: list[str]) -> None:
    """`draftsmith data`: run the command that the first argument names."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: draftsmith data {{{','.join(COMMANDS)}}} ...\n\n{(__doc__ or '').strip()}")
        raise SystemExit(0 if arguments else 2)
    if arguments[0] not in COMMANDS:
        raise ValueError(f"no command `data {arguments[0]}`; expected one of {', '.join(COMMANDS)}")
    COMMANDS[arguments[0]](arguments[1:])


if __name__ == "__main__":
    exit_on_error(main, sys.argv[1:])
