"""A client of MLflow, whose silence is a refusal: it does not answer, or there is none where the URI points."""

import contextlib
import os
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import SQLAlchemyError

from hidden_states.errors import Refusal, ServerError

NOT_THERE = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")  # the latter: a version that is no number, ...


def mlflow_client(uri: str, *, ask: bool = True) -> MlflowClient:
    """A client of the MLflow at `uri`, which has answered already.

    Args:
        ask: False = where it is not needed for certain; it may then be away.

    Raises:
        ServerError: it does not answer, or `uri` names no MLflow.
    """
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # MLflow's own 7 take two minutes
    with asking(uri):
        urlsplit(uri)
        client = MlflowClient(tracking_uri=uri)
        if ask:
            client.search_registered_models(max_results=1)
    return client


@contextlib.contextmanager
def asking(uri: str, missing: Refusal | None = None) -> Iterator[None]:
    """Around calls of a client.

    Args:
        missing: raised when MLflow answers that there is no such thing.

    Raises:
        ServerError: MLflow does not answer, or `uri` names none.
    """
    try:
        yield
    except (MlflowException, SQLAlchemyError, ImportError, ValueError, OSError) as error:
        if missing is not None and isinstance(error, MlflowException) and error.error_code in NOT_THERE:
            raise missing from error
        said = without_password(" ".join(str(error).split()))[:200]
        raise ServerError(
            f"MLflow at {without_password(uri)}", f"no answer ({said})", "http(s)://host:port or sqlite:///file",
            "Start it (`eyas up`), or correct MLFLOW_TRACKING_URI.",
        ) from error  # fmt: skip


def without_password(text: str) -> str:
    """The text, without what stands before the host of any address in it."""
    return re.sub(r"//[^/@\s]*@", "//", text)
