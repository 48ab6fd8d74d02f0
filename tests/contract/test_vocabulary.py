"""Renamed identifiers and modules do not return."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("oppo_core", "worker", "platform", "bench", "scripts", "examples")

# Retired module name: what replaced it.
MODULES = {
    "activation": "fused_modules",
    "fused_activations": "fused_modules",
    "aftermath": "post_restore",
    "aio": "client",
    "banded": "banded_attention",
    "beginnings": "resume_sources",
    "browser": "v1",
    "careful": "revertible_update",
    "changing": "spec_patch",
    "courier": "delivery",
    "dealing": "rank_states",
    "durable": "atomic_dir",
    "endings": "retry_decision",
    "far": "timeline_downsampling",
    "footprint": "memory_estimate",
    "handover": "deltas",
    "held": "retained_forward",
    "holes": "hole_punch",
    "hugging": "huggingface",
    "joining": "join",
    "journal": "event_log",
    "keeper": "checkpoint_pins",
    "left_out": "event_log",
    "local_ranks": "outcomes",
    "log_waiting": "log_long_poll",
    "making": "create",
    "meanings": "state_help",
    "measuring": "measurements",
    "neighbours": "outcomes",
    "ordered": "proxy",
    "passthrough_cache": "transformers_cache",
    "precision": "upcast",
    "presence": "recheck_access",
    "pretraining": "ptx_mix",
    "prove": "verify_streaming",
    "quarters": "server_dirs",
    "randomness": "rng",
    "reading": "metric_reader",
    "recompute": "activation_checkpointing",
    "refusals": "trl_compat",
    "removal": "safe_delete",
    "restoring": "restore",
    "resuming": "resume_rules",
    "sans_io": "messages",
    "saving": "overlap_savings",
    "sealing": "encryption",
    "shaping": "reward_shaping",
    "shares": "work_split",
    "shipping": "uploader",
    "silence": "liveness",
    "sizes": "units",
    "snapshot_of": "build_snapshot",
    "spared": "checkpoint_pins",
    "standing": "run_score",
    "standing_still": "checkpoint_locks",
    "steering": "lifecycle",
    "stepper": "backends",
    "streaming": "subprocess_decoder",
    "submitting": "spec_source",
    "synthesis": "synthetic_trace",
    "team_shell": "team_layout",
    "through": "sharded_base",
    "turns": "placement",
    "waiting": "wait_reasons",
    "whole_batch": "batch_rows",
    "wishes": "allowed_actions",
    "world": "simulation",
}
# Retired identifier: what to write.
IDENTIFIERS = {
    "ALONE": "SINGLE",
    "CatalogueWatch": "CatalogueScanner",
    "CheckpointFacts": "Checkpoint",
    "ClockWatch": "ThrottleMonitor",
    "DemoApi": "Client",
    "EarlyOrder": "EarlyBatch",
    "FieldNote": "FieldDoc",
    "FolderDone": "DeletionResult",
    "FolderOrder": "DeletionOrder",
    "GapFound": "SequenceGapError",
    "HeldForward": "RetainedForward",
    "HuggingNetwork": "HuggingFaceNetwork",
    "Impossible": "SettingError",
    "Keeper": "CheckpointPins",
    "KeptClaim": "SavedClaim",
    "LeftOut": "DroppedEvents",
    "LeftOutEvent": "DroppedEvent",
    "Meeting": "Rendezvous",
    "NEIGHBOUR_SUFFIX": "LOCAL_RANK_SUFFIX",
    "NoGpuStats": "GpuStats",
    "NotContained": "OutsideRootError",
    "NotDeletable": "DeletionRefused",
    "NothingToTrace": "TraceRangeError",
    "OF_EACH_NEIGHBOUR": "LOCAL_RANK_EVENTS",
    "OF_EACH_RANK": "NODE_EVENTS",
    "OneRank": "Ranks",
    "OrderedScorers": "ScorerProxy",
    "Prepared": "SetupResult",
    "Quarters": "ServerDirs",
    "QueuedRecording": "CudaRecorder.span",
    "RemoteScorers": "ProcessScorers",
    "RunFacts": "RunBase",
    "SPOKEN": "SUPPORTED_VERSIONS",
    "SeveralRanks": "ProcessGroup",
    "Shipping": "Uploader",
    "StepperMaker": "BackendFactory",
    "TOLD_EVERY": "REPORT_EVERY",
    "WholeLayer": "PassthroughLayer",
    "WholeScorers": "SinglePassScorers",
    "ask_for_run": "request_run_deletion",
    "begin_fork": "lock_fork_source",
    "clear_away": "clean_up",
    "codec_of": "load_codec",
    "cohorts_of": "load_cohorts",
    "complaints_about_trackers": "tracker_errors",
    "decoder_of": "build_decoder",
    "device_of": "select_device",
    "devices_called": "load_devices",
    "disks_of": "node_disks",
    "draft_of": "new_draft",
    "draw_odd_answer": "draw_varied_response",
    "error_of": "build_error",
    "evaluator_of": "build_evaluator",
    "even_cut": "select_even",
    "explain_waiting": "update_waiting_reasons",
    "export_hugging": "export_huggingface",
    "fall_of": "reward_drop",
    "framed": "to_frame",
    "give_up_absent": "fence_absent",
    "give_up_orphans": "fence_orphans",
    "held_launch": "lock_claimed_launch",
    "hold_off_deletion": "lock_out_deletion",
    "home_of": "rank_dir",
    "homes_in": "rank_dirs",
    "in_slices": "checkpoint_slices",
    "is_adapted": "has_lora",
    "is_told": "pins_exist",
    "keep_house": "run_round",
    "keep_identity": "save_identity",
    "kept_claim": "saved_claim",
    "keys_here": "current_keys",
    "lay_out": "build_layout",
    "least_overcommit": "min_overcommit",
    "lengths_told": "lengths_text",
    "let_go": "release",
    "levels_of": "quota_usage_by_team",
    "like_lengths": "batch_by_length",
    "line_plot": "plot_metrics",
    "load_hugging": "load_huggingface",
    "load_role_reference": "load_reference",
    "look_after_runs": "evaluate_runs",
    "look_at_database": "check_database_disk",
    "lost_others": "lost_peer",
    "make_way": "preempt_for",
    "marks_of": "compute_marks",
    "may_move": "can_transition",
    "meeting_of": "rendezvous_from_env",
    "most_in_flight": "max_checkpointed",
    "named_nodes": "node_names",
    "nobody_for": "unpreemptable",
    "not_in_it": "missing_parts",
    "note_shrunk": "record_shrunk_passes",
    "open_next_ones": "open_resume_checkpoints",
    "outcome_of": "build_outcome",
    "over_same_weights": "copy_sharing_weights",
    "overcommit_start": "initial_overcommit",
    "own_of": "load_rank_state",
    "packed_apart": "packing_error",
    "place_for": "backup_file",
    "plain_layout": "merged_layout",
    "plain_weights": "iter_merged_weights",
    "playwrights_own": "playwright_path",
    "pool_of": "build_pool",
    "problem_with": "rule_error",
    "problems_of": "translate_errors",
    "processes_of": "ranks_per_node",
    "ranks_a_node": "ranks_per_node",
    "rates_stale": "scores_stale_tokens",
    "refuse_idle": "reject_unused",
    "refuse_impossible": "require_preflight",
    "refuse_incomplete": "check_complete",
    "refuse_without_room": "require_database_space",
    "remember_port": "save_port",
    "remembered_port": "saved_port",
    "remove_of_run": "delete_run_folder",
    "restore_hugging": "restore_huggingface",
    "said_to": "encode_reply",
    "sample_of": "parse_sample",
    "seal_secrets_anew": "reencrypt_secrets",
    "sealed_for_ever": "undecryptable",
    "secret_of": "decrypt_secret",
    "server_of": "connect_server",
    "skip_numbers": "advance_sequences",
    "spare_for_others": "pin_for_others",
    "start_judge": "start_evaluate",
    "stop_asked": "stop_requested",
    "stops_of": "build_stop_conditions",
    "sums_in_turn": "serialize_reductions",
    "superfluous": "checkpoints_to_prune",
    "tell_again": "reemit_step",
    "tell_ending": "announce_end",
    "tell_shrunk": "report_shrunk_passes",
    "there_already": "is_downloaded",
    "threads_below": "torchrun_environ",
    "told_more": "mark_changed",
    "told_running": "reported_running",
    "told_tokens": "response_tokens",
    "turns_of": "load_state",
    "unfinite": "nonfinite",
    "updates_in_turn": "serialize_updates",
    "wait_judge": "wait_evaluate",
    "whole_cut": "select_whole_nodes",
    "without_retired": "replace_retired_settings",
    "without_unused": "drop_unused_settings",
}


def sources() -> list[Path]:
    """Python files of the product, migrations apart: they are history."""
    files = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return sorted(path for path in files if "migrations" not in path.parts)


def identifiers(tree: ast.AST) -> set[str]:
    """Every name that a module defines, binds or reads."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.alias(asname=str(name)):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.keyword(arg=str(name)):
                names.add(name)
    return names


def test_no_retired_module_name_is_used() -> None:
    used = {path.stem for path in sources()} & MODULES.keys()
    assert {name: MODULES[name] for name in used} == {}


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_retired_identifier_is_used(folder: str) -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}": f"write {IDENTIFIERS[name]}"
        for path in sources()
        if path.relative_to(ROOT).parts[0] == folder
        for name in identifiers(ast.parse(path.read_text(encoding="utf-8"))) & IDENTIFIERS.keys()
    }
    assert found == {}
