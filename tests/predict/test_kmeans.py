"""K-means of past requests keeps one of each kind; its one user is a benchmark of the EAMC."""

from __future__ import annotations

import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.policies.kmeans import from_kmeans
from moe_infinity.errors import ConfigError
from moe_infinity.predict.eamc import Eamc, RequestEam, row_normalised

NUM_LAYERS = 3
A, B, C = [[9, 1, 0, 0]] * NUM_LAYERS, [[0, 9, 1, 0]] * NUM_LAYERS, [[0, 0, 9, 1]] * NUM_LAYERS


def request(decode: object) -> RequestEam:
    counts = np.asarray(decode)
    return RequestEam(np.zeros_like(counts), counts)


def planted_requests(num_each: int = 6) -> list[RequestEam]:
    """Of three kinds, one after the other: A, B, C, A, ..."""
    rng = np.random.default_rng(0)
    kinds = [30 * np.array(kind) for kind in (A, B, C)]
    return [request(kinds[i % 3] + rng.integers(0, 9, kinds[0].shape)) for i in range(3 * num_each)]


def kinds_of(eamc: Eamc) -> list[int]:
    return [int(eamc.decode_matrix(idx)[0].argmax()) for idx in range(eamc.num_stored)]


def test_kmeans_keeps_one_request_of_each_planted_cluster():
    pytest.importorskip("scipy", reason="needs scipy")
    eams = planted_requests()
    for seed in range(5):
        eamc = from_kmeans(eams, 3, seed=seed)
        assert sorted(kinds_of(eamc)) == [0, 1, 2]
        members = [row_normalised(eam.decode).astype(np.float32) for eam in eams]
        for idx in range(3):
            assert any(np.array_equal(eamc.decode_matrix(idx), member) for member in members)


def test_kmeans_with_one_seed_gives_one_collection():
    pytest.importorskip("scipy", reason="needs scipy")
    first, again = (from_kmeans(planted_requests(), 5, seed=3) for _ in range(2))
    np.testing.assert_array_equal(first.decode, again.decode)


def test_of_each_cluster_the_member_nearest_the_centroid_is_kept(monkeypatch):
    """Given clusters {0, 2, 4}, {1, 3} and an empty one, with a member of each as centroid."""

    def clusters(points: np.ndarray, num: int, **options: object) -> tuple[np.ndarray, np.ndarray]:
        np.testing.assert_allclose(np.linalg.norm(points, axis=1), 1)
        assert (len(points), num) == (5, 3)
        warnings.warn("One of the clusters is empty", UserWarning, stacklevel=1)  # as scipy does
        return np.stack([points[2], points[3], points[0]]), np.array([0, 1, 0, 1, 0])

    monkeypatch.setitem(sys.modules, "scipy.cluster.vq", SimpleNamespace(kmeans2=clusters))
    monkeypatch.setitem(sys.modules, "scipy.cluster", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "scipy", SimpleNamespace())
    eams = planted_requests()[:5]
    eamc = from_kmeans(eams, 3)
    assert eamc.num_stored == 2
    for idx, member in enumerate((2, 3)):
        np.testing.assert_allclose(eamc.decode_matrix(idx), row_normalised(eams[member].decode))


def test_requests_that_fit_are_all_kept_once_without_clustering(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.cluster.vq", None)
    nothing = np.zeros_like(A)
    eams = [request(nothing), request(B), request(A), request(2 * np.array(B)), request(C)]
    eamc = from_kmeans(eams, 3)
    assert (eamc.capacity, kinds_of(eamc)) == (3, [1, 0, 2])


def test_clustering_without_scipy_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.cluster.vq", None)
    with pytest.raises(ConfigError, match=r"pip install 'moe-infinity\[dev\]'"):
        from_kmeans(planted_requests(), 3)


def test_no_requests_make_no_collection():
    with pytest.raises(ConfigError, match="no requests"):
        from_kmeans([], 3)
