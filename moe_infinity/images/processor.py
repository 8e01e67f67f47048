"""transformers' processor of a checkpoint: it makes tokens and tensors of texts with images."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import BatchFeature, ProcessorMixin
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.utils import is_torchvision_available

from moe_infinity.config import OffloadConfig
from moe_infinity.errors import CheckpointError, ConfigError
from moe_infinity.images.mmproj import Blind, Mmproj, find_mmproj, read_mmproj
from moe_infinity.images.pictures import INSTALL, MAX_PIXELS
from moe_infinity.loading.kind import load_tokenizer
from moe_infinity.printable import printable
from moe_infinity.untrusted.folder import check_processor

if TYPE_CHECKING:
    from PIL.Image import Image

VIDEOS = "video_processor"
OF_IMAGES = ("image_processor", "tokenizer")
EDGES = ("shortest_edge", "longest_edge")  # of images, in pixels


def takes_images(model: Any) -> bool:
    """Return True if a model's forward pass takes pixels."""
    is_blind = isinstance(model, Blind)
    return not is_blind and "pixel_values" in inspect.signature(model.forward).parameters


def load_processor(model: Any, checkpoint: str, config: OffloadConfig) -> Any:
    """The processor that transformers makes of a folder or hub id, or ours of a GGUF model's vision
    part; None for a model that takes no images. Raises ConfigError where a package that it needs is
    missing, and CheckpointError.
    """
    if not takes_images(model):
        return None
    _require_pillow()
    folder = config.config_from or checkpoint
    trust_remote_code = config.trust_remote_code
    try:
        mmproj = find_mmproj(checkpoint, config.mmproj)
        if mmproj is not None:
            tokenizer = load_tokenizer(
                checkpoint, config_from=config.config_from, trust_remote_code=trust_remote_code
            )
            return _of_mmproj(read_mmproj(mmproj), tokenizer)
        check_processor(folder)
        if is_torchvision_available():
            return transformers.AutoProcessor.from_pretrained(
                folder, trust_remote_code=trust_remote_code
            )
        kind = without(_class_for(model.config.model_type), (VIDEOS,))
        return kind.from_pretrained(folder)
    except Exception as error:  # of any kind: values of its files go wherever they are used
        message = printable(f"{type(error).__name__}: {error}", 2000)
        if "torchvision" in message or isinstance(error, ImportError):
            hint = "\nhint: pip install torchvision, of the version that fits your torch"
            raise ConfigError(f"the processor of {checkpoint} needs torchvision{hint}") from error
        raise CheckpointError(f"{checkpoint}: no usable processor: {message}") from error


def model_inputs(
    processor: Any, text: str, pictures: Sequence[Image], dtype: torch.dtype
) -> BatchFeature:
    """The inputs of a model of this dtype for a text with images. Processors make float32, or
    bfloat16 (Llama 4), and not every model casts what it gets (Aria, Kimi-K2.5), so transformers'
    own pipelines cast it.
    """
    made = processor(text=[text], images=[pictures], add_special_tokens=False, return_tensors="pt")
    return made.to(dtype=dtype)


def _of_mmproj(mmproj: Mmproj, tokenizer: Any) -> Any:
    """transformers' processor with the settings of a vision part, for images alone."""
    projector = mmproj.projector
    for name, token in projector.asked.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    kinds = IMAGE_PROCESSOR_MAPPING_NAMES[projector.model_type]
    backend = "torchvision" if is_torchvision_available() else "pil"
    settings = {**projector.fixed, **mmproj.fields(projector.settings, MAX_PIXELS)}
    sizes = {edge: settings.pop(edge) for edge in EDGES if edge in settings}
    images = getattr(transformers, kinds[backend])(**settings, **({"size": sizes} if sizes else {}))
    kind = _class_for(projector.model_type)
    others = tuple(name for name in kind.get_attributes() if name not in OF_IMAGES)
    return without(kind, others)(
        image_processor=images,
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
        **dict.fromkeys(others),
    )


class FewerParts(ProcessorMixin):  # type: ignore[misc]
    """Stands between a processor class and its base, so that it does without some parts: that for
    videos wants torchvision, whatever a prompt has.
    """

    left_out: tuple[str, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kept = {name: part for name, part in kwargs.items() if name not in self.left_out}
        super().__init__(*(part for part in args if part is not None), **kept)

    @classmethod
    def get_attributes(cls) -> list[str]:
        """Names of its parts."""
        return [name for name in super().get_attributes() if name not in cls.left_out]

    @classmethod
    def from_args_and_dict(cls, args: list[Any], *others: Any, **kwargs: Any) -> Any:
        """Make it of its parts, in the order in which the class takes them."""
        names = super().get_attributes()
        if VIDEOS in names:
            args.insert(names.index(VIDEOS), None)
        return super().from_args_and_dict(args, *others, **kwargs)


def without(kind: Any, parts: tuple[str, ...]) -> Any:
    """Return a processor class without these parts."""
    return type(kind.__name__, (kind, FewerParts), {"left_out": parts})


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
