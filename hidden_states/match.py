"""Which dump belongs to which sample: by request id and token digest, never by counter.

A counter restarts with the server and counts everybody's requests, so it only tells what nothing else can: that a dump
is missing from the middle (a gap), or was there before this extraction began (stale).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from eyas_capture import contract
from hidden_states.dump import Dump, DumpRef, read_record
from hidden_states.record import BadDump, Record, Writer, read_writer
from hidden_states.samples import Sample


@dataclass(frozen=True)
class Gap:
    """Counters first to last (both included) of a writer that nobody saw a dump of."""

    writer_id: str
    first: int
    last: int


@dataclass
class Reconciliation:
    """Every request of a batch is in exactly one of matched, missing, duplicate, short, wrong_tokens, unreadable.

    Attributes:
        matched: request id -> its one complete dump of the right tokens.
        missing: request ids without a dump.
        duplicate: request id -> its dumps, when there are several: none is used, for none is known to be the one.
        short: request id -> a dump that lacks rows; `record.incomplete_reason` says why.
        wrong_tokens: request id -> a dump of other tokens than were sent.
        unreadable: dumps whose record cannot be trusted, with the reason. Their requests show up as missing.
        foreign: dumps of requests that are not of this batch: health probes, other clients, earlier attempts.
        stale: dumps from before the base line, whatever request id they carry. Never matched.
        gaps: counters after the base line that were never seen.
    """

    matched: dict[str, Dump] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    duplicate: dict[str, list[Dump]] = field(default_factory=dict)
    short: dict[str, Dump] = field(default_factory=dict)
    wrong_tokens: dict[str, Dump] = field(default_factory=dict)
    unreadable: list[tuple[DumpRef, BadDump]] = field(default_factory=list)
    foreign: list[DumpRef] = field(default_factory=list)
    stale: list[DumpRef] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)

    def reason(self, request_id: str) -> str | None:
        """Why a request is not matched, as `kind: in words`; None when it is."""
        if request_id in self.missing:
            return "missing: no dump came"
        if request_id in self.duplicate:
            dumps = self.duplicate[request_id]
            return f"duplicate: {len(dumps)} dumps, " + ", ".join(str(dump.ref) for dump in dumps)
        if request_id in self.short:
            return f"short: {_short_in_words(self.short[request_id])}"
        if request_id in self.wrong_tokens:
            dump = self.wrong_tokens[request_id]
            return f"wrong tokens: {dump.ref} captured {dump.record.tokens} tokens that are not the ones sent"
        return None

    def counts(self) -> dict[str, int]:
        """Number of each, for the report."""
        return {name: len(getattr(self, name)) for name in self.__dataclass_fields__}


def reconcile(
    batch_requests: Mapping[str, Sample],
    dumps: Iterable[DumpRef | Dump],
    base_line: Mapping[str, int],
    seen: Mapping[str, Iterable[int]] | None = None,
) -> Reconciliation:
    """Sort the dumps of a folder by the requests of a batch.

    Args:
        batch_requests: request id -> the sample whose tokens were sent under it.
        dumps: everything published, in any order.
        base_line: writer id -> its last counter before this extraction. A writer that is not in it (a server that was
            started again since) counts from 0.
        seen: counters seen by writer, removed dumps included (`DumpFolder.seen`); left out = those of `dumps`. Gaps are
            judged by it, so batches that are in flight together do not take each other's dumps for gaps.
    """
    result = Reconciliation()
    by_request: dict[str, list[Dump]] = {}
    writers: dict[str, Writer] = {}
    counters: dict[str, set[int]] = {}
    for item in dumps:
        ref = item.ref if isinstance(item, Dump) else item
        counters.setdefault(ref.writer_id, set()).add(ref.counter)
        if ref.counter <= base_line.get(ref.writer_id, -1):
            result.stale.append(ref)
            continue
        try:
            record = item.record if isinstance(item, Dump) else read_record(ref)
            if record.request_id not in batch_requests:
                result.foreign.append(ref)
                continue
            by_request.setdefault(record.request_id, []).append(_opened(item, record, writers))
        except BadDump as error:
            result.unreadable.append((ref, error))
    for request_id, sample in batch_requests.items():
        found = by_request.get(request_id, [])
        if not found:
            result.missing.add(request_id)
        elif len(found) > 1:
            result.duplicate[request_id] = sorted(found, key=lambda dump: dump.ref)
        elif _other_tokens(found[0].record, sample):
            result.wrong_tokens[request_id] = found[0]
        elif not found[0].record.complete or found[0].record.rows != len(sample):
            result.short[request_id] = found[0]
        else:
            result.matched[request_id] = found[0]
    result.gaps = _gaps({writer: set(numbers) for writer, numbers in (seen or counters).items()}, base_line)
    return result


def _other_tokens(record: Record, sample: Sample) -> bool:
    digest = contract.tokens_sha256(sample.input_ids)
    return record.tokens_sha256 != digest or record.incomplete_reason == contract.TOKENS_DIFFER


def _opened(item: DumpRef | Dump, record: Record, writers: dict[str, Writer]) -> Dump:
    if isinstance(item, Dump):
        return item
    if item.writer_id not in writers:
        writers[item.writer_id] = read_writer(item.path.parent / contract.WRITER_FILE)
    return Dump(item, record, writers[item.writer_id])


def _gaps(seen: Mapping[str, set[int]], base_line: Mapping[str, int]) -> list[Gap]:
    gaps = []
    for writer_id, counters in sorted(seen.items()):
        expected = base_line.get(writer_id, -1) + 1
        for counter in sorted(c for c in counters if c >= expected):
            if counter > expected:
                gaps.append(Gap(writer_id, expected, counter - 1))
            expected = counter + 1
    return gaps


def _short_in_words(dump: Dump) -> str:
    record = dump.record
    words = f"{dump.ref}: {record.rows} tokens captured, {record.tokens} sent"
    if record.prefix_cached:
        return (
            f"{words}; {record.prefix_cached} were served from the prefix cache. Restart the server with the radix "
            "cache off or let extraction send a unique extra_key."
        )
    return f"{words}; {record.incomplete_reason or 'no reason given'}."
