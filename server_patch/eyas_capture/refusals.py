"""What cannot be captured, told at start-up by the flag to change."""

from dataclasses import dataclass
from typing import Any

DISABLED = "disabled"


class Drift(RuntimeError):
    """This SGLang release differs from the one the plugin knows; the message names what changed."""


@dataclass(frozen=True)
class ServerFacts:
    """The resolved configuration of this server and this process's place in it."""

    pp_size: int
    tp_size: int
    dp_size: int
    dp_rank: int | None
    attn_tp_rank: int
    prefill_graph: str
    flags: dict[str, Any]

    @property
    def writes(self) -> bool:
        """One rank of each replica writes: the others hold the same rows."""
        return self.attn_tp_rank == 0


# Flags kept in writer.json: they decide which rows exist and how they were computed.
_KEPT = (
    "device", "dtype", "quantization", "kv_cache_dtype", "attention_backend", "chunked_prefill_size",
    "enable_mixed_chunk", "disable_radix_cache", "disable_overlap_schedule", "speculative_algorithm",
    "enable_dp_attention", "ep_size", "max_total_tokens", "context_length", "random_seed",
)  # fmt: skip

# Flag on or unequal to its harmless value -> what to do about it. Each is a road past the captured one, or a layout
# in which a rank does not hold a request's rows whole.
_REFUSED = (
    ("pp_size", 1, "pipeline parallel splits the blocks over ranks: use --pp-size 1 (more --tp-size instead)"),
    ("enable_two_batch_overlap", False, "two-batch overlap has no capture path: drop --enable-two-batch-overlap"),
    ("speculative_algorithm", None, "a running drafter owns the capture path: drop --speculative-algorithm and its "
     "--speculative-* flags while capturing"),
    ("enable_return_aux_hidden_states", False, "SGLang's own return of aux states owns the capture path: drop "
     "--enable-return-aux-hidden-states (and --speculative-algorithm, --return-aux-hidden-state-layer-ids): the plugin "
     "needs none of them"),
    ("enable_pdmux", False, "split prefill has no capture path: drop --enable-pdmux"),
    ("dllm_algorithm", None, "diffusion decoding has no capture path: drop --dllm-algorithm"),
    ("enable_dp_attention", False, "data-parallel attention was never proven with capture: drop --enable-dp-attention "
     "(use --dp-size for whole replicas)"),
    ("attn_cp_size", 1, "context parallel splits a prompt over ranks: drop --attn-cp-size"),
    ("dcp_size", 1, "context parallel splits a prompt over ranks: drop --dcp-size"),
    ("enable_prefill_cp", False, "context parallel splits a prompt over ranks: drop --enable-prefill-cp"),
    ("enable_layernorm_sp", False, "sequence parallel splits rows over ranks: drop --enable-layernorm-sp"),
    ("enable_attn_tp_input_scattered", False, "scattered inputs split rows over ranks: drop "
     "--enable-attn-tp-input-scattered"),
)  # fmt: skip


def read_server(server_args: Any) -> ServerFacts:
    """The facts of the running scheduler process. Raises Drift when SGLang keeps them elsewhere."""
    from sglang.srt.arg_groups.model_override_base import resolved_view
    from sglang.srt.runtime_context import get_exec, get_parallel

    try:
        view, parallel = resolved_view(server_args), get_parallel()
        names = dict.fromkeys((*_KEPT, *(name for name, _, _ in _REFUSED)))
        flags = {name: _plain(getattr(view, name)) for name in names}
        return ServerFacts(
            pp_size=parallel.pp_size,
            tp_size=parallel.tp_size,
            dp_size=view.dp_size,
            dp_rank=parallel.dp_rank,
            attn_tp_rank=parallel.attn_tp_rank,
            prefill_graph=get_exec().graph.cuda_graph_config.prefill.backend,
            flags=flags | {"disaggregation_mode": _plain(view.disaggregation_mode)},
        )
    except AttributeError as error:
        raise Drift(f"SGLang's configuration has no longer what the plugin reads: {error}") from error


def refusals(facts: ServerFacts, is_generation: bool) -> list[str]:
    """Every reason why this server cannot be captured from, each naming the flag to change; empty = it can."""
    reasons = [
        f"{name}={facts.flags[name]!r}: {what}" for name, harmless, what in _REFUSED if facts.flags[name] != harmless
    ]
    if facts.prefill_graph != DISABLED:
        reasons.append(
            f"prefill CUDA graphs are on ({facts.prefill_graph}): hooks do not run in a replayed graph. Start the "
            "server with --cuda-graph-backend-prefill disabled (decode graphs may stay)"
        )
    if facts.flags["disaggregation_mode"] == "decode":
        reasons.append("a decode server never prefills: install the plugin on the prefill server")
    if not is_generation:
        reasons.append("an embedding or reward model generates nothing, so a drafter has nothing to learn from it")
    return reasons


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | None) else str(value)
