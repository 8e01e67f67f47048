"""The features that a prediction is made from, and the weights that learning starts with.

predict/predictor.py explains what each factor means.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Feature(IntEnum):
    """Place of a feature in an array. All but the first two are factors: they can be left out."""

    BASE = 0
    BIAS = 1
    REQUEST = 2
    TRANSITION = 3
    NEXT_TOKEN = 4
    EAMC = 5
    TOKEN = 6
    LAYER = 7
    ROUTER = 8


FACTORS = tuple(feature.name.lower() for feature in Feature if feature > Feature.BIAS)


class Stage(IntEnum):
    """What a prediction is made for."""

    NEXT = 0  # the next token, right after a layer was routed
    NOW = 1  # the token that is beginning
    AHEAD = 2  # the layer after the one that was routed


# What a prototype with weights per layer converged to, on average over the layers, on development
# requests of gpt-oss. The router's weight is a guess, as no trace has one.
START_WEIGHTS = np.array(
    [  # base bias request transition next_token eamc token layer router
        [1.0, -0.2, 0.35, 1.1, 0.6, 0.0, 0.0, 0.0, 0.0],
        [1.0, -0.3, 0.3, 0.9, 0.2, 0.0, 0.8, 0.0, 0.0],
        [1.0, -0.5, 0.3, 0.1, 0.2, 0.0, 0.6, 1.4, 3.0],
    ],
    dtype=np.float32,
)

# 1 for the features that each stage can know.
KNOWN = np.ones_like(START_WEIGHTS)
KNOWN[Stage.NEXT, Feature.TOKEN :] = 0
KNOWN[Stage.NOW, Feature.LAYER :] = 0
