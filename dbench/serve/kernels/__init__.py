"""Triton kernels of the CUDA path; importing one of its modules needs triton, which CUDA builds of torch bring.

A kernel takes every pointer, stride and size by itself, since Triton knows no records; the functions that launch
kernels take records.
"""
