# SPDX-License-Identifier: Apache-2.0
"""``main_ppo`` otherwise than most: other trainers, families and layouts, an older verl, engines that never sleep or
that nobody trains, and runs that the plugin leaves to stock verl.

All of it in ``make test-all``. ``make test`` has what each shows in the contract tests and in ``tests/bare_engine``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors import safe_open

import tiny_models
from e2e import checks
from e2e.runs import DUMMY, MODEL, ROLLOUT, SHORT_WAIT, SMALL_BUCKETS, Run, Setup, main_ppo
from packages import folder_with

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(1000)]

Tiny = Callable[[str], str]


@pytest.fixture(scope="module")
def colocated(tiny_model: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """verl's ``colocate_async`` trainer: one GPU for both, and requests that a sync cuts off. Three steps; a batch more
    than a step takes is in flight whenever verl aborts."""
    trainer = ("trainer.v1.trainer_mode=colocate_async", "trainer.v1.colocate_async.num_warmup_batches=1")
    setup = Setup((*trainer, DUMMY, SMALL_BUCKETS), 1, 3, Path(tiny_model("qwen2")))
    return main_ppo(setup, tmp_path_factory.mktemp("colocate-async"))


def test_every_step_of_colocate_async_is_synced(colocated: Run) -> None:
    checks.reached(colocated, steps=3)
    checks.plugin_ran(colocated, ranks=1)
    checks.reported(colocated, steps=3)
    for step in (1, 2, 3):
        checks.metrics_complete(colocated.logged[step], step)


def test_answers_go_on_behind_the_sync_that_cut_them_off(colocated: Run) -> None:
    """A step trains on answers that the weights of the step before have begun."""
    found = [colocated.logged[step]["training/off_policy/trajectory_staleness/max"] for step in (1, 2, 3)]
    assert max(found) >= 1, found


LEGACY = ("trainer.use_v1=False", DUMMY, SMALL_BUCKETS)


@pytest.fixture(scope="module")
def legacy(tiny_model: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """verl's legacy trainer, whose task runner resolves the config before it loads plugins; two steps of a Mixtral,
    whose trainer holds other tensors than its checkpoint: stock verl sends the router and all experts under names that
    SGLang skips. Embedding and head are tied, and SGLang's class has a head of its own."""
    setup = Setup(LEGACY, steps=2, model=Path(tiny_model("mixtral-tied")))
    return main_ppo(setup, tmp_path_factory.mktemp("legacy"))


def test_the_plugin_moves_the_weights_of_the_legacy_trainer(legacy: Run) -> None:
    checks.reached(legacy, steps=2)
    checks.same_weights(legacy)
    assert legacy.matching("Legacy trainer `main_ppo_v0.py` is deprecated"), legacy.tail
    assert legacy.matching(r"\(WorkerDict pid=\d+\) .*sharding manager FSDP2SGLangShardingManager, buckets of 1 MiB")


def test_its_syncs_are_reported_beside_its_metrics(legacy: Run) -> None:
    checks.reported(legacy, steps=2)
    assert len(legacy.matching(r"\(TaskRunner pid=\d+\) .*NO SYNC METRICS: .*legacy trainer")) == 1, legacy.tail
    for step in (0, 1, 2):
        assert legacy.matching(rf"\(WorkerDict pid=\d+\) .*sync of step {step}: [0-9.]+ s, "), legacy.tail
    for metrics in legacy.logged.values():
        assert not [name for name in metrics if "sync/" in name], (
            "verl's legacy trainer has learned to log them: say so"
        )


def test_every_parameter_of_mixtral_is_written_and_replayed(legacy: Run) -> None:
    assert len(legacy.reports) == 3, legacy.tail
    for report in legacy.reports:
        assert report["coverage_missing"] == 0 and report["tensors"] > 24, report
    assert legacy.reports[-1]["replayed_tensors"] == legacy.reports[-1]["tensors"], legacy.reports


