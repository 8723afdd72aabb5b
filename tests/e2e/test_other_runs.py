# SPDX-License-Identifier: Apache-2.0
"""Runs ``main_ppo`` otherwise than most in ``make test-all``; contract tests show the same in ``make test``."""

from pathlib import Path
from typing import NamedTuple

import pytest

import tiny_models
from e2e import checks
from e2e.releases import INSTALLED, RELEASES
from e2e.runs import DUMMY, MODEL, ROLLOUT, SMALL_BUCKETS, Play, Run, Setup, main_ppo
from fresh_process import folder_with

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(1000)]


def test_every_step_of_colocate_async_is_synced_and_answers_go_on_after_it(play: Play) -> None:
    """Keeps a batch more than a step takes in flight: steps train on answers which older weights have begun."""
    trainer = ("trainer.v1.trainer_mode=colocate_async", "trainer.v1.colocate_async.num_warmup_batches=1")
    run = play(*trainer, steps=3)
    checks.reached(run, steps=3)
    checks.plugin_ran(run, ranks=1)
    checks.reported(run, steps=3)
    for step in (1, 2, 3):
        checks.metrics_complete(run.logged[step], step)
    found = [run.logged[step]["training/off_policy/trajectory_staleness/max"] for step in (1, 2, 3)]
    assert max(found) >= 1, found


def test_the_legacy_trainer_and_a_mixtral_are_synced_and_reported(play: Play) -> None:
    """Covers a config that is resolved before plugins load, and experts that stock verl sends under unknown names."""
    run = play("trainer.use_v1=False", kind="mixtral-tied", steps=2)
    checks.reached(run, steps=2)
    checks.same_weights(run)
    assert run.matching("Legacy trainer `main_ppo_v0.py` is deprecated"), run.tail
    assert run.matching(r"\(WorkerDict pid=\d+\) .*sharding manager FSDP2SGLangShardingManager, buckets of 1 MiB")
    checks.reported(run, steps=2)
    assert len(run.matching(r"\(TaskRunner pid=\d+\) .*NO SYNC METRICS: .*legacy trainer")) == 1, run.tail
    for step in (0, 1, 2):
        assert run.matching(rf"\(WorkerDict pid=\d+\) .*sync of step {step}: [0-9.]+ s, "), run.tail
    for metrics in run.logged.values():
        assert not [name for name in metrics if "sync/" in name], "verl's legacy trainer logs them now: say so"
    for report in run.reports:
        assert report["coverage_missing"] == 0 and report["tensors"] > 24, report
    assert run.reports[-1]["replayed_tensors"] == run.reports[-1]["tensors"], run.reports


def test_engines_that_keep_their_memory_are_synced_once_a_step(play: Play) -> None:
    """Syncs two engines with ``free_cache_engine=False`` three times from an FSDP1 trainer; nothing is resumed."""
    run = play("actor_rollout_ref.actor.strategy=fsdp", "+sync=colocated_resident", ranks=2, steps=2, replicas=2)
    checks.reached(run, steps=2)
    checks.same_weights(run)
    for replica in (0, 1):
        assert run.matching(rf"task runner: replica {replica} is ours"), run.tail
    loaders = run.matching(r"\[verl-sync-plugin\] pid \d+ loader active, rank 0 of Qwen2ForCausalLM")
    assert len(loaders) == 2, run.tail
    assert {report["manager"] for report in run.reports} == {"FSDPSGLangShardingManager"}
    steps = [report["global_steps"] for report in run.reports]
    assert sorted(steps) == [0, 0, 1, 1, 2, 2], steps
    for report in run.reports:
        assert report["stages"]["sleep"] == 0 and "resume_weights" not in report["stages"], report
        assert report["replayed_tensors"] == report["tensors"] > 0, report
    for step in (1, 2):
        both = [report["nbytes"] for report in run.reports if report["global_steps"] == step]
        assert run.logged[step]["sync/bytes"] == sum(both)


class Case(NamedTuple):
    """A trainer, and a family whose sync is not that of Qwen2."""

    kind: str  # as make_model.py names it
    model: str  # SGLang's class for it
    ranks: int  # of the trainer, and tensor-parallel ones of the engine
    overrides: tuple[str, ...] = ()
    megatron: tuple[int, int, int] | None = None  # tensor, pipeline and expert parallel size; FSDP2 without
    missing: int = 0  # parameters and buffers that no sync writes


