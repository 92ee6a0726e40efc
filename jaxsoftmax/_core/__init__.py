"""What all operations share: checks of arguments, lowering, sharding, and the batch-invariant context."""
