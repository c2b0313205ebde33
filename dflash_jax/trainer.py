"""The training loop: data in, metrics, checkpoints and a drafter out."""

import json
import time
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from dflash_jax.checkpoint import Checkpoints
from dflash_jax.cli import INTERRUPTED
from dflash_jax.config import Config, to_json
from dflash_jax.data import training_data
from dflash_jax.distributed import from_main, initialize, is_main, on_host, say, wait_for_all
from dflash_jax.drafter import Drafter
from dflash_jax.errors import CheckpointError, DataError, NonFiniteLossError, named
from dflash_jax.features import Features, check_cache, layout_of, open_features
from dflash_jax.first_drafter import first_drafter, sample_batch
from dflash_jax.hf import load_text_target, save_drafter
from dflash_jax.metrics import MetricsWriter
from dflash_jax.optim import optimizer, schedule
from dflash_jax.preflight import Described, describe, identity, open_run
from dflash_jax.progress import (
    Pace,
    Profile,
    first_time_estimate,
    last_words,
    mean_share,
    measured_flops,
    memory_estimate,
    peak_flops,
    speed,
    step_cost,
    step_flops,
)
from dflash_jax.sharding import replicated_dimensions
from dflash_jax.stop import StopRequests
from dflash_jax.targets import DenseTarget
from dflash_jax.train_step import StepMetrics, TrainState, abstract_batch, init_state, make_train_step, place_batch
from dflash_jax.warm_start import tap_sizes

MEND = "lower optim.learning_rate or optim.clip_norm and start again in another train.run_dir; --resume would repeat it"


def fit(config: Config) -> int:
    """Train as configured; returns the exit status (130 after Ctrl-C, 143 after SIGTERM, with a checkpoint saved).

    The run folder then holds config.json (merged), metrics.jsonl, checkpoints/ and drafter/ (z-lab's layout). A config that cannot
    work is refused before any text is read.
    """
    initialize(config.distributed)
    with ExitStack() as held:
        run = describe(config)
        return _fit(config, run, open_run(config, run, held))


def _fit(config: Config, run: Described, checkpoints: Checkpoints) -> int:
    mesh, run_dir, c = run.mesh, Path(config.train.run_dir), run.target.config
    dataset = training_data(config, run.target, mesh)
    check_cache(config, c, run.drafter, dataset.records.digest)
    target = load_text_target(config.target.path, dtype=config.target.dtype, mesh=mesh)
    steps = config.train.steps or dataset.steps_in(config.data.num_epochs)
    first = first_drafter(config, target, dataset)
    drafter = Drafter(first.config, None)  # its parameters live in the state alone
    features = open_features(config, mesh, target, drafter.config.target_layer_ids, dataset)
    tap_sizes_M = tap_sizes(target, drafter.config.target_layer_ids, sample_batch(dataset))
    tx = optimizer(config.optim, steps, tap_sizes_M)
    train_step = make_train_step(config, target, drafter, tx, mesh)
    state = init_state(first, tx, mesh, ema=config.optim.ema > 0)
    del first
    iterator = dataset.iterator(steps, features.read, features.prefetch)
    who = identity(config, drafter.config, steps, dataset.fingerprint) | dict(features.identity)
    if config.train.resume:
        state, data_state = checkpoints.restore(state, who)
        iterator.set_state(data_state)
        say(f"resumed from step {int(state.step)}")
    taps = list(drafter.config.target_layer_ids)
    if is_main():
        with named(run_dir / "config.json"):
            (run_dir / "config.json").write_text(to_json(config), encoding="utf-8")
    say(f"target: {c.model_type}, taps {taps} of {c.num_layers} layers")
    d = drafter.config
    drafts = f"{len(d.draft_token_ids)} of {d.vocab_size} tokens" if d.draft_token_ids else "all tokens"
    say(f"drafter: {d.num_draft_layers} layers, blocks of {d.block_size}, dropout {d.dropout}, drafts {drafts}")
    say(f"data: {dataset.summary()}")
    say("\n".join([*replicated_dimensions(state.params, mesh), f"mesh: {dict(mesh.shape)}"]))
    if int(state.step) < steps:
        kept = layout_of(config, target, drafter.config.target_layer_ids)
        given = kept.numbers if config.train.features != "online" else 0
        batch = abstract_batch(config, max(dataset.widths()), given, mesh)
        cost = step_cost(train_step, state, target.params, *batch)
        say(memory_estimate(target.params, state, cost))
        devices = list(mesh.devices.flat)
        peak = peak_flops(config, devices)
        measured = measured_flops(d.dtype, devices) if peak is None else None
        flops = cost.flops * mean_share(c, d, config, dataset.widths())
        say(first_time_estimate(flops, steps - int(state.step), peak, measured))
    loop = _Loop(config, run, target, drafter, features, train_step, checkpoints, iterator, who, steps)
    state, finished = loop.run(state)
    if not finished:
        say(f"stopped at step {int(state.step)} of {steps}; continue with the same command and --resume")
        return loop.status
    _export(Drafter(drafter.config, on_host(state.eval_params)), run_dir / "drafter")
    best = from_main(checkpoints.best[0] if checkpoints.best else steps)
    if best != steps:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        del state
        try:
            params = on_host(checkpoints.restore(shapes, who, best)[0].eval_params)
            _export(Drafter(drafter.config, params), run_dir / "drafter-best")
        except CheckpointError as error:  # the drafter itself is written
            say(f"warning: no drafter-best: {error}")
            best = steps
    say(last_words(config, run_dir, None if best == steps else best))
    return 0


