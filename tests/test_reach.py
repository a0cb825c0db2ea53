"""The files that calibration reaches: what follows it is not among them."""

from .reach import reached

#: The files that `stages.calibrate` reaches, which may only become fewer.
CALIBRATION = 197


def test_calibration_reaches_no_more_files_than_it_did() -> None:
    files = reached("fp8q.stages.calibrate")
    assert {"fp8q.stages.measure", "fp8q.quantize.scales.decisions", "fp8q.core.files"} <= files
    assert len(files) <= CALIBRATION
