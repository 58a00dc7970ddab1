"""The one result format of every benchmark of the project, files under benchmarks/results included."""

from __future__ import annotations

import datetime

from pydantic import BaseModel, ConfigDict, Field


class BenchRow(BaseModel):
    """One measured case."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(description="Name of the case.")
    transport: str = Field(description="shm, gloo, ipc, nccl or mapped; a peer's own name for a peer.")
    mode: str = Field(description="Direct, Packed, or a peer's own mode.")
    model: str = Field(description="Model whose tensors were moved.")
    bytes: int = Field(description="Bytes of weights that each receiver got in one step.")
    tensors: int = Field(description="Number of tensors.")
    receivers: int = Field(description="Number of receivers.")
    milliseconds: float = Field(description="Median time of a whole step.")
    gigabytes_per_second: float = Field(description="bytes / median time, 10^9 bytes.")
    ratio_to_copy: float = Field(description="Rate over that of one copy of the same bytes in the same run.")
    reserved_growth_bytes: int = Field(description="Largest growth of reserved memory over the measured steps.")
    reserved_peak_bytes: int = Field(default=0, description="Largest peak over the model's own bytes on either side.")
    repeats: int = Field(default=0, description="Measured steps behind the median.")
    peer: str | None = Field(default=None, description="Project and version measured; null for WeightSync.")
    note: str = Field(default="", description="What a reader has to know, in a sentence.")


class BenchResult(BaseModel):
    """A run: where, with what, when, and its rows."""

    model_config = ConfigDict(extra="forbid")

    hardware: str = Field(description="Processor or GPU, and how many.")
    versions: dict[str, str] = Field(description="weightsync, python, torch, and what else was measured.")
    date: datetime.date = Field(description="Day of the run.")
    rows: list[BenchRow] = Field(description="One a measured case.")
