"""What writes and reads event files of TensorBoard."""

import sys

import pytest


def tensorboard():
    """The package tensorboardX, or the test is skipped.

    It imports PyTorch where that is installed, which takes 5 seconds; numbers do not need it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch", None)
        pytest.importorskip("tensorboardX.proto.event_pb2")
        return pytest.importorskip("tensorboardX")
