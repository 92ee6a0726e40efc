"""What differs between the versions of JAX that are supported."""

import functools
import importlib.util
import pathlib

import jax

# From this version on, JAX links kernels by nvJitLink if it finds it, which `jax[cuda13]` installs, and ptxas then
# ignores `setmaxnreg`: it warns of it as C7504. The extra `gpu` of this package stays below this version.
REGISTERS_LOST_SINCE = (0, 12)

_LIBRARY = "libnvJitLink.so"


def nvjitlink(packages: str = "nvidia") -> pathlib.Path | None:
    """NVIDIA's linker, where a package of that name has brought it along."""
    found = importlib.util.find_spec(packages)
    places = [] if found is None else found.submodule_search_locations or []
    return next((path for place in places for path in sorted(pathlib.Path(place).glob(f"*/lib/{_LIBRARY}*"))), None)


@functools.cache
def lost_registers() -> str | None:
    """Why kernels whose warpgroups share out registers are compiled without those here, and what to do about it."""
    library = nvjitlink()
    if jax.__version_info__ < REGISTERS_LOST_SINCE or library is None:
        return None
    return (
        f"JAX {jax.__version__} compiles attention kernels with too few registers where it finds {library}: they are "
        "right but slow. Use JAX 0.11.2 for their full speed."
    )
