"""The examples run as a reader would run them; those that set up JAX have a process of their own."""

import contextlib
import functools
import itertools
import os
import re
import runpy
import subprocess
import sys
import tarfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxsoftmax

ROOT = Path(__file__).parent.parent
TINY = {
    "char_model.py": ["--steps", "20", "--sample", "8"],
    "digits_vit.py": ["--steps", "80"],
    "generate.py": ["--steps", "8", "--tokens", "24", "--pages", "9", "--compare"],
    "long_context.py": ["--steps", "6", "--length", "64"],
}

# By tests of their own.
READ_CLOSELY = {"char_model.py", "generate.py", "packed_gpt.py", "vocabulary_sharded_loss.py"}


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs an example as `python` does, and returns what it prints."""

    def run(example):
        path, flags = ROOT / "examples" / example, TINY.get(example, [])
        if "jax.config.update" in path.read_text():
            command = [sys.executable, str(path), *flags]
            done = subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout
        monkeypatch.setattr(sys, "argv", [example, *flags])
        monkeypatch.syspath_prepend(path.parent)
        status = 0
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            status = end.code
        printed = capsys.readouterr().out
        assert not status, printed
        return printed

    return run


@pytest.mark.slow
def test_the_source_distribution_runs_the_demo(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / sdist.name.removesuffix(".tar.gz")
    # What `make test` needs beside the sources.
    for needed in (".ci/run", ".ci/venv", "benchmarks/results", "tests/test_examples.py"):
        assert (folder / needed).exists(), needed
    # In the place of an environment that takes minutes, the one that this test runs in.
    python = folder / ".venv-new" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (folder / ".venv-new" / "ready").touch()
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(folder)}
    command = ["make", "demo", "DEMO=--steps 3 --sample 4"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ".ci/venv" not in done.stdout
    assert "The loss fell; the curves agree." in done.stdout


@pytest.mark.parametrize("example", sorted({path.name for path in (ROOT / "examples").glob("*.py")} - READ_CLOSELY))
def test_example_runs(example, run):
    assert run(example)


def test_demo_compares_three_attentions(run):
    printed = run("char_model.py")
    rows = re.findall(r"^(flash|softmax|jax\.nn)(?: +[\d.]+){4} +([\d.e+-]+)$", printed, re.MULTILINE)
    assert [name for name, _ in rows] == ["flash", "softmax", "jax.nn"], printed
    assert all(float(gap) < 1e-3 for _, gap in rows)
    assert "The loss fell; the curves agree." in printed


@pytest.mark.parametrize(
    "last, gap, verdict",
    [(2.0, 0.0, "The loss fell; the curves agree."), (4.9, 0.0, "DID NOT FALL"), (2.0, 0.1, "DISAGREE")],
)
def test_demo_fails_unless_losses_fall_and_agree(monkeypatch, capsys, last, gap, verdict):
    demo = runpy.run_path(str(ROOT / "examples" / "char_model.py"))["main"].__globals__
    gaps = itertools.chain([gap], itertools.repeat(0.0))
    train = lambda *_: demo["Run"](None, np.linspace(5.0, last, 40) + next(gaps), last, 1e-3)
    monkeypatch.setitem(demo, "train", train)
    monkeypatch.setitem(demo, "write", lambda *_: "")
    monkeypatch.setattr(sys, "argv", ["char_model.py"])
    assert demo["main"]() == (verdict != "The loss fell; the curves agree.")
    assert verdict in capsys.readouterr().out


def test_demo_compares_speeds(capsys):
    """What the demo does last on a GPU, small; only cuDNN may be missing."""
    runpy.run_path(str(ROOT / "examples" / "char_model.py"))["compare_speeds"]((4, 16), (1, 8, 2, 64))
    printed = capsys.readouterr().out
    for name in ("jaxsoftmax", r"jax\.nn"):
        assert len(re.findall(rf"^  {name} +[\d.]+ us$", printed, re.MULTILINE)) == 2, printed
    assert len(re.findall(r"^  jax\.nn cuDNN", printed, re.MULTILINE)) == 1, printed


def test_every_attention_and_loss_of_the_gpt_train_it_alike(monkeypatch):
    """A vocabulary that the flag gives, of which the files have few tokens, and a last token that does not count."""
    gpt = runpy.run_path(str(ROOT / "examples" / "packed_gpt.py"))["main"].__globals__
    runs, train = [], gpt["train"]
    monkeypatch.setitem(gpt, "train", lambda *options: runs.append(train(*options)) or runs[-1])
    options = ["--vocabulary", "1000", "--steps", "12", "--length", "32", "--rows", "2"]
    monkeypatch.setattr(sys, "argv", ["packed_gpt.py", *options])
    assert gpt["main"]() == 0
    mine, theirs = runs
    np.testing.assert_allclose(mine.losses, theirs.losses, rtol=1e-5)
    assert mine.losses[-1] < mine.losses[0]
    assert mine.parameters == theirs.parameters == sum(x.size for x in jax.tree.leaves(nnx.state(mine.model)))


@pytest.mark.parametrize("loss", ["ours", "optax"])
def test_the_gpt_trains_once_with_a_loss_that_is_asked_for(monkeypatch, capsys, loss):
    gpt = runpy.run_path(str(ROOT / "examples" / "packed_gpt.py"))["main"].__globals__
    asked = []

    def train(attend, size, *_):
        asked.append((attend, size.vocabulary, _[-1]))
        return gpt["Run"](None, np.linspace(5.0, 4.0, 40), 1e3, 1.0)

    monkeypatch.setitem(gpt, "train", train)
    monkeypatch.setattr(gpt["Run"], "parameters", 123_400_000)
    monkeypatch.setattr(sys, "argv", ["packed_gpt.py", "--loss", loss, "--vocabulary", "1000"])
    assert gpt["main"]() == 0
    assert asked == [(gpt["ours"], 1000, gpt["LOSSES"][loss])]
    printed = capsys.readouterr().out
    assert f"loss {loss} " in printed
    assert "123.4 million parameters, peak memory of the process: nan GB" in printed


def test_the_policy_compares_log_probabilities_with_whole_logits(monkeypatch):
    policy_gradient = runpy.run_path(str(ROOT / "examples" / "rl_logprobs.py"))
    names = policy_gradient["check"].__globals__
    policy = policy_gradient["new_policy"](jax.random.key(0))
    texts = policy_gradient["sample"](policy, jax.random.key(1))
    right = policy_gradient["log_probs"]
    wrong = {
        "temperature": lambda hidden, *rest: right(1.01 * hidden, *rest),
        "entropy": lambda *x: (right(*x)[0], jax.lax.stop_gradient(right(*x)[1])),
    }
    for fault, log_probs in wrong.items():
        log_probs.__name__ = fault
        monkeypatch.setitem(names, "log_probs", log_probs)
        with pytest.raises(AssertionError):
            policy_gradient["check"](policy, texts)


def test_generation_gives_the_same_texts_with_every_cache(run):
    printed = run("generate.py")
    names = ["no cache", "contiguous cache", "contiguous cache, jax.nn", "pages"]
    speeds = re.findall(rf"^({'|'.join(names)}) +(\d+) +\d+$", printed, re.MULTILINE)
    assert [name for name, _ in speeds] == names, printed
    assert all(int(speed) > 0 for _, speed in speeds)
    assert "The 12 texts are the same in 4 ways, and all 9 pages are free again." in printed


@pytest.mark.parametrize(
    "text, free, complaint",
    [([7, 8], [1, 0], None), ([7, 9], [1, 0], "The texts differ: no cache, pages"), ([7, 8], [1], "Of 2 pages")],
)
def test_generation_fails_unless_texts_agree_and_pages_are_free(monkeypatch, text, free, complaint):
    monkeypatch.syspath_prepend(ROOT / "examples")
    check = runpy.run_path(str(ROOT / "examples" / "generate.py"))["check"]
    with pytest.raises(SystemExit, match=complaint) if complaint else contextlib.nullcontext():
        check({"no cache": [[7, 8]], "pages": [text]}, free, 2)


def test_no_program_of_the_vocabulary_example_gathers_logits(run):
    printed = run("vocabulary_sharded_loss.py")
    rows = re.findall(r"^(uncut|by hand|by jit) +loss ([\d.]+)(?:.* collectives (.*))?$", printed, re.MULTILINE)
    assert [name for name, _, _ in rows] == ["uncut", "by hand", "by jit"], printed
    assert len({loss for _, loss, _ in rows}) == 1
    assert rows[1][2] == "[('all-reduce', 576)]"
    assert re.fullmatch(r"\[(\('all-reduce', \d+\)(, )?)+\]", rows[2][2])


def test_the_vocabulary_example_sees_a_gather_where_there_is_one():
    collectives = runpy.run_path(str(ROOT / "examples" / "vocabulary_sharded_loss.py"))["collectives"]
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    gathers = jax.shard_map(lambda x: jax.lax.all_gather(x, "d"), mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    assert collectives(gathers, jnp.ones(64)) == [("all-gather", 64)]


def example(name):
    return runpy.run_path(str(ROOT / "examples" / name))


@pytest.mark.parametrize("counts", [[], [False], [False, False], [True]])
@pytest.mark.parametrize("name", ["ours", "optax"])
def test_losses_of_the_gpt_at_their_edges(name, counts):
    """No token, one, and none that counts: the mean of nothing is 0, and so is its gradient."""
    head = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    counts = jnp.array(counts, bool)
    labels, hidden = jnp.zeros(counts.shape, jnp.int32), jnp.ones((*counts.shape, 4))
    loss = example("packed_gpt.py")["LOSSES"][name]
    value, gradient = jax.value_and_grad(loss)(hidden, head, labels, counts)
    assert gradient.shape == hidden.shape
    assert (value > 0 and np.isfinite(value)) if counts.any() else value == 0 and not gradient.any()


@pytest.mark.parametrize("rows", [0, 1])
def test_losses_of_a_sharded_vocabulary_at_their_edges(rows):
    """No row, and one of which some devices, and all but one, have hidden columns only."""
    names = example("vocabulary_sharded_loss.py")
    mesh = jax.make_mesh((8,), ("vocabulary",), axis_types=(jax.sharding.AxisType.Auto,))
    by_hand = jax.shard_map(names["loss_by_hand"], mesh=mesh, in_specs=(names["CUT"], P()), out_specs=P())
    # By itself each operation of a `shard_map` is a program. XLA does not compile the map of an empty array as one.
    compiled = jax.jit if rows else lambda f: f
    programs = [compiled(jax.value_and_grad(loss)) for loss in (by_hand, names["loss"])]
    for hidden in (0, 9, 15) if rows else (0,):
        logits = jnp.where(jnp.arange(16) < hidden, -jnp.inf, jnp.linspace(-1, 1, 16)) * jnp.ones((rows, 1))
        found = [program(logits, jnp.full(rows, 15)) for program in programs]
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), *found)
        assert np.isfinite(found[0][0])


def test_states_of_pieces_at_their_edges():
    state = example("merge_split_rows.py")["state"]
    pieces = jnp.ones((2, 0)), jnp.full((2, 3), -jnp.inf), jnp.ones((2, 1))
    empty, whole = jaxsoftmax.merge(*map(state, pieces[:2])), jaxsoftmax.merge(*map(state, pieces))
    np.testing.assert_array_equal(jaxsoftmax.log_normalizer(empty), -np.inf)
    np.testing.assert_allclose(jaxsoftmax.log_normalizer(whole), 1.0)


def test_log_probabilities_at_their_edges():
    """Of no text, of one token, and in a vocabulary of one."""
    log_probs = example("rl_logprobs.py")["log_probs"]
    for texts, length, columns in ((0, 4, 5), (2, 0, 5), (1, 1, 1)):
        found = log_probs(jnp.ones((texts, length, 3)), jnp.ones((3, columns)), jnp.zeros((texts, length), int))
        for x in found:
            np.testing.assert_array_equal(x, np.zeros((texts, length)))
