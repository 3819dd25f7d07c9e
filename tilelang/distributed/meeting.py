"""How ranks compare texts on the host, and notice that one of them is gone.

They use the key-value store of torch.distributed.  A thread of every rank writes a count there again and again.  Who misses
the text of a rank looks at its count: a rank whose count has stopped is gone, one that is only slow (it compiles) is not.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from tilelang.errors import error

BEAT, GONE, POLL = 1.0, 12.0, 0.005  # seconds: between counts, without a new count, between questions


class Meeting:
    """The ranks of a program as one of them sees them.

    store: set(key, text), get(key), check([keys]), delete_key(key).  name: of this set of ranks.  gone: seconds without a
    sign of life.
    """

    def __init__(self, store: Any, rank: int, ranks: int, name: str = "ranks", gone: float = GONE) -> None:
        self.store, self.rank, self.ranks, self.name, self.gone = store, rank, ranks, f"tilelang/{name}", gone
        self.calls, self.lock, self.ended = 0, threading.Lock(), threading.Event()
        self._count(0)
        self.thread = threading.Thread(target=self._beat, name="tilelang-rank", daemon=True)
        self.thread.start()

    def end(self) -> None:
        """Stop giving signs of life.  The first rank, which may keep the store, waits until the others have done so."""
        self.ended.set()
        self.thread.join()
        self._ask("set", f"{self.name}/left/{self.rank}", "")
        for r in range(self.ranks if self.rank == 0 else 0):
            self._text(f"{self.name}/left/{r}", r, "the end")

    def gather(self, text: str) -> list[str]:
        """The texts of all ranks, which call this equally often.  Raises rank-stopped where one of them is gone."""
        call, self.calls = self.calls, self.calls + 1
        self._ask("set", f"{self.name}/{call}/{self.rank}", text)
        said = [self._text(f"{self.name}/{call}/{r}", r, text) for r in range(self.ranks)]
        if call:  # all ranks have come to this call, so none reads the texts of the one before
            self._ask("delete_key", f"{self.name}/{call - 1}/{self.rank}")
        return said

    def _text(self, key: str, rank: int, what: str) -> str:
        seen, since = b"", time.monotonic()
        while not self._ask("check", [key]):
            time.sleep(POLL)
            if time.monotonic() - since > BEAT:
                alive = self._ask("get", f"{self.name}/alive/{rank}") if self._ask("check", [
                    f"{self.name}/alive/{rank}"]) else b""
                if alive != seen:
                    seen, since = alive, time.monotonic()
                elif time.monotonic() - since > self.gone:
                    raise error("rank-stopped", f"rank {self.rank}: rank {rank} is gone; it did not come to {what}",
                                expected=f"a sign of life within {self.gone:g} seconds", found="none")
        return str(self._ask("get", key).decode())

    def _ask(self, method: str, *args: Any) -> Any:
        try:
            with self.lock:  # the store answers one question at a time
                return getattr(self.store, method)(*args)
        except RuntimeError as e:
            raise error("rank-stopped", f"rank {self.rank}: the store that the ranks share does not answer: the process that "
                        "keeps it (rank 0, or torchrun) is gone", expected="an answer of the store",
                        found=str(e).splitlines()[0][:200]) from None

    def _count(self, n: int) -> None:
        with self.lock:
            self.store.set(f"{self.name}/alive/{self.rank}", str(n))

    def _beat(self) -> None:
        n = 0
        while not self.ended.wait(BEAT / 2):
            n += 1
            try:
                self._count(n)
            except RuntimeError:  # the next question of this rank says that the store is gone
                return
