"""Refusals: what Eyas says when it cannot go on.

Every refusal names four things: where, what was found, what was expected, and what to do. One type per thing a caller
can act on; the command line prints the message without a traceback and exits with the type's code.
"""


class Refusal(Exception):
    """A clear end: `{where}: {found}; expected {expected}. {do}`

    Args:
        where: the file, line, dump, object, recipe key or address the refusal is about.
        found: what was there, with the figure or name that shows it.
        expected: what should have been there; left out when `found` already says it.
        do: the next step for a person, one or two full sentences.
    """

    exit_code = 1

    def __init__(self, where: str, found: str, expected: str | None = None, do: str = "") -> None:
        self.where, self.found, self.expected, self.do = where, found, expected, do
        middle = f"; expected {expected}" if expected else ""
        super().__init__(f"{where}: {found}{middle}. {do}".strip())

    def __reduce__(
        self,
    ) -> tuple[
        type, tuple[str, str, str | None, str]
    ]:  # Prefect moves exceptions between processes; the default would lose the four parts
        return type(self), (self.where, self.found, self.expected, self.do)


class RecipeError(Refusal):
    """The recipe cannot work as written; editing it is the cure. Never retried."""

    exit_code = 2


class DataError(Refusal):
    """A conversations file or row cannot be used."""

    exit_code = 3


class ServerError(Refusal):
    """The SGLang server did not start, died, hung, or answered wrongly."""

    exit_code = 4


class DumpError(Refusal):
    """A captured dump is not what was asked for, or not intact."""

    exit_code = 5


class StoreError(Refusal):
    """The object store cannot be reached, refused, or returned something else than what was written."""

    exit_code = 6


class DatasetError(Refusal):
    """A committed dataset is missing, damaged, or of another fingerprint."""

    exit_code = 7


class GateError(Refusal):
    """The captured states are well-shaped but wrong, or a served figure misses its bound."""

    exit_code = 8


class TrainingError(Refusal):
    """Training cannot start, or stopped itself (NaN, jump in loss)."""

    exit_code = 9
