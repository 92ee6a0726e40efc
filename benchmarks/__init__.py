"""The benchmark binary: `python -m benchmarks`. Correctness first, then device time beside the same run's copy."""
