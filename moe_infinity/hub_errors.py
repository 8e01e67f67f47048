"""The errors of huggingface_hub, in words that say what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # of httpx, or of httpx2 since huggingface_hub 2
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from moe_infinity.errors import ConfigError, DownloadError, MoEInfinityError

GOES_ON = "the same command goes on with what was downloaded"
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def explained(
    model: str, cache: Path, *, revision: str | None = None, hint: str = GOES_ON
) -> Iterator[None]:
    """Raises ConfigError for what is no id, DownloadError for all that goes wrong with a hub, the
    network or the disk. `hint` is for what may go well another time.
    """
    try:
        yield
    except MoEInfinityError:
        raise
    except HFValidationError as error:
        raise ConfigError(
            f"{model!r} is no id of a model, such as Qwen/Qwen3-30B-A3B: {error}"
        ) from error
    except (HTTPError, OSError) as error:
        raise DownloadError(
            f"{model}: {_explanation(error, model, cache, revision, hint)}"
        ) from error


def _explanation(error: Exception, model: str, cache: Path, revision: str | None, hint: str) -> str:
    hub = constants.ENDPOINT
    match error:
        case OfflineModeIsEnabled():
            return (
                "is not on this machine, and HF_HUB_OFFLINE is set\n"
                "hint: unset it, or copy the model's folder from another machine"
            )
        case GatedRepoError():
            return (
                "its owners give it to those who accept their terms\n"
                f"hint: accept them at {hub}/{model}, then `hf auth login`, or set HF_TOKEN"
            )
        case RevisionNotFoundError():
            return f"has no revision {revision}\nhint: {hub}/{model}/tree/main lists them"
        case RepositoryNotFoundError():
            return _not_found(hub)
        case HfHubHTTPError():
            status = error.response.status_code
            return (
                _not_found(hub)
                if status in (401, 403)
                else f"{hub} answered {status}\nhint: {hint}"
            )
        case HTTPError() | LocalEntryNotFoundError():
            return f"no answer from {hub}: {error}\nhint: check the network; {hint}"
        case OSError() if error.errno in FULL:
            return f"{cache}: the disk is full\nhint: make room; {hint}"
        case OSError() if error.errno in NOT_WRITABLE:
            return (
                f"{error.filename or cache} cannot be written: {error.strerror}\n"
                "hint: set HF_HUB_CACHE to a folder of yours"
            )
    return f"{error}\nhint: {hint}"


def _not_found(hub: str) -> str:
    return (
        f"{hub} has no such model, or not for you\n"
        "hint: check the spelling; for a private one `hf auth login`, or set HF_TOKEN"
    )
