"""Triton kernels of the CUDA path; importing one of its modules needs triton, which CUDA builds of torch bring."""
