# SPDX-License-Identifier: Apache-2.0
"""Differences between versions of verl and SGLang: detected by feature, in one place.

Supported: verl 0.9 and 0.10; SGLang 0.5.12 and later. With SGLang 0.5.21 and later stock verl 0.9.1 is broken. There
alone, one name in one verl module is replaced (``launch_shims``).
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.metadata
import inspect
import types
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from verl_sync_plugin.errors import IncompatibleHostError, RegistryConflictError

WITHOUT = "set VERL_USE_EXTERNAL_PLUGINS=none to run verl without plugins"
MODE = "async"  # the other half of verl's key for rollout adapters, next to the rollout's name
# The packages that take part in a sync
STACK = ("verl-sync-plugin", "verl", "sglang", "torch", "transformers", "megatron-core", "megatron-bridge")


def offered(module: Any, name: str) -> Any:
    """``module.name``, a hook of verl that the plugin cannot do without."""
    try:
        return getattr(module, name)
    except AttributeError:
        raise IncompatibleHostError(
            f"verl {version_of('verl')} does not offer {module.__name__}.{name}. verl-sync-plugin supports verl "
            f">=0.9,<0.11: pip install verl==0.9.1, or {WITHOUT}."
        ) from None


def refuse_stranger(what: str, rollout: str, found: Any, known: tuple[Any, ...]) -> None:
    """Raises RegistryConflictError when what a registry of verl's holds for a rollout is none of the ``known``."""
    if found not in known:
        raise RegistryConflictError(
            f"verl's {what} for {rollout} is already taken by {found!r}; verl-sync-plugin needs it. "
            f"Uninstall one of the two plugins, or {WITHOUT}."
        )


def version_of(package: str) -> str:
    """The version that is installed here; empty without one."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@contextmanager
def launch_shims() -> Iterator[None]:
    """Context in which verl 0.9.1 can launch SGLang >= 0.5.21, whose ``ServerArgs`` is no dataclass any more: verl's
    server module sees a ``dataclasses`` whose ``fields`` also knows msgspec structs."""
    from verl.workers.rollout.sglang_rollout import async_sglang_server as module

    if dataclasses.is_dataclass(module.ServerArgs):
        yield
        return
    real = module.dataclasses
    module.dataclasses = types.SimpleNamespace(**{**vars(dataclasses), "fields": _fields})
    try:
        yield
    finally:
        module.dataclasses = real


def _fields(struct: Any) -> list[Any]:
    if dataclasses.is_dataclass(struct):
        return list(dataclasses.fields(struct))
    return [types.SimpleNamespace(name=name) for name in struct.__struct_fields__]


async def flush_cache(tokenizer_manager: Any, **options: Any) -> bool:
    """Has SGLang flush its prefix cache; True if all schedulers have. With DP attention there are several, and its own
    call looks at the answer that comes first."""
    if all(argument(tokenizer_manager, key) in (None, 1) for key in ("dp_size", "attn_dp_size")):
        return bool(getattr(await tokenizer_manager.flush_cache(**options), "success", True))
    from sglang.srt.managers.io_struct import FlushCacheReqInput

    tokenizer_manager.auto_create_handle_loop()
    answers = await tokenizer_manager.flush_cache_communicator(FlushCacheReqInput(**options))
    return all(answer.success for answer in answers)


async def answering(tokenizer_manager: Any) -> bool:
    """True if SGLang has requests that it has not answered to the end, by the lock that its own pause looks at."""
    return bool(await tokenizer_manager.model_update_lock.is_locked())


@asynccontextmanager
async def weight_update_session(tokenizer_manager: Any) -> AsyncIterator[None]:
    """SGLang >= 0.5.21 accepts weights only inside a session; earlier ones know none."""
    begin = getattr(tokenizer_manager, "begin_weight_update", None)
    if begin is None:
        yield
        return
    from sglang.srt.managers import io_struct

    async def ask(call: Any, what: str) -> None:
        answer = await call
        success, message = answer if isinstance(answer, tuple) else (answer.success, answer.message)
        if not success:
            raise RuntimeError(f"SGLang refused to {what} a weight update: {message}")

    await ask(begin(io_struct.BeginWeightUpdateReqInput(selector="target")), "begin")
    try:
        yield
    finally:
        await ask(tokenizer_manager.end_weight_update(io_struct.EndWeightUpdateReqInput()), "end")


def target_alone(request: type) -> dict[str, Any]:
    """The argument of SGLang's ``request`` that keeps a draft model, which nobody trains, out of a weight update."""
    fields = {field.name for field in _fields(request)}
    return {"selector": "target"} if "selector" in fields else {"disable_draft_model": True}


async def replace_adapter(tokenizer_manager: Any, name: str, settings: dict[str, Any], packed: bytes) -> None:
    """Unloads the adapter of this name, if there is one, and loads another in its place. SGLang 0.5.12 takes one blob
    for all tensor-parallel ranks, later versions a list with one for each."""
    from sglang.srt.managers.io_struct import LoadLoRAAdapterFromTensorsReqInput, UnloadLoRAAdapterReqInput

    registry = tokenizer_manager.lora_registry
    held = registry.get_all_adapters().get(name)
    counter = held and registry._counters.get(held.lora_id)
    if counter is not None and counter.value() and not await answering(tokenizer_manager):
        # SGLang up to 0.5.21 never uncounts a request it refused, or aborted in its queue, and would wait
        await asyncio.sleep(0.05)  # for releases that are under way
        await counter.decrement(counter.value())
    if held or name in getattr(tokenizer_manager, "pending_lora_unloads", ()):  # one that was broken off
        _check_adapter(await tokenizer_manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=name)))
    blobs: dict[str, Any] = {"serialized_tensors": packed}
    if "serialized_named_tensors" in {field.name for field in _fields(LoadLoRAAdapterFromTensorsReqInput)}:
        blobs = {"serialized_named_tensors": [packed] * int(tokenizer_manager.server_args.tp_size)}
    request = LoadLoRAAdapterFromTensorsReqInput(lora_name=name, config_dict=settings, **blobs)
    _check_adapter(await tokenizer_manager.load_lora_adapter_from_tensors(request))


def placed_factor(cut: Any, factor: Any, rank: int) -> Any:
    """This rank's part of a factor, by a ``slice_lora_…_weights`` of SGLang's; since 0.5.17 that knows the rank."""
    return cut(factor, rank) if "tp_rank" in inspect.signature(cut).parameters else cut(factor)


def _check_adapter(answer: Any) -> None:
    if not answer.success:
        raise RuntimeError(f"SGLang refused the adapter: {answer.error_message}")


async def set_weight_version(tokenizer_manager: Any, version: str) -> None:
    """Makes SGLang report ``version`` for its weights, as its own weight updates do."""
    if hasattr(tokenizer_manager, "update_weight_version"):  # since 0.5.19, which tells each scheduler of it
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        request = UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
        await tokenizer_manager.update_weight_version(request)
    else:
        tokenizer_manager._update_weight_version_if_provided(version)


def argument(tokenizer_manager: Any, name: str) -> Any:
    """An argument of a running SGLang; ``None`` for one that this release does not have. From 0.5.17 on, what is
    resolved or changed after the launch does not stand in ``server_args`` any more."""
    try:
        return tokenizer_manager.config_value(name)
    except (AttributeError, ValueError):
        return getattr(tokenizer_manager.server_args, name, None)
