"""The recipe's schedule as Prefect takes it: a plan refuses one that is none, as `eyas serve` does."""

from prefect.client.schemas.schedules import CronSchedule
from pydantic import ValidationError

from hidden_states.errors import RecipeError
from infra.recipe import Recipe


def schedule(recipe: Recipe) -> CronSchedule | None:
    """When the pipeline starts by itself; None = never.

    Raises:
        RecipeError: not a cron line, or no such time zone.
    """
    if recipe.schedule.cron is None:
        return None
    try:
        return CronSchedule(cron=recipe.schedule.cron, timezone=recipe.schedule.timezone)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise RecipeError(
            f"recipe {recipe.name}, `schedule.{problem['loc'][0]}`", str(problem["ctx"]["error"]),
            "a cron line such as `0 3 * * *` and a time zone such as `Europe/Berlin`", "Correct it.",
        ) from error  # fmt: skip
