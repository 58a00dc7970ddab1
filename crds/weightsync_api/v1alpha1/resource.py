"""The WeightSync resource as a whole: metadata, spec and status."""

from __future__ import annotations

import re
from typing import ClassVar, Literal

from pydantic import ConfigDict, Field
from pydantic.alias_generators import to_camel

from ..base import ApiModel, Rule
from .spec import WeightSyncSpec
from .status import WeightSyncStatus

GROUP = "weightsync.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "WeightSync"
PLURAL = "weightsyncs"


NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
MAX_NAME = 63


class Metadata(ApiModel):
    """The part of ObjectMeta that WeightSync reads; the rest is kept as it is."""

    model_config: ClassVar[ConfigDict] = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="allow")

    name: str = Field(description="Name, a DNS label: pods, Services and their host names are derived from it.")
    namespace: str = Field(default="default", description="Namespace.")
    uid: str = Field(default="", description="Unique identifier that the API server gave.")
    generation: int = Field(default=0, description="Counts the changes of the spec.")
    labels: dict[str, str] = Field(default_factory=dict, description="Labels.")
    annotations: dict[str, str] = Field(default_factory=dict, description="Annotations.")


class WeightSync(ApiModel):
    """One sender, its receivers, and what each step between them cost."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            f"must be at most {MAX_NAME} lowercase letters, digits and hyphens, beginning with a letter and ending "
            "with a letter or digit: pods and Services are named after it",
            f"self.metadata.name.size() <= {MAX_NAME} && self.metadata.name.matches(r'{NAME_PATTERN}')",
            lambda ws: len(ws.metadata.name) <= MAX_NAME and re.fullmatch(NAME_PATTERN, ws.metadata.name) is not None,
            field="metadata.name",
        ),
    )

    api_version: Literal["weightsync.dev/v1alpha1"] = Field(description="weightsync.dev/v1alpha1")
    kind: Literal["WeightSync"] = Field(description="WeightSync")
    metadata: Metadata = Field(description="Object metadata.")
    spec: WeightSyncSpec = Field(description="What should be.")
    status: WeightSyncStatus | None = Field(default=None, description="What is; written by the operator.")
