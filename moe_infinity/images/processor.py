"""transformers' processor of a checkpoint: it makes tokens and tensors of texts with images."""

from __future__ import annotations

import inspect
from typing import Any

import transformers
from transformers import ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.utils import is_torchvision_available

from moe_infinity.checkpoint.file_names import find_gguf
from moe_infinity.errors import CheckpointError, ConfigError
from moe_infinity.images.pictures import INSTALL
from moe_infinity.printable import printable

VIDEOS = "video_processor"


def takes_images(model: Any) -> bool:
    """Return True if a model's forward pass takes pixels."""
    return "pixel_values" in inspect.signature(model.forward).parameters


def load_processor(
    model: Any, checkpoint: str, *, config_from: str | None, trust_remote_code: bool
) -> Any:
    """The processor that transformers makes of a folder or hub id; None for a model that takes no
    images, and beside a GGUF file. Raises ConfigError where a package that it needs is missing, and
    CheckpointError.
    """
    folder = config_from or checkpoint
    if not takes_images(model) or find_gguf(folder) is not None:
        return None
    _require_pillow()
    try:
        if is_torchvision_available():
            return transformers.AutoProcessor.from_pretrained(
                folder, trust_remote_code=trust_remote_code
            )
        kind = without_videos(_class_for(model.config.model_type))
        return kind.from_pretrained(folder)
    except Exception as error:  # of any kind: values of its files go wherever they are used
        message = printable(f"{type(error).__name__}: {error}", 2000)
        if "torchvision" in message or isinstance(error, ImportError):
            hint = "\nhint: pip install torchvision, of the version that fits your torch"
            raise ConfigError(f"the processor of {checkpoint} needs torchvision{hint}") from error
        raise CheckpointError(f"{checkpoint}: no usable processor: {message}") from error


class NoVideos(ProcessorMixin):  # type: ignore[misc]
    """Stands between a processor class and its base, so that it has no part for videos: that part
    wants torchvision, whatever a prompt has.
    """

    def __init__(self, *args: Any, video_processor: None = None, **kwargs: Any) -> None:
        super().__init__(*(part for part in args if part is not None), **kwargs)

    @classmethod
    def get_attributes(cls) -> list[str]:
        """Names of its parts."""
        return [name for name in super().get_attributes() if name != VIDEOS]

    @classmethod
    def from_args_and_dict(cls, args: list[Any], *others: Any, **kwargs: Any) -> Any:
        """Make it of its parts, in the order in which the class takes them."""
        names = super().get_attributes()
        if VIDEOS in names:
            args.insert(names.index(VIDEOS), None)
        return super().from_args_and_dict(args, *others, **kwargs)


def without_videos(kind: Any) -> Any:
    """Return a processor class without its part for videos."""
    return type(kind.__name__, (kind, NoVideos), {})


def _require_pillow() -> None:
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise ConfigError(INSTALL) from error


def _class_for(model_type: str) -> Any:
    """The processor class for a type of model. Raises CheckpointError."""
    found = getattr(transformers, PROCESSOR_MAPPING_NAMES.get(model_type) or "", None)
    if found is None:
        raise CheckpointError(f"transformers knows no processor for a {model_type}")
    return found
