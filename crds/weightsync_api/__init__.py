"""The contract that operator and agent share: pydantic models only.

Neither torch nor a Kubernetes client is imported here, so that either side can use it.
"""
