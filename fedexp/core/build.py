"""Functions that build objects from config nodes and check the nodes.

Names, types and interfaces are checked before anything runs.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from fedexp.core.errors import ConfigError, FedexpError, suggest
from fedexp.core.renames import renamed_import, renamed_key, renamed_path, renames
from fedexp.core.user_code import (
    TRACED,
    check_hooks,
    describe_exception,
    is_ours,
    place_of_class,
    place_of_error,
)

T = TypeVar("T")

# Metadata that marks a dataclass field as one that only code sets, not a config.
NOT_A_KEY: Mapping[str, bool] = types.MappingProxyType({"key": False})


def build(cls: type[T], node: Mapping[str, Any], where: str) -> T:
    """Build `cls`, or the subclass of it that ``_target_`` names, from a mapping.

    The class that is built must be a dataclass. Every key must be a field. Every value
    must have the type of its field, with three exceptions: an int is converted to a
    float, a list to a tuple, and a mapping to a dataclass. A ``ValueError`` that
    ``__post_init__`` raises becomes a `ConfigError`. In a user's plug-in, every other
    error of ``__post_init__`` becomes a `ConfigError`, too.

    Args:
        cls: A dataclass or an interface.
        node: Field values by name, as plain Python values (not OmegaConf nodes).
        where: Config key of the node, for messages.

    Raises:
        ConfigError: A key or value does not fit.
    """
    values = dict(node)
    target = values.pop("_target_", None)
    kind = cls if target is None else locate(target, cls, where)
    if not dataclasses.is_dataclass(kind):
        raise _no_dataclass(kind, where)
    if target is not None:
        check_hooks(kind, f"{where}._target_")
    try:
        hints = _hints(kind)
    except NameError as error:
        raise ConfigError(
            f"the type of a field is not known: {error}", where=place_of_class(kind)
        ) from error
    fields = {
        field.name: field
        for field in dataclasses.fields(kind)
        if field.init and field.metadata.get("key", True)
    }
    for key in values:
        if key not in fields:
            if "__dataclass_fields__" not in vars(kind) and (
                hasattr(kind, str(key)) or "__init__" in vars(kind)
            ):
                # Only a base class of `kind` is a dataclass.
                raise _no_dataclass(kind, where)
            _refuse_renamed(str(key), fields, where)
            raise ConfigError(
                f"unknown key '{key}'",
                where=f"{where}.{key}" if where else key,
                expected=f"a field of {kind.__name__}: {', '.join(fields) or 'it has none'}",
                do=suggest(str(key), fields),
            )
    arguments = {}
    for name, field in fields.items():
        place = f"{where}.{name}" if where else name
        if name in values:
            arguments[name] = convert(values[name], hints[name], place)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"'{place}' is not set", where=place, expected=describe(hints[name]))
    try:
        return typing.cast(T, kind(**arguments))
    except FedexpError:
        raise
    except ValueError as error:
        named = str(error).partition(" ")[0].partition("=")[0].rstrip(",:").rpartition(".")[2]
        place = ".".join(part for part in (where, named if named in fields else "") if part)
        raise ConfigError(str(error), where=place or "config") from error
    except Exception as error:
        if is_ours(kind.__module__):
            raise
        place = place_of_error(error) or place_of_class(kind)
        raise ConfigError(
            f"{kind.__name__} cannot be made of its config: {describe_exception(error)}",
            where=f"{place} ({where})",
            do=TRACED,
        ) from error


def _refuse_renamed(key: str, fields: Mapping[str, Any], where: str) -> None:
    """Raise the error for a key that was moved or renamed."""
    place = f"{where}.{key}" if where else key
    error = renamed_key(place)
    if error is not None:
        parent, _, name = renames().keys[place].new.rpartition(".")
        if parent != where or name in fields:
            raise error


def _no_dataclass(kind: type, where: str) -> ConfigError:
    return ConfigError(
        f"'{kind.__module__}.{kind.__qualname__}' is not a dataclass: its fields cannot be "
        "set by a config",
        where=f"{where}._target_",
        expected="a plug-in written as @dataclass(frozen=True), without its own __init__",
        do="write @dataclass(frozen=True) above the class",
    )


_hints = functools.cache(typing.get_type_hints)


def locate(path: Any, interface: type, where: str) -> type:
    """Return the class at the dotted `path`.

    Args:
        path: Dotted path, ``package.module.Class``.
        interface: Required base class of the class at `path`.
        where: Config key that names the class, for messages.

    Raises:
        ConfigError: There is no such class, or it does not derive from `interface`.
    """
    place = f"{where}._target_"
    if not isinstance(path, str) or "." not in path:
        raise ConfigError(
            "not a class path", where=place, expected="package.module.Class", got=repr(path)
        )
    if (renamed := renamed_path(path, place)) is not None:
        raise renamed
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except FedexpError:
        raise
    except Exception as error:
        named = error.name if isinstance(error, ModuleNotFoundError) else None
        if named is not None and (module_name == named or module_name.startswith(f"{named}.")):
            raise ConfigError(
                f"module '{module_name}' was not found",
                where=place,
                got=path,
                do="check the spelling and that its folder is on the Python path (PYTHONPATH, "
                "or pip install -e)",
            ) from error
        if is_ours(module_name):
            raise
        if isinstance(error, ImportError):
            renamed = renamed_import(module_name, place_of_error(error), place)
            if renamed is not None:
                raise renamed from error
        raise ConfigError(
            f"module '{module_name}' cannot be imported: {describe_exception(error)}",
            where=f"{place_of_error(error) or path} ({place})",
            do=f"install '{named}', or correct the import; {TRACED}" if named else TRACED,
        ) from error
    found = getattr(module, name, None)
    if not isinstance(found, type):
        raise ConfigError(
            f"'{module_name}' has no class '{name}'",
            where=place,
            do=suggest(
                name, [key for key, value in vars(module).items() if isinstance(value, type)]
            ),
        )
    if not issubclass(found, interface):
        raise ConfigError(
            f"'{path}' is not {'an' if interface.__name__[0] in 'AEIO' else 'a'} "
            f"{interface.__name__}",
            where=place,
            expected=f"a subclass of {interface.__module__}.{interface.__name__}",
        )
    return found


def convert(value: Any, hint: Any, where: str) -> Any:
    """Check that `value` fits the type `hint`, and return it as this type.

    Raises:
        ConfigError: The value does not fit the type.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        others = [option for option in arguments if option is not type(None)]
        # An optional type such as `int | None` has only one type besides None. The
        # direct conversion raises an error that names that type.
        if len(others) == 1 and value is not None:
            return convert(value, others[0], where)
        for option in arguments:
            try:
                return convert(value, option, where)
            except ConfigError:
                continue
    elif origin is Literal:
        if value in arguments and type(value) in {type(a) for a in arguments}:
            return value
        raise ConfigError(
            f"'{value}' is not a choice of '{where}'",
            where=where,
            expected=" | ".join(map(str, arguments)),
            got=repr(value),
            do=suggest(str(value), [str(a) for a in arguments]),
        )
    elif origin is tuple and isinstance(value, Sequence) and not isinstance(value, str):
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(convert(v, arguments[0], f"{where}[{i}]") for i, v in enumerate(value))
        if len(value) == len(arguments):
            return tuple(
                convert(v, a, f"{where}[{i}]")
                for i, (v, a) in enumerate(zip(value, arguments, strict=True))
            )
    elif origin is dict and isinstance(value, Mapping):
        return {
            convert(k, arguments[0], where): convert(v, arguments[1], f"{where}.{k}")
            for k, v in value.items()
        }
    elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, Mapping):
            return build(hint, value, where)
    elif hint is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    elif isinstance(hint, type) and isinstance(value, hint):
        return value
    raise ConfigError(
        f"'{where}' has the wrong type",
        where=where,
        expected=describe(hint),
        got=repr(value),
        do=_rewritten(value, hint, where),
    )


