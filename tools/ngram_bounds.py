"""The loss of n-gram models, which the demo model should beat.

    train stream -> unigram (add-one) -> bigram -> trigram, each interpolated with the one below

Absolute discounting: each n-gram that was seen loses `discount` counts, distributed as the
lower order predicts. Counts are sorted arrays of keys, so 20 million tokens take seconds.
"""

from __future__ import annotations

import numpy as np

# Shape suffixes: W windows, T predicted tokens of a window.


def ngram_keys(tokens: np.ndarray, order: int, vocab: int) -> np.ndarray:
    """A number for each run of `order` tokens along the last axis."""
    count = tokens.shape[-1] - order + 1
    keys = np.zeros((*tokens.shape[:-1], count), dtype=np.int64)
    for i in range(order):
        keys = keys * vocab + tokens[..., i : i + count]
    return keys


def found(table: np.ndarray, values: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The values of `keys` that are in the sorted `table`; 0 for the others."""
    at = np.searchsorted(table, keys).clip(max=len(table) - 1)
    return np.where(table[at] == keys, values[at], 0)


def extend(
    lower_WT: np.ndarray, stream: np.ndarray, windows: np.ndarray, order: int, vocab: int
) -> np.ndarray:
    """Probabilities of the n-gram model of `order`, made from those of the order below."""
    grams, counts = np.unique(ngram_keys(stream, order, vocab), return_counts=True)
    once = (counts == 1).sum()
    twice = (counts == 2).sum()
    discount = once / (once + 2 * twice)  # the usual estimate (Ney, Essen and Kneser, 1994)
    contexts, starts, types = np.unique(grams // vocab, return_index=True, return_counts=True)
    totals = np.add.reduceat(counts, starts)

    keys = ngram_keys(windows.astype(np.int64), order, vocab)
    seen = (found(grams, counts, keys) - discount).clip(min=0)
    total = found(contexts, totals, keys // vocab)
    given_up = np.where(total > 0, discount * found(contexts, types, keys // vocab), 1)
    result: np.ndarray = lower_WT.copy()  # stays where a window starts: too little context
    result[:, order - 2 :] = (seen + given_up * lower_WT[:, order - 2 :]) / np.maximum(total, 1)
    return result


def ngram_nats(
    stream: np.ndarray, windows: dict[str, np.ndarray], vocab: int
) -> dict[str, dict[str, float]]:
    """Mean loss per domain of the unigram (add-one), bigram and trigram models."""
    counts = np.bincount(stream, minlength=vocab) + 1
    every = np.concatenate(list(windows.values()))
    unigram = (counts / counts.sum())[every[:, 1:]]
    bigram = extend(unigram, stream, every, 2, vocab)
    trigram = extend(bigram, stream, every, 3, vocab)
    cuts = np.cumsum([len(w) for w in windows.values()])[:-1]
    nats: dict[str, dict[str, float]] = {domain: {} for domain in windows}
    for name, probability in (("unigram", unigram), ("bigram", bigram), ("trigram", trigram)):
        for domain, part in zip(windows, np.split(-np.log(probability), cuts), strict=True):
            nats[domain][name] = float(part.mean())
    return nats
