"""Files of arrays: what is no file is named, and not read."""

import os
from pathlib import Path

import pytest

from fp8q.core.arrays import read_arrays
from fp8q.core.errors import InputError


def test_a_pipe_is_not_waited_for_and_a_device_not_read_to_its_end(tmp_path: Path) -> None:
    pipe, device, gone = tmp_path / "pipe.npz", tmp_path / "device.npz", tmp_path / "gone.npz"
    os.mkfifo(pipe)
    device.symlink_to("/dev/zero")
    for path, fault in ((pipe, "is a pipe"), (device, "is a device"), (gone, "there is no such file")):
        with pytest.raises(InputError) as refused:
            read_arrays(path, "token ids", "mend it")
        assert str(refused.value) == f"{path}: {fault}; mend it"
