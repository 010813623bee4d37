"""Pages of the commands, generated from the parsers of their command lines."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping

from fedexp.site.markdown import code, escaped, fenced, table
from fedexp.site.page import Page

_FOLDER = "reference/commands"


def pages(run_help: str, parsers: Mapping[str, argparse.ArgumentParser]) -> list[Page]:
    """Return a page that lists the commands, then one page per command.

    Args:
        run_help: The text that ``fedexp --help`` prints.
        parsers: Parsers of the other commands, by the command's name.
    """
    first, _, rest = run_help.partition("\n")
    about = {"fedexp": f"{first.partition(' - ')[2].capitalize()}."}
    about |= {name: parser.description or "" for name, parser in parsers.items()}
    rows = [[f"[{code(name)}]({name}.md)", escaped(text)] for name, text in about.items()]

    made = [
        Page(
            f"{_FOLDER}/index.md",
            "Commands",
            f"# Commands\n\n{table(['command', 'what it does'], rows)}\n",
        ),
        Page(
            f"{_FOLDER}/fedexp.md",
            "fedexp",
            f"# fedexp\n\n{escaped(about['fedexp'])} [Configuration](../config/index.md) explains "
            f"every key.\n\n{fenced(rest.strip(), 'text')}\n",
        ),
    ]
    for name, parser in parsers.items():
        text = "\n\n".join(_page(name, parser))
        made.append(Page(f"{_FOLDER}/{name}.md", name, f"{text}\n"))
    return made


def _page(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    yield f"# {name}"
    yield escaped(parser.description or "")

    commands = [
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    ]
    if not commands:
        yield from _arguments(parser)
    for action in commands:
        for about in action._choices_actions:
            yield f"## {about.dest} {{#{about.dest}}}"
            yield escaped(_sentence(about.help or ""))
            yield from _arguments(action.choices[about.dest])


def _arguments(command: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the usage, the arguments and the epilog of a command."""
    yield fenced(_usage(command), "text")
    rows = [
        [_flags(action), escaped(_help(action, command))]
        for action in command._actions
        if not isinstance(action, argparse._HelpAction)
    ]
    if rows:
        yield table(["argument", "meaning"], rows)
    if command.epilog:
        example = command.epilog.removeprefix("example: ")
        yield "Example:" if example != command.epilog else escaped(command.epilog)
        if example != command.epilog:
            yield fenced(example, "sh")


def _usage(parser: argparse.ArgumentParser) -> str:
    return " ".join(parser.format_usage().split()).removeprefix("usage: ").replace(" [-h]", "")


def _flags(action: argparse.Action) -> str:
    """Return an option's flags and value, or the name of a positional argument."""
    if not action.option_strings:
        return code(str(action.metavar or action.dest))
    value = action.metavar or action.dest.upper()
    if isinstance(action.choices, list | tuple):
        value = action.metavar or "{" + ",".join(map(str, action.choices)) + "}"
    shown = "" if action.nargs == 0 else f" {value}"
    return ", ".join(code(f"{flag}{shown}") for flag in action.option_strings)


def _help(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    text = (action.help or "") % {**vars(action), "prog": parser.prog}
    return _sentence(text)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if not text or text.endswith(".") else ".")
