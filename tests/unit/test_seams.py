# SPDX-License-Identifier: Apache-2.0
"""Checks that code outside an engine's folder does not know it: imports at any place, names and literals."""

import ast
import re
from pathlib import Path

import verl_sync_plugin

PACKAGE = Path(verl_sync_plugin.__file__).resolve().parent
# Where SGLang may be known: its room, the line of its registration, what differs between its versions, and the doctor
HOMES = ("rollouts/sglang/", "rollouts/__init__.py", "compat.py", "cli/")
# What a file may know all the same: a key of verl's; the rollout's name, and those of its managers in logs
ALLOWED = {
    "rollouts/adapter.py": r"self\.config\.load_format",
    "verify.py": r"actor_rollout_ref\.rollout\.load_format",
    "sharding_manager.py": r"'sglang'|\w+SGLangSharding",
}
# SGLang's name, its arguments, its methods, and names of tensors that its models treat in their own way
WORDS = re.compile(
    r"sglang|load_format|post_load_weights|serverargs|server_args|tokenizer_manager|update_weights_from_tensor"
    r"|custom_weight_loader|chunked_prefill|mem_fraction|moe_runner|json_model_override|dp_attention|cpu_offload_gb"
    r"|torchao|memory_occupation|memory_saver|q_a_proj|kv_a_proj|has_vision|eplb|scheduler_rank",
    re.IGNORECASE,
)


def bare(code: str) -> str:
    """The code without comments and docstrings, of attributes too."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            kept = [each for each in body if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.unparse(tree)


def test_only_its_own_room_knows_the_engine() -> None:
    leaks = []
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        if not file.startswith(HOMES):
            text = bare(path.read_text())
            if file in ALLOWED:
                text = re.sub(ALLOWED[file], "", text)
            leaks += [f"{file}: {line.strip()}" for line in text.splitlines() if WORDS.search(line)]
    assert not leaks, "\n".join(leaks)
