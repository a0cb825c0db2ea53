"""The recipes of CONTRIBUTING.md, followed to the letter in a copy of the package.

A block of code of a recipe begins with `# FILE: in NAME` (its lines become the last ones of this class, list, table,
or `if NAME:`), `# FILE: above NAME` (and the comment on it), `# FILE: among the imports`, `# FILE: at the end` or
`# FILE: a new file`. So a recipe that no longer works, or that needs another line somewhere, fails here.
"""

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from fp8q.core.run import Run
from fp8q.options import DYNAMIC
from fp8q.quantize.reading.quantization_config import ORIGINAL, READ
from fp8q.quantize.scales.scheme import UNQUANTIZED, Scheme
from fp8q.validate.accuracy.document import load_token_losses

from .conftest import Texts
from .noise import mean_noise, root_mean_square

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = (
    "__init__.py", "__main__.py", "api.py", "cli", "core", "options", "calibrate", "quantize", "export", "validate",
    "serve", "stages", "integrations", "benchmarks",
)  # fmt: skip
BLOCK = re.compile(
    r"```python\n# (?P<file>[\w/.]+): (?:in (?P<name>\w+)|above (?P<above>\w+)|(?P<imported>among the imports)|"
    r"at the end|(?P<new>a new file))\n"
    r"(?P<code>.*?)```",
    re.DOTALL,
)


def recipe(title: str) -> list[re.Match[str]]:
    """The blocks of code of the recipe `title`."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return list(BLOCK.finditer(page.partition(f"### {title}\n")[2].partition("\n##")[0]))


def last_line(source: str, name: str) -> int:
    """The number of lines of `source` up to the end of what `name` holds."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            field = [child for child in node.body if isinstance(child, ast.AnnAssign)][-1]
            return field.end_lineno or field.lineno
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == name:
            return node.body[-1].end_lineno or node.lineno
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return (node.end_lineno or node.lineno) - 1
    raise AssertionError(f"no {name}")


def follow(title: str, package: Path) -> None:
    """Change the files of `package` as the recipe `title` says."""
    blocks = recipe(title)
    assert blocks, title
    for block in blocks:
        file = package / block["file"]
        assert file.exists() is not bool(block["new"]), file
        source = "" if block["new"] else file.read_text(encoding="utf-8")
        if block["name"]:
            number = last_line(source, block["name"])
            lines, code = source.splitlines(), block["code"].splitlines()
            if lines[number].startswith(("]", ")")) and not code[-1].endswith(","):
                code[-1] += ","  # an element of a list
            lines[number:number] = [f"    {line}" for line in code]
            source = "\n".join(lines) + "\n"
        elif block["above"]:
            entry = re.search(rf"^(?:#: .*\n)*{block['above']} = ", source, re.MULTILINE)
            assert entry is not None, block["above"]
            source = source[: entry.start()] + block["code"] + source[entry.start() :]
        elif block["imported"]:
            before, line, after = source.rpartition("\nfrom .")
            source = f"{before}\n{block['code']}{line[1:]}{after}"
        else:
            source += block["code"] if block["new"] else f"\n\n{block['code']}"
        file.write_text(source, encoding="utf-8")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package and of what makes the tables in docs, with the bytecode of files that stay as they are."""
    copied = tmp_path / "copy" / "fp8q"
    copied.mkdir(parents=True)
    for name in PACKAGE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copied / name, ignore=shutil.ignore_patterns("results"))
        else:
            shutil.copy2(ROOT / name, copied / name)
    return copied


def python(package: Path, *arguments: object) -> str:
    """Run Python with the copy of the package, and return all that it says."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=package.parent, env={"PYTHONPATH": str(package.parent)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


CLIP = """
import numpy as np
from fp8q.calibrate.measure.histogram import Histogram
from fp8q.core.errors import InputError
from fp8q.options import Clipping
from fp8q.quantize.scales.activation_scales import tensor_scale

one_and_896 = Histogram(np.array([0x3F80, 0x4460], np.int16), np.array([3, 1], np.int64))
scale = tensor_scale(one_and_896, Clipping("fraction", amax_fraction=0.5))
print(scale.method, scale.amax, scale.clip, scale.scale, scale.saturation)
for options in ({"amax_fraction": 0.5}, {"method": "fractions"}):
    try:
        Clipping(**options)
    except InputError as error:
        print(error)
"""