def _export(drafter: Drafter, folder: Path) -> None:
    if is_main():
        save_drafter(drafter, folder)
    wait_for_all("exported")


class _Loop:
    """State of the loop that is not in a checkpoint."""

    def __init__(
        self,
        config: Config,
        run: Described,
        target: DenseTarget,
        drafter: Drafter,
        features: Features,
        train_step: Any,
        checkpoints: Checkpoints,
        iterator: Any,
        identity: dict[str, Any],
        steps: int,
    ) -> None:
        self.config, self.mesh, self.heldout, self.features = config, run.mesh, run.heldout, features
        self.target, self.drafter = target, drafter
        self.train_step, self.checkpoints, self.iterator, self.identity = train_step, checkpoints, iterator, identity
        self.steps, self.run_dir = steps, Path(config.train.run_dir)
        self.merged_config = json.loads(to_json(config))
        # all of them now: to ask the device for one would wait for the step that it works on
        with jax.numpy_dtype_promotion("standard"):
            self.learning_rates = np.asarray(schedule(config.optim, steps)(jnp.arange(steps)))
        self.flops = partial(step_flops, target.config, drafter.config, config)
        self.peak_flops = peak_flops(config, list(self.mesh.devices.flat))
        self.pace, self.profile = Pace(steps), Profile(self.run_dir / "profile", config.train.profile_steps)
        self.window: list[dict[str, Any]] = []
        self.status = INTERRUPTED

    def run(self, state: TrainState) -> tuple[TrainState, bool]:
        """Train to the last step, or until someone asks to stop (False).

        Metrics of a step are fetched when the next one is on its way: the device never waits for them. Raises `DataError` for data
        that can no longer be read, after a save where one process can save alone.
        """
        train = self.config.train
        step = int(state.step)
        pending: tuple[int, StepMetrics, dict[str, Any]] | None = None
        position = self.iterator.get_state()
        with (
            StopRequests() as stop,
            MetricsWriter(self.run_dir, train.tensorboard, step) if is_main() else nullcontext() as self.writer,
            tqdm(total=self.steps, initial=step, unit="step", disable=not is_main()) as self.bar,
            self.profile as profile,
        ):
            self.free_since = time.perf_counter()
            cut, bad = False, ""
            if self._evaluation_due(step) and not self.checkpoints.is_measured(step):  # it was stopped within that evaluation
                tau = self._evaluate(step, state, stop)
                cut = tau is None
                if tau is not None:
                    self.checkpoints.measure(step, tau)
            while not cut and step < self.steps and not stop.asked():
                self.checkpoints.check()
                asked = time.perf_counter()
                try:
                    raw = next(self.iterator)
                except DataError as error:  # some file has gone bad
                    bad = str(error).splitlines()[0]  # Grain adds lines of its own
                    if jax.process_count() > 1:  # a save takes all of them, and the others have batches to go on with
                        raise DataError(bad) from None
                    break
                host = {"data_wait": time.perf_counter() - asked}
                batch, width = place_batch(raw, self.mesh), raw["tokens_BT"].shape[1]
                profile.before(step + 1)
                state, metrics = self.train_step(state, self.target.params, batch, self.features(raw))
                position, step = self.iterator.get_state(), step + 1
                if pending is not None:
                    self._note(*pending)
                pending = (step, metrics, host | {"width": width})
                profile.after(step, metrics)
                self.bar.update()
                due = step == self.steps
                evaluate = self._evaluation_due(step)
                if due or evaluate or step % train.save_every == 0:  # never save a state whose loss has not been seen to be finite
                    self._note(*pending)
                    pending = None
                    tau = self._evaluate(step, state, stop) if evaluate else None
                    cut = evaluate and tau is None
                    if not cut and (due or step % train.save_every == 0 or self._is_best(tau)):
                        self._save(state, position, tau)
                    self.free_since = time.perf_counter()
            stopped = step < self.steps or cut
            if stopped:
                if pending is not None:
                    self._note(*pending)
                self._save(state, position)
                self.status = stop.status
            self.checkpoints.wait()
        if bad:
            raise DataError(f"{bad}; then --resume: step {step} is saved")
        return state, not stopped

    def _note(self, step: int, metrics: StepMetrics, host: dict[str, Any]) -> None:
        """Fetch the metrics of a step, and write those of the window that ends with it."""
        values = self._read(step, metrics, host)
        self.window.append(values)
        if estimate := self.pace.note(step, values["width"], values["seconds"]):
            self._say(estimate)
        if step % self.config.train.log_every and step < self.steps:
            return
        line = summarise(self.window) | speed(self.window, self.flops, self.peak_flops)
        line |= {"step": step, "learning_rate": float(self.learning_rates[max(step - 1 - values["skipped_steps"], 0)])}
        self.window = []
        if self.writer is not None:
            self.writer.write(step, line)
        if "loss" in line:
            shown = {"loss": f"{line['loss']:.3f}", "tau": f"{line['acceptance_length']:.2f}"}
            self.bar.set_postfix(shown | {"anchors/s": f"{line['anchors_per_second']:.0f}"})

    def _evaluation_due(self, step: int) -> bool:
        return bool(self.heldout.prompts) and step > 0 and (step == self.steps or step % self.config.train.eval_every == 0)

    def _evaluate(self, step: int, state: TrainState, stop: StopRequests) -> float | None:
        """The acceptance length on held-out prompts; None when someone asked to stop meanwhile."""
        decoded = self.heldout.measure(self.target, Drafter(self.drafter.config, state.eval_params), stop.asked)
        if decoded is None:
            return None
        tau: float = decoded["eval_acceptance_length"]
        if self.writer is not None:
            self.writer.write(step, {"step": step} | decoded)
        self._say(f"step {step}: acceptance length {tau:.3f} (pooled) on held-out prompts")
        return tau

    def _say(self, text: str) -> None:
        if is_main():
            self.bar.write(text)  # a plain print would tear the bar

    def _is_best(self, tau: float | None) -> bool:
        if tau is None:
            return False
        best = self.checkpoints.best
        return bool(from_main(best is None or tau >= best[1]))

    def _read(self, step: int, metrics: StepMetrics, host: dict[str, Any]) -> dict[str, Any]:
        values: dict[str, Any] = {"sums": jax.device_get(metrics.sums), "grad_norm": float(metrics.grad_norm)}
        values["tokens"] = int(metrics.tokens)
        values |= {name: np.asarray(value) for name, value in metrics.diagnostics.items()} | host
        now = time.perf_counter()
        values |= {"started": self.free_since, "seconds": now - self.free_since}
        self.free_since = now
        guard = jax.device_get(metrics.guard)
        values |= {"skipped_steps": int(guard.skipped), "skipped": bool(guard.in_a_row)}
        if guard.in_a_row >= self.config.train.max_skipped:
            raise NonFiniteLossError(
                f"{guard.in_a_row} steps in a row, up to step {step}, were skipped because the loss or its gradient was not finite "
                f"(or beyond optim.skip_above) {self._newest}: {MEND}"
            )
        return values

    def _save(self, state: TrainState, position: dict[str, Any], tau: float | None = None) -> None:
        """Write a checkpoint, but never one of parameters that are not finite (a step skipped for another reason is no harm)."""
        if int(state.guard.in_a_row) and not all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(state.params)):
            raise NonFiniteLossError(f"the parameters are not finite at step {int(state.step)} {self._newest}: {MEND}")
        self.checkpoints.save(state, position, self.identity, self.merged_config, tau)

    @property
    def _newest(self) -> str:
        return f"(the newest checkpoint is step {self.checkpoints.newest})"


