"""Whether a source can be read: `python -m weightsync_agent.sources.check SOURCE`, spec.sender.source as JSON.

Exit code 0: it can; 2: one sentence on stderr says why not. Nothing is allocated and no weight is read.
"""

from __future__ import annotations

import sys

from weightsync_api.v1alpha1.spec import Source as SourceSpec

from ..errors import WeightSyncError
from . import open_source


def main() -> int:
    try:
        open_source(SourceSpec.model_validate_json(sys.argv[1]))
    except WeightSyncError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