def test_a_clip_method_is_added_by_an_entry_an_option_and_a_function(package: Path) -> None:
    follow("Add a clip method", package)
    assert python(package, "-c", CLIP).splitlines() == [
        "fraction 896.0 448.0 1.0 0.25",
        "--amax-fraction 0.5: is for --method fraction, and the method is amax; choose that one, or leave this out",
        "--method fractions: is none of amax, percentile, mse, entropy, delayed, fraction",
    ]
    shown = python(package, "-m", "fp8q", "scales", "--help-all")
    assert "delayed, fraction" in " ".join(shown.split())
    assert "--amax-fraction" in shown
    tables = "import sys; sys.path.insert(0, 'fp8q/benchmarks'); from pages.choosing_scales import clip_methods as made"
    row = python(package, "-c", f"{tables}; print(made())").splitlines()[-2]
    assert row == "| `fraction` | `--amax-fraction` of the largest magnitude seen | what lies above |  |"


FORM = """
import torch
from fp8q.options import Form, ScaleOptions
from fp8q.quantize.codes.encoding import E4M3, code_values
from fp8q.quantize.lint.check import SERVER_RULES
from fp8q.quantize.scales.decisions import TensorScale
from fp8q.quantize.scales.scheme import form_fields, forms_in
from fp8q.quantize.scales.servers import computed, graph_refusal
from fp8q.quantize.weights.sequential import gemm_input

power = Form("power")
*_, rule = ScaleOptions(form=("*.down_proj=power",)).form_rules
fields = form_fields({"a": power})
print(rule.form == power, power.words, fields, forms_in(fields) == {"a": power})
scale = TensorScale(
    method="amax", amax=1, clip=1, scale=1, saturation=0, underflow=0, sqnr_db=None, dynamic=True, power=True
)
x = torch.tensor([[449.0, 1.0], [1.0, 2.0**-3]])
print(scale.form == power, gemm_input(x, scale).tolist(), code_values(x, torch.tensor([[2.0], [2.0**-8]])).tolist())
print(computed("vllm", "power"), computed("tensorrt", "power"))
print(graph_refusal([power]))
"""
#: The most files of the package that a form is written in; a number that may only fall.
FILES_OF_A_FORM = 8


def test_a_form_is_added_by_entries_in_eight_files(package: Path) -> None:
    assert len({block["file"] for block in recipe("Add a form")}) <= FILES_OF_A_FORM
    follow("Add a form", package)
    assert python(package, "-c", FORM).splitlines() == [
        "True powers of two {'power_inputs': ['a']} True",
        "True [[448.0, 1.0], [1.0, 0.125]] [[224.0, 0.5], [256.0, 32.0]]",
        "dynamic None",
        "--form power gives each token a scale at run time, for which TensorRT has no FP8 GEMM",
    ]
    shown = " ".join(re.sub(r"[│\s]+", " ", python(package, "-m", "fp8q", "scales", "--help-all")).split())
    assert "power (a power of two for each token)" in shown
    assert '"power_inputs"' in (package / "integrations/vllm/fp8q_vllm/config.py").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_model_is_calibrated_validated_and_linted_in_the_form_of_the_recipe(
    package: Path, demo_checkpoint: Path, demo_texts: Texts
) -> None:
    follow("Add a form", package)
    run = package.parent / "run"
    made = python(
        package, "-m", "fp8q", "calibrate", demo_checkpoint, "--data", demo_texts.calibration, "--eval-data",
        demo_texts.evaluation, "--samples", 4, "--no-graph", "--form", "power", "--out", run,
    )  # fmt: skip
    assert "Files" in made, made
    config = json.loads((run / "model/config.json").read_text(encoding="utf-8"))
    scales = json.loads((run / "scales.json").read_text(encoding="utf-8"))
    assert config["fp8q"]["power_inputs"] == [*scales["activations"]]
    assert config["quantization_config"]["config_groups"]["group_0"]["input_activations"]["strategy"] == "token"
    assert "**Powers of two**: each token of the input of every FP8 GEMM" in (run / "model/README.md").read_text()
    said = python(
        package, "-m", "fp8q", "validate", run, "--max-tokens", 2048, "--json", "--runtimes", "bf16,reference"
    )
    rows = json.loads(next(line for line in said.splitlines() if line.startswith("{")))["accuracy"]
    assert [row["runtime"] for row in rows] == ["bf16", "reference"]
    assert 0 < rows[1]["kl_mean_nats"] < 0.1
    assert "no findings" in python(package, "-m", "fp8q", "lint", run / "model", "--for", "vllm")
    modules = json.loads(python(package, "-m", "fp8q", "inspect", run, "--json"))["modules"]
    assert any(row.get("power") for row in modules)


