"""Of the unit tests: what Hypothesis finds depends on the code, and on no clock."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A machine that stalls for a second while an example is made is no slow strategy. Read by every `settings` of a test.
settings.register_profile("no clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no clock")