def test_the_legacy_trainer_switched_off_is_stock_verl(tmp_path: Path) -> None:
    stock = main_ppo(Setup((*LEGACY, f"{ROLLOUT}.custom.sync.enabled=False")), tmp_path)
    checks.reached(stock, steps=1)
    checks.same_weights(stock)
    assert stock.matching(r"\(SGLangHttpServer pid=\d+\)") and not stock.reports
    assert "SyncSGLangHttpServer" not in stock.text and "is ours" not in stock.text


@pytest.fixture(scope="module")
def awake(tiny_model: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two rollout engines that keep their memory (``free_cache_engine=False``), next to an FSDP1 trainer of two ranks;
    two steps, so three syncs of two engines."""
    overrides = ("actor_rollout_ref.actor.strategy=fsdp", "+sync=colocated_resident", DUMMY, SMALL_BUCKETS)
    setup = Setup(overrides, 2, 2, Path(tiny_model("qwen2")), replicas=2)
    return main_ppo(setup, tmp_path_factory.mktemp("awake"))


def test_both_engines_have_the_weights_of_the_trainer_at_every_step(awake: Run) -> None:
    checks.reached(awake, steps=2)
    checks.same_weights(awake)
    for replica in (0, 1):
        assert awake.matching(rf"task runner: replica {replica} is ours"), awake.tail
    loaders = awake.matching(r"\[verl-sync-plugin\] pid \d+ loader active, rank 0 of Qwen2ForCausalLM")
    assert len(loaders) == 2, awake.tail
    assert {report["manager"] for report in awake.reports} == {"FSDPSGLangShardingManager"}


def test_each_engine_is_synced_once_a_step_and_nothing_is_resumed(awake: Run) -> None:
    steps = [report["global_steps"] for report in awake.reports]
    assert sorted(steps) == [0, 0, 1, 1, 2, 2], steps
    for report in awake.reports:
        assert report["stages"]["sleep"] == 0 and "resume_weights" not in report["stages"], report
        assert report["replayed_tensors"] == report["tensors"] > 0, report
        # Every engine holds the whole model, of which each trainer rank packs a half
        assert report["own_bytes"] == report["peer_bytes"] == report["nbytes"] // 2, report
    for step in (1, 2):
        both = [report["nbytes"] for report in awake.reports if report["global_steps"] == step]
        assert awake.logged[step]["sync/bytes"] == sum(both)


class Family(NamedTuple):
    """One whose sync is not that of Qwen2.

    Attributes:
        kind: of model, as ``make_model.py`` names it.
        model: SGLang's class for it.
        ranks: trainer ranks, and tensor-parallel ranks of the engine.
        overrides: what it needs.
        replayed: from the second sync on all its tensors are replayed, or none.
        missing: parameters and buffers that no sync writes.
    """

    kind: str
    model: str
    ranks: int
    overrides: tuple[str, ...]
    replayed: bool
    missing: int


# Only eager attention caps its logits in the trainer. A buffer that is in no checkpoint forbids random weights, so
# it is the second step that shows a sync: the checkpoint's weights are stale by then
EAGER = (f"{MODEL}.override_config.attn_implementation=eager",)
FAMILIES = (
    Family("mixtral", "MixtralForCausalLM", 2, (DUMMY,), replayed=True, missing=0),
    Family("gemma2", "Gemma2ForCausalLM", 1, EAGER, replayed=False, missing=1),
)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.kind)
def test_the_syncs_of_a_family_are_what_the_table_says(family: Family, tiny_model: Tiny, tmp_path: Path) -> None:
    model = Path(tiny_model(family.kind))
    trained = main_ppo(Setup((SMALL_BUCKETS, *family.overrides), family.ranks, steps=2, model=model), tmp_path)
    checks.reached(trained, steps=2)
    checks.same_weights(trained)
    checks.plugin_ran(trained, family.ranks, model=family.model, backup="on")
    checks.reported(trained, steps=2)
    for report in trained.reports:
        assert report["hashed_tensors"] == report["tensors"], report
        assert report["coverage_missing"] == family.missing, report
    last = trained.reports[-1]
    assert last["replayed_tensors"] == (last["tensors"] if family.replayed else 0), last


class Layout(NamedTuple):
    """One way to train with Megatron.

    Attributes:
        sizes: tensor, pipeline and expert parallel size.
        kind: of model.
        model: SGLang's class for it.
        parameters: as many as SGLang has.
        padded: how many times the model's bytes may travel: all ranks' segments of a bucket are as long as the longest.
    """

    sizes: tuple[int, int, int]
    kind: str = "qwen2"
    model: str = "Qwen2ForCausalLM"
    parameters: int = 17
    padded: float = 1.05


LAYOUTS = {
    "ep2": Layout((1, 1, 2), "qwen3-moe", "Qwen3MoeForCausalLM", 21, 1.15),
    "tp2": Layout((2, 1, 1)),
    "pp2": Layout((1, 2, 1)),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_megatron_trains_and_the_engine_has_the_weights_of_every_step(
    layout: Layout, even_model: Path, tiny_model: Tiny, tmp_path: Path
) -> None:
    model = even_model if layout.kind == "qwen2" else Path(tiny_model(layout.kind))
    overrides = (DUMMY, SMALL_BUCKETS, SHORT_WAIT)
    trained = main_ppo(Setup(overrides, ranks=2, steps=2, model=model, megatron=layout.sizes), tmp_path)
    checks.reached(trained, steps=2)
    checks.same_weights(trained)
    manager = "MegatronSGLangShardingManager"
    checks.plugin_ran(trained, ranks=2, manager=manager, model=layout.model)
    checks.reported(trained, steps=2, manager=manager)
    for step in (1, 2):
        checks.metrics_complete(trained.logged[step], step)
    with safe_open(model / "model.safetensors", "pt") as checkpoint:
        sizes = {name: checkpoint.get_tensor(name).nbytes for name in checkpoint.keys()}  # noqa: SIM118
    for report in trained.reports:
        assert report["tensors"] == len(sizes)
        assert sum(sizes.values()) <= report["nbytes"] <= layout.padded * sum(sizes.values())
        assert report["coverage_expected"] == layout.parameters and report["coverage_missing"] == 0


VERL = "0.9.0"
# This verl hands SGLang "all-linear" as it is
SERVED = (
    *(f"{MODEL}.lora.merge=False", f"{MODEL}.lora.rank=8", f"{MODEL}.lora.alpha=16"),
    f"{MODEL}.lora.target_modules=[q_proj,k_proj,v_proj,o_proj]",
    f"+{ROLLOUT}.engine_kwargs.sglang.lora_backend=torch_native",
)


@pytest.mark.parametrize("overrides", [(SMALL_BUCKETS,), SERVED], ids=["full", "served"])
def test_an_older_verl_trains(
    overrides: tuple[str, ...], tiny_model: Tiny, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """SGLang starts with random weights; served as an adapter or not, all that it needs must have come by a sync."""
    folder, model = folder_with(tmp_path_factory, f"verl=={VERL}"), Path(tiny_model("qwen2"))
    run = main_ppo(
        Setup((DUMMY, *overrides), steps=2, model=model, modules=("e2e.versions",), path=(str(folder),)), tmp_path
    )
    checks.reached(run, steps=2)
    said = {line.text.partition("[e2e] ")[2] for line in run.matching(r"\[e2e\] verl ")}
    assert said == {f"verl {VERL} from {folder}/verl/__init__.py"}, run.tail
    checks.same_weights(run)
    checks.reported(run, steps=2)
    if overrides is SERVED:
        factors = 2 * 2 * 4  # A and B of four linear layers in two blocks
        assert run.reports[0]["buckets"] > 0 and not run.reports[0]["coverage_missing"], run.reports
        assert [report["tensors"] for report in run.reports[1:]] == [factors] * 2, run.reports
    else:
        checks.plugin_ran(run, ranks=1)


TEACHER, REWARD = "distillation.teacher_models.teacher_model", "reward.reward_model"
# What run.sh says of the actor's engine
ON_A_CPU = (
    *("device=cpu", "attention_backend=torch_native", "sampling_backend=pytorch", "enable_memory_saver=False"),
    *("disable_overlap_schedule=True", "max_total_tokens=8192", "log_level=warning", "sleep_on_idle=True"),
    "grammar_backend=none",  # needed where the engine has a tokenizer, as a reward model's
)


def engine(rollout: str) -> tuple[str, ...]:
    """An engine of one rank under a rollout config of verl's."""
    sizes = ("tensor_model_parallel_size=1", "gpu_memory_utilization=0.1", "max_num_seqs=16")
    named = (f"{rollout}.{size}" for size in ("name=sglang", *sizes))
    return (*named, *(f"+{rollout}.engine_kwargs.sglang.{argument}" for argument in ON_A_CPU))


def servers(run: Run, name: str) -> int:
    """How many server actors of a class were made."""
    return len(run.matching(rf"\({name} pid=\d+\) .*SGLang http server: "))


def test_a_teacher_and_a_reward_model_run_next_to_a_synced_actor(larger_model: Path, tmp_path: Path) -> None:
    """Engines that nobody trains: nothing syncs them, so they are verl's own, whether the plugin is on or off."""
    overrides = (
        *("distillation.enabled=True", "distillation.nnodes=1", "distillation.n_gpus_per_node=1"),
        *(f"{TEACHER}.model_path={larger_model}", *engine(f"{TEACHER}.inference")),
        *(f"{REWARD}.enable=True", f"{REWARD}.enable_resource_pool=True", f"{REWARD}.nnodes=1"),
        *(f"{REWARD}.n_gpus_per_node=1", f"{REWARD}.model_path={larger_model}", *engine(f"{REWARD}.rollout")),
        *(f"{REWARD}.rollout.prompt_length=64", f"{REWARD}.rollout.response_length=16"),
        *("++ray_kwargs.ray_init.num_gpus=3", DUMMY, SMALL_BUCKETS),
    )
    run = main_ppo(Setup(overrides, model=larger_model, modules=("e2e.teacher_sampling",)), tmp_path)
    checks.reached(run, steps=1)
    checks.same_weights(run)
    checks.plugin_ran(run, ranks=1)
    assert "actor/distillation/loss" in " ".join(run.logged[1]), run.logged[1]
    assert (servers(run, "SyncSGLangHttpServer"), servers(run, "SGLangHttpServer")) == (1, 2), run.tail


# The quickstart gives this key of the plugin, and load_format=auto
AS_STOCK = (f"{ROLLOUT}.update_weights_bucket_megabytes=null", DUMMY)


def stock_ran(run: Run, cause: str) -> None:
    """verl's own code moved the weights in every process, and the driver said why."""
    checks.reached(run, steps=1)
    said = run.matching(rf"driver: weight sync NOT IN USE, stock verl moves the weights\. .*{cause}")
    assert len(said) == 1, run.tail
    assert run.matching(r"\(SGLangHttpServer pid=\d+\)") and not run.reports
    for ours in ("SyncSGLangHttpServer", "is ours", "loader active", checks.OUR_WORKER, "sharding manager FSDP"):
        assert ours not in run.text, ours


def test_a_strategy_that_no_sharding_manager_knows_is_left_to_stock_verl(tmp_path: Path) -> None:
    overrides = ("actor_rollout_ref.actor.strategy=fsdp_turbo", *AS_STOCK)
    run = main_ppo(Setup(overrides, modules=("e2e.plain_engine",)), tmp_path)
    stock_ran(run, r"actor\.strategy=fsdp_turbo")
    checks.same_weights(run)


def test_a_rollout_in_fp8_is_left_to_stock_verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl quantizes, sends and serves; only the product with fp8 weights is a stand-in, for want of a GPU."""
    monkeypatch.setenv("VERL_DISABLE_TRITON_FP8", "1")
    # SGLang shares out whole blocks of 128
    model = tiny_models.write("qwen2", tmp_path / "model", hidden_size=256, intermediate_size=512)
    path = (str(Path(__file__).parent / "fp8_on_cpu"),)
    run = main_ppo(Setup((f"{ROLLOUT}.quantization=fp8", *AS_STOCK), model=model, path=path), tmp_path)
    stock_ran(run, r"rollout\.quantization='fp8': weight sync sends plain weights\.$")
    metrics = run.logged[1]
    # Measured with fp8: 0.985; with random weights 0.12
    assert metrics["training/rollout_actor_probs_pearson_corr"] > 0.95, metrics
