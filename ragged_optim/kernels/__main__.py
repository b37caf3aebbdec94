"""``python -m ragged_optim.kernels``: build the kernels ahead of their first use."""

from ragged_optim.kernels.compile import KERNELS, build

for name in KERNELS:
    print(f"{name}: {build(name) or 'not built (no C++ compiler); the eager code will be used'}")
