"""Why a prompt could not be made."""


class PromptError(ValueError):
    """The request's own fault: HTTP 400. `param` is the field, as `messages[0].role`."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param
