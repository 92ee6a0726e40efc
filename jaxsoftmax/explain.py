"""`python -m jaxsoftmax.explain MODULE:FUNCTION`: prints what the calls of this package in a program run.

The function takes no arguments and returns `(f, args)`; what is explained is `f(*args)`. Arrays among the arguments may
be `jax.ShapeDtypeStruct`s. Nothing but the function itself is run, and no GPU is needed.
"""

import argparse
import importlib
import sys

from jaxsoftmax._explain import explain
from pallas_kernels import hardware


def main() -> None:
    """Reads the command line and prints the explanation."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxsoftmax.explain", description=(__doc__ or "").partition("\n\n")[2]
    )
    parser.add_argument("program", metavar="MODULE:FUNCTION")
    parser.add_argument(
        "--device", choices=hardware.NAMED, help="the GPU to explain for; default: the one present, or H200"
    )
    parser.add_argument("--verbose", action="store_true", help="show the kernels' configurations")
    given = parser.parse_args()
    module, colon, name = given.program.partition(":")
    if not colon:
        parser.error(f"got {given.program!r}, wanted MODULE:FUNCTION, as train:step of a file train.py.")
    sys.path.insert(0, "")
    pair = getattr(importlib.import_module(module), name)()
    if not (isinstance(pair, tuple) and len(pair) == 2 and callable(pair[0]) and isinstance(pair[1], (tuple, list))):
        parser.error(f"{given.program} returns a {type(pair).__name__}, wanted a pair of a function and its arguments.")
    function, args = pair
    print(explain(function, device=given.device, verbose=given.verbose)(*args))


if __name__ == "__main__":
    main()
else:
    # The name is that of the function, which an import of this module would hide.
    sys.modules[__name__] = explain  # type: ignore[assignment]
