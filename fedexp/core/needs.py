"""Requirements of plug-ins.

They are checked for all jobs of a sweep before the first one starts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Demand:
    """A key of the config and the value that it must have.

    Args:
        key: A config key such as ``local.momentum``, or a group of plug-ins such as
            ``server_optimizer``.
        value: The required value. For a group, the required class or a base class of
            it.
        why: The reason, as a text that follows the plug-in's name in messages, for
            example "needs SGD at the clients".
        instead: An alternative setting, as text, or empty.
    """

    key: str
    value: object
    why: str
    instead: str = ""


SGD = Demand("local.optimizer", "sgd", "needs SGD at the clients")
SAME_INIT = Demand("init", "same", "starts every client from one model")


@dataclass(frozen=True)
class Needs:
    """The requirements of a plug-in.

    Each flag below names the requirement that applies if the flag is true.

    Args:
        demands: Values that keys of the config must have. The demands of two plug-ins
            must not contradict each other.
        proxy: Server data must be configured.
        proxy_labels: Server data must be configured with labels.
        unseen_proxy: In runs with a single round, server data must not be test data of
            the clients' data set. Test data of another set (``proxy.dataset``) are
            allowed.
        validation: The config must cut a validation share. An aggregator gets the share
            as ``env.validation``.
        update_norms: ``RoundStats.squared_norms`` must be computed.
        same_architecture: All clients and the server must have the same architecture.
            Methods that average or match models need it.
        lifted_by: A setting that lifts `same_architecture`, for example
            ``aggregator.student_start=fresh``, or empty.
        same_clients: All clients must have the same architecture. The server may have
            another one.
        global_model: Clients must receive a model that combines several clients, not
            the model that they trained last.
        broadcasts: From the second round on, clients start from the server's model. In
            runs of several rounds, all clients and the server must therefore have the
            same architecture.
        images: Samples must be 8-bit images. Methods that generate images need it.
        augmented: Training batches must pass a random transform.
        local_steps: The numbers of local steps must be known, so ``client_models.path``
            must be null.
        sample_counts: The numbers of the clients' training samples must be known. This
            need and the next two matter only for models from ``client_models.path``.
        class_counts: The clients' training samples of each class must be counted.
        client_inputs: The clients' training samples must be present, because probes run
            on them or later steps train on them.
    """

    demands: tuple[Demand, ...] = ()
    proxy: bool = False
    proxy_labels: bool = False
    unseen_proxy: bool = False
    validation: bool = False
    update_norms: bool = False
    same_architecture: bool = False
    lifted_by: str = ""
    same_clients: bool = False
    global_model: bool = False
    broadcasts: bool = False
    images: bool = False
    augmented: bool = False
    local_steps: bool = False
    sample_counts: bool = False
    class_counts: bool = False
    client_inputs: bool = False

    def __or__(self, other: Needs) -> Needs:
        """Return the requirements of two plug-ins together."""
        either = {
            field.name: getattr(self, field.name) or getattr(other, field.name)
            for field in fields(self)
        }
        return Needs(**{**either, "demands": self.demands + other.demands})
