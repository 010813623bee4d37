"""Exit codes of the commands, and functions that report errors without a traceback."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from fedexp.core.errors import ConfigError, FedexpError, nearest
from fedexp.tracking.outlet import lasting_output, require_output, visible

USAGE_ERROR, JOB_ERROR = 2, 1


def run_guarded(work: Callable[[], int], needs_output: bool = False) -> int:
    """Run `work`, and report errors that the user can correct by a message.

    All other exceptions are raised as they are.

    Args:
        work: Work of the command.
        needs_output: Whether it is an error if the standard output cannot be written,
            because it is the command's result.

    Returns:
        The exit code of `work`, or the exit code for the error.
    """
    with lasting_output():
        try:
            code = work()
            if needs_output:
                require_output()
            return code
        except FedexpError as error:
            print_error(error)
            return USAGE_ERROR
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 128 + signal.SIGINT
        except RecursionError as error:
            described = FedexpError(
                "a value or a file is nested too deeply, or code calls itself without end",
                do="HYDRA_FULL_ERROR=1 before the command shows the place",
            )
            described.__cause__ = error
            print_error(described)
            return JOB_ERROR
        except Exception as error:
            from fedexp.core import user_code
            from fedexp.storage.files import refused

            if (known := refused(error) or user_code.user_code_error(error)) is None:
                raise
            known.__cause__ = error
            print_error(known)
            return JOB_ERROR


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `ConfigError` with the nearest command or flag.

    Positional arguments with ``nargs="*"`` may also follow options. Plain argparse
    would refuse them there.

    Args:
        command: Function that `run` calls with the parsed arguments. It returns the
            exit code. None if the subparsers of this parser have such functions
            instead.
        **options: Arguments of `argparse.ArgumentParser`.
    """

    def __init__(
        self, command: Callable[[argparse.Namespace], int] | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        if command is not None:
            self.set_defaults(run=command)

    def run(self, arguments: list[str]) -> int:
        """Call the function of the chosen command with the parsed arguments.

        The parsed arguments also have ``typed``, the command line as it was typed.

        Returns:
            The exit code.
        """
        options = self.parse_args(arguments)
        options.typed = shlex.join([self.prog, *arguments])
        return int(options.run(options))

    def error(self, message: str) -> NoReturn:
        """Raise argparse's error as `ConfigError`, with the correct usage."""
        what = message.removeprefix("argument ")
        usage = " ".join(self.format_usage().split()).removeprefix("usage: ")
        raise ConfigError(
            what, where=self.prog, expected=usage, do=f"{self.prog} --help explains each of them"
        )

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            kind = f"value of {action.option_strings[0]}" if action.option_strings else "command"
            raise self._unknown(kind, str(value), [str(choice) for choice in action.choices])

    def parse_known_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        options, rest = super().parse_known_args(args, namespace)
        takes = next(
            (
                action.dest
                for action in self._actions
                if action.nargs == "*" and not action.option_strings
            ),
            None,
        )

        for argument in rest:
            if argument.startswith("-"):
                raise self._unknown(
                    "flag", argument.partition("=")[0], [*self._option_string_actions]
                )
            if takes is None:
                self.error(f"unknown argument '{argument}'")

        if rest and takes is not None:
            setattr(options, takes, [*getattr(options, takes), *rest])
        return options, []

    def _unknown(self, kind: str, name: str, known: Sequence[str]) -> ConfigError:
        near = nearest(name, known)
        do = f"did you mean '{near}'?" if near else f"{self.prog} --help explains each of them"
        return ConfigError(
            f"unknown {kind} '{name}'", where=self.prog, expected=", ".join(known), do=do
        )


def print_error(error: FedexpError) -> None:
    """Print an error without its traceback, unless HYDRA_FULL_ERROR is 1."""
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        traceback.print_exception(error)
    else:
        print(visible(f"error: {error}"), file=sys.stderr)
