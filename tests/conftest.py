"""One thread per rank, loopback only, and a small hypothesis profile; ``HYPOTHESIS_PROFILE=deep`` for the large one."""

import os

# Whatever the environment says: sums of several threads have other bits than those of ranks, which have one each.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import pytest
from hypothesis import HealthCheck, settings

_COMMON = {"deadline": None, "print_blob": True, "suppress_health_check": list(HealthCheck)}
settings.register_profile("ci", max_examples=25, derandomize=True, **_COMMON)
settings.register_profile("deep", max_examples=1000, **_COMMON)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
settings.load_profile(PROFILE)


# Half a minute and more each: where several workers share the files out, these go first, so that all end together.
LONG = ("test_train.py", "test_notebooks.py", "test_planner_properties.py", "test_compile.py", "test_redistribute.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say why a test is skipped: ``gpu`` without a CUDA device, ``deep`` outside the deep profile."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
    reasons = {}
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            reasons["gpu"] = "needs a CUDA device, and torch.cuda.is_available() is False here"
    if PROFILE != "deep":
        reasons["deep"] = "long; `make test-deep` (HYPOTHESIS_PROFILE=deep) runs it"
    for item in items:
        for marker, reason in reasons.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
