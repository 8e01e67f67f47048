"""The features that a prediction is made from, and the weights that learning starts with.

predict/predictor.py explains what each factor means.
"""

from __future__ import annotations

import numpy as np

BASE = 0
BIAS = 1
REQUEST = 2
TRANSITION = 3
NEXT_TOKEN = 4
EAMC = 5
TOKEN = 6
LAYER = 7
ROUTER = 8
NUM_FEATURES = 9

FEATURE_OF = {  # those that can be left out
    "request": REQUEST,
    "transition": TRANSITION,
    "next_token": NEXT_TOKEN,
    "eamc": EAMC,
    "token": TOKEN,
    "layer": LAYER,
    "router": ROUTER,
}
FACTORS = tuple(FEATURE_OF)

# The stages of a prediction.
NEXT = 0  # for the next token, right after a layer was routed
NOW = 1  # for the token that is beginning
AHEAD = 2  # for the layer after the one that was routed
NUM_STAGES = 3

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
KNOWN = np.zeros((NUM_STAGES, NUM_FEATURES), dtype=np.float32)
KNOWN[NEXT, : EAMC + 1] = 1
KNOWN[NOW, : TOKEN + 1] = 1
KNOWN[AHEAD] = 1
