"""Warnings of PEFT that tests with its adapters pass over."""

from __future__ import annotations

import pytest

IGNORED = [
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:peft"),
    # peft asks for names that transformers 5.24 deprecates
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]