FORMAT = """
from pathlib import Path
from fp8q.core.errors import InputError
from fp8q.quantize.reading.codecs import declared_in

for fields in ({"quant_method": "rows", "keep": ["lm_*"], "rounding": 3}, {"quant_method": "columns"}):
    try:
        said = declared_in({"quantization_config": fields}, Path("config.json"))
        print(said.form, said.scheme("a.up"), said.scheme("lm_head"))
        print(*said.remarks)
    except InputError as error:
        print(error)
"""
#: The most files of the package that a format of checkpoints is written in; a number that may only fall.
FILES_OF_A_FORMAT = 3


def test_a_format_of_checkpoints_is_added_by_a_file_and_two_entries(package: Path) -> None:
    assert len({block["file"] for block in recipe("Add a format of checkpoints")}) <= FILES_OF_A_FORMAT
    follow("Add a format of checkpoints", package)
    forms = READ.replace(" and ", ", ")
    assert python(package, "-c", FORMAT).splitlines() == [
        f"rows {Scheme('channel', DYNAMIC)} {UNQUANTIZED}",
        "rounding (in no class that was read)",
        f"config.json: quant_method is 'columns', and what is read is {forms} and rows; {ORIGINAL}",
    ]


LINTED = """<ir_version: 11, opset_import: ["" : 23]>
copied (float[batch, 4] x) => (float[batch, 4] y) {
  [copy] y = Identity(x)
}"""


@pytest.mark.slow
def test_a_lint_rule_is_added_by_one_function(package: Path) -> None:
    follow("Add a lint rule", package)
    graph = package.parent / "model.onnx"
    graph.write_bytes(onnx.parser.parse_model(LINTED).SerializeToString())
    assert "warning F320 producer: names no producer; set producer_name to the tool that writes the graph" in (
        python(package, "-m", "fp8q", "lint", graph).splitlines()
    )
    explained = python(package, "-m", "fp8q", "lint", "--explain", "F320")
    assert " ".join(explained.split()) == (
        "F320 producer Warning, for any graph. The file names the tool that wrote it: whoever finds a fault can then "
        "report it there."
    )


TEXT = """
from pathlib import Path
from fp8q.calibrate.text.documents import load_texts
from fp8q.cli.config import path_or_name
from fp8q.core.errors import InputError

print(load_texts("notes.MD"))
print(path_or_name("owner/notes.markdown", Path("/texts")), path_or_name("owner/notes", Path("/texts")))
try:
    load_texts("notes.rst")
except InputError as error:
    print(error)
"""


def test_a_text_format_is_added_by_an_entry_and_a_reader(package: Path) -> None:
    follow("Add a text format", package)
    for name in ("notes.MD", "notes.rst"):
        (package.parent / name).write_text("one\n\ntwo", encoding="utf-8")
    forms = (
        "a .txt, .jsonl, .parquet, .md or .markdown file, a directory saved by `datasets`, or a hub data set (name, "
        "name:config or name:config:split)"
    )
    assert python(package, "-c", TEXT).splitlines() == [
        "['one', 'two']",
        "/texts/owner/notes.markdown owner/notes",
        "notes.rst: does not end in .txt, .jsonl, .parquet, .md or .markdown, which tell how to read it; give " + forms,
    ]
    shown = python(package, "-m", "fp8q", "calibrate", "--help")
    assert "Text to calibrate on: .txt, .jsonl, .parquet, .md, .markdown, a saved" in re.sub(r"[\s│]+", " ", shown)


COLUMNS = """
from fp8q.validate.report.accuracy_rows import NUMBERS, AccuracyRow
from fp8q.validate.report.rows import ModuleRow
from fp8q.validate.report.tables import accuracy_table, module_table

row = ModuleRow("model.layers.3.mlp.up_proj", "product", amax=1.0, clip=1.0, scale=0.5, terms=1)
print([cell.text for cell in module_table([row]).cells()[0]][-1])
for fp8 in (AccuracyRow("reference", 8.02, 2.08, perplexity_over_fp32=0.0025), AccuracyRow("reference", 8.02, 2.08)):
    table = accuracy_table([fp8])
    print([column.title for column in table.columns][-1], table.cells()[0][-1].text)
print("perplexity_over_fp32" in NUMBERS)
"""


