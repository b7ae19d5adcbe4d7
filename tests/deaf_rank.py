"""A rank that no Ctrl-C stops, in a module that is quick to import."""

import signal
from pathlib import Path

from shardwise.parallel.launch import Place


def never_stop(place: Place, folder: str) -> None:
    """Run a rank that notes Ctrl-C in a file of its own and goes on."""
    signal.signal(signal.SIGINT, lambda *_: Path(folder, f"told-{place.rank}").touch())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    Path(folder, f"ready-{place.rank}").touch()
    while True:
        signal.pause()
