"""Command lines: the merged config of a run, and errors without tracebacks."""

import dataclasses
import errno
import os
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

import jax
import jsonargparse
import yaml

from dflash_jax.config import Config
from dflash_jax.errors import DFlashError

INTERRUPTED = 130
"""exit status after Ctrl-C, as shells have it"""
TERMINATED = 143
"""exit status after SIGTERM"""


class _Parser(jsonargparse.ArgumentParser):  # type: ignore[misc]
    """Errors in two lines: what is wrong, and where the options are explained."""

    def parse_args(self, args: Sequence[str], *rest: Any, **named: Any) -> Any:  # type: ignore[override]
        for file in _config_files(args):
            try:
                content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
                if not content or (isinstance(content, dict) and not any(content.values())):
                    self.error(f"{file} sets nothing: leave --config out, or give a section such as target with its fields")
            except OSError:
                pass  # the parser says it well
            except UnicodeDecodeError as error:
                self.error(f"{file} is not UTF-8 text ({error}): save it as UTF-8")
            except yaml.YAMLError as error:
                self.error(f"{file} is not YAML: {error}")
        return super().parse_args(args, *rest, **named)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        print(f"error: {message}\n{self.prog} --help explains every option", file=sys.stderr)
        sys.exit(2)


def _config_files(args: Sequence[str]) -> list[str]:
    after = [value for name, value in pairwise(args) if name == "--config"]
    return after + [arg.removeprefix("--config=") for arg in args if arg.startswith("--config=")]


def config_parser(description: str, prog: str | None = None) -> Any:
    """A parser for `--config FILE` (YAML) and a dotted override of every field of `Config`."""
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = _Parser(prog=prog, description=description, allow_abbrev=False)
    parser.add_argument("--config", action="config", help="YAML preset; later options override it")
    parser.add_class_arguments(Config, None)
    return parser


def plain_parser(description: str, prog: str) -> Any:
    """A parser without the options of `Config`, for commands that need few."""
    return _Parser(prog=prog, description=description, allow_abbrev=False)


def build_config(parsed: Any, parser: Any) -> Config:
    """The `Config` among parsed arguments."""
    for field in dataclasses.fields(Config):
        section = getattr(parsed, field.name)
        if section is None:  # its fields are all commented out
            section = jsonargparse.Namespace()
            setattr(parsed, field.name, section)
        if not isinstance(section, jsonargparse.Namespace):
            parser.error(f"{field.name} is {section!r}, but it is a section of the config: give its fields")
        for name, kind in get_type_hints(field.type).items():  # jsonargparse takes a null of a file for any field
            if getattr(section, name, field) is None and type(None) not in get_args(kind):
                parser.error(f"{field.name}.{name} is null: give a value, or leave it out for its default")
    values = parser.instantiate(parsed)
    return Config(**{field.name: getattr(values, field.name) for field in dataclasses.fields(Config)})


def parse_config(argv: Sequence[str], description: str = "A dflash_jax run.") -> Config:
    """The merged config of a command line. Unknown names and wrong types end the process with a message (status 2)."""
    parser = config_parser(description)
    return build_config(parser.parse_args(list(argv)), parser)


def run(main: Callable[[list[str]], int | None], argv: Sequence[str] | None = None) -> None:
    """Call an entry point and exit: 1 with the message of a `DFlashError` or of the operating system, 130 after Ctrl-C."""
    try:
        status = main(list(sys.argv[1:] if argv is None else argv))
    except DFlashError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BrokenPipeError:  # the reader of our output left
        status = 1
    except OSError as error:  # a full disk, a folder without permission: the message names the file
        mend = (
            ": free some space; training goes on with --resume, regenerate and cache by themselves"
            if error.errno == errno.ENOSPC
            else ""
        )
        print(f"error: {error}{mend}", file=sys.stderr)
        status = 1
    if status == 1 and jax.distributed.is_initialized():
        # An orderly end would wait for the other processes, and they for this one. So they learn that it is gone.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
