"""Declared requirements of plug-ins, checked for every job of a sweep before its first one starts."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Demand:
    """One key of the config that must have one value.

    Args:
        key: as in the config, ``local.momentum`` say, or a group of plug-ins, ``server_optimizer`` say.
        value: what it must be; of a group the class, or one that it derives from.
        why: goes after the plug-in's name: "needs SGD at the clients".
        instead: what else could be set, in words.
    """

    key: str
    value: object
    why: str
    instead: str = ""


SGD = Demand("local.optimizer", "sgd", "needs SGD at the clients")
SAME_INIT = Demand("init", "same", "starts every client from one model")


@dataclass(frozen=True)
class Needs:
    """What a plug-in cannot do without.

    Args:
        demands: values that keys of the config must have; those of two plug-ins must agree.
        proxy, proxy_labels: server data must be configured, with labels; unseen_proxy: of one round, they must not
            be test data.
        validation: the config must cut a validation share; an aggregator gets it as ``env.validation``.
        update_norms: RoundStats.squared_norms must be filled.
        same_architecture: every client and the server must have one network (whatever averages or matches models);
            lifted_by: what else could be set, as ``aggregator.student_start=fresh``; empty: nothing.
        global_model: clients must receive a model of several clients', not the one they last trained.
        broadcasts: clients start from the server's model from the second round on, so of several rounds likewise.
        images: samples must be 8-bit images (whatever makes images of its own); augmented: training batches must pass a random
            transform.
        local_steps: the numbers of local steps must be known, so models from elsewhere will not do.
    """

    demands: tuple[Demand, ...] = ()
    proxy: bool = False
    proxy_labels: bool = False
    unseen_proxy: bool = False
    validation: bool = False
    update_norms: bool = False
    same_architecture: bool = False
    lifted_by: str = ""
    global_model: bool = False
    broadcasts: bool = False
    images: bool = False
    augmented: bool = False
    local_steps: bool = False

    def __or__(self, other: Needs) -> Needs:
        """What two plug-ins need together."""
        either = {
            field.name: getattr(self, field.name) or getattr(other, field.name)
            for field in fields(self)
        }
        return Needs(**{**either, "demands": self.demands + other.demands})
