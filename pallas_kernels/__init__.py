"""Softmax kernels for Hopper GPUs in Pallas Mosaic GPU, over plain `[rows, cols]` arrays."""
