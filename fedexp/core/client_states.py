"""States of clients, such as control variates, which are stored from round to round.

All changes that a step makes are applied together. Unchanged states are not copied.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping

from fedexp.core.trees import Tree, Trees


class ClientStates(Mapping[int, Trees]):
    """A mapping from client index to state, for all clients that have a state.

    A subclass decides where the states are stored. One call of `commit` applies all
    changes of a step. A state that was read before the call does not change.
    """

    version = 0  # number of committed steps

    @abstractmethod
    def put(self, client: int, state: Trees) -> None:
        """Store `state` as the state of the client.

        A repeated call with the same state changes nothing.
        """

    def spill(self) -> None:
        """Move states from memory to disk if the subclass limits its use of memory.

        It is called after every commit. By default it does nothing.
        """

    def commit(self, changes: Mapping[int, Trees]) -> None:
        """Apply the changes of a step.

        An interrupted call may have applied only some changes. It must be repeated with
        the same changes.
        """
        for client, state in changes.items():
            self.put(client, state)
        self.version += 1
        self.spill()


class StatesInMemory(ClientStates):
    """Client states that are all in the memory of this process."""

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
    """The client states after step k, as the states before step k and pending changes.

    The run commits the changes of step k only when it begins step k + 1. After an
    interruption, the stored states are therefore those of a finished step. This mapping
    can be read until the run begins step k + 2. Later reads raise RuntimeError.

    Args:
        before: The states before step k.
        changes: The states that step k changed, by client.
    """

    def __init__(self, before: ClientStates, changes: Mapping[int, Trees]) -> None:
        self.before, self.changes = before, changes
        self._version = before.version

    def committed(self) -> ClientStates:
        """Commit the changes of the step if they are pending, and return the states.

        Raises:
            RuntimeError: The changes of a later step have been committed.
        """
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
                "this snapshot is outdated, because its client states have changed: "
                "keep the latest one"
            )
        return self.before


def committed(clients: Mapping[int, Trees]) -> ClientStates:
    """Return the client states with which a run continues after a snapshot.

    Args:
        clients: The client states of the snapshot. If some of their changes are
            pending, these are committed. A plain mapping is copied.
    """
    if isinstance(clients, After):
        return clients.committed()
    return clients if isinstance(clients, ClientStates) else StatesInMemory(clients)


def owned(tree: Tree) -> Tree:
    """Return `tree` with a copy of each tensor that is a view of a larger tensor.

    The tensors that an engine returns may be slices of one large tensor. Storing a
    slice without a copy would keep the whole large tensor in memory.
    """
    return {
        name: value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
        for name, value in tree.items()
    }