# Only eager attention caps its logits in the trainer. A buffer that is in no checkpoint forbids random weights, so
# it is the second step that shows a sync: the checkpoint's weights are stale by then
EAGER = f"{MODEL}.override_config.attn_implementation=eager", f"{ROLLOUT}.load_format=auto"
CASES = {
    "mixtral": Case("mixtral", "MixtralForCausalLM", 2),
    "gemma2": Case("gemma2", "Gemma2ForCausalLM", 1, EAGER, missing=1),
    "megatron-ep2": Case("qwen3-moe", "Qwen3MoeForCausalLM", 2, megatron=(1, 1, 2)),
    "megatron-pp2": Case("qwen2", "Qwen2ForCausalLM", 2, megatron=(1, 2, 1)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_the_engine_has_the_weights_of_every_step(case: Case, play: Play) -> None:
    trained = play(*case.overrides, kind=case.kind, ranks=case.ranks, steps=2, megatron=case.megatron)
    manager = "MegatronSGLangShardingManager" if case.megatron else "FSDP2SGLangShardingManager"
    checks.whole(trained, 2, case.ranks, manager, model=case.model)
    assert all(report["coverage_missing"] == case.missing for report in trained.reports), trained.reports
    last = trained.reports[-1]
    assert last["tensors"] == last["replayed_tensors"], last


VERL = "0.9.0"
# This verl hands SGLang "all-linear" as it is
SERVED = (
    *(f"{MODEL}.lora.merge=False", f"{MODEL}.lora.rank=8", f"{MODEL}.lora.alpha=16"),
    f"{MODEL}.lora.target_modules=[q_proj,k_proj,v_proj,o_proj]",
    f"+{ROLLOUT}.engine_kwargs.sglang.lora_backend=torch_native",
)


@pytest.mark.parametrize("overrides", [(), SERVED], ids=["full", "served"])
def test_an_older_verl_trains(overrides: tuple[str, ...], play: Play, tmp_path_factory: pytest.TempPathFactory) -> None:
    """SGLang starts with random weights; served as an adapter or not, all that it needs must have come by a sync."""
    folder = folder_with(tmp_path_factory, f"verl=={VERL}")
    run = play(*overrides, steps=2, change="versions", path=(str(folder),))
    checks.reached(run, steps=2)
    said = {line.text.partition("[e2e] ")[2] for line in run.matching(r"\[e2e\] verl ")}
    assert said == {f"verl {VERL} from {folder}/verl/__init__.py"}, run.tail
    checks.same_weights(run)
    checks.reported(run, steps=2)
    if overrides:
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
    run = main_ppo(Setup(overrides, model=larger_model, change="teacher_sampling"), tmp_path)
    checks.reached(run, steps=1)
    checks.same_weights(run)
    checks.plugin_ran(run, ranks=1)
    assert "actor/distillation/loss" in " ".join(run.logged[1]), run.logged[1]
    assert (servers(run, "SyncSGLangHttpServer"), servers(run, "SGLangHttpServer")) == (1, 2), run.tail


@pytest.mark.parametrize("release", [INSTALLED, [*RELEASES][-1]])
def test_a_rollout_in_fp8(release: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Quantizes on two ranks and verifies every sync; only SGLang's product with fp8 weights is a stand-in."""
    # SGLang shares out whole blocks of 128
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 4}
    model = tiny_models.write("qwen2", tmp_path / "model", **sizes)
    newer = [] if release == INSTALLED else [folder_with(tmp_path_factory, f"sglang=={release}", *RELEASES[release])]
    path = (str(Path(__file__).parent / "fp8_on_cpu"), *map(str, newer))
    no_grammar = f"+{ROLLOUT}.engine_kwargs.sglang.grammar_backend=none"
    overrides = (no_grammar, f"{ROLLOUT}.quantization=fp8", f"{ROLLOUT}.custom.sync.verify=always", DUMMY)
    run = main_ppo(Setup(overrides, ranks=2, steps=2, model=model, path=path), tmp_path)
    checks.reached(run, steps=2)
    checks.reported(run, steps=2)
    assert len(run.matching("driver: weight sync on")) == 1, run.tail
    for report in run.reports:  # 14 weights, each with its scales
        assert report["tensors"] == 41 and report["verified_tensors"] == 41, report
    # Measured with fp8: 0.985; with random weights 0.12
    assert all(run.logged[step]["training/rollout_actor_probs_pearson_corr"] > 0.95 for step in (1, 2)), run.logged
