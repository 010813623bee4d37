"""Client states between rounds: changed a whole step at a time, without a copy of what did not change."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping

from fedexp.core.trees import Tree, Trees


class ClientStates(Mapping[int, Trees]):
    """State by client, of all clients that have one. Where they lie is the subclass's matter.

    A step's changes come in one `commit`; values that were handed out stay as they were.
    """

    version = 0  # steps committed

    @abstractmethod
    def put(self, client: int, state: Trees) -> None:
        """Make `state` the client's; putting what is already there changes nothing."""

    def spill(self) -> None:
        """Called after every commit: the moment to move states elsewhere."""

    def commit(self, changes: Mapping[int, Trees]) -> None:
        """Take over a step's changes. If this is interrupted, the same commit has to be made again."""
        for client, state in changes.items():
            self.put(client, state)
        self.version += 1
        self.spill()


class StatesInMemory(ClientStates):
    """All of them in this process."""

    def __init__(self, states: Mapping[int, Trees]) -> None:
        self._states = dict(states)

    def put(self, client: int, state: Trees) -> None:
        self._states[client] = state

    def __getitem__(self, client: int) -> Trees:
        return self._states[client]

    def __iter__(self) -> Iterator[int]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)


class After(Mapping[int, Trees]):
    """The states after a step: its changes, laid over the states before it.

    Nothing is committed before somebody goes on from here, so an interruption leaves the states of a finished step.
    Usable until the step after the next is asked for; later reads raise RuntimeError.
    """

    def __init__(self, before: ClientStates, changes: Mapping[int, Trees]) -> None:
        self.before, self.changes = before, changes
        self._version = before.version

    def committed(self) -> ClientStates:
        """The states themselves, with the changes of this step and no later one."""
        if self.before.version == self._version:
            self.before.commit(self.changes)
        return self._base()

    def __getitem__(self, client: int) -> Trees:
        before = self._base()
        return self.changes[client] if client in self.changes else before[client]

    def __iter__(self) -> Iterator[int]:
        before = self._base()
        yield from before
        yield from (client for client in self.changes if client not in before)

    def __len__(self) -> int:
        before = self._base()
        return len(before) + sum(client not in before for client in self.changes)

    def _base(self) -> ClientStates:
        if self.before.version > self._version + 1:
            raise RuntimeError(
                "this snapshot is outdated: its client states have moved on; keep the latest one"
            )
        return self.before


def committed(clients: Mapping[int, Trees]) -> ClientStates:
    """The states to go on from after a snapshot with these `clients`; a plain mapping is copied."""
    if isinstance(clients, After):
        return clients.committed()
    return clients if isinstance(clients, ClientStates) else StatesInMemory(clients)


def owned(state: Trees) -> Trees:
    """`state` without views: an engine's results may be slices of one large tensor, which they would keep alive."""
    return {name: _owned(tree) for name, tree in state.items()}


def _owned(tree: Tree) -> Tree:
    return {
        name: value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
        for name, value in tree.items()
    }
