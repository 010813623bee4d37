"""Files of trees, and a store that names each file by its content.

A tree is a dict of tensors. It is stored as one safetensors file. Nested state is
encoded as JSON that refers to the stored trees.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fedexp.core.errors import StorageError
from fedexp.core.stored_weights import StoredWeights
from fedexp.core.trees import Tree, digest
from fedexp.core.weights import ModelSpec, Weights
from fedexp.storage.files import damaged, replacing

_ALIGN = 64  # bytes


def save_tree(path: Path, tree: Tree, facts: dict[str, Any] | None = None) -> int:
    """Write a tree as one safetensors file, atomically.

    safetensors sorts its keys and refuses tensors that share memory. The order of the
    keys is therefore stored too, and shared tensors are copied.

    Args:
        path: File to write.
        tree: Tree to store.
        facts: JSON values that are stored with the tree.

    Returns:
        The size of the file in bytes.
    """
    seen: set[int] = set()
    data: Tree = {}
    for key, value in tree.items():
        flat = value.detach().cpu().contiguous()
        data[key] = flat.clone() if flat.untyped_storage().data_ptr() in seen else flat
        seen.add(data[key].untyped_storage().data_ptr())
    # All metadata are stored under one key. Several keys would be written in random
    # order, and the bytes of the file would differ from run to run.
    about = {"fedexp": json.dumps({"order": list(tree), **(facts or {})})}
    # `save_file` writes tensors directly from memory, without a copy of the whole file.
    with replacing(path) as part:
        try:
            safetensors.torch.save_file(data, part, metadata=about)
        except safetensors.SafetensorError as error:
            # The message contains the system's error code, for example that of a full
            # disk.
            code = re.search(r"os error (\d+)", str(error))
            if code is None:
                raise
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
        return part.stat().st_size


def load_tree(path: Path, device: torch.device, verify: bool = True) -> tuple[Tree, dict[str, Any]]:
    """Return the tree that `save_tree` wrote, with its keys in order, and the facts.

    Args:
        path: File to read.
        device: Device on which tensors are put.
        verify: Whether the contents are compared with the digest that `save_sealed`
            stores. Files that `save_tree` wrote have no digest.

    Raises:
        StorageError: The file is damaged. The message names it.
    """
    with opened(path, device) as file:
        facts = read_facts(file)
        tree = {key: read_tensor(file, key) for key in facts.pop("order")}
    seal = facts.pop(_SEAL, None)  # files of earlier versions have no seal
    if verify and seal and seal != _seal(tree, facts):
        raise damaged(path)
    return tree, facts


@contextlib.contextmanager
def opened(path: Path, device: torch.device) -> Iterator[Any]:
    """Open the file for reading, with tensors put on `device`.

    Raises:
        StorageError: The file is damaged. The message names it.
    """
    try:
        with safetensors.safe_open(path, framework="pt", device=str(device)) as file:
            yield file
    except (
        safetensors.SafetensorError,
        KeyError,
        TypeError,
        ValueError,
        RecursionError,
    ) as error:
        raise damaged(path, str(error)) from error


def save_sealed(path: Path, tree: Tree, facts: dict[str, Any] | None = None) -> int:
    """Write a tree as `save_tree` does, with a digest (seal) of the tree and facts."""
    size = save_tree(path, tree, {**(facts or {}), _SEAL: _seal(tree, facts or {})})
    _trusted.add(path)
    return size


def load_sealed(
    path: Path, device: torch.device, dropped: Callable[[], None] = lambda: None
) -> tuple[Tree, dict[str, Any]] | None:
    """Return what `save_sealed` wrote, or None if the file is absent or damaged.

    The file's time is set to now, because caches delete the least recently used files.
    A file that another process wrote is verified when it is first read. A damaged file
    is deleted.

    Args:
        path: File to read.
        device: Device on which tensors are put.
        dropped: Callback that is called if the file is damaged and therefore deleted.
    """
    try:
        tree, facts = load_tree(path, device, verify=path not in _trusted)
    except OSError:
        return None
    except StorageError:
        with contextlib.suppress(OSError):
            path.unlink()
        dropped()
        return None

    _trusted.add(path)
    with contextlib.suppress(OSError):  # the folder may be read-only
        path.touch()

    return tree, facts


_SEAL = "seal"
_trusted: set[Path] = set()  # files whose content this process wrote or verified


def _seal(tree: Tree, facts: dict[str, Any]) -> str:
    return hashlib.sha256(f"{digest(tree)} {json.dumps(facts)}".encode()).hexdigest()[:40]


def read_facts(file: Any) -> dict[str, Any]:
    """Return the facts and the order of keys in an open file that `save_tree` wrote."""
    facts: dict[str, Any] = json.loads(file.metadata()["fedexp"])
    return facts


def read_tensor(file: Any, key: str) -> Tensor:
    """Return a tensor of an open file, in memory that is aligned as torch aligns it.

    The bits of a matrix product depend on the alignment of its factors on some
    processors. With the same alignment, a tensor that was stored gives the same results
    as the original.
    """
    value: Tensor = file.get_tensor(key)
    return value if value.data_ptr() % _ALIGN == 0 else value.clone()


class TensorStore:
    """A store with one file per tree. The file's name is a hash of the tree.

    A tree that is stored again without a change is not written again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._quick_hashes: set[int] = set()  # quick hashes of the stored trees
        self._trusted: set[str] = set()  # files written or verified by this object

    def put(self, tree: Tree, name: str | None = None) -> str:
        """Store `tree` unless it is already stored, and return its name.

        A quick hash covers names, dtypes, shapes and the first four numbers of each
        tensor. If no earlier tree has the same quick hash, the tree is new. It is then
        hashed while it is written. Otherwise the tree is hashed before writing, because
        its file may exist.

        Args:
            tree: Tree to store.
            name: Name of the tree, or None to compute it.
        """
        tree = {key: value.detach().cpu().contiguous() for key, value in tree.items()}
        quick_hash = hash(
            str(
                [
                    (key, value.dtype, value.shape, value.view(-1)[:4].tolist())
                    for key, value in tree.items()
                ]
            )
        )

        if name is None and quick_hash not in self._quick_hashes:
            written = self._path("new")
            with ThreadPoolExecutor(1) as thread:
                hashed = thread.submit(digest, tree)
                save_tree(written, tree)
            name = hashed.result()
            written.replace(self._path(name))
            self._trusted.add(name)

        name = name or digest(tree)
        if not self._path(name).exists():
            save_tree(self._path(name), tree)
            self._trusted.add(name)
        self._quick_hashes.add(quick_hash)
        return name

    def get(self, name: str, device: torch.device) -> Tree:
        """Return the tree that is stored under `name`.

        The name is the digest of the content. The content of a file that another
        process wrote is checked against its name when it is first read.

        Raises:
            StorageError: The file is missing or damaged.
        """
        with self._reading(name):
            tree = load_tree(self._path(name), device)[0]
            if name not in self._trusted and digest(tree) != name:
                raise damaged(self._path(name), "the content does not match the file's name")
            self._trusted.add(name)
            return tree

    def tensor(self, name: str, key: str, device: torch.device) -> Tensor:
        """Return one tensor of a stored tree.

        No other tensor is read. If another process wrote the file, all its tensors are
        read once to verify the file.
        """
        if name not in self._trusted:
            return self.get(name, device)[key]
        with self._reading(name), opened(self._path(name), device) as file:
            return read_tensor(file, key)

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, StorageError) as error:
            raise StorageError(
                "a stored tensor file is missing or damaged",
                where=str(self._path(name)),
                do="restart the run with reuse=false",
            ) from error

    def names(self) -> set[str]:
        """Return the names of all stored trees, without the suffix of the files."""
        return {path.stem for path in self.folder.glob("*.safetensors")}

    def delete(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def keep_only(self, names: set[str]) -> None:
        """Delete every tree that is not in `names`, and files left by crashes."""
        if not self.folder.is_dir():
            return
        for path in self.folder.iterdir():
            if path.name.removesuffix(".safetensors") not in names:
                path.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"


def encode(
    value: Any,
    put: Callable[[Tree], str],
    name_of: Callable[[StoredWeights], str],
    at: str = "state",
) -> Any:
    """Encode nested state as a JSON value. Tensors are stored as trees.

    Args:
        value: Nested dict, list, tuple, scalars, Tensor, Weights and StoredWeights.
            Subclasses of dict, list and tuple are refused, because `decode` returns
            plain types. ``OrderedDict`` and ``torch.Size`` are accepted.
        put: Function that stores a tree and returns its name.
        name_of: Function that returns the name of a stored model.
        at: Place of the value within the state, for messages.

    Raises:
        StorageError: A part of the value has another type.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return {"$tensor": put({"value": value})}

    if isinstance(value, Weights | StoredWeights):
        spec = {"arch": value.spec.arch, "kwargs": encode(value.spec.kwargs, put, name_of, at)}
        if isinstance(value, StoredWeights):
            return {"$kept": {"spec": spec, "tree": name_of(value)}}
        return {
            "$weights": {"spec": spec, "params": put(value.params), "buffers": put(value.buffers)}
        }

    if type(value) in (tuple, list, torch.Size):
        items = [encode(one, put, name_of, f"{at}[{number}]") for number, one in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}

    if type(value) in (dict, OrderedDict):
        for key in value:
            if not isinstance(key, str) or key.startswith("$"):
                raise StorageError(
                    "a key of the method's state cannot be stored",
                    where=at,
                    expected="text that does not begin with '$'",
                    got=repr(key),
                    do="use other keys, for example str(client)",
                )
        if value and all(isinstance(item, Tensor) for item in value.values()):
            return {"$tree": put(value)}
        return {key: encode(item, put, name_of, f"{at}[{key!r}]") for key, item in value.items()}

    raise StorageError(
        "a part of the method's state cannot be stored",
        where=at,
        expected="dict, list, tuple, str, int, float, bool, None, Tensor, Weights or StoredWeights",
        got=f"{type(value).__module__}.{type(value).__qualname__}",
        do="convert it to one of these types",
    )


def check_storable(state: Any) -> None:
    """Refuse a method's state that a checkpoint could not store, without writing.

    Raises:
        StorageError: A part of the state has a type that `encode` refuses.
    """
    encode(state, lambda tree: "", lambda stored: "")


def decode(
    node: Any, get: Callable[[str], Tree], make_reference: Callable[[ModelSpec, str], StoredWeights]
) -> Any:
    """Return the nested state that `encode` turned into `node`.

    Args:
        node: Encoded value.
        get: Function that returns the tree of a name.
        make_reference: Function that returns a reference to the stored model of a spec
            and a name.
    """
    if isinstance(node, list):
        return [decode(item, get, make_reference) for item in node]
    if not isinstance(node, dict):
        return node
    if "$tensor" in node:
        return get(node["$tensor"])["value"]
    if "$tree" in node:
        return get(node["$tree"])
    if "$tuple" in node:
        return tuple(decode(item, get, make_reference) for item in node["$tuple"])

    if "$weights" in node or "$kept" in node:
        (stored,) = node.values()
        spec = ModelSpec(
            stored["spec"]["arch"], decode(stored["spec"]["kwargs"], get, make_reference)
        )
        if "$kept" in node:
            return make_reference(spec, stored["tree"])
        return Weights(spec, get(stored["params"]), get(stored["buffers"]))

    return {key: decode(item, get, make_reference) for key, item in node.items()}


def references(node: Any) -> Iterator[str]:
    """Yield the names of the trees that an encoded value refers to."""
    if isinstance(node, list):
        for item in node:
            yield from references(item)
    elif isinstance(node, dict):
        for key, item in node.items():
            if key in ("$tensor", "$tree"):
                yield item
            elif key in ("$weights", "$kept"):
                yield from (item[part] for part in ("params", "buffers", "tree") if part in item)
            else:
                yield from references(item)
