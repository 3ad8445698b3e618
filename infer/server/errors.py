"""What a client is told when it cannot have what it asks for."""

from collections.abc import Mapping
from typing import Any


class ApiError(Exception):
    """An answer other than what was asked for.

    Parameters
    ----------
    status : int
        Of HTTP, 400 to 599.
    message : str
        One line: what was given, what is wanted.
    field : str, optional
        Of the request's body, which is to be changed.
    code : str, optional
        By which a program tells errors of one status apart.
    headers : mapping of str to str, optional
        Sent with it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        field: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.field = field
        self.code = code
        self.headers = dict(headers or {})

    def content(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, _type_of_others(self.status)),
                "param": self.field,
                "code": self.code,
            }
        }


def invalid(message: str, field: str | None = None, code: str | None = None) -> ApiError:
    """Return the error for a request that no repetition makes right."""
    return ApiError(400, message, field=field, code=code)


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


def _type_of_others(status: int) -> str:
    return "server_error" if status >= 500 else "invalid_request_error"
