"""Data of the clients whose models are stored in a folder.

The file ``client_data.safetensors``, next to ``model.safetensors``, contains one of
three things: the clients' training samples, the positions of these samples in a data
set, or answers to probes. A probe is a function of a model and its client's data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedexp.core.probe import Probe
from fedexp.core.trees import Tree
from fedexp.storage.files import damaged
from fedexp.storage.tensors import load_tree, save_tree

CLIENT_DATA = "client_data.safetensors"


@dataclass(frozen=True, eq=False)
class ClientData:
    """The samples that the models of a folder were trained on, or facts about them.

    Each sequence has one entry per model. It is empty if the folder does not have this
    content.

    Args:
        answers: Answers of the model's client to probes. The keys are returned by
            `probe_name`.
        samples: Raw inputs of shape (n, *shape) and targets of shape (n, ...) of the
            client's n samples.
        indices: Positions of the client's n samples in the training split of a data
            set, (n,) int64.
        data_sha256: Fingerprint of the data set that `indices` refer to, or None
            without `indices`.
    """

    answers: Sequence[Mapping[str, Tree]] = ()
    samples: Sequence[tuple[Tensor, Tensor]] = ()
    indices: Sequence[Tensor] = ()
    data_sha256: str | None = None


def probe_name(probe: Probe) -> str:
    """Return the name under which answers to `probe` are stored.

    It contains the class and all fields, because they decide the answer.
    """
    return f"{type(probe).__module__}.{probe!r}"


def save_client_data(data: ClientData, folder: Path) -> None:
    """Write `data` to ``client_data.safetensors`` of a folder."""
    tree: Tree = {}
    names = [list(answers) for answers in data.answers]

    for model, answers in enumerate(data.answers):
        for number, answer in enumerate(answers.values()):
            tree |= {f"answers/{model}/{number}/{key}": value for key, value in answer.items()}
    for model, (x, y) in enumerate(data.samples):
        tree |= {f"x/{model}": x, f"y/{model}": y}
    tree |= {f"indices/{model}": index for model, index in enumerate(data.indices)}

    sizes = {"samples": len(data.samples), "indices": len(data.indices)}
    save_tree(
        folder / CLIENT_DATA, tree, {"probes": names, "data_sha256": data.data_sha256, **sizes}
    )


def load_client_data(folder: Path) -> ClientData | None:
    """Read ``client_data.safetensors`` of a folder, or return None if it has none.

    Raises:
        StorageError: The file is damaged.
    """
    path = folder / CLIENT_DATA
    if not path.is_file():
        return None
    tree, facts = load_tree(path, torch.device("cpu"))

    def answer(prefix: str) -> Tree:
        return {key[len(prefix) :]: tree[key] for key in tree if key.startswith(prefix)}

    try:
        return ClientData(
            [
                {name: answer(f"answers/{model}/{number}/") for number, name in enumerate(names)}
                for model, names in enumerate(facts["probes"])
            ],
            [(tree[f"x/{model}"], tree[f"y/{model}"]) for model in range(facts["samples"])],
            [tree[f"indices/{model}"] for model in range(facts["indices"])],
            facts["data_sha256"],
        )
    except (KeyError, TypeError) as error:
        raise damaged(path, f"it lacks {error}") from error
