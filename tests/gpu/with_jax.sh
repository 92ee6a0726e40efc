#!/bin/sh
# Runs a command with a version of JAX, which is the machine's own or is installed from parts that were brought along.
# Usage: [PARTS=FOLDER] [JAX=FOLDER] tests/gpu/with_jax.sh VERSION COMMAND...
#   PARTS: where ../shared/tools/newest_jax.sh has left .jax_aa, .jax_ab, ...; default: the root of the tree
#   JAX: where the packages are installed, once; default: /tmp/jax_VERSION
# Fails, and runs nothing, if python3 would import another version, or a plugin for CUDA of another version.
set -eu
cd "$(dirname "$0")/../.."
version=${1:?which version}
shift
parts=${PARTS:-.}
folder=${JAX:-/tmp/jax_$version}
own=$(python3 -c 'import importlib.metadata; print(importlib.metadata.version("jax"))' || true)
if [ "$own" != "$version" ]; then
  if [ ! -d "$folder" ]; then
    wheels=$(mktemp -d)
    cat "$parts"/.jax_??/part.?? | tar xf - -C "$wheels"
    python3 -m pip install -q --no-index --no-deps --no-compile --target "$folder.partial" "$wheels"/*.whl >&2
    mv "$folder.partial" "$folder"
    rm -r "$wheels"
  fi
  export PYTHONPATH="$folder:$PWD${PYTHONPATH:+:$PYTHONPATH}"
fi
python3 - "$version" <<'EOF'
import importlib.metadata
import sys

import jax

found = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt")}
found["jax.__version__"] = jax.__version__
if set(found.values()) != {sys.argv[1]}:
    sys.exit(f"wanted JAX {sys.argv[1]}, got {found} from {jax.__file__}")
EOF
exec "$@"
