"""The recipe a flow run began with. A retry is the same run again, so it must be the same recipe.

It is kept with the run in Prefect, as an artifact that its page shows, because a retry may come to another host.
"""

import json
import re

import yaml
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
)
from prefect.runtime import flow_run

from hidden_states.errors import RecipeError
from infra.recipe import Recipe

KEY = "recipe"
NOT_OF_THE_RUN = ("schedule",)  # when a run begins is no part of what it does
NAMED = 5


def keep_or_compare(recipe: Recipe) -> None:
    """First attempt: keep the recipe. Later ones: refuse when it has been edited since.

    Raises:
        RecipeError: names each key that differs.
    """
    run_id = flow_run.get_id()
    if run_id is None:
        return
    now = {key: value for key, value in recipe.flat().items() if key.split(".")[0] not in NOT_OF_THE_RUN}
    before = _kept(run_id)
    if before is None:
        text = yaml.safe_dump(recipe.as_dict(), sort_keys=False)
        content = json.dumps(now, sort_keys=True, default=str)
        create_markdown_artifact(f"```yaml\n{text}```\n\n```json\n{content}\n```\n", key=KEY,
                                 description="The recipe of this run, with every default filled in")  # fmt: skip
        return
    now = json.loads(json.dumps(now, default=str))
    differing = [f"{key} ({before.get(key)!r} / {now.get(key)!r})" for key in sorted(before.keys() | now.keys())
                 if before.get(key) != now.get(key)]  # fmt: skip
    if differing:
        more = f" and {len(differing) - NAMED} more" if len(differing) > NAMED else ""
        raise RecipeError(
            f"recipe {recipe.name}", f"edited since this run began: {', '.join(differing[:NAMED])}{more}",
            "the recipe the run began with",
            "A retry is the same run again. Put the recipe back, or start a new run: it goes on with the "
            "dataset's version where the edit leaves alone what that is made of, and begins a new one otherwise.",
        )  # fmt: skip


def _kept(run_id: str) -> dict[str, object] | None:
    only = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run_id]), key=ArtifactFilterKey(any_=[KEY]))
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=only, limit=1)
    if not found:
        return None
    block = re.search(r"```json\n(.*?)\n```", str(found[0].data), re.DOTALL)
    return dict(json.loads(block[1])) if block else None
