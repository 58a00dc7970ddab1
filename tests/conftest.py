"""Of all tests."""

import signal

import pytest

pytest.register_assert_rewrite("step_promises")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # So in a background job of a shell. The processes that tests start would inherit it, and Ctrl-C is one promise.
    signal.signal(signal.SIGINT, signal.default_int_handler)
