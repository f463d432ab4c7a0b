"""What is tried again by itself, and what never is."""

from typing import Any, cast

import pytest
from prefect.states import Completed, exception_to_failed_state
from prefect.utilities.asyncutils import run_coro_as_sync

from hidden_states import errors
from hidden_states.errors import Refusal
from tasks.step import worth_another_try

MAY_PASS = {errors.ServerError, errors.StoreError}
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Refusal)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_only_a_server_or_a_store_that_failed_is_asked_again(kind: type[Refusal]) -> None:
    state = run_coro_as_sync(exception_to_failed_state(kind("here", "found", "expected", "Do.")))
    assert worth_another_try(cast(Any, None), cast(Any, None), cast(Any, state)) is (kind in MAY_PASS)


def test_what_is_no_refusal_of_ours_may_pass_too() -> None:
    state = run_coro_as_sync(exception_to_failed_state(RuntimeError("the network hiccuped")))
    assert worth_another_try(cast(Any, None), cast(Any, None), cast(Any, state))
    assert not worth_another_try(cast(Any, None), cast(Any, None), Completed(data=1))
