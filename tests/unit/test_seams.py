# SPDX-License-Identifier: Apache-2.0
"""Knowledge of a rollout engine stays in its own folder, found in the code itself: imports, names and literals.

Docstrings and comments may mention an engine. What import-linter checks too, it checks for imports at any place of a
file, but not for ``importlib``, names, or texts.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import verl_sync_plugin

PACKAGE = Path(verl_sync_plugin.__file__).resolve().parent
# Where SGLang may be known, and why
HOMES = {
    "rollouts/sglang/": "the room of the engine",
    "rollouts/__init__.py": "its line of registration",
    "compat.py": "what differs between its versions",
    "cli/": "the doctor names its package",
}
# A word that looks like SGLang's and is another's: file and whole literal
EXCEPTIONS = {("verify.py", "actor_rollout_ref.rollout.load_format"): "verl's own key"}
# What registers the pairs, and what it may know: the rollout's name, and their names in logs
PAIRS_FILE = "sharding_manager.py"
PAIRS = re.compile(r"'sglang'|\w+SGLangShardingManager")
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


def leaks(code: str, file: str) -> list[str]:
    """Lists what code outside of ``HOMES`` knows of SGLang, as ``file: line``."""
    if any(file == home or (home.endswith("/") and file.startswith(home)) for home in HOMES):
        return []
    text = bare(code)
    for allowed in (each for where, each in EXCEPTIONS if where == file):
        text = text.replace(allowed, "")
    if file == PAIRS_FILE:
        text = PAIRS.sub("", text)
    return [f"{file}: {line.strip()}" for line in text.splitlines() if WORDS.search(line)]


def test_only_its_own_room_knows_the_engine() -> None:
    files = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    found = [leak for file, code in files.items() for leak in leaks(code, file)]
    assert not found, "\n".join(found)


def test_a_leak_is_seen() -> None:
    pair = "@register_sharding_manager(trainer='fsdp', rollout='sglang')\nclass FSDPSGLangShardingManager: ..."
    assert leaks(pair, "hooks/driver.py") and not leaks(pair, PAIRS_FILE)
    for code in ("importlib.import_module('sglang.srt')", "raise E('SGLang cannot')", "class SGLangModel: ..."):
        assert leaks(code, PAIRS_FILE) and not leaks(code, "rollouts/sglang/model.py")
