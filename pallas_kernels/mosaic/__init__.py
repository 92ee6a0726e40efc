"""What the kernels need below Pallas: PTX, vectors of rows, barriers, reductions, workspaces. It knows no operation."""
