"""What the user, or the page, can put right: one line."""


class Repeated(Exception):
    """This action is in the log already: the page sent it again because it did not hear the answer."""

    def __init__(self, event: int) -> None:
        super().__init__(str(event))
        self.event = event


class LabelError(Exception):
    """What is wrong, with which value, what to do; ``status`` is that of the answer over HTTP."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status
