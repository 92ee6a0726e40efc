"""`python -m benchmarks.training`: the GPT of examples/packed_gpt.py at 100 million parameters, ours beside `jax.nn`.

Each variant trains in a process of its own, so that its peak of memory is its own: attention and cross entropy from
here, or `jax.nn`'s attention with the documents as a mask, by XLA or by cuDNN, and optax's cross entropy. All are
traced at once; then, one after the other, each has the GPU to itself: it compiles, takes a few steps to warm up and the
timed ones, by wall clock around all of them. All see the same tokens from the same parameters, so the losses must fall
and agree.

    python -m benchmarks.training --json=benchmarks/results/h200/models.json --commit=SHA
"""

import fcntl
import functools
import json
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

# The processes share the device's memory, and whichever trains may have nearly all of it.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from flax import nnx

from benchmarks import report
from benchmarks import results as measured
from benchmarks.results import NOT_MEASURED, Results

FLAGS = flags.FLAGS
VARIANTS = {"ours": "jaxsoftmax", "jax.nn": "`jax.nn`, XLA", "jax.nn cudnn": "`jax.nn`, cuDNN"}
# Of the model: width, heads, key heads, layers, vocabulary and dtype. Of a run: rows, tokens, steps to warm up, steps.
SIZES = {
    "tiny": ((64, 4, 2, 2, 256, jnp.float32), (2, 32, 2, 6)),
    "small": ((768, 12, 4, 12, 32000, jnp.bfloat16), (8, 4096, 5, 20)),
}
_ROOT = pathlib.Path(__file__).parents[1]
_AGREEMENT = 0.05  # nats between two loss curves, in bfloat16


def define_flags() -> None:
    flags.DEFINE_enum("size", "small", list(SIZES), "Size of the model.")
    flags.DEFINE_string("json", None, "Where to write results.")
    flags.DEFINE_string("commit", None, "The commit that is measured; default: ask git.")
    flags.DEFINE_enum("child", None, list(VARIANTS), "Train this variant, as the process that the binary starts.")
    flags.DEFINE_string("device", None, "Of such a process: the file that it locks while it has the device.")


def train(variant: str) -> dict[str, Any]:
    """Traces a variant's step, waits for the device, compiles and trains, and says what it took."""
    example = runpy.run_path(str(_ROOT / "examples" / "packed_gpt.py"))
    model, (rows, length, warm, steps) = SIZES[FLAGS.size]
    size = example["Size"](*model)
    attend = example["ours"] if variant == "ours" else example["theirs"]
    if variant == "jax.nn cudnn":
        attend = functools.partial(attend, by="cudnn")
    loss_of = example["loss_of"] if variant == "ours" else _loss_by_optax
    optimizer = optax.adamw(3e-4)
    make = lambda: example["GPT"](size, length, attend, nnx.Rngs(0))
    graph, abstract = nnx.split(nnx.eval_shape(make))

    @jax.jit
    def start() -> tuple[Any, Any]:
        parameters = nnx.state(make())
        return parameters, optimizer.init(parameters)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(parameters: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(lambda p: loss_of(nnx.merge(graph, p), batch))(parameters)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss

    source = example["batches"](length, rows, size.vocabulary)
    batches = [next(source) for _ in range(warm + steps)]
    first = start.lower()
    lowered = step.lower(*first.out_info, batches[0])
    fcntl.flock(os.open(FLAGS.device, os.O_RDWR), fcntl.LOCK_EX)  # until the end of the process
    began = time.perf_counter()
    begin, compiled = first.compile(), lowered.compile()
    seconds, memory = time.perf_counter() - began, compiled.memory_analysis()
    (parameters, state), losses = begin(), []
    for i, batch in enumerate(batches):
        if i == warm:
            jax.block_until_ready((parameters, losses))
            began = time.perf_counter()
        parameters, state, loss = compiled(parameters, state, batch)
        losses.append(loss)
    jax.block_until_ready((parameters, losses))
    step_s = (time.perf_counter() - began) / steps
    stats = jax.local_devices()[0].memory_stats() or {}
    return {
        "status": "ok",
        "tokens_per_s": round(rows * length / step_s),
        "step_ms": round(1e3 * step_s, 3),
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "temp_bytes": memory.temp_size_in_bytes if memory else None,
        "kernels": lowered.as_text().count("@mosaic_gpu"),
        "compile_s": round(seconds, 1),
        "parameters": sum(x.size for x in jax.tree.leaves(abstract)),
        "losses": [round(float(loss), 4) for loss in losses],
    }


def _loss_by_optax(model: Any, batch: Any) -> jax.Array:
    """The example's loss as without this library: float32 logits, and the mean over what counts."""
    logits = model(batch.tokens[:, :-1], batch.documents[:, :-1], batch.positions[:, :-1])
    counts = batch.documents[:, 1:] == batch.documents[:, :-1]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch.tokens[:, 1:])
    return jnp.where(counts, losses, 0).sum() / counts.sum()


