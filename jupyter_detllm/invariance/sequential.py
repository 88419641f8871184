"""One sequence at a time: invariant by never having a batch, for every platform."""

from __future__ import annotations

from jupyter_detllm.core.levels import ONE_AT_A_TIME
from jupyter_detllm.invariance.base import Host, Method

__all__ = ["OneAtATime"]


class OneAtATime(Method):
    """The engine submits one completion, waits for it, and submits the next."""

    name = ONE_AT_A_TIME
    changes = "completions run one after the other; no kernel is changed"
    undone = "nothing has to be undone"
    costs = "a batch takes as long as its completions one by one (measured on CPU: 7 times)"
    sequential = True

    def refusal(self, host: Host) -> str:
        """Refuse nothing: there is no place where this cannot be tried."""
        return ""
