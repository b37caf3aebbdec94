"""One thread per rank, loopback only, and a small hypothesis profile; ``HYPOTHESIS_PROFILE=deep`` for the large one."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

from hypothesis import HealthCheck, settings

_COMMON = {"deadline": None, "print_blob": True, "suppress_health_check": list(HealthCheck)}
settings.register_profile("ci", max_examples=25, derandomize=True, **_COMMON)
settings.register_profile("deep", max_examples=1000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
