"""Of all tests."""

import signal

import pytest

pytest.register_assert_rewrite("step_promises")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # So in a shell's background job. The processes that tests start would inherit it, and Ctrl-C is one of the promises.
    signal.signal(signal.SIGINT, signal.default_int_handler)
