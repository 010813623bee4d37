"""Client states between rounds.

All changes of a step are applied together. Unchanged states are not copied.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping

from fedexp.core.trees import Tree, Trees


class ClientStates(Mapping[int, Trees]):
    """A mapping from client index to state, for all clients that have a state.

    A subclass decides where the states are stored. One call of `commit` applies all
    changes of a step. States that were read before the call do not change.
    """

    version = 0  # number of committed steps

    @abstractmethod
    def put(self, client: int, state: Trees) -> None:
        """Make `state` the state of the client.

        Putting the state that is already there changes nothing.
        """

    def spill(self) -> None:
        """Move states out of memory if the subclass limits memory.

        It is called after every commit.
        """

    def commit(self, changes: Mapping[int, Trees]) -> None:
        """Apply the changes of a step.

        If the call is interrupted, it must be repeated with the same changes.
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
    """The states after a step: its changes on top of the states before it.

    The changes are committed only when the run begins the next step. After an
    interruption, the states are therefore those of a finished step. The mapping is
    usable until the run begins the step after the next one. Later reads raise
    RuntimeError.
    """

    def __init__(self, before: ClientStates, changes: Mapping[int, Trees]) -> None:
        self.before, self.changes = before, changes
        self._version = before.version

    def committed(self) -> ClientStates:
        """Commit the changes of this step, if still pending, and return the states.

        The states contain no changes of later steps.
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
    """Return the client states from which a run continues after a snapshot.

    `clients` are the client states of the snapshot. Their pending changes are
    committed. A plain mapping is copied.
    """
    if isinstance(clients, After):
        return clients.committed()
    return clients if isinstance(clients, ClientStates) else StatesInMemory(clients)


def owned(tree: Tree) -> Tree:
    """Return `tree` with copies of tensors that are views of larger tensors.

    The tensors that an engine returns may be slices of one large tensor. Storing a
    slice would keep the whole large tensor in memory.
    """
    return {
        name: value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
        for name, value in tree.items()
    }
