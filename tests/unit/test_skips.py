# SPDX-License-Identifier: Apache-2.0
"""Tensors that SGLang's models rightly leave alone."""

from __future__ import annotations

from types import SimpleNamespace

from verl_sync_plugin.rollouts.sglang.model import why_skipped


def test_what_an_engine_rightly_leaves_alone() -> None:
    assert why_skipped(None, "model.layers.0.self_attn.rotary_emb.inv_freq", ())
    assert not why_skipped(None, "z", ())


def test_layers_that_predict_further_tokens_may_be_left_alone() -> None:
    """They are known by what only they have, so no layer of the trainer's own is taken for one, however many it has."""
    for layer in ("model.layers.4.", "model.language_model.layers.9.", "language_model.model.layers.61."):
        sent = (f"{layer}eh_proj.weight", f"{layer}mlp.up_proj.weight")
        assert all(why_skipped(None, name, sent) for name in sent)
        assert not why_skipped(None, sent[1], sent[1:])
        assert not why_skipped(None, "model.layers.3.mlp.up_proj.weight", sent)
    for name in ("model.mtp_layers.0.mlp.up_proj.weight", "mtp.fc.weight"):
        assert why_skipped(None, name, ())
    assert not why_skipped(None, "model.visual.layers.9.mlp.up_proj.weight", ())


def test_a_vision_tower_may_be_left_alone_by_an_engine_without_one() -> None:
    for name in ("vision_model.class_embedding", "multi_modal_projector.linear_1.weight"):
        blind = {has: why_skipped(SimpleNamespace(has_vision=has), name, ()) for has in (False, None, True)}
        assert blind[False] and blind[None] and not blind[True] and not why_skipped(SimpleNamespace(), name, ())
