"""The benchmark binary: `python -m benchmarks`. Correctness first, then device time beside the same run's copy."""

import importlib.util

if importlib.util.find_spec("absl") is None:
    raise ModuleNotFoundError(
        "benchmarks: absl is not installed, and it reads the flags. Run pip install 'jaxsoftmax[bench]', or in a "
        "checkout pip install '.[bench]'.",
        name="absl",
    )
