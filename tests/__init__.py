"""Tests and benchmarks: nothing comes from the cache of plans, and Python looks less often for garbage in cycles than by
default, which takes a tenth of the time of planning small models."""

import gc
import os

gc.set_threshold(20_000, 20, 20)
os.environ["SBPC_CACHE"] = "0"  # so do the processes that tests start
