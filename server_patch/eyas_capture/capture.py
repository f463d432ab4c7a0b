"""What happens on each forward pass: whose rows these are, and where they go.

On every rank the model's capture path is switched on for the same passes, as a function of the batch alone: captured
blocks may complete a collective that other ranks then must join. Whether rows are *kept* is the writing rank's
business.
"""

import logging
import sys
import threading
import time
import traceback
import weakref
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from eyas_capture import contract
from eyas_capture.hooks import BESIDES_TOKENS
from eyas_capture.layers import CaptureLayers
from eyas_capture.refusals import Drift
from eyas_capture.repeat import from_the_start, is_defect, once_more
from eyas_capture.results import states, told_apart
from eyas_capture.rows import Layout
from eyas_capture.settings import OPTED_IN
from eyas_capture.spans import Assembly, Part
from eyas_capture.writer import LONGEST_BLOCK, Writer

logger = logging.getLogger(__name__)

_COPIES_COME_WITHIN = 60.0  # seconds of a prefill with n > 1


@dataclass(frozen=True)
class Chunk:
    """One request's share of a pass: pass rows [offset, offset + length) are prompt rows from `start`."""

    request: Any
    offset: int
    start: int
    length: int


class Capture:
    """Capture in one scheduler process. `writer` is None on ranks that only have to run the same passes."""

    def __init__(self, layers: CaptureLayers, mode: str, writer: Writer | None, ranks: int = 1) -> None:
        """`ranks` run the same passes together."""
        self._layers = layers
        self._blocks = len(layers.after_block)
        self._alone = ranks == 1
        self._mode = mode
        self._writer = writer
        self._requests: list[Any] = []  # of the batch that was announced
        self._expected = False  # the batch that was announced has rows to capture, and no pass has shown up yet
        self._tried = False  # the model has run with its capture path on
        self._stock_only = ranks == 1 and writer is None  # or it could not, or nobody keeps its rows any more
        self._given_up = False
        self._lock = threading.RLock()
        self._open: weakref.WeakKeyDictionary[Any, Assembly] = weakref.WeakKeyDictionary()
        self._orphans: dict[int, Assembly] = {}  # open assemblies by counter, also those whose request object is gone
        self._done: weakref.WeakSet[Any] = weakref.WeakSet()  # retracted requests prefill again: once is enough
        # By token digest: copies still to come of a prefill with n > 1, and since when (a client may go away).
        self._samples_left: dict[str, tuple[int, float]] = {}

    # ---- forward thread

    def announce(self, requests: list[Any], forward_batch: Any) -> None:
        """A batch is about to run: remember its requests, because the pass knows only their ids."""
        unseen = self._expected
        try:
            self._announce(requests, forward_batch)
        except Exception as error:  # as in forward: the server must not notice. The same on every rank
            self._requests = []
            self.give_up(f"{type(error).__name__}: {error}")
        if self._writer is None:
            return
        try:
            if unseen:
                self._miss("unseen", "a prefill went past the capture hooks (a compiled or graphed path?)")
            self._expect_copies(requests, forward_batch)
            self.close_ended()
        except Exception as error:  # the same; only this rank has met it, and it stays in step
            self.give_up(f"{type(error).__name__}: {error}")

    def _announce(self, requests: list[Any], forward_batch: Any) -> None:
        self._requests = list(requests)
        self._expected = bool(self._chunks(forward_batch))

    def _expect_copies(self, requests: list[Any], forward_batch: Any) -> None:
        if self._samples_left and forward_batch.forward_mode.is_extend_without_speculative():
            for request in requests:
                if request.sampling_params.n > 1 and request.sampling_params.max_new_tokens > 0:
                    # The copies decode, so they are not mistaken for the prefill that came before them.
                    self._samples_left.pop(contract.tokens_sha256(request.origin_input_ids), None)

    def forward(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The inner model's forward(input_ids, positions, forward_batch, ...): returns what the stock model returns."""
        forward_batch = kwargs["forward_batch"] if "forward_batch" in kwargs else args[2]
        try:
            chunks, dry_run = self._chunks(forward_batch), not self._tried and from_the_start(forward_batch)
        except Exception as error:  # the same on every rank
            self.give_up(f"{type(error).__name__}: {error}")
            chunks, dry_run = [], False
        self._expected = False
        if self._stock_only or not (chunks or dry_run):
            return original(*args, **kwargs)
        if not (dry_run or self._tried or self._layers.proven):
            self._miss("untried", "the first pass of an unknown model that is captured must not go on from a prefix")
            return original(*args, **kwargs)
        input_ids = args[0] if args else kwargs.get("input_ids")
        # A multimodal wrapper passes embeddings and no ids; the batch still has them.
        input_ids = forward_batch.input_ids if input_ids is None else input_ids
        repeatable = dry_run or self._layers.proven or from_the_start(forward_batch)
        again: Any = once_more(args, kwargs, dry_run=not self._tried, alone=self._alone) if repeatable else None
        why = None
        try:
            with self._layers.on():
                result = original(*args, **kwargs)
            if again is not None and not self._tried:
                states(*told_apart(result), len(input_ids), self._blocks)
        except Exception as error:
            if again is None or not (self._alone or is_defect(error)):
                raise
            why = f"the model's capture path raised {type(error).__name__}: {error}"
            result = None
            logger.error("eyas: %s\n%s", why, traceback.format_exc())  # as text: log handlers may keep exceptions
        if why is not None:  # only here has the failed pass given back its memory: the exception held its frames
            args, kwargs = again
            result = original(*args, **kwargs)
            self._stock_only = True
            self.give_up(why)
            return result
        self._tried = True
        answer, aux = told_apart(result)
        if chunks and self._writer and self._writer.state == contract.CAPTURING and not self._writer.ending:
            try:
                self._keep(chunks, input_ids, *states(answer, aux, len(input_ids), self._blocks))
            except Exception as error:  # whatever it is, it must end the capture and not the server
                self.give_up(f"{type(error).__name__}: {error}")
        return answer

    def _chunks(self, forward_batch: Any) -> list[Chunk]:
        """The parts of this pass to capture; a function of the batch alone, the same on every rank.

        A decode row of a mixed batch looks like an extend of 1: its prefix is at or beyond the prompt's end.
        """
        if not forward_batch.forward_mode.is_extend_without_speculative() or forward_batch.rids is None:
            return []
        chunks, offset = [], 0
        for request, length, start in zip(
            self._in_batch(forward_batch.rids),
            forward_batch.extend_seq_lens_cpu,
            forward_batch.extend_prefix_lens_cpu,
            strict=True,
        ):
            if request is not None and self._wanted(request):
                length_of_prompt = len(request.origin_input_ids)
                if start < length_of_prompt:
                    stop = min(start + length, length_of_prompt)
                    chunks.append(Chunk(request, offset, int(start), int(stop - start)))
            offset += int(length)
        return chunks

    def _in_batch(self, rids: list[str]) -> list[Any]:
        """The announced requests in the order of a pass, None for one that was not announced."""
        if [request.rid for request in self._requests] == rids:
            return self._requests  # by their places: a client may use an id twice
        known = {request.rid: request for request in self._requests}
        return [known.pop(rid, None) for rid in rids]

    def _wanted(self, request: Any) -> bool:
        if request.rid.startswith(contract.HEALTH_PREFIX):
            return False
        if self._mode == OPTED_IN and not request.rid.startswith(contract.OPT_IN_PREFIX):
            return False
        # Parallel sampling: SGLang first prefills the prompt once with max_new_tokens 0, then sends n copies.
        return request.sampling_params.n == 1 or request.sampling_params.max_new_tokens == 0

    def _miss(self, what: str, text: str) -> None:
        if self._writer is not None:
            self._writer.unseen_pass()
            self._writer.tell(
                what, "%s: its requests have no dump. totals.unseen_passes of writer.json counts it", text
            )

    def _keep(
        self, chunks: list[Chunk], input_ids: torch.Tensor, hidden: torch.Tensor, aux: list[torch.Tensor]
    ) -> None:
        last = chunks[-1]
        if len(input_ids) < last.offset + last.length:
            raise Drift(f"a pass over {len(input_ids)} tokens has chunks up to {last.offset + last.length}")
        named = {contract.block_tensor(block): rows for block, rows in zip(self._layers.after_block, aux, strict=True)}
        named[contract.FINAL] = hidden
        assert self._writer is not None
        layout, until = Layout.of(named), time.monotonic() + LONGEST_BLOCK
        with self._lock:
            begun: list[tuple[Any, Assembly]] = []
            kept: list[tuple[Chunk, Assembly, int]] = []
            for chunk in chunks:
                assembly = self._open.get(chunk.request)
                if assembly is None and (assembly := self._begun(chunk, layout, until)):
                    begun.append((chunk.request, assembly))
                if assembly and assembly.nbytes:
                    at = assembly.new(chunk.start, chunk.start + chunk.length)
                    if at is not None:
                        kept.append((chunk, assembly, at))
            if begun or kept:
                self._copy(begun, kept, input_ids, named, layout)
        self._writer.look()

    def _copy(
        self,
        begun: list[tuple[Any, Assembly]],
        kept: list[tuple[Chunk, Assembly, int]],
        input_ids: torch.Tensor,
        named: dict[str, torch.Tensor],
        layout: Layout,
    ) -> None:
        """Keep the prompts that begin, and chunks from prompt row `at` on; close those that end."""
        assert self._writer is not None
        assemblies = dict.fromkeys([*begun, *((chunk.request, assembly) for chunk, assembly, _ in kept)])
        parts = [(chunk.offset + at - chunk.start, chunk.start + chunk.length - at) for chunk, _, at in kept]
        try:
            rows = self._writer.copier.copy([assembly.tokens for _, assembly in begun], parts, input_ids, named, layout)
        except OSError as error:
            self._writer.tell("memory", "no host memory for the rows of a pass: %s", error)
            for request, assembly in assemblies:
                if assembly.prompt is not None:  # it keeps the rows it has, and they may not have landed yet
                    self._close(request, assembly, contract.CAPTURE_FAILED)
                elif self._forget(request, assembly):
                    self._writer.lose(assembly, error.strerror or str(error))
            return
        rows.holders, fence = len(assemblies), self._writer.copier.fence()
        for (_, assembly), place in zip(begun, rows.prompts, strict=True):
            assembly.prompt = rows, place
        for (chunk, assembly, at), first in zip(kept, rows.rows, strict=True):
            assembly.parts.append(Part(at, chunk.start + chunk.length, rows, first))
        for request, assembly in assemblies:
            assembly.fence = fence
            if assembly.ended or not assembly.nbytes:
                self._close(request, assembly, assembly.reason())

    def _begun(self, chunk: Chunk, layout: Layout, until: float) -> Assembly | None:
        """A new assembly for a request's first rows, without `nbytes` if there is no room; None if it has its dump."""
        request = chunk.request
        if request in self._done:
            return None
        # An aborted request still runs one pass, with its prompt cut to one token.
        if request.finished() or request.to_finish is not None or self._is_a_further_sample(request):
            self._done.add(request)
            return None
        assert self._writer is not None
        tokens = array("q", request.origin_input_ids)
        nbytes = layout.bytes_for(len(tokens), len(tokens) - chunk.start)
        assembly = Assembly(
            self._writer.next_counter(), str(request.rid), tokens, base=chunk.start, unfit=_unfit(request)
        )
        if self._writer.reserve(nbytes, until):
            assembly.nbytes = nbytes
        elif self._writer.crowded:
            self._writer.lose(assembly, contract.QUEUE_FULL)
            self._done.add(request)
            return None
        else:
            assembly.unfit = contract.QUEUE_FULL
        self._open[request] = assembly
        self._orphans[assembly.counter] = assembly
        return assembly

    def _is_a_further_sample(self, request: Any) -> bool:
        """With n > 1 and max_new_tokens 0 the prefill and its n copies look alike: the first one is captured."""
        samples = request.sampling_params.n
        if samples == 1:
            return False
        key, now = contract.tokens_sha256(request.origin_input_ids), time.monotonic()
        self._samples_left = {k: old for k, old in self._samples_left.items() if now - old[1] < _COPIES_COME_WITHIN}
        left, _ = self._samples_left.pop(key, (samples + 1, now))
        if left > 1:
            self._samples_left[key] = left - 1, now
        return left <= samples

    # ---- ends of prefills

    def close_ended(self) -> None:
        """Publish, as incomplete, what was captured of requests that ended before their prompt did.

        Called from the forward thread before each pass and from the writer's tick when the server is idle. A pass that
        waits for the disk holds the lock: then there will be another call.
        """
        if not self._orphans or not self._lock.acquire(blocking=False):
            return
        try:
            alive = set()
            for request, assembly in list(self._open.items()):
                if request.finished() or request.to_finish is not None:
                    self._close(request, assembly, contract.ABORTED)
                else:
                    alive.add(assembly.counter)
            for counter in [counter for counter in self._orphans if counter not in alive]:
                self._submit(self._orphans.pop(counter), contract.ABORTED)
        finally:
            self._lock.release()

    def close_all(self, reason: str) -> None:
        """Publish, as incomplete, every prefill that is under way."""
        with self._lock:
            for request, assembly in list(self._open.items()):
                self._close(request, assembly, reason)
            for counter in list(self._orphans):
                self._submit(self._orphans.pop(counter), reason)

    def give_up(self, why: str) -> None:
        """Stop capturing, loudly and once; the server goes on serving, and writer.json says so."""
        if self._given_up:
            return
        self._given_up = True
        self._stock_only |= self._alone  # else other ranks go on, and expect this one in their collectives
        logger.error("EYAS CAPTURE HAS STOPPED, serving goes on: %s", why, exc_info=sys.exc_info()[0] is not None)
        if self._writer is not None:
            self._writer.state = contract.BROKEN
            self._writer.refused = [why]
            try:
                self.close_all(contract.CAPTURE_FAILED)
                self._writer.publish()
            except Exception:  # the trouble may be the writer's own
                logger.exception("eyas: what was under way is lost")

    def _close(self, request: Any, assembly: Assembly, reason: str | None) -> None:
        if self._forget(request, assembly):
            self._submit(assembly, reason)

    def _forget(self, request: Any, assembly: Assembly) -> bool:
        """No pass adds to it any more; whether it was under way until now."""
        del self._open[request]
        self._done.add(request)
        return self._orphans.pop(assembly.counter, None) is not None

    def _submit(self, assembly: Assembly, reason: str | None) -> None:
        assert self._writer is not None
        if assembly.prompt is None:  # nothing of it was copied: there is nothing to write
            self._writer.lose(assembly, reason or contract.CAPTURE_FAILED)
        else:
            self._writer.submit(assembly, reason)


def _unfit(request: Any) -> str | None:
    """Why this request's rows are not the base model's states of its token ids; None when they are."""
    if any(getattr(request, name) is not None for name in BESIDES_TOKENS):
        return contract.NOT_ONLY_TOKENS
    return None if request.lora_id is None else contract.ADAPTER
