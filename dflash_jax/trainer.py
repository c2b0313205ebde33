"""The training loop: data in, metrics, checkpoints and a drafter out."""

import dataclasses
import json
import time
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from dflash_jax.checkpoint import Checkpoints
from dflash_jax.cli import INTERRUPTED
from dflash_jax.config import Config, check_counts, to_json
from dflash_jax.conversations import expand_files, first_messages, read_prompts
from dflash_jax.data import training_data
from dflash_jax.distributed import everyone, from_main, initialize, is_main, on_host, say, wait_for_all
from dflash_jax.drafter import Drafter
from dflash_jax.errors import CheckpointError, ConfigError, NonFiniteLossError, PromptError, named
from dflash_jax.features import Features, check_features, open_features
from dflash_jax.first_drafter import first_drafter, sample_batch
from dflash_jax.generate import check_prompts, generate
from dflash_jax.hf import load_text_target, save_drafter
from dflash_jax.lock import only_process
from dflash_jax.metrics import MetricsWriter
from dflash_jax.model_config import DFlashConfig
from dflash_jax.optim import optimizer, schedule
from dflash_jax.progress import Pace, Profile, last_words, memory_estimate, peak_flops, speed, step_flops
from dflash_jax.prompts import Prompt, packaged_prompts
from dflash_jax.sharding import make_mesh, replicated_dimensions
from dflash_jax.stop import StopRequests
from dflash_jax.targets import DenseTarget
from dflash_jax.train_step import StepMetrics, TrainState, init_state, make_train_step, place_batch
from dflash_jax.warm_start import tap_sizes

PACKAGED = "packaged"
MEND = "lower optim.learning_rate or optim.clip_norm and start again in another train.run_dir; --resume would repeat it"


def fit(config: Config) -> int:
    """Train as configured; returns the exit status (130 after Ctrl-C, 143 after SIGTERM, with a checkpoint saved).

    The run folder then holds config.json (merged), metrics.jsonl, checkpoints/ and drafter/ (z-lab's layout).
    """
    check_counts(config)
    _check_files(config)
    initialize(config.distributed)
    check_features(config)
    with ExitStack() as held:
        return _fit(config, Path(config.train.run_dir), held)


def _fit(config: Config, run_dir: Path, held: ExitStack) -> int:
    mesh = make_mesh(config.mesh)
    target = load_text_target(config.target.path, dtype=config.target.dtype, mesh=mesh)
    if not config.data.train:
        raise ConfigError("data.train names no file: write one with `python -m dflash_jax regenerate` and give its path")
    dataset = training_data(config, target, mesh)
    steps = config.train.steps or dataset.steps_in(config.data.num_epochs)
    first = first_drafter(config, target, dataset)
    drafter = Drafter(first.config, None)  # its parameters live in the state alone
    features = open_features(config, mesh, target, drafter.config.target_layer_ids, dataset)
    tap_sizes_M = tap_sizes(target, drafter.config.target_layer_ids, sample_batch(dataset))
    tx = optimizer(config.optim, steps, tap_sizes_M)
    train_step = make_train_step(config, target, drafter, tx, mesh)
    state = init_state(first, tx, mesh, ema=config.optim.ema > 0)
    del first
    run_dir.mkdir(parents=True, exist_ok=True)
    if is_main():
        held.enter_context(only_process(run_dir))
    checkpoints = Checkpoints(run_dir / "checkpoints", config.train.keep)
    iterator = dataset.iterator(steps, features.read, features.prefetch)
    identity = _identity(config, drafter.config, steps, dataset.fingerprint) | dict(features.identity)
    if config.train.resume:
        state, data_state = checkpoints.restore(state, identity)
        iterator.set_state(data_state)
        say(f"resumed from step {int(state.step)}")
    elif checkpoints.newest is not None:
        raise ConfigError(
            f"{run_dir} holds a run that reached step {checkpoints.newest}: --resume it, or give another train.run_dir"
        )
    elif (run_dir / "drafter").exists():
        raise ConfigError(f"{run_dir / 'drafter'} is the drafter of an earlier run: give another train.run_dir, or move it away")
    wait_for_all("checked")  # before anything is written that these checks look for
    if is_main():
        with named(run_dir / "config.json"):
            (run_dir / "config.json").write_text(to_json(config), encoding="utf-8")
    wait_for_all("begun")
    if not everyone((run_dir / "config.json").is_file()):
        raise ConfigError(f"{run_dir.absolute()} is not one folder for all processes: give a train.run_dir that all hosts share")
    taps = list(drafter.config.target_layer_ids)
    say(f"target: {target.config.model_type}, taps {taps} of {target.config.num_layers} layers")
    d = drafter.config
    drafts = f"{len(d.draft_token_ids)} of {d.vocab_size} tokens" if d.draft_token_ids else "all tokens"
    say(f"drafter: {d.num_draft_layers} layers, blocks of {d.block_size}, dropout {d.dropout}, drafts {drafts}")
    say(f"data: {dataset.summary()}")
    say("\n".join([*replicated_dimensions(state.params, mesh), f"mesh: {dict(mesh.shape)}"]))
    say(memory_estimate(target.params, state))
    loop = _Loop(config, mesh, target, drafter, features, train_step, checkpoints, iterator, identity, steps, run_dir)
    try:
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
                params = on_host(checkpoints.restore(shapes, identity, best)[0].eval_params)
                _export(Drafter(drafter.config, params), run_dir / "drafter-best")
            except CheckpointError as error:  # the drafter itself is written
                say(f"warning: no drafter-best: {error}")
                best = steps
    finally:
        checkpoints.close()
    say(last_words(config, run_dir, None if best == steps else best))
    return 0


