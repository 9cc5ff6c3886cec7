from __future__ import annotations
from typing import Literal
from pydantic import Field
from meshtune.config.section import Section
class FunctionReward(Section):
    kind: Literal["function"] = "function"
    function: str
    weight: float = 1.0
RewardSection = FunctionReward
