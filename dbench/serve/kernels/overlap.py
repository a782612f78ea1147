"""Kernels that start while the one before them ends: programmatic dependent launch, from compute capability 9.0 on.

A kernel launched with `overlap_options` is set up early, then waits until everything queued before it is done and
seen; without it, a gap of about a microsecond lies between any two kernels, and a decode step has hundreds.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

FIRST_CAPABILITY = (9, 0)


@triton.jit
def wait_for_kernels_before(OVERLAPS: tl.constexpr):
    """First of all in a kernel launched with `overlap_options`: nothing of earlier kernels may be read before."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@cache
def overlap_options(device: torch.device) -> dict[str, bool]:
    """Keyword arguments of a launch: the kernel's OVERLAPS, and the option of Triton that goes with it."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY:
        return {"OVERLAPS": True, "launch_pdl": True}
    return {"OVERLAPS": False}
