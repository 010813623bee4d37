"""Declared requirements of plug-ins, checked for every job of a sweep before its first one starts."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Needs:
    """What a plug-in cannot do without.

    Args:
        plain_sgd: the local optimizer must be SGD without momentum (a control variate inside the gradient).
        sgd: the local optimizer must be SGD, with or without momentum.
        proxy, proxy_labels: server data must be configured, with labels.
        validation: the config must cut a validation share; an aggregator gets it as ``env.validation``.
        update_norms: RoundStats.squared_norms must be filled.
        same_init: every client must start from the global model.
        local_steps: the numbers of local steps must be known, so models from elsewhere will not do.
    """

    plain_sgd: bool = False
    sgd: bool = False
    proxy: bool = False
    proxy_labels: bool = False
    validation: bool = False
    update_norms: bool = False
    same_init: bool = False
    local_steps: bool = False

    def __or__(self, other: Needs) -> Needs:
        return Needs(**{field.name: getattr(self, field.name) or getattr(other, field.name) for field in fields(self)})
