"""Programs of Meshtune have only operations, types and custom calls that the plugins for Apple's GPUs can run.

No such machine is at hand: plugin_operations.toml says which ones, by the plugins' sources. Training is lowered for
their platform, generation for a CPU.
"""

from __future__ import annotations

import pathlib
import re
import tomllib

import jax
import pytest
from jax._src.interpreters.mlir import make_ir_context
from jax._src.lib.mlir import ir, passmanager
from jaxlib.mlir.dialects import stablehlo

from meshtune import quickstart
from meshtune.config.load import load_recipe
from meshtune.plan.program import step_of

stablehlo.register_stablehlo_passes()
PLUGINS = tomllib.loads(pathlib.Path(__file__).with_name("plugin_operations.toml").read_text(encoding="utf-8"))
HEADLINE = "examples/headline/8b-qlora.yaml"
ROOT = pathlib.Path(__file__).parents[2]


pytestmark = pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")


@pytest.fixture(autouse=True)
def without_shardy():
    """jax-mps turns Shardy off."""
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", False)
    yield
    jax.config.update("jax_use_shardy_partitioner", before)


def unsupported(module: ir.Module) -> dict[str, set[str]]:
    """The parts of a program that each plugin lacks: names of operations, "custom_call TARGET" and types."""
    with module.context:
        legalise = passmanager.PassManager.parse("builtin.module(func.func(chlo-legalize-to-stablehlo))")
        legalise.run(module.operation)
        operations, calls, types = set[str](), set[str](), set[str]()

        def visit(operation):
            name = operation.name
            operations.add(name)
            if name == "stablehlo.custom_call":
                calls.add(ir.StringAttr(operation.attributes["call_target_name"]).value)
            for value in (*operation.operands, *operation.results):
                if isinstance(value.type, ir.RankedTensorType):
                    types.add(str(value.type.element_type))
            return ir.WalkResult.ADVANCE

        module.operation.walk(visit)
    operations -= {"builtin.module", "func.func"}
    return {
        name: operations.difference(plugin["operations"])
        | {f"custom_call {target}" for target in calls.difference(plugin["custom_calls"])}
        | types.difference(plugin["types"])
        for name, plugin in PLUGINS.items()
    }


NOTHING = {name: set() for name in PLUGINS}


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        pytest.param(
            ("method=full", "optimizer.in_backward=true", "optimizer.max_grad_norm=null"), marks=pytest.mark.slow
        ),
        pytest.param(("stage=dpo",), marks=pytest.mark.slow),
    ],
)
def test_the_quickstarts_step_has_only_their_operations(overrides, tmp_path):
    program = step_of(quickstart.recipe(tmp_path, *overrides))
    lowered = program.step.trace(*program.arguments).lower(lowering_platforms=("mps",))
    assert unsupported(lowered.compiler_ir("stablehlo")) == NOTHING


@pytest.mark.parametrize("precision", ["mixed", pytest.param("float16", marks=pytest.mark.slow)])
def test_a_step_of_lora_on_nf4_has_only_their_operations(precision):
    recipe = load_recipe(str(ROOT / HEADLINE), ["compute.offload=[]", f"compute.precision={precision}"])
    program = step_of(recipe)
    lowered = program.step.trace(*program.arguments).lower(lowering_platforms=("mps",))
    assert unsupported(lowered.compiler_ir("stablehlo")) == NOTHING


def test_generation_has_only_their_operations(tmp_path):
    from meshtune.generate.api import load

    before = jax.config.values["jax_dump_ir_to"]
    jax.config.update("jax_dump_ir_to", str(tmp_path))
    try:
        load(quickstart.MODEL).generate(["Once upon a time"], max_tokens=4, temperature=0.7, top_p=0.9)
    finally:
        jax.config.update("jax_dump_ir_to", before)
    programs = [path.read_text(encoding="utf-8") for path in tmp_path.glob("*.mlir")]
    assert any("stablehlo.while" in program for program in programs), "an engine's programs were not dumped"
    for program in programs:
        with make_ir_context():
            assert unsupported(ir.Module.parse(program)) == NOTHING


def test_an_operation_that_is_missing_is_found():
    lowered = jax.jit(lambda x: jax.lax.linalg.lu(x)[0]).lower(jax.numpy.eye(4))
    text = lowered.as_text()
    targets = set(re.findall(r"custom_call @(\w+)", text))
    assert targets
    found = unsupported(lowered.compiler_ir("stablehlo"))
    assert all({f"custom_call {target}" for target in targets} <= lacking for lacking in found.values())
