"""What holds for all tests."""

import signal


def pytest_configure() -> None:
    """Whatever started pytest may ignore signals (nohup, a job in the background); what the tests start must not."""
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
