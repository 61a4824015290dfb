"""Every test process runs on one thread: models this small gain nothing from more, and several processes share the cores."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the processes that tests start


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: tests also wait, for the processes they start and for servers that are slow on purpose."""
    return (os.cpu_count() or 1) + 1
