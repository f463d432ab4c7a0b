"""What an S3 failure means, in words, never with a credential in it; and those that pass when asked again."""

import random
import time
from collections.abc import Callable
from typing import TypeVar

import botocore.exceptions as botocore
from botocore.exceptions import ClientError
from urllib3.exceptions import HTTPError

from hidden_states.errors import StoreError
from hidden_states.store import ObjectExists, ObjectMissing, StoreUnreachable

READ_ATTEMPTS = 6

_NO_CREDENTIALS = (
    botocore.NoCredentialsError,
    botocore.PartialCredentialsError,
    botocore.CredentialRetrievalError,
    botocore.TokenRetrievalError,
    botocore.SSOError,
)
_PROFILE = (botocore.ProfileNotFound, botocore.ConfigParseError, botocore.ConfigNotFound)
_WRONG_KEY = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken", "TokenRefreshRequired")
_WRONG_REGION = ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "301")
_DAMAGED = ("BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch", "IncompleteBody")
_NEEDS = {
    "write": "s3:PutObject",
    "read": "s3:GetObject",
    "look at": "s3:GetObject",
    "list": "s3:ListBucket",
    "delete": "s3:DeleteObject",
    "look at the bucket": "s3:ListBucket",
}


T = TypeVar("T")


def patiently(read: Callable[[], T]) -> T:
    """Repeats a read whose body broke off: botocore retries requests, not bodies."""
    for attempt in range(READ_ATTEMPTS):
        try:
            return read()
        except (botocore.HTTPClientError, botocore.IncompleteReadError, HTTPError):
            if attempt == READ_ATTEMPTS - 1:
                raise
            time.sleep(min(8.0, 0.2 * 2**attempt) * (0.5 + random.random()))
    raise AssertionError("unreachable")


def explain(exc: Exception, *, where: str, action: str, endpoint: str | None) -> StoreError:
    """The StoreError for what botocore raised while it tried to `action` (a verb, "write") the object at `where`."""
    at = endpoint or "AWS"
    if isinstance(exc, ClientError):
        return _answered(exc, where, action, at)
    if isinstance(exc, _NO_CREDENTIALS):
        return StoreError(
            where,
            "no credentials found, or not whole",
            "an access key and its secret",
            "Name a profile in the recipe, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
        )
    if isinstance(exc, _PROFILE):
        return StoreError(
            where,
            "the AWS profile or its file cannot be read",
            None,
            "See ~/.aws/config and ~/.aws/credentials, and the recipe's profile.",
        )
    if isinstance(exc, botocore.ParamValidationError | botocore.InvalidRegionError):
        return StoreError(where, "boto3 refused the bucket's or the region's name", None, "Correct it in the recipe.")
    if isinstance(exc, ValueError):
        return StoreError(where, "the endpoint is not a URL", "http(s)://host[:port]", "Correct it in the recipe.")
    if isinstance(exc, botocore.SSLError):
        return StoreUnreachable(
            where,
            f"no TLS connection to {at}",
            "a certificate this machine trusts",
            "Check https/http in the endpoint; set AWS_CA_BUNDLE for a private authority.",
        )
    kind = "no answer in time from" if "Timeout" in type(exc).__name__ else "the connection broke to"
    if isinstance(exc, botocore.EndpointConnectionError | botocore.ConnectTimeoutError):
        kind = "cannot reach"
    return StoreUnreachable(
        where,
        f"{kind} {at} while trying to {action} ({type(exc).__name__})",
        None,
        "See that the store runs and that the endpoint in the recipe is its S3 address.",
    )


def _answered(exc: ClientError, where: str, action: str, at: str) -> StoreError:
    code = str(exc.response.get("Error", {}).get("Code", "?"))
    status = int(exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    said = f"{at} answered {code} (HTTP {status})"
    if code in _WRONG_KEY:
        return StoreError(
            where,
            f"access denied: {said}",
            "valid credentials",
            "The key, its secret or its token is wrong or has expired: see the environment and the profile.",
        )
    if code == "RequestTimeTooSkewed":
        return StoreError(
            where,
            f"{said}: this machine's clock and the store's differ",
            "less than 15 minutes",
            "Synchronise the clock (NTP). A part that takes longer than 15 minutes looks the same.",
        )
    if status == 403 or code in ("AccessDenied", "AllAccessDisabled"):
        verb = "no write permission" if action == "write" else f"access denied, cannot {action}"
        return StoreError(
            where,
            f"{verb}: {said}",
            _NEEDS.get(action, "the permission"),
            "Ask the bucket's owner for it, or use another prefix, profile or key.",
        )
    if code == "NoSuchBucket" or (code == "404" and action == "look at the bucket"):
        return StoreError(
            where,
            f"the bucket does not exist at {at}",
            None,
            "Create it, or correct the bucket, the endpoint or the region in the recipe.",
        )
    if code in ("NoSuchKey", "404", "NotFound"):
        return ObjectMissing(where, "not found", None, "Check the name; list the dataset.")
    if code in ("PreconditionFailed", "ConditionalRequestConflict", "412"):
        return ObjectExists(where, "exists already", "a free key")
    if code == "NotImplemented" or status == 501:
        return StoreError(
            where,
            f"{said} when asked to {action}",
            None,
            "The store lacks this part of S3 (conditional or checksummed puts). Set "
            "AWS_REQUEST_CHECKSUM_CALCULATION=when_required, or use another store.",
        )
    if code in _WRONG_REGION:
        return StoreError(
            where, f"{said}: the bucket lives in another region", None, "Correct the region in the recipe."
        )
    if code in _DAMAGED:
        return StoreError(
            where,
            f"{said}: the bytes that arrived are not those sent",
            None,
            "Retry; if it repeats, the file changed on the local disk or a proxy alters the traffic.",
        )
    if code == "InvalidRange" or status == 416:
        return StoreError(
            where,
            f"{said}: the object ends before the rows asked for",
            None,
            "The object is truncated: verify the dataset and capture the batch again.",
        )
    if status >= 500 or code in ("SlowDown", "Throttling", "ThrottlingException", "RequestTimeout", "429"):
        return StoreUnreachable(
            where,
            f"{said} to every attempt to {action}",
            None,
            "The store is overloaded, full or starting. See its log and disk; the same command resumes.",
        )
    return StoreError(where, f"{said} when asked to {action}", None, "See the store's log for this request.")
