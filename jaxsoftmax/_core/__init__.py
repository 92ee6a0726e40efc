"""What all operations share: checks of arguments, the batch-invariant context, lowering and sharding."""