def _rewritten(value: Any, hint: Any, where: str) -> str | None:
    """Return advice for three mistakes, or None if the user made another mistake.

    The mistakes are a number for a list, a list for one value, and a plug-in whose
    field has a type such as ``list[int]``.
    """
    if typing.get_args(hint)[-1:] == (Ellipsis,) and isinstance(value, int | float):
        return f"write brackets: {where}=[{value}]"
    if hint in (int, float, str) and isinstance(value, list | tuple):
        return (
            f"one run has one value; a sweep over several: -m {where}={','.join(map(str, value))}"
        )
    if typing.get_origin(hint) in (list, Sequence) and isinstance(value, list | tuple):
        (entry,) = typing.get_args(hint)
        inner = entry.__name__ if isinstance(entry, type) else entry
        return f"a list in a config becomes a tuple: declare the field as tuple[{inner}, ...]"
    return None


def describe(hint: Any) -> str:
    """Describe a type for an error message."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(a) for a in arguments)
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin is tuple:
        inner = ", ".join("..." if a is Ellipsis else describe(a) for a in arguments)
        return f"a list [{inner}]"
    if dataclasses.is_dataclass(hint):
        return f"keys below it: {', '.join(field.name for field in dataclasses.fields(hint))}"
    plain = {
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "text",
        type(None): "null",
    }
    return plain.get(hint, getattr(hint, "__name__", str(hint)))


def require(condition: bool, message: str) -> None:
    """Raise an error with `message` unless `condition` is true.

    Dataclasses call it in ``__post_init__`` to check the values of their fields.

    Raises:
        ValueError: `condition` is false.
    """
    if not condition:
        raise ValueError(message)


def require_positive(plugin: object, *names: str) -> None:
    """Check in ``__post_init__`` that fields of `plugin` are positive or None.

    Raises:
        ValueError: One of the fields is 0 or negative.
    """
    for name in names:
        value = getattr(plugin, name)
        require(value is None or value > 0, f"{name} must be positive, got {value}")


def require_not_negative(plugin: object, *names: str) -> None:
    """Check in ``__post_init__`` that fields of `plugin` are 0, positive or None.

    Raises:
        ValueError: One of the fields is negative.
    """
    for name in names:
        value = getattr(plugin, name)
        require(value is None or value >= 0, f"{name} must not be negative, got {value}")
