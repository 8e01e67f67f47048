"""Which options of an `OffloadConfig` go with which policy. Checked before a model is loaded."""

from __future__ import annotations

from moe_infinity.cache.policies import ACTIVATION_AWARE, POLICIES
from moe_infinity.config import OffloadConfig
from moe_infinity.errors import ConfigError
from moe_infinity.predict.features import FACTORS


def check_policy(config: OffloadConfig) -> None:
    """Raises ConfigError for an unknown policy, and for options that the policy does not serve."""
    policy = config.policy
    if policy not in POLICIES:
        raise ConfigError(
            f"unknown policy {policy!r}, expected one of: {', '.join(POLICIES)}; "
            "the baselines of `moe-infinity simulate` run in the simulator only"
        )
    predicts = policy == ACTIVATION_AWARE
    if config.prefetch and not predicts:
        raise ConfigError(
            f"policy {policy} predicts nothing, so it cannot prefetch; use {ACTIVATION_AWARE}"
        )
    if config.early_router and not config.prefetch:
        raise ConfigError(f"early_router serves prefetch=True with policy {ACTIVATION_AWARE}")
    if config.history is not None and not predicts:
        raise ConfigError(f"policy {policy} keeps no history, {ACTIVATION_AWARE} does")
    _check_without(config)


def _check_without(config: OffloadConfig) -> None:
    without = config.without
    is_list = isinstance(without, tuple | list)
    if not is_list or not all(name in FACTORS for name in without):
        raise ConfigError(f"without names some of {', '.join(FACTORS)}, not {without!r}")
    if without and config.policy != ACTIVATION_AWARE:
        raise ConfigError(f"policy {config.policy} has no factors to leave out")
    if without and config.history is not None:
        raise ConfigError("without is for ablation: it would spoil what the history keeps")
