"""Of all tests."""

import pytest

pytest.register_assert_rewrite("step_promises")
