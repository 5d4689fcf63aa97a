"""How much may be asked for at once, counted in tokens: those of prompts and those that answers may have."""

from __future__ import annotations

from paradec.integrations.server.asked import Refused


class Work:
    """Tokens of the requests that are being answered or wait. One thread at a time.

    Args:
        most: of them all together.
    """

    def __init__(self, most: int):
        self.most, self.held = most, 0

    def take(self, tokens: int, retry_after: int) -> None:
        """Count the tokens of one answer, its prompt's and those that it may have.

        Raises:
            Refused: they never fit (400), or do not fit now (429, to be tried again after so many seconds).
        """
        if tokens > self.most:
            raise Refused(f"{tokens} tokens of prompt and answer are more than this server takes, {self.most}", 400)
        if self.held + tokens > self.most:
            raise Refused(
                f"{self.held} tokens are being answered or wait, and {tokens} more are beyond {self.most}; try again",
                429,
                retry_after=retry_after,
            )
        self.held += tokens

    def give_back(self, tokens: int) -> None:
        """An answer has ended."""
        self.held -= tokens
