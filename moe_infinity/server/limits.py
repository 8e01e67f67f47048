"""The most of everything that a client chooses the size of. Each is checked before the work that it
bounds.

`moe-infinity serve --help-limits` prints the table, and docs/serving.md shows it. A limit that has
an option is that of `ServeConfig`, and is only named here.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1 << 10
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Limit:
    """The most of one thing, and the status of a request that has more."""

    what: str
    most: int
    unit: str
    status: int
    field: str = ""  # that is named; empty: the body as a whole, or the connection
    option: str = ""  # that sets another number


# Of a body, before it is read.
ITEMS = Limit("objects, arrays, names and values of JSON, together", 300_000, "items", 413)
DEPTH = Limit("arrays and objects inside each other", 200, "levels", 400)
UPLOAD_S = Limit("time for a whole body", 30, "s", 408)
CHUNK_BYTES = Limit("bytes of a chunk of a body on average, at least", 16, "bytes", 0)
BODIES = Limit(
    "bodies of all clients, until an answer begins (or two of --max-body)", 32 * MIB, "bytes", 429
)
BODIES_OF_ONE = Limit("those bodies of one client (or one of --max-body)", 16 * MIB, "bytes", 429)
# Of its lists and objects, by field.
PROMPTS = Limit("prompts", 2_048, "items", 400, "prompt, input")
MESSAGES = Limit("messages", 10_000, "items", 400, "messages, input")
PARTS = Limit("parts of a message", 10_000, "items", 400, "content")
TOOLS = Limit("tools", 1_024, "items", 400, "tools, functions")
CALLS = Limit("calls in a message", 1_024, "items", 400, "tool_calls")
STOPS = Limit("stop strings", 16, "items", 400, "stop, stop_sequences")
STOP_CHARACTERS = Limit("a stop string", 1_000, "characters", 400, "stop, stop_sequences")
STOP_IDS = Limit("tokens that end an answer", 1_024, "items", 400, "stop_token_ids")
BIASES = Limit("biases", 100_000, "items", 400, "logit_bias")
VARIABLES = Limit("variables of the template", 64, "items", 400, "chat_template_kwargs")
METADATA = Limit("entries of metadata", 16, "items", 400, "metadata")
NAME_CHARACTERS = Limit("a model's name", 1_000, "characters", 400, "model")
NGRAM = Limit("tokens that may not be repeated", 64, "tokens", 400, "no_repeat_ngram_size")
CHOICES = Limit("choices", 16, "items", 400, "n")
LOGPROBS = Limit("alternatives of a token", 20, "items", 400, "logprobs, top_logprobs")
LISTED = Limit("prompt tokens x (1 + alternatives)", 100_000, "entries", 400, "logprobs with echo")
# Of images.
IMAGES = Limit("images of a request", 100, "items", 400, "messages, input")
IMAGE_BYTES = Limit("files of these images, together", 64 * MIB, "bytes", 400, "messages, input")
PIXELS = Limit("pixels of these images, together", 1 << 25, "pixels", 400, "messages, input")
FETCH_S = Limit("time to fetch these images", 10, "s", 400, "messages, input")
KEPT = Limit("items of responses that are kept for references", 32 * MIB, "bytes", 400, "input")
# Of structures.
GRAMMAR = Limit("a grammar in Lark", 128 * KIB, "characters", 400, "grammar")
GBNF = Limit("a grammar in GBNF", 24 * KIB, "characters", 400, "grammar")
REGEX = Limit("a regular expression", 64 * KIB, "characters", 400, "regex")
CHOICE = Limit("texts to choose from", 1_900, "items", 400, "choice")
CHOICE_CHARACTERS = Limit("these texts together", 512 * KIB, "characters", 400, "choice")
SCHEMA = Limit(
    "JSON schemas of a request, together", 512 * KIB, "characters", 400, "json, parameters"
)
# Of preparation: JSON, fields, templates, tokens, grammars.
PREPARING_S = Limit("time for all preparation of a request", 30, "s", 503)
RENDERING_S = Limit("time of the chat template", 5, "s", 400, "messages")
RENDERED = Limit("text that the chat template makes", 16 * MIB, "characters", 400, "messages")
# Of the queue.
QUEUED_TOKENS = Limit("prompt tokens of all clients that wait", 2_000_000, "tokens", 429)
QUEUED_TOKENS_OF_ONE = Limit("prompt tokens of one client that wait", 1_000_000, "tokens", 429)
QUEUED_IMAGES = Limit("images of all clients that wait, as tensors", 1024 * MIB, "bytes", 429)
CLIENTS = Limit("clients that may fill a queue each", 8, "clients", 429)
# Of connections.
# Fewer where the process may have fewer open files. A new one closes the one that is idle longest.
CONNECTIONS = Limit("connections", 1_000, "connections", 0)
HEADER_BYTES = Limit("a request's line and headers", 32 * KIB, "bytes", 400)
HEADER_S = Limit("time from a connection to the end of its first headers", 20, "s", 0)
IDLE_S = Limit("time between two requests of a connection", 60, "s", 0)
UNREAD_S = Limit("time in which a client reads nothing of its answer", 60, "s", 0)
# Those with an option.
BODY = Limit("a body", 4 * MIB, "bytes", 413, option="--max-body")
QUEUE = Limit("sequences of one client that wait", 64, "sequences", 429, option="--max-queue")
DEADLINE = Limit("time of a request, waiting included", 3_600, "s", 504, option="--deadline")

# The list or object of a body that has a limit of its own.
LENGTHS = {
    "messages": MESSAGES,
    "content": PARTS,
    "tools": TOOLS,
    "functions": TOOLS,
    "tool_calls": CALLS,
    "stop": STOPS,
    "stop_sequences": STOPS,
    "stop_token_ids": STOP_IDS,
    "logit_bias": BIASES,
    "chat_template_kwargs": VARIABLES,
    "metadata": METADATA,
    "choice": CHOICE,
}


def table() -> list[tuple[str, str, str, str]]:
    """All limits in the order of this file: what, the most with its unit, status, field or
    option.
    """
    found = [each for each in globals().values() if isinstance(each, Limit)]
    return [
        (each.what, amount(each), str(each.status or "closed"), each.option or each.field)
        for each in found
    ]


def amount(limit: Limit) -> str:
    """The number as people write it."""
    if limit.unit in ("bytes", "characters") and limit.most >= KIB and limit.most % KIB == 0:
        size = limit.most
        return f"{size / MIB:g} MiB" if size % MIB == 0 else f"{size / KIB:g} KiB"
    return (
        f"{limit.most:,g} {limit.unit}" if limit.most < 1e6 else f"{int(limit.most):,} {limit.unit}"
    )
