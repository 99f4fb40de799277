"""Say what is wrong with a drafter's folder, one line for each thing; exit 1 where something is.

draftsmith check served/llama-drafter --target meta-llama/Llama-3.1-8B-Instruct
draftsmith check someone/their-drafter --target meta-llama/Llama-3.1-8B-Instruct --engine vllm
draftsmith check served/drafter --target HuggingFaceTB/SmolLM2-135M-Instruct --serve vllm --python ~/vllm/bin/python

The rules are those of the engines' loaders (models/FORMATS.md). Then a second reading, in plain torch, is held to what our model reads from
the folder: logits on random inputs. A draft model must load in transformers. --serve runs the folder in the engine itself: in 99 of 100 rounds
(near ties may differ) it must propose what the same folder proposes here, and its hidden states stand beside ours, layer by layer.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.eval import options
from draftsmith.train.exchange.export import DTYPES, ENGINES

if TYPE_CHECKING:  # --help imports no model library
    from draftsmith.train.exchange.serving import Served

SHOWN = 5  # differing rounds


def parser() -> argparse.ArgumentParser:
    parser = options.new_parser("check", __doc__)
    parser.add_argument("folder", help="folder or Hub id of a drafter, ours or anyone's")
    parser.add_argument("--target", required=True, help="folder or Hub id of the target that it drafts for")
    parser.add_argument(
        "--engine",
        action="append",
        choices=ENGINES,
        help="hold it to this engine's rules; may be repeated (default: the engine it was exported for, else all that serve such a drafter)",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run the target's own code from the Hub")
    serving = parser.add_argument_group("with --serve, which decodes these prompts greedily, one at a time")
    serving.add_argument("--serve", choices=("vllm",), help="run the folder in this engine too")
    serving.add_argument("--python", help="interpreter of an environment with the engine (default: this one)")
    serving.add_argument("--dtype", choices=DTYPES[1:], help="of both (default float32; less makes near ties differ)")
    serving.add_argument("--depth", type=int, help="tokens of a chain (default: the depth of the folder's tree)")
    options.add_prompts(serving, limit=2)  # pyright: ignore[reportArgumentType]
    return parser


def main(arguments: list[str]) -> None:
    described = parser()
    chosen: Any = described.parse_args(arguments)
    options.check_numbers(chosen, 3 if chosen.serve else 1)  # the first token comes without a draft, and the last draft is not compared
    for name in ("python", "dtype", "depth", "prompts", "limit", "max_new_tokens"):
        if not chosen.serve and getattr(chosen, name) != described.get_default(name):
            raise ValueError(f"--{name.replace('_', '-')} is of a run in an engine; give --serve vllm too, or leave it out")
    chosen.dtype = chosen.dtype or "float32"

    from draftsmith.inference.terminal import printable
    from draftsmith.models.formats.gguf_file import FILE
    from draftsmith.models.formats.note import read_note
    from draftsmith.models.formats.published import folder_of, format_of, target_of
    from draftsmith.models.formats.verify import faults
    from draftsmith.models.identity import recorded_revision
    from draftsmith.train.exchange.export import open_target

    folder = folder_of(chosen.folder)
    ours = read_note(folder).get("target")  # of a GGUF file nothing else says it
    recorded = ours or ({} if (folder / FILE).is_file() or not format_of(str(folder)) else target_of(str(folder)))
    revision = recorded_revision(chosen.target, recorded)
    target, _ = open_target(chosen.target, revision, chosen.trust_remote_code)
    lines = faults(folder, target, chosen.engine)
    for line in lines:
        print(printable(line))
    if not lines:
        print(f"{chosen.folder}: nothing wrong was seen")
    served = _serve(chosen, folder, revision) if chosen.serve else None
    if served is not None:
        for line in served_lines(served):
            print(line)
    if lines or not (served is None or served.same):
        raise SystemExit(1)


def _serve(chosen: Any, folder: Path, revision: str | None) -> "Served":
    import sys

    from draftsmith.data import prompts as prompt_files
    from draftsmith.eval import loading
    from draftsmith.eval.answers import encode_prompts
    from draftsmith.models.drafter import DrafterModel
    from draftsmith.models.formats.engines import PARALLEL, VLLM_METHODS, served_depth
    from draftsmith.models.formats.verify import family_in
    from draftsmith.models.pard import ParallelDraftModel
    from draftsmith.models.target import resolve_path
    from draftsmith.train.exchange import serving

    family = family_in(folder)
    if family not in VLLM_METHODS:
        raise ValueError(f"--serve vllm: vLLM serves no {family} drafter of a folder; it serves {', '.join(VLLM_METHODS)}")
    given = prompt_files.load(chosen.prompts, chosen.limit, distinct=True)
    target, (drafter,) = loading.open_models(chosen.target, [str(folder)], chosen.dtype, chosen.trust_remote_code)
    prompts = given or loading.shipped_prompts(target, chosen.limit)
    depth = chosen.depth or (served_depth(drafter.config) if isinstance(drafter, DrafterModel) else max(1, drafter.max_depth))
    if depth > drafter.depth_limit:
        raise ValueError(f"--depth {depth}: {drafter.method} looks {drafter.depth_limit} ahead at most; lower it")
    encoded, _ = encode_prompts(target, prompts, chosen.max_new_tokens)
    speculative = {"method": VLLM_METHODS[family], "model": str(folder.resolve()), "num_speculative_tokens": depth}
    speculative |= PARALLEL if family == "peagle" or isinstance(drafter, ParallelDraftModel) else {}
    request = {"target": resolve_path(chosen.target), "dtype": chosen.dtype, "speculative": speculative}
    request |= {"revision": revision, "trust_remote_code": chosen.trust_remote_code}
    ids = [prompt.ids for prompt in encoded]
    try:
        return serving.serve(target, drafter, ids, chosen.max_new_tokens, depth, chosen.python or sys.executable, request, False)
    except serving.NotServed as error:
        raise ValueError(f"--serve vllm: {error}; --python names an environment that has vLLM") from None


def served_lines(served: "Served") -> list[str]:
    """What the engine did, in lines for people."""
    from draftsmith.eval.intervals import shown

    lines = [f"vLLM {served.version}: {served.texts} of {served.prompts} answers are those of plain greedy decoding here"]
    equal, about = served.rounds - len(served.differences), served.tau
    lines.append(
        f"proposals: {equal:,} of {served.rounds:,} rounds are equal" + ("" if served.same else "; WRONG: another drafter is served")
    )
    for each in served.differences[:SHOWN]:
        lines.append(f"    prompt {each.prompt}, position {each.position}: vLLM {each.theirs}, here {each.ours}")
    interval = shown(about.low, about.high)
    lines.append(
        f"τ by one count: vLLM {about.estimate:.4f}, here {served.tau_here.estimate:.4f} ({interval}); vLLM's counters {served.counted:.4f}"
    )
    for each in served.features:
        name = "last hidden state" if each.layer < 0 else f"output of layer {each.layer}"
        lines.append(f"{name}: relative error {each.mean:.1e}, at most {each.largest:.1e} at a position")
    return lines
