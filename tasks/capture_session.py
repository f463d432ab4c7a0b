"""One capture server of a run: started, watched, started again when it died, always stopped."""

import os
import secrets
import time
from collections.abc import Iterable
from pathlib import Path

from prefect.logging import get_run_logger

from eyas_capture import contract
from hidden_states.dump import DumpFolder, DumpRef
from hidden_states.errors import ServerError
from hidden_states.record import Writer
from infra.client import SGLangClient
from infra.recipe import Recipe, Server
from infra.server import CPU_ENV, CPU_FLAGS, ServerSpec, SGLangServer, attach
from tasks.job import Job, need
from tasks.server_log import ServerLog

WRITER_DEADLINE_S = 30.0
PROBE_DEADLINE_S = 15.0  # one token, answered already: only its dump is waited for
SAME_HOST = (
    "Correct `dump_dir`, or mount the server's folder here, or run `eyas extract` with this recipe on the server's own "
    "host: it stores to the same bucket, and `eyas run` goes on from there."
)


def server_spec(recipe: Recipe, server: Server, log_path: Path, pid_file: Path) -> ServerSpec:
    """The target's server as the recipe describes it, without capture and without a drafter."""
    target = recipe.target
    flags = dict(server.flags)
    flags.setdefault("tp-size", server.tp_size)
    if target.trust_remote_code:
        flags["trust-remote-code"] = True
    if target.dtype != "auto":
        flags["dtype"] = target.dtype
    env = dict(server.env)
    if server.device == "cpu":
        flags = {**CPU_FLAGS, **flags}
        env = {**CPU_ENV, **env}
    return ServerSpec(
        python=Path(server.python or ""),
        model_path=target.model_path,
        port=server.port,
        flags=flags,
        env=env,
        log_path=log_path,
        pid_file=pid_file,
    )