def test_a_report_column_is_added_by_an_entry(package: Path) -> None:
    follow("Add a report column", package)
    assert python(package, "-c", COLUMNS).splitlines() == ["3", "over FP32 +0.25 %", "perplexity 8.0200", "True"]


RUNTIME = """
from fp8q.options import NOT_SERVED, WITHOUT_GRAPH, ValidateOptions
from fp8q.validate.accuracy.runtimes import OPENERS
from fp8q.validate.endpoint.judgement import arithmetic_of

name = "reference-exact"
print(ValidateOptions("bf16,reference-exact").chosen, name in OPENERS, name in WITHOUT_GRAPH, name in NOT_SERVED)
print(arithmetic_of(name))
"""


@pytest.mark.slow
def test_a_runtime_is_added_by_an_entry_and_a_function(package: Path) -> None:
    follow("Add a runtime", package)
    assert python(package, "-c", RUNTIME).splitlines() == [
        "('bf16', 'reference-exact') True True False", "as validated"
    ]  # fmt: skip
    tables = "import sys; sys.path.insert(0, 'fp8q/benchmarks'); from pages.validate import runtimes as made"
    row = python(package, "-c", f"{tables}; print(made())").splitlines()[-2]
    assert row == "| `reference-exact` | the FP8 checkpoint in torch, with the sums of its GEMMs in FP32 |"


@pytest.mark.slow
def test_the_runtime_of_the_recipe_is_validated(package: Path, demo_checkpoint: Path, demo_texts: Texts) -> None:
    follow("Add a runtime", package)
    made = python(
        package, "-m", "fp8q", "calibrate", demo_checkpoint, "--data", demo_texts.calibration, "--eval-data",
        demo_texts.evaluation, "--samples", 4, "--no-graph", "--out", package.parent / "run",
    )  # fmt: skip
    assert "Files" in made, made
    said = python(
        package, "-m", "fp8q", "validate", package.parent / "run", "--max-tokens", 2048, "--json",
        "--runtimes", "bf16,reference,reference-exact",
    )  # fmt: skip
    document = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    rows = {row["runtime"]: row for row in document["accuracy"]}
    assert list(rows) == ["bf16", "reference", "reference-exact"]
    losses = load_token_losses(Run(package.parent / "run"))  # both in BF16, whose own rounding is as large as FP8's
    difference, tokens = root_mean_square(losses["reference"], losses["reference-exact"])
    mean = np.nanmean(losses["reference"] - losses["reference-exact"], dtype=np.float64)
    assert abs(mean) <= mean_noise(difference, tokens)


WINDOWS = """
from pathlib import Path
import numpy as np
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.stages.pipeline.stage import Key
from fp8q.stages.pipeline.stages import CORPUS, CorpusFacts
from fp8q.stages.pipeline.stage import Notes

run = Run(Path("run"))
facts = CorpusFacts(data="a.txt", eval_data="b.txt", model="model")
with CORPUS.writing(run, Key({}, CORPUS.options(), facts), Notes(SILENT)) as log:
    np.savez(run.calibration, input_ids=np.array([[1, 2, 2], [3, 1, 1]]))
    log.outputs.append(run.calibration)
"""


@pytest.mark.slow
def test_a_stage_is_added_by_an_entry_and_a_file(package: Path) -> None:
    follow("Add a stage", package)
    python(package, "-c", WINDOWS)
    assert python(package, "-m", "fp8q", "vocabulary", "run") == "3 of 6 tokens are distinct.\n"
    record = json.loads((package.parent / "run/run.json").read_text(encoding="utf-8"))
    assert list(record["stages"]["vocabulary"]["inputs"]) == ["calibration.npz"]
    assert python(package, "-m", "fp8q", "vocabulary", "run", "--json") == '{"distinct": 3, "tokens": 6}\n'
    again = json.loads((package.parent / "run/run.json").read_text(encoding="utf-8"))
    assert again == record, "a finished stage is passed over"
    assert "fp8q vocabulary RUN" in python(package, "-m", "fp8q", "vocabulary", "--help")
