"""Federated averaging by FedJAX.

    python scripts/frameworks/run_fedjax.py WORK RECORD [jit|pmap]

The third argument is the backend of `fedjax.for_each_client`. The backend pmap divides
clients among devices. XLA_FLAGS=--xla_force_host_platform_device_count=2 turns the
CPU's cores into two devices.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import fedjax
import haiku as hk
import jax
import numpy as np
from fedjax.algorithms import fed_avg
from work import arguments, write_record


class CountingDataset(fedjax.ClientDataset):
    """A client's data that counts the batches and samples that training takes."""

    steps = samples = 0

    def shuffle_repeat_batch(self, *hparams: object, **more: object) -> Iterator[object]:
        for batch in super().shuffle_repeat_batch(*hparams, **more):
            CountingDataset.steps += 1
            CountingDataset.samples += len(batch["y"])
            yield batch


def max_pool(x: jax.Array) -> jax.Array:
    """Return the maxima of windows of two by two pixels.

    `hk.MaxPool` computes the same maxima, but its gradient is slow on a CPU.
    """
    n, height, width, channels = x.shape
    return x.reshape(n, height // 2, 2, width // 2, 2, channels).max((2, 4))


def forward(batch: dict[str, jax.Array], workload: str) -> jax.Array:
    """Compute the model's outputs for images of shape (batch, 28, 28, 1)."""
    if workload == "W1":
        layers = [hk.Flatten(), hk.Linear(200), jax.nn.relu, hk.Linear(10)]
    else:
        layers = [
            *(hk.Conv2D(32, 5), jax.nn.relu, max_pool),
            *(hk.Conv2D(64, 5), jax.nn.relu, max_pool),
            *(hk.Flatten(), hk.Linear(512), jax.nn.relu, hk.Linear(10)),
        ]
    return hk.Sequential(layers)(batch["x"])


def names_of(workload: str) -> list[str]:
    """Return the names that Haiku gives to the layers, in forward order."""
    return ["linear", "linear_1"] if workload == "W1" else [
        *("conv2_d", "conv2_d_1", "linear", "linear_1")
    ]  # fmt: skip


def to_jax(weights: list[np.ndarray], workload: str) -> dict[str, dict[str, np.ndarray]]:
    """Convert weights from PyTorch's layout to Haiku's."""
    params, channels = {}, None
    for name, given, b in zip(names_of(workload), weights[::2], weights[1::2], strict=True):
        w = given
        if w.ndim == 4:
            params[name] = {"w": w.transpose(2, 3, 1, 0), "b": b}
            channels = len(w)
            continue
        if channels is not None:
            # The channel is the first axis of an image in PyTorch, and the last axis in
            # JAX. Flattened images therefore have a different order of entries
            side = round((w.shape[1] / channels) ** 0.5)
            w = w.reshape(-1, channels, side, side).transpose(0, 2, 3, 1).reshape(len(w), -1)
            channels = None
        params[name] = {"w": w.T, "b": b}
    return params


def to_torch(params: dict[str, dict[str, jax.Array]], workload: str) -> list[np.ndarray]:
    """Convert weights from Haiku's layout to PyTorch's."""
    weights, channels = [], None
    for name in names_of(workload):
        w, b = np.asarray(params[name]["w"]), np.asarray(params[name]["b"])
        if w.ndim == 4:
            channels = w.shape[-1]
            w = w.transpose(3, 2, 0, 1)
        else:
            w = w.T
            if channels is not None:
                side = round((w.shape[1] / channels) ** 0.5)
                w = w.reshape(-1, side, side, channels).transpose(0, 3, 1, 2).reshape(len(w), -1)
                channels = None
        weights += [np.ascontiguousarray(w), b]
    return weights


def main() -> None:
    work, record, more = arguments()
    fedjax.set_for_each_client_backend(more[0] if more else "jit")
    x = np.ascontiguousarray(work.x.transpose(0, 2, 3, 1))

    def loss(batch: dict[str, jax.Array], outputs: jax.Array) -> jax.Array:
        return fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], outputs)

    model = fedjax.create_model_from_haiku(
        hk.transform(lambda batch: forward(batch, work.workload)),
        {"x": x[:1], "y": work.y[:1]},
        loss,
    )
    algorithm = fed_avg.federated_averaging(
        fedjax.model_grad(model),
        fedjax.optimizers.sgd(work.lr),
        fedjax.optimizers.sgd(1.0),
        # The samples are not shuffled, because the work prescribes their order
        fedjax.ShuffleRepeatBatchHParams(batch_size=work.batch_size, skip_shuffle=True),
    )
    params = {
        name: {key: jax.numpy.asarray(value) for key, value in layer.items()}
        for name, layer in to_jax(work.weights, work.workload).items()
    }
    state = algorithm.init(params)
    keys = jax.random.split(jax.random.PRNGKey(0), work.orders.shape[1])
    seconds, steps, samples = [], [], []

    for cohort, orders in zip(work.cohorts, work.orders, strict=True):
        CountingDataset.steps = CountingDataset.samples = 0
        start = time.perf_counter()
        clients = [
            (client, CountingDataset({"x": x[order], "y": work.y[order]}), key)
            for client, order, key in zip(cohort.tolist(), orders, keys, strict=True)
        ]
        state, _ = algorithm.apply(state, clients)
        jax.block_until_ready(state.params)
        seconds.append(time.perf_counter() - start)
        steps.append(CountingDataset.steps)
        samples.append(CountingDataset.samples)

    write_record(record, seconds, steps, samples, to_torch(state.params, work.workload))


if __name__ == "__main__":
    main()
