"""What the user, or the page, can put right: one line."""


class LabelError(Exception):
    """What is wrong, with which value, what to do; ``status`` is that of the answer over HTTP."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status
