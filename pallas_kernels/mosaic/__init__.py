"""Helpers below Pallas: PTX, vectors of rows, barriers, reductions, workspaces. They know no operation."""
