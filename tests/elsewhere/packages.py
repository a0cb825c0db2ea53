"""The environments of vLLM, Edge-LLM, lm-eval and clients of servers, which want other versions than fp8q, or more.

Each lies on top of the environment that runs the tests, as `.venv/vllm` and `.venv/lm-eval`, and holds only what that
one does not bring, or brings in another version; torch, 750 MB of it, is not there twice. `vllm.txt` and its like
list it, exact versions, and of it only what is imported here. It is installed without what it says it depends on: so
vLLM takes 0.7 GB and not 3.5, and torchaudio and torchcodec, whose builds do not match torch's, are not there at all.

On a CPU two lines are mended. vLLM's GEMM of FP8 codes narrows the scales of activations to the number of tokens, since
it expects one scale for each token, and a static scale is one for all; on a GPU other code runs. torchvision, which the
classes of models that see import and their text does not need, is built for a GPU: its operators are not there, and
what it registers for their shapes is left out.
"""

import sysconfig
from pathlib import Path

from environments import HOME, kept_environment, pip_for

#: Environment -> lines of its packages that are others: the file, the line, and what stands there instead.
MENDED = {
    "vllm": (
        (
            "vllm/model_executor/kernels/linear/scaled_mm/pytorch.py",
            "        x_scale = torch.narrow(As, 0, 0, num_tokens)\n",
            "        x_scale = As if As.numel() == 1 else torch.narrow(As, 0, 0, num_tokens)\n",
        ),
        ("torchvision/__init__.py", "    _meta_registrations,\n", ""),
    ),
}


def site_packages(home: Path) -> Path:
    """Where the packages of the environment at `home` are."""
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(home)}))


def installed(name: str) -> Path:
    """The environment with what `name`.txt lists.

    Raises UnavailableError where there is no package index, or no wheel for this platform or Python.
    """
    listed, below = Path(__file__).with_name(f"{name}.txt"), sysconfig.get_paths()["purelib"]
    beneath = Path(__file__).resolve().parents[2] / "constraints.txt"  # what is the same there is not installed again

    def fill(home: Path) -> None:
        (site_packages(home) / "below.pth").write_text(f"import site; site.addsitedir({below!r})\n")
        pip_for(home, "--no-deps", "--requirement", str(listed))
        for path, before, after in MENDED.get(name, ()):  # here, where other workers wait: none reads half a file
            file = site_packages(home) / path
            source = file.read_text(encoding="utf-8")
            assert source.count(before) == 1, f"the line of {path} is another: is it mended there?"
            file.write_text(source.replace(before, after), encoding="utf-8")

    texts = [file.read_text(encoding="utf-8") for file in (listed, beneath)]
    mends = [line for mend in MENDED.get(name, ()) for line in mend]
    return kept_environment(HOME / name, [*texts, *mends, below], fill)