def summarise(window: list[dict[str, Any]]) -> dict[str, Any]:
    """Metrics of the steps since the last line: sums over sums, rates over the wall time. Skipped steps are only counted; a window
    of nothing else has no loss."""
    line: dict[str, Any] = {"skipped_steps": window[-1]["skipped_steps"]}
    seconds = max(window[-1]["started"] + window[-1]["seconds"] - window[0]["started"], 1e-9)
    window = [values for values in window if not values["skipped"]]
    if not window:
        return line
    sums = jax.tree.map(lambda *x: np.sum(np.stack(x), axis=0), *(values["sums"] for values in window))
    line |= {
        "loss": float(sums.weighted / max(sums.weight, 1e-9)),
        "unweighted_loss": float(sums.unweighted / max(sums.slots, 1.0)),
        "acceptance_length": float(1 + sums.accepted / max(sums.blocks, 1.0)),
        "accuracy_per_position": (sums.correct_K[1:] / np.maximum(sums.count_K[1:], 1.0)).tolist(),
        "grad_norm": float(np.mean([values["grad_norm"] for values in window])),
        "anchors_per_second": float(sums.blocks / seconds),
        "tokens_per_second": sum(values["tokens"] for values in window) / seconds,
    }
    for name in ("attention_entropy_L", "context_feature_norm"):
        if name in window[-1]:
            line[name] = np.mean([values[name] for values in window], axis=0).tolist()
    return line
