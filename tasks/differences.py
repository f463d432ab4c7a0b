"""What two drafters' lineages say they do not share: data, recipe, code. Each entry is `name: one's / the other's`."""

from collections.abc import Mapping
from typing import Any

from infra.recipe import flat

DATA = ("dataset_uri", "manifest_digest", "fingerprint", "samples", "held_out_samples", "tokens")
CODE = ("git_commit", "sglang_version")
# Where things lie and what they are called: another place for the same thing is no difference of the drafters.
PLACES = ("name", "store.", "server.python", "server.dump_dir", "server.url", "server.port", "register.", "schedule.")


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, list[str]]:
    """By kind (`data`, `recipe`, `code`), what differs between two `lineage.json`; all empty = nothing does.

    A drafter without a lineage cannot be told apart in this way, and that is said in each kind.
    """
    if not one or not other:
        unknown = ["not known: no lineage.json in the folder of " + ("either" if one == other else "one of them")]
        return {"data": unknown, "recipe": unknown, "code": unknown}
    ours, theirs = (flat(lineage.get("recipe", {})) for lineage in (one, other))
    chosen = sorted(key for key in ours.keys() | theirs.keys() if not key.startswith(PLACES))
    return {
        "data": _differing(one, other, DATA),
        "recipe": _differing(ours, theirs, chosen),
        "code": _differing(one, other, CODE),
    }


def _differing(one: Mapping[str, Any], other: Mapping[str, Any], names: Any) -> list[str]:
    return [f"{name}: {_said(one, name)} / {_said(other, name)}" for name in names if one.get(name) != other.get(name)]


def _said(source: Mapping[str, Any], name: str) -> str:
    value = source.get(name)
    if value is None:
        return "-"
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return text[:16] + "…" if name in ("manifest_digest", "fingerprint") else text
