"""Every process ends with its test, and signals do not depend on how pytest was started."""

import multiprocessing
import signal
import subprocess

import pytest

from processes import default_dispositions, ended_with_block


def test_a_test_that_fails_leaves_no_process_in_any_session() -> None:
    shell = "sleep 600 & echo $!; wait"
    with pytest.raises(ZeroDivisionError), ended_with_block():
        command = ["bash", "-c", shell]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        assert process.stdout is not None
        int(process.stdout.readline())
        _ = 1 / 0
    assert process.wait(30) == -signal.SIGKILL
    assert process.stdout.read() == b"", "its child has ended too, and with it the pipe"
    process.stdout.close()


def test_pooled_ranks_stay() -> None:
    with ended_with_block():
        pooled = multiprocessing.get_context("spawn").Process(target=signal.pause, daemon=True)
        pooled.start()
    try:
        assert pooled.is_alive()
    finally:
        pooled.kill()
        pooled.join()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_nohup_ignores_has_its_default_within(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with default_dispositions():
            assert signal.getsignal(number) is not signal.SIG_IGN
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
