"""The direction of the imports, and the sizes that keep the code readable."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dbench"
DOCUMENT = ROOT / "docs" / "architecture.md"

LAYERS = {
    "dbench": 0,
    "dbench.errors": 0,
    "dbench.options": 0,
    "dbench.engine_options": 0,
    "dbench.option_fields": 0,
    "dbench.events": 0,
    "dbench.event_file": 0,
    "dbench.json_values": 0,
    "dbench.progress": 0,
    "dbench.unmasking_rules": 0,
    "dbench.values": 1,
    "dbench.config": 1,
    "dbench.option_conflicts": 1,
    "dbench.resolve": 1,
    "dbench.measure": 0,
    "dbench.metric_names": 1,
    "dbench.quantiles": 1,
    "dbench.result_files": 1,
    "dbench.run_folder": 1,
    "dbench.measure.event_log": 1,
    "dbench.measure.intervals": 1,
    "dbench.measure.blocks": 1,
    "dbench.measure.run_data": 1,
    "dbench.measure.workers": 1,
    "dbench.measure.summary": 1,
    "dbench.measure.curves": 1,
    "dbench.metrics": 1,
    "dbench.environment": 1,
    "dbench.models": 1,
    "dbench.serve": 0,
    "dbench.serve.sequence": 1,
    "dbench.serve.address": 1,
    "dbench.serve.tls": 1,
    "dbench.serve.policy": 1,
    "dbench.serve.routes": 1,
    "dbench.serve.pages": 1,
    "dbench.serve.families": 1,
    "dbench.serve.proto": 1,
    "dbench.serve.wire": 1,
    "dbench.serve.wire_link": 1,
    "dbench.serve.tokenizer": 1,
    "dbench.serve.tokenizer_files": 1,
    "dbench.serve.chat": 1,
    "dbench.serve.runner": 2,
    "dbench.serve.transit": 2,
    "dbench.serve.validation": 2,
    "dbench.serve.tracking": 2,
    "dbench.serve.finished": 2,
    "dbench.serve.fleet": 2,
    "dbench.serve.link_epochs": 2,
    "dbench.serve.block_ends": 2,
    "dbench.serve.block_pairs": 2,
    "dbench.serve.backlog": 2,
    "dbench.serve.placement": 2,
    "dbench.serve.requests": 2,
    "dbench.serve.scheduler_records": 2,
    "dbench.serve.engine": 2,
    "dbench.serve.engine_log": 2,
    "dbench.serve.engine_state": 2,
    "dbench.serve.fake_runner": 2,
    "dbench.serve.warm_up": 2,
    "dbench.serve.batch": 3,
    "dbench.serve.kv": 3,
    "dbench.serve.attention": 3,
    "dbench.serve.model": 3,
    "dbench.serve.weights": 3,
    "dbench.serve.noise": 3,
    "dbench.serve.unmask": 3,
    "dbench.serve.op_marks": 3,
    "dbench.serve.refresh_attention": 3,
    "dbench.serve.kernels": 3,
    "dbench.serve.kernels.attention": 3,
    "dbench.serve.kernels.elementwise": 3,
    "dbench.serve.kernels.layout": 3,
    "dbench.serve.kernels.overlap": 3,
    "dbench.serve.kernels.sampling": 3,
    "dbench.serve.cuda_model": 3,
    "dbench.serve.cuda_batch": 3,
    "dbench.serve.device_clock": 3,
    "dbench.serve.graphs": 3,
    "dbench.serve.cuda_memory": 3,
    "dbench.serve.torch_runner": 4,
    "dbench.serve.channel": 4,
    "dbench.serve.cuda_runner": 4,
    "dbench.serve.cuda_build": 4,
    "dbench.serve.profiled_runner": 4,
    "dbench.serve.scheduler": 5,
    "dbench.serve.spool": 1,
    "dbench.serve.recorder": 5,
    "dbench.serve.hub": 5,
    "dbench.serve.client_service": 5,
    "dbench.serve.link_service": 5,
    "dbench.serve.local_workers": 5,
    "dbench.serve.restarts": 5,
    "dbench.serve.tables": 5,
    "dbench.serve.deployment": 5,
    "dbench.serve.handover": 5,
    "dbench.serve.status": 5,
    "dbench.serve.endpoint": 5,
    "dbench.serve.worker_board": 5,
    "dbench.serve.worker_stream": 5,
    "dbench.serve.child": 5,
    "dbench.serve.worker": 5,
    "dbench.serve.kv_links": 5,
    "dbench.serve.transfer": 5,
    "dbench.serve.meeting": 5,
    "dbench.serve.remote_worker": 5,
    "dbench.serve.server": 5,
    "dbench.serve.launch": 5,
    "dbench.serve.client": 5,
    "dbench.load": 0,
    "dbench.load.arrivals": 1,
    "dbench.load.lengths": 1,
    "dbench.load.tasks": 1,
    "dbench.load.traces": 1,
    "dbench.load.stop": 1,
    "dbench.load.pacing": 1,
    "dbench.load.record": 1,
    "dbench.load.target": 5,
    "dbench.load.fake_target": 5,
    "dbench.load.questions": 6,
    "dbench.load.schedule": 6,
    "dbench.load.flights": 6,
    "dbench.load.driver": 6,
    "dbench.search": 0,
    "dbench.search.space": 1,
    "dbench.search.sla": 1,
    "dbench.search.capacity": 1,
    "dbench.search.verdict": 1,
    "dbench.search.statistics": 1,
    "dbench.search.early_stop": 1,
    "dbench.search.lease": 1,
    "dbench.search.keys": 2,
    "dbench.search.storage": 2,
    "dbench.search.store": 2,
    "dbench.search.stored": 2,
    "dbench.search.yaml_jobs": 2,
    "dbench.search.results": 3,
    "dbench.search.summary": 6,
    "dbench.search.files": 6,
    "dbench.search.plan": 7,
    "dbench.search.objective": 7,
    "dbench.search.server_runner": 7,
    "dbench.search.reevaluate": 7,
    "dbench.search.study": 7,
    "dbench.console": 6,
    "dbench.console.axis": 6,
    "dbench.console.board": 6,
    "dbench.console.layout": 6,
    "dbench.console.live": 6,
    "dbench.console.logs": 6,
    "dbench.console.look": 6,
    "dbench.console.plain": 6,
    "dbench.console.rates": 6,
    "dbench.console.run_view": 6,
    "dbench.console.search_view": 6,
    "dbench.console.serve_view": 6,
    "dbench.console.trials": 6,
    "dbench.console.view": 6,
    "dbench.console.workers": 6,
    "dbench.plots": 6,
    "dbench.plots.canvas": 6,
    "dbench.plots.run_figures": 6,
    "dbench.plots.search_figures": 6,
    "dbench.report": 6,
    "dbench.cli_options": 7,
    "dbench.commands": 7,
    "dbench.commands.common": 7,
    "dbench.commands.summary": 7,
    "dbench.commands.serve": 7,
    "dbench.commands.run": 7,
    "dbench.commands.search": 7,
    "dbench.commands.submit": 7,
    "dbench.commands.worker": 7,
    "dbench.commands.report": 7,
    "dbench.commands.trace": 7,
    "dbench.cli": 7,
    "dbench.__main__": 7,
}
"""Module -> layer. A module imports from lower layers, or from its own layer without a cycle."""

NO_TORCH_UP_TO_LAYER = 2
"""In dbench.serve, so that the scheduler process starts fast."""

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def modules() -> dict[str, Path]:
    paths = [p for p in PACKAGE.rglob("*.py") if "proto" not in p.parts or p.name == "__init__.py"]
    return {name_of(path): path for path in sorted(paths)}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            base = node.module or ""
            found |= {f"{base}.{a.name}" if f"{base}.{a.name}" in LAYERS else base for a in node.names}
    return found


def layer_of(module: str) -> int | None:
    while module:
        if module in LAYERS:
            return LAYERS[module]
        module = module.rpartition(".")[0]
    return None


@pytest.mark.parametrize("module", modules())
def test_module_has_a_layer(module: str) -> None:
    assert module in LAYERS


def test_every_layer_has_its_module() -> None:
    assert modules().keys() >= LAYERS.keys()


def documented_layers() -> dict[str, int]:
    """What the tables of the document say: under a heading "### `folder`", rows "| layer | `name` `name/` | ... |"."""
    found: dict[str, int] = {}
    package = ""
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        if heading := re.fullmatch(r"### `([\w/]+)`", line):
            package = heading[1].replace("/", ".")
        elif row := re.match(r"\| (\d) \| ([^|]+) \|", line):
            found |= {f"{package}.{name}": int(row[1]) for name in re.findall(r"`(\w+)/?`", row[2])}
    return found


def test_the_document_names_every_module_in_its_layer() -> None:
    own_table = ("dbench", "dbench.serve", "dbench.load", "dbench.search")
    wanted: dict[str, int] = {}
    for module, layer in LAYERS.items():
        package = max((p for p in own_table if module.startswith(f"{p}.")), key=len, default=None)
        if package is not None and module not in own_table:
            name = ".".join(module.split(".")[: package.count(".") + 2])
            wanted[name] = max(layer, wanted.get(name, 0))
    assert documented_layers() == wanted


@pytest.mark.parametrize("module", modules())
def test_module_imports_no_higher_layer(module: str) -> None:
    for imported in imports_of(modules()[module]):
        layer = layer_of(imported)
        if imported.startswith("dbench") and layer is not None:
            assert layer <= LAYERS[module], f"{module} imports {imported}"


def test_imports_inside_a_layer_have_no_cycle() -> None:
    paths = modules()
    graph = {m: {i for i in imports_of(p) if i in paths and i != m} for m, p in paths.items()}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for imported in graph.get(module, ()):
                visit(imported, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("module", [m for m in modules() if m.startswith("dbench.serve")])
def test_serve_knows_nothing_of_load_or_search(module: str) -> None:
    assert not [i for i in imports_of(modules()[module]) if i.startswith(("dbench.load", "dbench.search"))]


@pytest.mark.parametrize("module", [m for m in modules() if m.startswith("dbench.load")])
def test_load_reaches_serve_only_through_its_target(module: str) -> None:
    """Records of serve that a target's signatures need are named by target.py for the others."""
    found = [imported for imported in imports_of(modules()[module]) if imported.startswith("dbench.serve")]
    assert not found or module == "dbench.load.target"


@pytest.mark.parametrize("module", [m for m in modules() if m.startswith("dbench.serve")])
def test_low_layers_of_serve_do_without_torch(module: str) -> None:
    if LAYERS[module] <= NO_TORCH_UP_TO_LAYER:
        assert not [i for i in imports_of(modules()[module]) if i.split(".")[0] == "torch"]


@pytest.mark.parametrize("module", modules())
def test_sizes_stay_readable(module: str) -> None:
    text = modules()[module].read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < MAX_FUNCTION_LINES, f"{module}.{node.name}"


@pytest.mark.parametrize("folder", ["tests", "tools", "benchmarks"])
def test_files_beside_the_package_stay_readable(folder: str) -> None:
    lengths = {path: path.read_text(encoding="utf-8").count("\n") for path in (ROOT / folder).rglob("*.py")}
    assert lengths
    assert not [str(path) for path, length in lengths.items() if length > MAX_FILE_LINES]
