"""A simulated CUDA device for a CPU build of PyTorch.

::

    with simulate() as device:
        x = torch.ones(3, device="cuda")
        print(device.counter.rows().total())

Four layers make CPU tensors behave as CUDA tensors:

1. `modes.CallMode` notes which Python call runs, on which device and with which
   generator. Operators that C++ calls inside it are placed accordingly.
2. `modes.KernelMode` sees every ATen operator below autograd and functorch. It refuses
   what CUDA refuses, tags outputs and counts.
3. `patches` replaces what C++ would answer from the real device, such as
   ``Tensor.device``.
4. `patches` also replaces the functions of ``torch.cuda``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

import fedexp
from tests.simulated_cuda.counts import Counter
from tests.simulated_cuda.operators import Operator, tensors_in
from tests.simulated_cuda.storages import CPU, Storages

CAPACITY = 80 * 2**30


class Call:
    """A Python call of a torch function that is running.

    Args:
        args: All arguments, by which operators without tensors are placed.
        device: The argument ``device``, or None.
        generator: The argument ``generator``, or None.
        counts_checks: Whether range checks of the CPU are counted. CUDA has none in
            `torch.nn.functional.one_hot`.
    """

    def __init__(
        self,
        args: Any,
        device: torch.device | None = None,
        generator: torch.Generator | None = None,
        counts_checks: bool = True,
    ) -> None:
        self.args = args
        self.device = device
        self.generator = generator
        self.counts_checks = counts_checks


class Transfer(Call):
    """A running call of ``Tensor.to`` that moves a tensor to `device`."""

    device: torch.device

    def __init__(self, device: torch.device) -> None:
        super().__init__((), device)


class SimulatedCuda:
    """State of the simulation.

    Args:
        count: Number of devices.
        capacity: Bytes of memory of each device.
        watched: Folder of the package whose lines counts are attributed to.

    Attributes:
        violations: Messages of all errors that CUDA would raise. Code may catch such an
            error, so tests check this list.
        current: Index of the current device, which ``device="cuda"`` means.
    """

    def __init__(self, count: int, capacity: int, watched: Path) -> None:
        self.storages = Storages(count, capacity)
        self.counter = Counter(watched)
        self.violations: list[str] = []
        self.current = 0
        self._local = threading.local()

    @property
    def calls(self) -> list[Call]:
        """The running Python calls of this thread. The innermost call is last."""
        if not hasattr(self._local, "calls"):
            self._local.calls = []
        return self._local.calls

    def resolve(self, device: Any) -> torch.device:
        """Return a device with its index.

        Raises:
            RuntimeError: There is no such device.
        """
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if device.type != "cuda":
            return device
        index = self.current if device.index is None else device.index
        if index >= len(self.storages.devices):
            raise RuntimeError("CUDA error: invalid device ordinal")
        return self.storages.devices[index]

    def device_of(self, values: Any) -> torch.device:
        """Return the first simulated device of the tensors in a value, or the CPU."""
        devices = map(self.storages.device, tensors_in(values))
        return next((device for device in devices if device.type == "cuda"), CPU)

    def is_simulated(self, tensor: Tensor) -> bool:
        return self.storages.device(tensor).type == "cuda"

    def place(self, values: Any, device: torch.device) -> None:
        """Place the tensors in a value on a device."""
        for tensor in tensors_in(values):
            if self.storages.tag(tensor, device):
                self.counter.use(device.index)

    def synchronise(self, reason: str, device: torch.device, times: int = 1) -> None:
        """Count that the host waits for a device."""
        self.storages.finish_copies()
        self.counter.add(reason, device.index, syncs=times)

    def copy(self, source: Tensor, target: Tensor, reason: str, *, non_blocking: bool) -> None:
        """Count a copy between tensors that may be on different devices.

        Only a `non_blocking` copy from or to pinned memory is asynchronous.
        """
        here, there = self.storages.device(source), self.storages.device(target)
        if here == there:
            return
        if "cpu" not in (here.type, there.type):
            self.counter.add(f"{reason} (peer)", there.index, launches=1)
            return

        goes_down = here.type == "cuda"
        host, device = (target, here) if goes_down else (source, there)
        way = "d2h" if goes_down else "h2d"
        self.counter.add(
            f"{reason} ({way})", device.index, **{way: 1, f"{way}_bytes": source.nbytes}
        )
        if non_blocking and self.storages.is_pinned(host):
            self.storages.begin_copy(host, writes=goes_down)
        else:
            self.synchronise(f"{reason} ({way})", device)

    def refuse(self, message: str, kind: type[Exception] = RuntimeError) -> NoReturn:
        """Raise an error as CUDA would."""
        self.violations.append(message)
        raise kind(message)

    def check_host(self, tensors: Sequence[Tensor], op: Operator | str, args: Any = ()) -> None:
        """Refuse a host tensor that an asynchronous copy still uses."""
        written = op.outputs_among(args) if isinstance(op, Operator) else []
        name = op.full if isinstance(op, Operator) else op
        for tensor in tensors:
            writes = any(tensor is each for each in written)
            if not self.is_simulated(tensor) and self.storages.is_unsafe(tensor, writes=writes):
                use = "written" if writes else "read"
                self.refuse(
                    f"{name}: a host tensor of shape {tuple(tensor.shape)} is {use} before a "
                    "synchronisation has finished its non_blocking copy"
                )


@contextlib.contextmanager
def simulate(
    count: int = 2, capacity: int = CAPACITY, watched: Path | None = None
) -> Iterator[SimulatedCuda]:
    """Simulate CUDA devices inside the block, in this thread and threads it starts.

    Args:
        count: Number of devices.
        capacity: Bytes of memory of each device.
        watched: Folder of the package whose lines counts are attributed to, by default
            that of fedexp.
    """
    # These modules need `SimulatedCuda`.
    from tests.simulated_cuda.modes import CallMode, KernelMode
    from tests.simulated_cuda.patches import patched

    package = Path(str(fedexp.__file__)).parent
    device = SimulatedCuda(count, capacity, watched or package)
    with patched(device), CallMode(device), KernelMode(device):
        yield device
