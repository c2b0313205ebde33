"""python -m dflash_jax COMMAND: regenerate, cache, bench, doctor, export, aot, invariants. `COMMAND --help` lists the options."""

import dataclasses
import sys
from pathlib import Path
from typing import get_args

from dflash_jax.aot import EXAMPLES, aot
from dflash_jax.bench import bench
from dflash_jax.cli import INTERRUPTED, build_config, config_parser, plain_parser, run
from dflash_jax.conversations import read_prompts
from dflash_jax.doctor import doctor
from dflash_jax.drafter import Drafter
from dflash_jax.errors import ConfigError
from dflash_jax.export import FORMATS, export_drafter
from dflash_jax.hf import load_drafter, load_target, load_text_target
from dflash_jax.invariants import check_invariants
from dflash_jax.model_config import Dtype
from dflash_jax.precompute import precompute
from dflash_jax.prompts import packaged_prompts
from dflash_jax.regenerate import regenerate


def regenerate_command(argv: list[str]) -> int:
    """Let the target answer prompts."""
    parser = config_parser(
        "Let the target answer prompts: the text that drafters learn from. Run it again after a kill: it continues.",
        prog="dflash_jax regenerate",
    )
    parser.add_argument("--out", type=str, help="JSONL file to append to; default: the first of data.train")
    parser.add_argument(
        "--prompts", action="append", default=[], help="JSONL file of prompts, repeatable; default: the packaged training prompts"
    )
    parser.add_argument("--limit", type=int, default=0, help="at most this many prompts; 0 takes all")
    parser.add_argument("--batch_size", type=int, default=32, help="rows decoded together; raise it until memory or speed ends")
    parsed = parser.parse_args(argv)
    config = build_config(parsed, parser)
    out = parsed.out or (config.data.train[0] if config.data.train else None)
    if out is None:
        raise ConfigError("there is no output file: give --out FILE.jsonl, or data.train in the config")
    if parsed.limit < 0 or parsed.batch_size < 1:
        raise ConfigError(f"--limit {parsed.limit} must be 0 or more and --batch_size {parsed.batch_size} at least 1")
    prompts = read_prompts(parsed.prompts) if parsed.prompts else packaged_prompts("train")
    target = load_text_target(config.target.path, dtype=config.target.dtype)
    try:
        name = f"{Path(config.target.path).name}, {config.target.dtype}"  # not the whole path: it differs from machine to machine
        written = regenerate(target, prompts[: parsed.limit or None], Path(out), config.decode, parsed.batch_size, name)
    except KeyboardInterrupt:
        print(f"\nstopped; finished answers are in {out}, and the same command continues")
        return INTERRUPTED
    print(f"{written} answers written to {out}")
    return 0


def cache_command(argv: list[str]) -> int:
    """Keep the target's features of the training text on disk."""
    parser = config_parser(
        "Compute the target's features of the training text once, for training with --train.features cache. Give the options of "
        "the training run; data.batch_size and data.buckets may be others. Run it again after a kill: it continues.",
        prog="dflash_jax cache",
    )
    parser.add_argument("--check", action="store_true", help="read all that is there first, and make again what is damaged")
    parsed = parser.parse_args(argv)
    try:
        return precompute(build_config(parsed, parser), parsed.check)
    except KeyboardInterrupt:
        print("\nstopped; the shards that are whole are kept, and the same command continues")
        return INTERRUPTED


def bench_command(argv: list[str]) -> int:
    """Measure a drafter."""
    parser = config_parser("Measure a drafter: acceptance, exactness, speed. The last line is JSON.", prog="dflash_jax bench")
    parser.add_argument(
        "--prompts", action="append", default=[], help="JSONL file of prompts, repeatable; the same as bench.prompts"
    )
    parsed = parser.parse_args(argv)
    config = build_config(parsed, parser)
    if parsed.prompts:
        config = dataclasses.replace(config, bench=dataclasses.replace(config.bench, prompts=parsed.prompts))
    return bench(config)


def doctor_command(argv: list[str]) -> int:
    """Find out why a drafter accepts little."""
    parser = plain_parser(
        "Find silent wiring errors: what config.json states against the target, weights, features, acceptance on short prompts, "
        "and whether other taps, rope or windows would accept more. Exit status 1 when anything was found, a failure or a warning.",
        prog="dflash_jax doctor",
    )
    parser.add_argument("--target", required=True, help="folder, hub id, GGUF file, or smollm2-135m (the embedded model)")
    parser.add_argument("--drafter", required=True, help="the drafter's folder or hub id, in any layout that is read")
    parser.add_argument(
        "--dtype", choices=get_args(Dtype), default="bfloat16", help="of both models: the one they are served in; float32 is exact"
    )
    parser.add_argument(
        "--prompts", action="append", default=[],
        help="JSONL file of prompts, repeatable: of the kind you serve, and long where windows matter; default: 16 short ones",
    )  # fmt: skip
    asked = parser.parse_args(argv)
    return doctor(asked.target, asked.drafter, asked.dtype, read_prompts(asked.prompts) if asked.prompts else ())


