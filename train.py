"""Train a drafter: python train.py --config configs/smollm2_135m.yaml [--optim.learning_rate 1e-3] [--resume]"""

from dflash_jax.cli import parse_config, run
from dflash_jax.trainer import fit


def main(argv: list[str]) -> int:
    """Parse, build, call."""
    argv = ["--train.resume=true" if arg == "--resume" else arg for arg in argv]
    return fit(parse_config(argv, "Train a drafter. --resume continues from the newest checkpoint of train.run_dir."))


if __name__ == "__main__":
    run(main)
