"""An EAM Collection made offline, as in v1 of the paper: one request of each K-means cluster."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib import import_module

import numpy as np

from moe_infinity.errors import ConfigError
from moe_infinity.predict.eamc import Eamc, RequestEam, row_normalised


def from_kmeans(eams: Sequence[RequestEam], capacity: int, *, seed: int = 0) -> Eamc:
    """Of each of `capacity` clusters the member nearest the centroid, or all distinct requests if
    they fit. Raises ConfigError if scipy is missing.
    """
    if not eams:
        raise ConfigError("an EAMC cannot be made of no requests: its shape is unknown")
    distinct: dict[bytes, RequestEam] = {}
    for eam in (eam for eam in eams if eam.decode.any()):
        distinct.setdefault(row_normalised(eam.decode).tobytes(), eam)
    chosen = list(distinct.values())
    if len(chosen) > capacity:
        chosen = _one_per_cluster(chosen, capacity, seed)
    eamc = Eamc(capacity, *eams[0].decode.shape)
    for eam in chosen:
        eamc.add(eam)
    return eamc


def _one_per_cluster(eams: Sequence[RequestEam], num: int, seed: int) -> list[RequestEam]:
    """Of each of `num` clusters the member nearest the centroid; fewer if a cluster is empty."""
    try:
        kmeans2 = import_module("scipy.cluster.vq").kmeans2
    except ImportError as error:
        raise ConfigError(
            "clustering requests needs scipy\nhint: pip install 'moe-infinity[dev]'"
        ) from error
    points = np.stack([row_normalised(eam.decode).reshape(-1) for eam in eams])
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an empty cluster
        centroids, labels = kmeans2(points, num, minit="++", seed=seed)
    distances_P = np.linalg.norm(points - centroids[labels], axis=1)
    members = [np.flatnonzero(labels == cluster) for cluster in np.unique(labels)]
    return [eams[of_one[distances_P[of_one].argmin()]] for of_one in members]