def export_command(argv: list[str]) -> int:
    """Write a drafter for other engines."""
    parser = plain_parser(
        "Write a drafter as other engines load it, in bfloat16, with a README that has the commands to start them.",
        prog="dflash_jax export",
    )
    parser.add_argument(
        "--to", choices=FORMATS, required=True,
        help="zlab: for vLLM, SGLang, tpu-inference and z-lab's own class, the usual choice; speculators: for vLLM and to train on "
        "with the package speculators, and the only one for a drafter of some tokens only (drafter.draft_vocab_size)",
    )  # fmt: skip
    parser.add_argument("--drafter", required=True, help="the drafter's folder or hub id, in any layout that is read")
    parser.add_argument("--target", required=True, help="the target it drafts for, to check that it fits; it is loaded into memory")
    parser.add_argument("--out", required=True, help="folder to write; with --to zlab its name must hold dflash, as vLLM expects")
    parser.add_argument(
        "--target_name", default="",
        help="what other engines call the target; default: --target. Give its hub id when --target is a GGUF file or a folder",
    )  # fmt: skip
    parser.add_argument(
        "--all_tokens", action="store_true",
        help="let other engines draft from the whole vocabulary although the drafter names some tokens only: right where it "
        "learned from all of them (as the shipped one did), bad for acceptance where it learned with drafter.draft_vocab_size",
    )  # fmt: skip
    asked = parser.parse_args(argv)
    if Path(asked.out).expanduser().resolve() == Path(asked.drafter).expanduser().resolve():
        raise ConfigError(
            f"--out is the drafter's own folder {asked.drafter}, which would lose what the layout cannot say: give another"
        )
    target = load_target(asked.target)
    drafter = load_drafter(asked.drafter, target)
    if asked.all_tokens:
        drafter = Drafter(dataclasses.replace(drafter.config, draft_token_ids=()), drafter.params)
    export_drafter(drafter, target, asked.to, asked.out, asked.target_name or asked.target)
    print(f"written to {asked.out}; its README.md has the commands for the engines")
    return 0


def aot_command(argv: list[str]) -> int:
    """Compile a run for devices that need not be there, and say whether it fits."""
    parser = config_parser(
        "Compile a run's train step, prefill and decode chunk for devices that need not be there: memory, work and collectives "
        "of one device. Needs no weights (target.path may be a folder of config.json alone), and for TPUs the extra tpu. Exit "
        "status 1 when a program does not fit. The last line is JSON.",
        prog="dflash_jax aot",
    )
    parser.add_argument("--topology", required=True, help=f"the slice, such as {EXAMPLES} (fake CPU devices); mesh.* must fit it")
    parser.add_argument("--programs", choices=("train", "decode", "both"), default="both", help="what to compile")
    parser.add_argument("--rows", type=int, default=8, help="rows decoded together")
    parser.add_argument(
        "--prompt_length", type=int, default=1024, help="tokens of their prompts; decode.max_new_tokens come on top"
    )
    parser.add_argument("--memory_gib", type=float, help="memory of a device; default: that of its kind")
    parsed = parser.parse_args(argv)
    config = build_config(parsed, parser)
    return aot(config, parsed.topology, parsed.programs, parsed.rows, parsed.prompt_length, parsed.memory_gib)


def invariants_command(argv: list[str]) -> int:
    """Check what DFlash claims of itself."""
    if argv:
        print("python -m dflash_jax invariants takes no options: it checks the paper's properties on a small random model")
        return 0 if argv[0] in ("-h", "--help") else 2
    return check_invariants()


COMMANDS = {
    "regenerate": regenerate_command,
    "cache": cache_command,
    "bench": bench_command,
    "doctor": doctor_command,
    "export": export_command,
    "aot": aot_command,
    "invariants": invariants_command,
}


def main(argv: list[str]) -> int:
    """Dispatch to a command."""
    if argv and argv[0] in COMMANDS:
        return COMMANDS[argv[0]](argv[1:])
    print("usage: python -m dflash_jax COMMAND [options]\n\ncommands:")
    for name, command in COMMANDS.items():
        print(f"  {name:<12}{command.__doc__}")
    if argv and argv[0] not in ("-h", "--help"):
        print(f"error: {argv[0]!r} is no command", file=sys.stderr)
    return 0 if argv and argv[0] in ("-h", "--help") else 2


if __name__ == "__main__":
    run(main)
