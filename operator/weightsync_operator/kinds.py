"""The kinds of objects that the operator reads or writes, and where the API server has each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from weightsync_api.v1alpha1 import API_VERSION, KIND, PLURAL

CONFIG_MAP, SECRET, SERVICE = "ConfigMap", "Secret", "Service"
STATEFUL_SET, NETWORK_POLICY, DISRUPTION_BUDGET = "StatefulSet", "NetworkPolicy", "PodDisruptionBudget"
POD, EVENT, LEASE = "Pod", "Event", "Lease"


class Place(NamedTuple):
    """Where the API server has a kind."""

    api_version: str
    """VERSION of the core group, or GROUP/VERSION."""
    plural: str

    @property
    def group(self) -> str:
        """Empty: the core group."""
        return self.api_version.rpartition("/")[0]

    @property
    def version(self) -> str:
        return self.api_version.rpartition("/")[2]


PLACES: Mapping[str, Place] = {
    KIND: Place(API_VERSION, PLURAL),
    POD: Place("v1", "pods"),
    CONFIG_MAP: Place("v1", "configmaps"),
    SECRET: Place("v1", "secrets"),
    SERVICE: Place("v1", "services"),
    STATEFUL_SET: Place("apps/v1", "statefulsets"),
    NETWORK_POLICY: Place("networking.k8s.io/v1", "networkpolicies"),
    DISRUPTION_BUDGET: Place("policy/v1", "poddisruptionbudgets"),
    EVENT: Place("v1", "events"),
    LEASE: Place("coordination.k8s.io/v1", "leases"),
}

WATCHED = (KIND, POD, CONFIG_MAP, SECRET, SERVICE, STATEFUL_SET, NETWORK_POLICY, DISRUPTION_BUDGET)
"""All but WeightSyncs by the label weightsync.dev/name only, on the server's side."""
