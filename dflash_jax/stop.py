"""Ctrl-C and SIGTERM as a question that is asked between steps, and within evaluations."""

import os
import signal
import sys
import threading
from typing import Any

import jax
from jax.experimental import multihost_utils

from dflash_jax.cli import INTERRUPTED, TERMINATED


class StopRequests:
    """Whether to save and stop: a context manager.

    A signal only sets a flag, because within a step the old state is already donated and the new one not yet ours. Several
    processes stop at the same place whichever of them was told (a pod's host that is taken away gets SIGTERM): JAX's preemption
    service hears SIGTERM and makes them agree, and Ctrl-C becomes a SIGTERM to ourselves.
    A second Ctrl-C ends the run once a save that is on its way is whole. Where Ctrl-C is ignored, or in another thread than the
    main one, nothing changes.
    """

    def __enter__(self) -> "StopRequests":
        self.pressed, self.terminated, self.questions = False, False, 0
        self._before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._hear(signal.SIGINT, self._press)
            if jax.process_count() == 1:
                self._hear(signal.SIGTERM, self._terminate)
        return self

    def asked(self) -> bool:
        """Whether to stop now. All processes ask at the same places: after each step, and between parts of an evaluation."""
        if jax.process_count() == 1:
            return self.pressed or self.terminated
        # the service agrees on the number of a question, the next that no process has asked yet, and says yes to that one only
        self.questions += 1
        self.terminated = bool(multihost_utils.reached_preemption_sync_point(self.questions)) or self.terminated
        return self.terminated

    @property
    def status(self) -> int:
        """The exit status that shells expect."""
        return INTERRUPTED if self.pressed else TERMINATED

    def _hear(self, kind: signal.Signals, act: Any) -> None:
        before = signal.getsignal(kind)
        if before is not signal.SIG_IGN:
            self._before[kind] = before
            signal.signal(kind, act)

    def _press(self, *_: Any) -> None:
        self.pressed = True
        signal.signal(signal.SIGINT, self._before[signal.SIGINT])
        print("\nsaving after this step; Ctrl-C again to stop at once", file=sys.stderr)
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def _terminate(self, *_: Any) -> None:
        self.terminated = True
        print("\nSIGTERM: saving after this step", file=sys.stderr)

    def __exit__(self, *_: object) -> None:
        for kind, before in self._before.items():
            signal.signal(kind, before)
