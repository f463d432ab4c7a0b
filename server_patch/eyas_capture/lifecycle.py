"""From a loaded model to a drained queue: what the plugin does in a scheduler process, in order."""

import contextlib
import functools
import hashlib
import importlib.metadata
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from eyas_capture import contract, hooks
from eyas_capture.capture import Capture
from eyas_capture.identity import Identity, sweep_partials
from eyas_capture.layers import CaptureLayers, LayersError
from eyas_capture.refusals import Drift, ServerFacts, read_server, refusals
from eyas_capture.settings import BLOCK, Settings, SettingsError
from eyas_capture.totals import Totals
from eyas_capture.writer import Writer

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 100.0  # after SGLang's own shutdown, which by default kills its schedulers after 15 s
CRASH_DRAIN_SECONDS = 5.0  # a scheduler that raised: whoever waits for it must hear of it soon
SIGTERM_DRAIN_SECONDS = 25.0  # a scheduler that is signalled itself; container managers kill after 30 s
_TOKENIZER_MODULE = "sglang.srt.managers.tokenizer_manager"
_EXIT_TIMEOUT = "_SCHEDULER_EXIT_TIMEOUT_SECS"


class Lifecycle:
    """The plugin in one process: hooks first, capture once the model is loaded, the last dump before the end."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self._dump_dir = Path(env[contract.ENV_DUMP_DIR]).absolute()
        self._settings: Settings | None = None
        self._capture: Capture | None = None
        self._writer: Writer | None = None
        self._model_seen = False

    def hook(self) -> None:
        """Register with SGLang; on a release that differs, or nonsense in the environment, refuse instead."""
        try:
            self._settings = Settings.from_env(self._env)
            hooks.check_sglang()
        except (SettingsError, Drift) as error:
            main = multiprocessing.parent_process() is None
            self._refuse([str(error)], Identity(self._dump_dir, None, {}) if main else None)
            return
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(hooks.LOAD_MODEL, self.after_load_model, HookType.AFTER)
        HookRegistry.register(hooks.INIT_BATCH, self.around_init_batch, HookType.AROUND)
        HookRegistry.register(hooks.EVENT_LOOP, self.around_event_loop, HookType.AROUND)
        for function in hooks.NEW_WEIGHTS:
            HookRegistry.register(function, self.before_new_weights, HookType.BEFORE)
        tokenizer_manager = sys.modules.get(_TOKENIZER_MODULE)
        if hasattr(tokenizer_manager, _EXIT_TIMEOUT):
            # This process ends the schedulers, and would kill them in the middle of draining the queue.
            setattr(tokenizer_manager, _EXIT_TIMEOUT, max(getattr(tokenizer_manager, _EXIT_TIMEOUT), DRAIN_SECONDS + 5))

    # ---- hooks

    def after_load_model(self, result: Any, runner: Any) -> None:
        """ModelRunner.load_model: the model is there, and nothing has run on it yet."""
        if runner.is_draft_worker or self._model_seen:
            return
        self._model_seen = True
        try:
            self._begin(runner)
        except Exception as error:  # a server must start with a broken plugin too
            logger.exception("eyas: capture cannot begin")
            why = [f"{type(error).__name__}: {error}"]
            if self._writer is None:
                self._refuse(why, Identity(self._dump_dir, None, {}))
            else:
                self._writer.state, self._writer.refused = contract.REFUSED, why
                self._writer.publish()

    def around_init_batch(self, original: Callable[..., Any], cls: Any, batch: Any, runner: Any, **kwargs: Any) -> Any:
        """ForwardBatch.init_new: the last place that knows the requests of a pass."""
        forward_batch = original(cls, batch, runner, **kwargs)
        if self._capture is not None and not runner.is_draft_worker:
            self._capture.announce(batch.reqs, forward_batch)
        return forward_batch

    def before_new_weights(self, *args: Any, **kwargs: Any) -> None:
        """SchedulerWeightUpdaterManager.update_weights_from_...: writer.json names the model that was there before."""
        if self._capture is not None:
            self._capture.give_up("the server was given other weights than it started with: start it again with them")

    def around_event_loop(self, original: Callable[..., Any], scheduler: Any) -> Any:
        """Scheduler.run_event_loop: serving begins and, when it returns, is over."""
        if not self._model_seen:
            logger.error("EYAS CAPTURE IS OFF: SGLang loaded its model past %s", hooks.LOAD_MODEL)
        if self._writer is not None:
            self._drain_on_sigterm()
        deadline_s = DRAIN_SECONDS
        try:
            return original(scheduler)
        except Exception:
            deadline_s = CRASH_DRAIN_SECONDS
            raise
        finally:
            self._end(deadline_s)

    # ---- begin and end

    def _begin(self, runner: Any) -> None:
        assert self._settings is not None
        server = read_server(runner.server_args)
        reasons = refusals(server, runner.is_generation)
        layers = None
        if not reasons:
            try:
                layers = CaptureLayers(runner.model, self._settings.after_block)
                hooks.check_forward(layers.inner)
            except (LayersError, Drift) as error:
                reasons, layers = [str(error)], None
        facts = self._facts(runner, server, layers)
        identity = Identity(self._dump_dir, server.dp_rank, facts) if server.writes else None
        if layers is None:
            self._refuse(reasons, identity)
            return
        if not layers.proven:
            logger.warning(
                "eyas: %s was never compared with a reference; prove its dumps before you train on them",
                type(layers.inner).__name__,
            )
        device = torch.device(runner.device)
        if identity is not None:
            self._writer = self._started_writer(identity, device)
        self._capture = Capture(layers, self._settings.mode, self._writer, server.tp_size)
        _wrap_forward(layers.inner, self._capture.forward)
        if self._writer is not None:
            logger.info(
                "eyas: capturing blocks %s (mode %s) into %s",
                list(layers.after_block),
                self._settings.mode,
                self._writer.identity.folder,
            )

    def _started_writer(self, identity: Identity, device: torch.device) -> Writer | None:
        """None where there cannot be one: this rank then runs the same passes as the others, and keeps nothing."""
        assert self._settings is not None
        with contextlib.suppress(Exception):  # told by the writer, which tries again for as long as it lives
            self._dump_dir.mkdir(parents=True, exist_ok=True)
            sweep_partials(self._dump_dir)
        try:
            writer = Writer(identity, self._settings.queue_bytes, self._settings.when_full == BLOCK, device)
            writer.start(self._close_ended)
        except Exception as error:  # no memory, descriptors or threads to be had
            logger.exception("eyas: the writer cannot start")
            self._refuse([f"{type(error).__name__}: {error}"], identity)
            return None
        return writer

    def _close_ended(self) -> None:
        if self._capture is not None:
            self._capture.close_ended()

    def _facts(self, runner: Any, server: ServerFacts, layers: CaptureLayers | None) -> dict[str, Any]:
        config = Path(runner.model_config.model_path) / "config.json"
        architectures = getattr(runner.model_config.hf_config, "architectures", None)
        return {
            "tp_size": server.tp_size,
            "dp_size": server.dp_size,
            "pp_size": server.pp_size,
            "plugin_version": importlib.metadata.version("eyas-capture"),
            "sglang_version": importlib.metadata.version("sglang"),
            "model_path": runner.model_config.model_path,
            "config_sha256": hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else None,
            "architecture": architectures[0] if architectures else type(runner.model).__name__,
            "dtype": str(runner.model_config.dtype).removeprefix("torch."),
            "hidden_size": runner.model_config.hidden_size,
            "blocks": layers.blocks if layers else None,
            "after_block": list(layers.after_block) if layers else None,
            "capture_points": layers.points if layers else None,
            "final_norm": "post",
            "mode": self._settings.mode if self._settings else None,
            "flags": server.flags | {"prefill_graph": server.prefill_graph},
        }

    def _refuse(self, reasons: list[str], identity: Identity | None) -> None:
        """Serve on without capture, and say so where people look and, as `identity`, where the pipeline looks."""
        logger.error("EYAS CAPTURE IS OFF, serving goes on. %s", " | ".join(reasons))
        if identity is None:
            return
        try:
            identity.publish(contract.REFUSED, reasons, Totals().as_json())
        except OSError as error:
            logger.error("eyas: cannot write %s: %s", identity.folder / contract.WRITER_FILE, error)

    def _end(self, deadline_s: float) -> None:
        if self._capture is None or self._writer is None:
            return
        self._writer.ending = True  # a forward pass that waits for the disk must not hold up the end
        try:
            try:
                self._capture.close_all(contract.SERVER_STOPPED)
            except Exception:
                logger.exception("eyas: what was under way is lost")
            if not self._writer.stop(deadline_s):
                logger.error(
                    "eyas: after %.0f s the disk had not taken every dump: what was still queued is lost", deadline_s
                )
        except Exception:  # the scheduler's own trouble is what people must hear of
            logger.exception("eyas: the end of capture failed")

    def _drain_on_sigterm(self) -> None:
        """SIGTERM at this process ends it at once, as before, except that the queue is written first.

        The draining is a thread's, woken through a file descriptor: the main thread may sit in a collective that
        never ends, because its peers have died already.
        """
        if (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        ):
            return
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        previous = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        if previous != -1:  # somebody else listens for signals here: leave it to them
            signal.set_wakeup_fd(previous)
            return
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        threading.Thread(target=self._await_sigterm, args=(reading,), name="eyas-sigterm", daemon=True).start()

    def _await_sigterm(self, reading: int) -> None:
        while signal.SIGTERM not in os.read(reading, 64):
            pass
        logger.warning("eyas: SIGTERM, writing the queue before the end")
        try:
            self._end(SIGTERM_DRAIN_SECONDS)
        finally:
            os._exit(128 + signal.SIGTERM)


def _wrap_forward(model: Any, forward: Callable[..., Any]) -> None:
    """Route one module's forward through capture; an attribute of the instance, so no other model is touched."""
    original = model.forward

    @functools.wraps(original)
    def captured(*args: Any, **kwargs: Any) -> Any:
        return forward(original, args, kwargs)

    model.forward = captured
