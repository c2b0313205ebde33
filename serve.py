"""Answer prompts in the terminal: python serve.py --config configs/smollm2_135m.yaml --prompt "Why is the sky blue?" [--compare]"""

from dflash_jax.chat import answer_prompts
from dflash_jax.cli import build_config, config_parser, run


def main(argv: list[str]) -> int:
    """Parse, build, call."""
    parser = config_parser("Answer prompts in the terminal.", prog="serve.py")
    parser.add_argument("--prompt", action="append", default=[], help="a user's message; repeat it for several answers")
    parser.add_argument(
        "--compare", action="store_true", help="also decode plainly: shows the speedup, and that the text is the same"
    )
    parsed = parser.parse_args(argv)
    if not parsed.prompt:
        parser.error("give --prompt TEXT")
    return answer_prompts(build_config(parsed, parser), parsed.prompt, parsed.compare)


if __name__ == "__main__":
    run(main)
