"""Several hosts on Ray: replicas of a model behind one address. Needs the extra `cluster`."""

from moe_infinity.cluster.replicas import build_app

__all__ = ["build_app"]
