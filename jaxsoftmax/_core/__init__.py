"""All operations share this: checks of arguments, the batch-invariant context, lowering and sharding."""
