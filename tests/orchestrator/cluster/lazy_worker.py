"""Workers whose classes the process of the tests does not import."""

from __future__ import annotations

from troupe.workers.contract.messages import WorkerGone


class Lazy:
    """A worker with synchronous methods."""

    def __init__(self, *words: str) -> None:
        self._words = words

    def answer(self, word: str, *, mark: str = "") -> tuple[str, ...]:
        """All words, and the name of the class."""
        return (*self._words, word + mark, type(self).__name__)

    def close(self) -> None:
        """Nothing to free."""

    def fail(self) -> None:
        """Fails as a worker whose engine is gone."""
        raise WorkerGone("my engine is gone")


class LazyCoroutines:
    """The same with coroutines."""

    def __init__(self, *words: str) -> None:
        self._worker = Lazy(*words)

    async def answer(self, word: str, *, mark: str = "") -> tuple[str, ...]:
        """See `Lazy.answer`."""
        return self._worker.answer(word, mark=mark)

    async def close(self) -> None:
        """See `Lazy.close`."""

    async def fail(self) -> None:
        """See `Lazy.fail`."""
        self._worker.fail()
