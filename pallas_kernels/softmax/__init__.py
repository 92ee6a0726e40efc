"""The softmax ladder: one file per algorithm, in the order in which each improves on the one before."""

from pallas_kernels.softmax import block, cluster, grid, naive, online, team, warp

LADDER = {module.RUNG.name: module.RUNG for module in (naive, warp, block, online, cluster, grid, team)}
