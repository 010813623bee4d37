"""Requirements of plug-ins.

The requirements of all runs of a sweep are checked before the first run starts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Demand:
    """A config key and the value that a plug-in requires for it.

    Args:
        key: A config key such as ``local.momentum``, or a config group of plug-ins such
            as ``server_optimizer``.
        value: The required value. If `key` is a group, the chosen plug-in must be an
            instance of this class.
        why: The reason. Messages append it to the plug-in's name, for example "needs
            SGD at the clients".
        instead: Text that names an alternative setting, or empty.
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
        proxy: Server data (proxy data) must be configured.
        proxy_labels: Server data must be configured with labels.
        unseen_proxy: In runs with a single round, server data must not be test data of
            the clients' data set. Test data of another data set (``proxy.dataset``) are
            allowed.
        validation: The config must hold out a part of the clients' data for validation.
            An aggregator gets these samples as ``env.validation``.
        plain_mean: The server optimizer must receive the weighted mean of the clients'
            updates (`Aggregator.is_plain_mean`).
        update_norms: ``RoundStats.squared_norms`` must be computed.
        same_architecture: All clients and the server must have the same architecture.
            Methods that average or match models need it.
        lifted_by: A setting with which `same_architecture` is not required, for example
            ``aggregator.student_start=fresh``, or empty.
        same_clients: All clients must have the same architecture. The server's
            architecture may differ.
        global_model: In every round, clients must receive a model that combines several
            clients, not the model that they trained in their last round.
        broadcasts: In runs of several rounds, all clients and the server must have the
            same architecture. The reason is that clients start from the server's model
            from the second round on.
        images: Samples must be 8-bit images. Methods that generate images need it.
        augmented: Training batches must pass a random transform.
        local_steps: Each client's number of local steps must be known. It is not known
            for models from a folder, so ``client_models.path`` must be null.
        sample_counts: Each client's number of training samples must be known. The flags
            `sample_counts`, `class_counts` and `client_inputs` matter only for models
            from a folder (``client_models.path``).
        class_counts: Each client's number of training samples of each class must be
            known.
        client_inputs: The clients' training samples must be present, because probes or
            later training steps use them.
    """

    demands: tuple[Demand, ...] = ()
    proxy: bool = False
    proxy_labels: bool = False
    unseen_proxy: bool = False
    validation: bool = False
    plain_mean: bool = False
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
        """Return the union of the requirements of two plug-ins."""
        either = {
            field.name: getattr(self, field.name) or getattr(other, field.name)
            for field in fields(self)
        }
        return Needs(**{**either, "demands": self.demands + other.demands})
