"""Which options go with which policy. tests/test_config.py checks that `MoE(...)` asks."""

from __future__ import annotations

from typing import Any

import pytest

from moe_infinity.cache.policies import POLICIES
from moe_infinity.config import OffloadConfig
from moe_infinity.errors import ConfigError
from moe_infinity.predict.predictor import check_policy
from moe_infinity.predict.tables import FACTORS


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_runs_with_the_defaults(policy):
    check_policy(OffloadConfig(policy=policy))


@pytest.mark.parametrize(
    "options",
    [
        {"prefetch": True}, {"prefetch": True, "early_router": True}, {"history": "file.npz"},
        {"without": FACTORS}, {"without": ["token"], "prefetch": True},
    ],
)  # fmt: skip
def test_the_default_policy_serves_every_option(options):
    check_policy(OffloadConfig(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "mru"}, r"'mru'.*activation-aware, lru, lfu, request-lfu"),
        ({"policy": "neighbor"}, "run in the simulator only"),
        ({"policy": "lru", "prefetch": True}, "cannot prefetch; use activation-aware"),
        ({"early_router": True}, "early_router serves prefetch=True"),
        ({"policy": "lfu", "history": "file.npz"}, "lfu keeps no history"),
        ({"without": "token"}, "without names some of"),
        ({"without": ["gate"]}, r"router, not \['gate'\]"),
        ({"policy": "lru", "without": ["token"]}, "no factors to leave out"),
        ({"history": "file.npz", "without": ["token"]}, "ablation"),
    ],
)
def test_what_a_policy_does_not_serve_is_refused(options: dict[str, Any], message):
    with pytest.raises(ConfigError, match=message):
        check_policy(OffloadConfig(**options))
