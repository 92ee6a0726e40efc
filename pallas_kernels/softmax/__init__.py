"""The softmax ladder: one file per algorithm, in the order in which each improves on the one before."""

LADDER = {}
