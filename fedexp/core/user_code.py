"""Functions that find errors in users' code and check the signatures of its methods."""

from __future__ import annotations

import inspect
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from pathlib import Path
from types import FunctionType
from typing import Any

from fedexp.core.errors import ConfigError, FedexpError
from fedexp.core.renames import attribute_hint, renames

LIBRARIES = tuple(
    {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
)
# Names of folders that contain only installed packages, in any environment.
_PACKAGE_FOLDERS = {"site-packages", "dist-packages"}
TRACED = "HYDRA_FULL_ERROR=1 before the command shows the traceback"
_OURS = str(Path(__file__).resolve().parents[1])


def is_ours(module: str) -> bool:
    """Return whether a module is part of fedexp."""
    return module.partition(".")[0] == "fedexp"


def is_installed(file: Path) -> bool:
    """Return whether a file belongs to Python or to an installed package.

    The package may also be outside this environment, in one of these places: the user's
    packages (``pip install --user``), the system's packages, or a folder that was
    filled by ``pip install --target``.
    """
    if any(file.is_relative_to(home) for home in LIBRARIES):
        return True
    if _PACKAGE_FOLDERS & {*file.parts}:
        return True
    return any(
        file.relative_to(folder).parts[0] in _names_installed_in(folder)
        for folder in {*sys.path}
        if folder and file.is_relative_to(folder) and file != Path(folder)
    )


@cache
def _names_installed_in(folder: str) -> frozenset[str]:
    """Return the top-level names that installed packages have in `folder`."""
    records = Path(folder).glob("*.dist-info/RECORD")
    lines = (line for path in records for line in path.read_text(errors="replace").splitlines())
    return frozenset(line.partition(",")[0].partition("/")[0] for line in lines)


def place_of_error(error: BaseException) -> str | None:
    """Return the place of an error in a user's code as ``file:line``.

    Returns:
        The innermost line of the user's code in the traceback. None if the traceback
        contains only lines of fedexp and of installed packages.
    """
    if isinstance(error, SyntaxError) and _is_users(error.filename):
        return f"{error.filename}:{error.lineno}"
    return next(
        (
            f"{frame.filename}:{frame.lineno}"
            for frame in reversed(traceback.extract_tb(error.__traceback__))
            if _is_users(frame.filename)
        ),
        None,
    )


def _is_users(file: str | None) -> bool:
    if not file or file.startswith("<"):
        return False
    path = Path(file).absolute()
    return not (path.is_relative_to(_OURS) or is_installed(path))


def place_of_class(kind: type) -> str:
    """Return ``file:line`` of a class, or its name if it has no file."""
    try:
        return f"{inspect.getsourcefile(kind)}:{inspect.getsourcelines(kind)[1]}"
    except (OSError, TypeError):
        return f"{kind.__module__}.{kind.__qualname__}"


def place_of_hook(kind: type, hooks: Sequence[str]) -> str | None:
    """Return ``file:line`` of the first method in `hooks` that a user's class defines.

    The user's class is `kind` or one of its bases. If it defines none of the methods,
    the result is None.
    """
    return next(
        (
            _place_of_member(vars(cls)[hook], cls)
            for hook in hooks
            for cls in kind.__mro__
            if not is_ours(cls.__module__) and hook in vars(cls)
        ),
        None,
    )


def user_code_error(error: BaseException, do: str = TRACED) -> FedexpError | None:
    """Return a `FedexpError` for an exception that a user's code raised.

    Args:
        error: The exception.
        do: Next step for the message.

    Returns:
        The new error, or None if the exception did not arise in a user's code or is
        already a `FedexpError`.
    """
    if isinstance(error, FedexpError) or (place := place_of_error(error)) is None:
        return None
    return FedexpError(f"your code raised {describe_exception(error)}", where=place, do=do)


def describe_exception(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message.

    If an attribute is missing because it was renamed in version 0.2, the new name is
    added to the text.
    """
    text = str(error.msg if isinstance(error, SyntaxError) else error).partition("\n")[0]
    if isinstance(error, AttributeError) and (new := attribute_hint(error)) is not None:
        text += f" ({new} since version 0.2)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def check_hooks(kind: type, where: str) -> None:
    """Refuse a plug-in whose methods cannot be called as fedexp calls them.

    A method of a user's class must accept all arguments of the fedexp method that it
    overrides, in the order of that method. Positional arguments may have other names.
    Additional arguments need defaults.

    Args:
        kind: Class of the plug-in.
        where: Config key that names the class.

    Raises:
        ConfigError: A method does not fit. The message names its line.
    """
    problems = _problems(kind)
    if problems:
        problem_texts, places, expected, got = zip(*problems, strict=True)
        raise ConfigError(
            "; ".join(problem_texts),
            where=f"{', '.join(dict.fromkeys(places))} ({where})",
            expected="; ".join(expected),
            got="; ".join(filter(None, got)) or None,
        )


@cache
def _problems(kind: type) -> tuple[tuple[str, str, str, str | None], ...]:
    """List every method of a plug-in that is missing or unfit.

    A method is unfit if it has an old name or cannot be called as fedexp calls it.

    Returns:
        One tuple of texts per problem: what is wrong, where, what was expected, and
        what was found (or None).
    """
    problems: list[tuple[str, str, str, str | None]] = []
    for number, cls in enumerate(kind.__mro__):
        if is_ours(cls.__module__):
            continue
        problems += _old_names(kind, cls)
        for name, own in vars(cls).items():
            replaced = next(
                (
                    vars(base)[name]
                    for base in kind.__mro__[number + 1 :]
                    if is_ours(base.__module__) and name in vars(base)
                ),
                None,
            )
            found = None if name.startswith("_") else _mismatch(name, own, replaced)
            if found is not None:
                what = f"{kind.__name__}.{name} cannot be called as its interface says"
                problems.append((what, _place_of_member(own, cls), *found))
    missing = sorted(getattr(kind, "__abstractmethods__", ()))
    if missing:
        what = f"{kind.__name__} lacks {', '.join(missing)}"
        expected = ", ".join(_written(name, getattr(kind, name)) for name in missing)
        problems.append((what, place_of_class(kind), expected, None))
    return tuple(problems)


def _old_names(kind: type, cls: type) -> Iterator[tuple[str, str, str, str | None]]:
    """Yield a problem for each name or value in `cls` that was renamed in version 0.2.

    `cls` is `kind` or one of its base classes outside fedexp. Without this check, a
    method with an old name would never be called.
    """
    own = {**inspect.get_annotations(cls), **vars(cls)}
    for old, new in renames().members_of(kind).items():
        if old in own and new not in own:
            what = f"{kind.__name__}.{old} has another name since version 0.2"
            place = _place_of_member(own[old], cls)
            yield what, place, f"{new} (docs/0.1-to-0.2.md has every name)", old
    for name, values in renames().values_of(kind).items():
        value = own.get(name)
        if isinstance(value, str) and value in values:
            what = f"{kind.__name__}.{name} has another value since version 0.2"
            yield what, place_of_class(cls), f"{name} = {values[value]!r}", f"{name} = {value!r}"


def _mismatch(name: str, own: Any, replaced: Any) -> tuple[str, str] | None:
    """Return None if the member `own` of a class can override the member `replaced`.

    Otherwise return two texts, what was expected and what was found.
    """
    if isinstance(replaced, property | cached_property):
        return ("a @property", f"def {name}(...)") if isinstance(own, FunctionType) else None
    if not isinstance(replaced, FunctionType):
        return None
    if not callable(own) and not isinstance(own, staticmethod | classmethod):
        return _written(name, replaced), f"a {type(own).__name__}"
    if isinstance(own, FunctionType):
        parameters = inspect.signature(replaced).parameters.values()
        given = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        named = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
        try:
            inspect.signature(own).bind(*given, **named)
        except TypeError:
            return _written(name, replaced), _written(name, own)
    return None


def _place_of_member(own: Any, cls: type) -> str:
    """Return ``file:line`` of the method or property `own`.

    If `own` has no Python code, return the place of its class `cls`.
    """
    function = getattr(own, "__func__", None) or getattr(own, "fget", None) or own
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else place_of_class(cls)


def _written(name: str, method: Any) -> str:
    """Write a method as ``def NAME(ARGUMENTS)``, without types."""
    if not callable(method):
        return name
    parts = inspect.signature(method).parameters.values()
    return f"def {name}({', '.join(str(p.replace(annotation=p.empty)) for p in parts)})"
