"""Rules R101 to R105: the configuration and folders that Triton reads before any backend does."""

from ...core.errors import InputError
from ...core.files import regular_file
from ...core.findings import Broken
from ...options import model_name
from .folder import CONFIG, PLATFORMS, ModelFolder, Repository, why
from .rules import model_rule, repository_rule

AGAIN = "run `fp8q triton` again"
#: Model file -> the remedy if it is missing.
WITHOUT = {
    "model.py": f"a server waits for minutes for a model without it; {AGAIN}",
    "model.plan": "put the engine there that `fp8q build-engine` builds with TensorRT",
}


@repository_rule("R101", "config-reads")
def config_reads(repository: Repository) -> Broken:
    """Every folder of a repository holds a config.pbtxt that Triton's schema reads. Triton takes each for a model, and
    a server that loads all of them stops at one it cannot read.
    """
    for model in repository.models:
        if model.config is None:
            place = model.place()
            fault = f"there is no {CONFIG}" if model.problem == "there is no such file" else model.problem
            yield place, f"{fault}; {AGAIN}, or move the folder out of the repository"


@model_rule("R102", "model-name")
def name_of_folder(model: ModelFolder) -> Broken:
    """A model is called as its folder, and by letters, digits, '.', '_' and '-'. Triton refuses another name than the
    folder's; other characters do not pass through URLs as they are.
    """
    folder = model.folder.name
    name = model.config.name if model.config is not None else ""
    if name and name != folder:
        yield model.place(), f"the name is {name}, and the folder's {folder}; give both one name"
    if folder != model_name(folder):
        yield model.place(), f"{folder} is no name for a model; rename the folder, for example {model_name(folder)}"


@model_rule("R103", "backend")
def backend(model: ModelFolder) -> Broken:
    """A model names one backend, that of its files: a Python model's is python, an engine's tensorrt, or the platform
    tensorrt_plan.
    """
    assert model.config is not None, "`model_rule` leaves out what does not parse"
    platform = str(model.config.platform)
    named = str(model.config.backend)
    if not platform and not named:
        yield model.place(), 'names no backend; set backend: "python", or the platform of an engine'
        return
    if platform and platform not in PLATFORMS:
        yield model.place(), f"the platform {platform} is none of {', '.join(PLATFORMS)}; set one of them, or a backend"
        return
    if platform and named and PLATFORMS[platform] != named:
        yield model.place(), f"the platform {platform} is not the backend {named}'s; keep the right one of them"
        return
    wanted = "python" if model.is_text else "tensorrt" if model.is_engine else model.backend
    if model.backend != wanted:
        yield model.place(), f"the backend is {model.backend}, and the files are for {wanted}; {AGAIN}"


@model_rule("R104", "version-folder")
def version_folder(model: ModelFolder) -> Broken:
    """A model has a folder for each version that is served, named by a number that does not begin with 0: Triton looks
    at no others.
    """
    if not model.numbered:
        yield model.place(), "the model has no version: no folder beside it is named by a number; make the folder 1"
        return
    for version in model.served:
        if not version.is_dir():
            yield (
                model.place(),
                f"the version {version.name} is to be served and is not there; put it there, or another",
            )


@model_rule("R105", "model-file")
def model_file(model: ModelFolder) -> Broken:
    """What the backend opens is there, and is a file that holds something. A server waits for minutes for a model.py
    that is missing, and takes no signal meanwhile.
    """
    name = model.model_file
    for version in model.served if name and model.backend != "ensemble" else ():
        if not version.is_dir():
            continue  # R104
        file = version / str(name)
        remedy = WITHOUT.get(str(name), "put it there")
        try:
            if regular_file(file) == 0:
                yield model.place(file), f"is empty; {remedy}"
        except InputError as error:
            yield model.place(file), f"{why(error, file)}; {remedy}"
