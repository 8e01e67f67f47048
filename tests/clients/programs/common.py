"""What every program of a library shares: its arguments and its prompts."""

import sys
from typing import Literal

from pydantic import BaseModel

URL, API, KIND = sys.argv[1:4]  # of the server, without /v1
V1 = f"{URL}/v1"
MODEL = "demo"
PROMPT = "Say hi."
LONG = "word " * 6000


class City(BaseModel):
    """An answer with one possible content: the model's own choice would be endless."""

    name: Literal["Graz", "Linz"]
    size: Literal[1, 2]


def do(**kinds) -> None:
    """Run what this program has for the kind that was asked for."""
    kinds[KIND]()
