"""The training loop: AdamW (warm-up, plateau, linear decay), progress lines, checkpoints that resume exactly."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdllm.models.llada import Params
from jdllm.train.batches import Batch

SAVE_SECONDS = 60
DECAY = 0.35
"""Share of the steps in which the learning rate falls to a hundredth."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How long and how fast: batches (jdllm.train.batches.TOKENS), peak learning rate, warm-up batches."""

    steps: int
    peak: float
    warmup: int = 50


@dataclasses.dataclass
class Progress:
    """What a checkpoint says besides the arrays: how far training came and what it cost."""

    round: int = 0
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


def optimizer(schedule: Schedule) -> optax.GradientTransformation:
    """AdamW, weight decay on matrices only, gradients clipped to norm 1."""
    # A plateau instead of a cosine: the run up to the decay does not depend on how long it will be.
    decay = round(DECAY * schedule.steps)
    rate = optax.join_schedules(
        [
            optax.linear_schedule(0.0, schedule.peak, schedule.warmup),
            optax.constant_schedule(schedule.peak),
            optax.linear_schedule(schedule.peak, 0.01 * schedule.peak, decay),
        ],
        [schedule.warmup, schedule.steps - decay],
    )
    matrices: Callable[[Params], dict[str, bool]] = lambda params: {name: w.ndim == 2 for name, w in params.items()}
    adamw = optax.adamw(rate, b1=0.9, b2=0.98, weight_decay=0.01, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def fit(
    loss: Callable[[Params, dict[str, jax.Array]], jax.Array],
    trained: Params,
    rounds: Callable[[int], Iterator[list[Batch]]],
    schedule: Schedule,
    folder: Path,
    validate: Callable[[Params, Progress], str] = lambda params, progress: "",
    every: int = 250,
) -> Params:
    """Minimise ``loss(trained, batch)`` and return the trained weights. Each of JAX's devices takes a share of a batch.

    Args:
        rounds: from a round's number, the batches from there on (jdllm.train.batches.rounds).
        folder: checkpoints; one that is already there is continued.
        validate: called every ``every`` steps for a text to print.
    """
    tx = optimizer(schedule)
    opt_state, progress = tx.init(trained), Progress()
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "state.npz").exists():
        trained, opt_state, progress = _restore(folder, trained, opt_state)
    mesh = Mesh(np.array(jax.devices()), ("rows",))
    trained, opt_state = jax.device_put((trained, opt_state), NamedSharding(mesh, PartitionSpec()))

    @jax.jit
    def update(trained, opt_state, batch):
        value, gradients = jax.value_and_grad(loss)(trained, batch)
        updates, opt_state = tx.update(gradients, opt_state, trained)
        return optax.apply_updates(trained, updates), opt_state, value

    losses: list[jax.Array] = []  # read rarely, so that the host makes the next batches while the device works
    clock = saved = time.monotonic()
    stream = rounds(progress.round)
    while progress.step < schedule.steps:
        for batch in next(stream)[: schedule.steps - progress.step]:
            trained, opt_state, value = update(trained, opt_state, _spread(batch, mesh))
            losses.append(value)
            progress.step += 1
            progress.tokens += batch["noisy"].size
            if progress.step % 25 == 0:
                mean, losses = np.mean(losses), []
                spent = progress.seconds + time.monotonic() - clock
                print(
                    f"step {progress.step:5}/{schedule.steps}  loss {mean:.4f}  "
                    f"{progress.tokens / 1e6:.2f} M tokens  {spent:.0f} s",
                    flush=True,
                )
            if progress.step % every == 0 and (text := validate(trained, progress)):
                print(f"step {progress.step:5}  {text}", flush=True)
        progress.round += 1
        now = time.monotonic()
        if now - saved > SAVE_SECONDS or progress.step >= schedule.steps:
            progress.seconds, clock, saved = progress.seconds + now - clock, now, now
            _save(folder, trained, opt_state, progress)
    return trained


def _spread(batch: Batch, mesh: Mesh) -> dict[str, jax.Array]:
    """A batch's rows shared out over the devices, filled up with rows of weight 0 where they do not go round."""
    missing = -len(batch["weights"]) % mesh.size
    fill = {name: np.repeat(array[:1], missing, axis=0) for name, array in batch.items()}
    fill["weights"] = np.zeros_like(fill["weights"])
    full = {name: np.concatenate([array, fill[name]]) for name, array in batch.items()}
    return jax.device_put(full, NamedSharding(mesh, PartitionSpec("rows")))


def _save(folder: Path, trained: Params, opt_state: optax.OptState, progress: Progress) -> None:
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves((trained, opt_state))]
    # One file, renamed into place: weights, optimizer and progress never disagree after a kill.
    with open(folder / "state.tmp", "wb") as file:
        np.savez(file, *leaves, progress=np.array(json.dumps(dataclasses.asdict(progress))))
    (folder / "state.tmp").rename(folder / "state.npz")


def _restore(folder: Path, trained: Params, opt_state: optax.OptState) -> tuple[Params, optax.OptState, Progress]:
    old, structure = jax.tree.flatten((trained, opt_state))
    with np.load(folder / "state.npz") as arrays:
        leaves = [jnp.asarray(arrays[f"arr_{i}"]) for i in range(len(old))]
        progress = Progress(**json.loads(str(arrays["progress"])))
    trained, opt_state = jax.tree.unflatten(structure, leaves)
    return trained, opt_state, progress


def load(folder: Path, like: Params) -> tuple[Params, Progress]:
    """The weights of a checkpoint, without its optimizer."""
    with np.load(folder / "state.npz") as arrays:
        leaves = [jnp.asarray(arrays[f"arr_{i}"]) for i in range(len(like))]
        progress = Progress(**json.loads(str(arrays["progress"])))
    return jax.tree.unflatten(jax.tree.structure(like), leaves), progress
