"""The kernels of the loop, which the driver compiles: on a GPU each answers its example as NumPy does. Not run yet."""

import numpy as np
import pytest

from fp8q.serve.loop.cache import CacheLayout
from fp8q.serve.loop.cuda import CudaDevice
from fp8q.serve.loop.device_kernels import load_kernels

pytestmark = pytest.mark.gpu


def test_the_driver_compiles_them_and_their_example_passes() -> None:
    layout = CacheLayout(("0.key", "0.value"), ((8, 128),) * 2, (np.dtype(np.uint8),) * 2)
    assert load_kernels(CudaDevice(), layout) is not None
