"""Every test process runs on one thread: models this small gain nothing from more, and several processes share the cores."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the processes that tests start
