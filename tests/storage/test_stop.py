"""What a stop flag knows of its write."""

from __future__ import annotations

import pytest

from gym_ckpt_grpc.storage import StopFlag, WriteStopped


def test_it_knows_whether_the_write_has_named_its_files() -> None:
    """Not before, not if it was stopped first, not if naming failed; and a later stop changes nothing."""
    stopped, failed, done = StopFlag(), StopFlag(), StopFlag()
    stopped.stop()
    with pytest.raises(WriteStopped), stopped.publication():
        raise AssertionError("it was stopped")
    with pytest.raises(OSError, match="full"), failed.publication():
        raise OSError("full")
    with done.publication():
        assert not done.published
    assert done.stop()
    assert (stopped.published, failed.published, done.published) == (False, False, True)