def _export(drafter: Drafter, folder: Path) -> None:
    if is_main():
        save_drafter(drafter, folder)
    wait_for_all("exported")


def _check_files(config: Config) -> None:
    for name, path in (("train.run_dir", config.train.run_dir), ("data.records", config.data.records)):
        if "://" in path:
            raise ConfigError(f"{name} is {path}: give a folder that is mounted on every host")
    heldout = [] if config.data.heldout == [PACKAGED] else expand_files(config.data.heldout, "data.heldout")
    train = expand_files(config.data.train, "data.train")
    both = {Path(path).resolve() for path in train} & {Path(path).resolve() for path in heldout}
    if both:
        raise ConfigError(f"data.heldout names {both.pop()}, which is trained on: hold other prompts out")


def _identity(config: Config, drafter: DFlashConfig, steps: int, data: str) -> dict[str, Any]:
    """What a resumed run must have in common with the checkpoint: all that decides the numbers."""
    names = ("init", "anchors_per_row", "anchors_per_document", "loss", "slot_weights", "vocab_sample", "features", "seed")
    train = {name: getattr(config.train, name) for name in names}
    parts = {"drafter": dataclasses.asdict(drafter), "target": dataclasses.asdict(config.target), "train": train}
    parts["optim"] = dataclasses.asdict(config.optim)
    flat = {f"{section}.{name}": value for section, values in parts.items() for name, value in values.items()}
    return json.loads(json.dumps(flat | {"steps": steps, "data": data}))  # type: ignore[no-any-return]


class _Loop:
    """State of the loop that is not in a checkpoint."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        target: DenseTarget,
        drafter: Drafter,
        features: Features,
        train_step: Any,
        checkpoints: Checkpoints,
        iterator: Any,
        identity: dict[str, Any],
        steps: int,
        run_dir: Path,
    ) -> None:
        self.config, self.mesh, self.target, self.drafter, self.features = config, mesh, target, drafter, features
        self.train_step, self.checkpoints, self.iterator, self.identity = train_step, checkpoints, iterator, identity
        self.steps, self.run_dir = steps, run_dir
        self.merged_config = json.loads(to_json(config))
        # all of them now: to ask the device for one would wait for the step that it works on
        with jax.numpy_dtype_promotion("standard"):
            self.learning_rates = np.asarray(schedule(config.optim, steps)(jnp.arange(steps)))
        self.flops = partial(step_flops, target.config, drafter.config, config)
        self.peak_flops = peak_flops(config, list(mesh.devices.flat))
        self.pace, self.profile = Pace(steps), Profile(run_dir / "profile", config.train.profile_steps)
        self.window: list[dict[str, Any]] = []
        self.status = INTERRUPTED
        self.heldout = [target.tokenizer.encode_chat(first_messages(p)) for p in self._heldout_prompts()]
        if self.heldout:
            try:
                check_prompts(target, self.heldout)
            except PromptError as error:
                raise PromptError(f"data.heldout: {error}") from None

    def _heldout_prompts(self) -> list[Prompt]:
        data = self.config.data
        if not data.heldout or not self.config.train.eval_every:
            return []
        if data.heldout == [PACKAGED]:
            return packaged_prompts("eval", limit=data.heldout_prompts)
        return read_prompts(expand_files(data.heldout, "data.heldout"))[: data.heldout_prompts]

    def run(self, state: TrainState) -> tuple[TrainState, bool]:
        """Train to the last step, or until someone asks to stop (False).

        Metrics of a step are fetched when the next one is on its way: the device never waits for them.
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
            while step < self.steps and not stop.asked(step):
                asked = time.perf_counter()
                raw = next(self.iterator)
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
                evaluate = bool(self.heldout) and (due or step % train.eval_every == 0)
                if due or evaluate or step % train.save_every == 0:  # never save a state whose loss has not been seen to be finite
                    self._note(*pending)
                    pending = None
                    tau = self._evaluate(step, state) if evaluate else None
                    if due or step % train.save_every == 0 or self._is_best(tau):
                        self._save(state, position, tau)
                    self.free_since = time.perf_counter()
            if step < self.steps:
                if pending is not None:
                    self._note(*pending)
                self._save(state, position)
                self.status = stop.status
                return state, False
        return state, True

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

    def _evaluate(self, step: int, state: TrainState) -> float:
        decoded = self._decode(state)
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

    def _decode(self, state: TrainState) -> dict[str, Any]:
        current = Drafter(self.drafter.config, state.eval_params)
        out = generate(self.target, current, self.heldout, max_new_tokens=self.config.train.eval_max_new_tokens)
        return {
            "eval_acceptance_length": out.stats.acceptance_length,
            "eval_acceptance_length_macro": out.stats.acceptance_length_macro,
            "eval_accepted_per_position": list(out.stats.pooled.accepted_per_position),
        }


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
