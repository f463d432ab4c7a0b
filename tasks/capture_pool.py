"""The capture servers of a run, shared out to whoever has a batch to capture."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from hidden_states.errors import Refusal, ServerError
from hidden_states.record import Writer
from tasks.capture_session import CaptureSession

T = TypeVar("T")
ASK_AGAIN_S = 30.0  # between looks at a server of somebody else's that stopped answering


class Ending(Refusal):
    """The run is ending: no server is handed out, and none is started again."""


class CapturePool:
    """Sessions, each used by one batch at a time.

    A session whose server failed is avoided while others work: one of our own is started again by whoever takes it, one
    of somebody else's is left alone until it answers.
    """

    def __init__(self, sessions: list[CaptureSession]) -> None:
        self.sessions = sessions
        self._free = list(sessions)
        self._failed_at: dict[CaptureSession, float] = {}
        self._turn = threading.Condition()
        self._ending = False

    def start(self) -> None:
        """Start (or attach to) every server, side by side: loading takes minutes each."""
        self.each(lambda session: session.start())

    @contextlib.contextmanager
    def take(self) -> Iterator[CaptureSession]:
        """A session for one batch, its server alive; waits for one.

        Raises:
            ServerError: the server could not be started again. What the block raises passes through.
            Ending: the run is over.
        """
        session = self._next()
        while not session.owned and len(self._failed_at.keys() - {session}) < len(self.sessions) - 1:
            if session.alive:
                break
            self._failed_at[session] = time.monotonic()  # others go on; nobody waits for it
            self._give_back(session)
            session = self._next()
        try:
            session.revive()
            self._failed_at.pop(session, None)
            yield session
        except ServerError:
            self._failed_at[session] = time.monotonic()
            raise
        finally:
            self._give_back(session)

    def each(self, act: Callable[[CaptureSession], T]) -> list[T]:
        """Do something with every session at once; the first error is raised when all are through."""
        with ThreadPoolExecutor(len(self.sessions), thread_name_prefix="capture-server") as threads:
            # Prefect finds the run it logs for in the context, which threads do not inherit.
            waiting = [threads.submit(copy_context().run, act, session) for session in self.sessions]
        return [future.result() for future in waiting]

    def writers(self) -> list[Writer]:
        """The live writers of all servers."""
        return [writer for session in self.sessions for writer in session.writers()]

    def stop(self) -> None:
        """End every server of ours; nothing is handed out any more."""
        with self._turn:
            self._ending = True
            self._turn.notify_all()
        for session in self.sessions:
            session.stop()

    @property
    def starts(self) -> int:
        """How often a server was started."""
        return sum(session.starts for session in self.sessions)

    def _give_back(self, session: CaptureSession) -> None:
        with self._turn:
            self._free.append(session)
            self._turn.notify()

    def _next(self) -> CaptureSession:
        with self._turn:
            while True:
                if self._ending:
                    raise Ending("capture servers", "the run is ending", None, "Run the same command again.")
                ready = sorted((s for s in self._free if self._may_work(s)), key=lambda s: s in self._failed_at)
                if ready:
                    self._free.remove(ready[0])
                    return ready[0]
                self._turn.wait(1.0)

    def _may_work(self, session: CaptureSession) -> bool:
        failed_at = self._failed_at.get(session)
        if failed_at is None or session.owned or len(self._failed_at) == len(self.sessions):
            return True
        if time.monotonic() - failed_at < ASK_AGAIN_S:
            return False
        self._failed_at[session] = time.monotonic()
        return session.alive
