"""What a server was sent, by position."""

import torch

from corolla.remote.history import History


def test_what_is_written_is_read_whatever_was_there_before() -> None:
    states = torch.randn(300, 8)
    history = History()
    for start, end in ((0, 7), (7, 8), (8, 9), (4, 6), (9, 300)):
        history.write(start, states[start:end])
    assert torch.equal(history.read(0, 300), states)
    assert torch.equal(history.read(5, 150), states[5:150])
    history.write(5, states[:3])
    assert torch.equal(history.read(4, 9), torch.cat([states[4:5], states[:3], states[8:9]]))