def measure() -> dict[str, dict[str, Any]]:
    """Every variant in a process of its own: traced together, compiled and trained one after the other."""
    found = {}
    with tempfile.NamedTemporaryFile() as device:
        command = [sys.executable, "-m", "benchmarks.training", f"--size={FLAGS.size}", f"--device={device.name}"]
        start = lambda name: subprocess.Popen([*command, f"--child={name}"], stdout=subprocess.PIPE, cwd=_ROOT)
        for name, child in {name: start(name) for name in VARIANTS}.items():
            answer, _ = child.communicate()
            died = {"status": "failed", "reason": "the process died; its last words are above"}
            found[name] = json.loads(answer) if answer else died
            print(f"{name}: {json.dumps(found[name])}", flush=True)
    return found


def judged(impls: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """How far the loss curves are apart, and whether all fell and agree."""
    curves = [np.array(entry["losses"]) for entry in impls.values() if entry["status"] == "ok"]
    gap = float(np.max([np.abs(curve - curves[0]) for curve in curves])) if curves else float("nan")
    fell = [bool(curve[-3:].mean() < curve[0]) for curve in curves]
    return {"loss_gap": round(gap, 5), "right": bool(curves) and all(fell) and gap < _AGREEMENT}


def table(results: Results) -> str:
    """The newest run of each size and batch, for the documents."""
    records = results.records()
    if not records:
        return NOT_MEASURED
    rows = []
    for record in records:
        case, ours = record["case"], record["impls"]["ours"]
        for name, words in VARIANTS.items():
            entry = record["impls"].get(name, {"status": "-"})
            cells = [entry["status"], *["-"] * 5]
            if entry["status"] == "ok":
                times = f"{ours['tokens_per_s'] / entry['tokens_per_s']:.2f}" if ours["status"] == "ok" else "-"
                sizes = [f"{entry[key] / 1e9:.1f}" if entry[key] else "-" for key in ("peak_bytes", "temp_bytes")]
                cells = [str(entry["tokens_per_s"]), times, f"{entry['step_ms']:.1f}", *sizes]
                cells.append(f"{entry['losses'][-1]:.3f}")
            rows.append([f"{words}, {case['rows']} x {case['length']}", *cells, record["run"]["when"]])
    heads = ["GPT", "tokens/s", "x", "ms a step", "peak, GB", "temporary, GB", "last loss", "measured"]
    case = records[0]["case"]
    return report.markdown(heads, rows) + (
        f"\n\n{report.setting(records)}; "
        f"{case['parameters'] / 1e6:.0f} million parameters, {case['layers']} layers, heads {case['heads']}/"
        f"{case['key_heads']} of {case['head_dim']}, vocabulary {case['vocabulary']}, {case['dtype']}; rows x tokens, "
        f'the mean of {case["steps"]} steps by wall clock. "x" says how many times faster ours is. The loss curves are '
        f"at most {max(record['loss_gap'] for record in records):.3f} apart."
    )


def main(_: list[str]) -> None:
    if FLAGS.child:
        said, sys.stdout = sys.stdout, sys.stderr
        try:
            answer = train(FLAGS.child)
        except Exception as error:  # out of memory, or no cuDNN: part of the result
            answer = {"status": "failed", "reason": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        print(json.dumps(answer), file=said)
        return
    (width, heads, key_heads, layers, vocabulary, dtype), (rows, length, warm, steps) = SIZES[FLAGS.size]
    impls = measure()
    case = {"name": f"gpt_{FLAGS.size}_{rows}x{length}", "rows": rows, "length": length, "warm": warm, "steps": steps}
    case |= {"width": width, "heads": heads, "key_heads": key_heads, "head_dim": width // heads, "layers": layers}
    case |= {"vocabulary": vocabulary, "dtype": jnp.dtype(dtype).name}
    case["parameters"] = max(entry.get("parameters", 0) for entry in impls.values())
    found = {"case": case, "impls": impls, **judged(impls)}
    print(f"The losses are at most {found['loss_gap']} apart: {'right' if found['right'] else 'WRONG'}.")
    if FLAGS.json:
        header = measured.header(commit=FLAGS.commit, seed=0, rounds=1) | {"topic": "models"}
        measured.write(pathlib.Path(FLAGS.json), header, [found])
    sys.exit(0 if found["right"] and impls["ours"]["status"] == "ok" else 1)


if __name__ == "__main__":
    define_flags()
    app.run(main)
