"""What the bench's processes tell one another, a JSON object a line."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field
from weightsync_api.agent_config import AgentConfig


class ReceiverTask(BaseModel):
    """What a receiver's process is to do; its argument."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: AgentConfig
    rank: int = Field(ge=1)
    model: str
    device: str = Field(description="torch's name of the device that its weights are on.")
    threads: int = Field(ge=1, description="Threads that torch may use on CPUs.")


class ReceiverReady(BaseModel):
    """The receiver's weights are there, every page touched. It says so once, on stdout."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    reserved_bytes: int = Field(description="Its reserved memory with the weights and nothing else.")
