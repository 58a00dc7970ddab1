"""The WeightSync resource as a whole: metadata, spec and status."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import ConfigDict, Field
from pydantic.alias_generators import to_camel

from ..base import ApiModel
from .spec import WeightSyncSpec
from .status import WeightSyncStatus

GROUP = "weightsync.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "WeightSync"
PLURAL = "weightsyncs"


class Metadata(ApiModel):
    """The part of ObjectMeta that WeightSync reads; the rest is kept as it is."""

    model_config: ClassVar[ConfigDict] = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="allow")

    name: str = Field(max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", description="Name (a DNS label).")
    namespace: str = Field(default="default", description="Namespace.")
    uid: str = Field(default="", description="Unique identifier that the API server gave.")
    generation: int = Field(default=0, description="Counts the changes of the spec.")


class WeightSync(ApiModel):
    """One sender, its receivers, and what each step between them cost."""

    api_version: Literal["weightsync.dev/v1alpha1"] = Field(description="weightsync.dev/v1alpha1")
    kind: Literal["WeightSync"] = Field(description="WeightSync")
    metadata: Metadata = Field(description="Object metadata.")
    spec: WeightSyncSpec = Field(description="What should be.")
    status: WeightSyncStatus | None = Field(default=None, description="What is; written by the operator.")
