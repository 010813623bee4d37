"""The reference engine: one client after the other, one network reused, data on the device once."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedexp.core.data import FederatedData
from fedexp.core.engine import Executor
from fedexp.core.errors import ClientError, FedexpError
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.kernel import train_client
from fedexp.core.models import ModelSpec, Net


@dataclass
class Serial(Executor):
    """Executes jobs in this process, in order."""

    _nets: dict[ModelSpec, Net] = field(init=False, default_factory=dict)

    def map(self, jobs: Sequence[ClientJob], data: FederatedData) -> Generator[ClientResult, None, None]:
        for job in jobs:
            net = self._net(job)
            try:
                result = train_client(job, net, data.train, _index(data, job.client))
            except FedexpError:
                raise
            except Exception as error:
                raise ClientError(
                    f"client {job.client} failed: {type(error).__name__}: {error}",
                    where=f"client {job.client}, {len(data.partition.of(job.client))} training samples, lr {job.budget.lr:g}",
                ) from error
            finally:
                net.release()
            yield result

    def _net(self, job: ClientJob) -> Net:
        spec = job.start.spec
        if spec not in self._nets:
            first = next(iter(job.start.params.values()))
            self._nets[spec] = Net(spec, first.device, first.dtype)
        return self._nets[spec]


def _index(data: FederatedData, client: int) -> Tensor:
    return torch.from_numpy(data.partition.of(client)).to(data.train.x.device)
