"""Save the progress of a measurement in memory now and then, so that a killed call goes on after the last batch saved.

Statistics of batches are added exactly, so those of the batches before and after are those of all, byte for byte.
Second moments are summed in files that change with each batch: what is saved are copies, of which one is complete at
any time. A call that goes on adds the same batches in the same order, so these are equal too.
"""

import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from ...core.files import reading, replacing
from .moments import SecondMoments
from .statistics import TensorStatistics, load_arrays, save_arrays

#: Seconds between two times that the progress is saved, at least, and the share of the time that saving may take.
EVERY_S = 60.0
SHARE = 0.02


class SavedBatches:
    """The statistics and second moments of the first batches of a measurement, in a folder."""

    def __init__(self, folder: Path, moments: SecondMoments | None):
        """Save inside `folder`, which exists, with the sums of `moments`."""
        self.folder = folder / "batches"
        self.moments = moments
        self._next = time.monotonic() + EVERY_S

    def load(self, batches: int) -> tuple[int, dict[str, TensorStatistics]]:
        """Return how many of so many `batches` an earlier call measured, and their statistics; go on with its second
        moments.
        """
        if self.moments is not None:
            self.moments.go_on(self.folder / "moments", batches)
        if not self.folder.is_dir():
            return 0, {}
        with reading(self.folder, "what a killed call left", "remove it"):
            count = int((self.folder / "count").read_text(encoding="utf-8"))
        return count, load_arrays(self.folder / "statistics.safetensors")[0]

    def is_due(self) -> bool:
        """Tell whether it is time to save: on a disk without the room it never is."""
        sums = self.moments.bytes if self.moments is not None else 0
        return time.monotonic() >= self._next and 2 * sums <= shutil.disk_usage(self.folder.parent).free

    def save(self, count: int, tensors: Mapping[str, TensorStatistics]) -> None:
        """Save the statistics `tensors` of the first `count` batches, and the second moments as they are."""
        begin = time.monotonic()
        with replacing(self.folder) as partial:
            partial.mkdir()
            save_arrays(partial / "statistics.safetensors", tensors, {})
            if self.moments is not None:
                self.moments.copy(partial / "moments")
            (partial / "count").write_text(str(count), encoding="utf-8")
        end = time.monotonic()
        self._next = end + max(EVERY_S, (end - begin) / SHARE)
