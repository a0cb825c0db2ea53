"""The campaign is a script with modules beside it, as those in `benchmarks`: its tests find them the same way."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
