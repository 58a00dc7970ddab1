"""`weightsync bench`: what a step costs, against one copy of the same bytes in the same run."""