class CaptureSession:
    """A server with the capture plugin, its dump folder, and the counters seen so far.

    One batch at a time is captured in a session; dumps that others still work on are held.

    Args:
        settings: this server as the recipe describes it.
        number: its place in the recipe's list, from 0: names its log, its pid file and its dump folder.
    """

    def __init__(self, job: Job, settings: Server, number: int = 0) -> None:
        self.job, self.settings, self.number = job, settings, number
        self.owned = settings.url is None
        self.name = "SGLang" if number == 0 else f"SGLang {number + 1}"
        self._suffix = "" if number == 0 else f"-{number + 1}"
        self.dumps = DumpFolder(Path(settings.dump_dir or job.folder / f"dumps{self._suffix}").resolve())
        self.base_line: dict[str, int] = {}
        self._held: set[DumpRef] = set()
        self.starts = 0
        self.server: SGLangServer | None = None
        self.client: SGLangClient | None = None

    def start(self) -> None:
        """Start (or attach to) the server and wait until it is ready; the writer of every replica must be seen."""
        recipe, settings = self.job.recipe, self.settings
        log = get_run_logger()
        if self.owned:
            self.dumps.path.mkdir(mode=0o700, parents=True, exist_ok=True)  # states tell what was said
            self.starts += 1
            log_name = f"sglang-capture{self._suffix}{'' if self.starts == 1 else f'.{self.starts}'}.log"
            pid_file = self.job.state / f"sglang{self._suffix}.pid"
            self.job.note("server started", server=self.number, log=log_name)
            spec = server_spec(recipe, settings, self.job.folder / log_name, pid_file)
            spec.env |= {
                contract.ENV_DUMP_DIR: str(self.dumps.path),
                contract.ENV_AFTER_BLOCK: ",".join(map(str, recipe.capture.blocks)),
                contract.ENV_MODE: recipe.capture.mode,
            }
            self.server = SGLangServer(spec)
            self.server.start()
            log.info("%s is loading %s; its log is %s", self.name, self.job.target_name, spec.log_path)
        else:
            self.server = attach(str(settings.url))
        started = time.monotonic()
        self.server.wait_ready(settings.ready_deadline_s, ServerLog(log.info, self.name).line)
        log.info("%s is ready at %s after %.0f s", self.name, self.server.base_url, time.monotonic() - started)
        self.client = SGLangClient(
            self.server.base_url,
            timeout_s=settings.request_timeout_s,
            vocab_size=need(self.job.plan, "plan").shape.vocab_size,
        )
        self.writers()
        if not self.owned:
            self._see_own_dump()

    def _see_own_dump(self) -> None:
        """Somebody else's server: does what it captures arrive in the folder that is seen from here?

        Raises:
            ServerError: it does not.
        """
        rid = f"{contract.OPT_IN_PREFIX}{secrets.token_hex(4)}-probe"
        need(self.client, "client").generate([0], rid=rid, extra_key=rid, max_new_tokens=1)
        if self.dumps.wait_for([rid], PROBE_DEADLINE_S):
            raise ServerError(
                f"capture folder {self.dumps.path}",
                f"{self.settings.url} answered a request, but its dump does not show here",
                "the folder that server writes its dumps to",
                f"{SAME_HOST} The server knows its folder as {contract.ENV_DUMP_DIR}.",
            )

    def writers(self) -> list[Writer]:
        """The capture plugin's live writers.

        Raises:
            ServerError: no writer of this server shows in the dump folder, or the plugin refused to capture.
        """
        where = f"capture folder {self.dumps.path}"
        deadline = time.monotonic() + WRITER_DEADLINE_S
        while True:
            writers = [w for w in self.dumps.writers() if self._is_live(w)]
            refused = [reason for writer in writers for reason in writer.refused]
            if refused:
                raise ServerError(
                    where, f"the capture plugin refused: {'; '.join(refused)}", None, "Change the server's flags."
                )
            if writers:
                return writers
            if time.monotonic() > deadline:
                raise ServerError(
                    where,
                    "no writer of this server is there",
                    "one folder with a writer.json per replica",
                    "Is server_patch/ installed in the server's environment, and is this the folder the server knows "
                    f"as {contract.ENV_DUMP_DIR}? {SAME_HOST}",
                )
            time.sleep(0.2)

    def _is_live(self, writer: Writer) -> bool:
        if not self.owned:
            return True
        return os.path.exists(f"/proc/{writer.pid}")

    @property
    def alive(self) -> bool:
        """Whether the server's process still runs (a server that is not ours: whether it answers)."""
        return self.server is not None and self.server.alive()

    def may_still_write(self) -> bool:
        """Whether a dump may still come. Another's server is not asked: its health check is a request of its own."""
        return not self.owned or self.alive

    def revive(self) -> bool:
        """Start the server again if it died. Returns whether that was needed."""
        if self.alive:
            return False
        get_run_logger().warning("%s is gone; starting it again (only the batch in flight is redone)", self.name)
        self.stop()
        self.start()
        self.clear()
        return True

    def clear(self) -> int:
        """Remove every dump that is not held (warm-up, other clients, attempts that died); take the base line."""
        removed = self.dumps.remove(self.unheld())
        self.base_line = self.dumps.base_line()
        return removed

    def unheld(self) -> list[DumpRef]:
        """Published dumps that no batch works on."""
        return [ref for ref in self.dumps.dumps() if ref not in self._held]

    def hold(self, refs: Iterable[DumpRef]) -> None:
        """Keep these dumps while the next batch is captured."""
        self._held |= set(refs)

    def release(self, refs: Iterable[DumpRef]) -> None:
        """Remove dumps that are done with."""
        done = set(refs)
        self.dumps.remove(done)
        self._held -= done

    def stop(self) -> None:
        """End the server if it is ours; close the connection otherwise."""
        if self.client is not None:
            self.client.close()
            self.client = None
        if self.server is not None and self.owned:
            self.server.stop()
        self.server = None
