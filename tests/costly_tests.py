"""Tests whose cases together take more than two processor seconds, by file.

Of their cases `pytest` takes each fifth; `pytest --durations=0` says what each case takes.
"""

COSTLY = {
    "test_accumulate_devices.py": (
        "test_in_shard_map",
        "test_under_jit",
    ),
    "test_accumulate_judging.py": ("test_as_a_loop_over_microbatches",),
    "test_accumulate_means.py": (
        "test_memory_is_of_few_gradients_whatever_their_number",
        "test_the_gradient_of_the_whole_batch_with_unequal_weights",
    ),
    "test_adaptive.py": (
        "test_any_rule_on_any_scope_is_the_rule_on_each_group",
        "test_numbers_may_change_on_the_fly_without_compiling_again",
        "test_vmap_over_trees_and_states_equals_loops",
    ),
    "test_checkify.py": ("test_one_bad_example_is_reported",),
    "test_clipped_grad_options.py": ("test_gradients_are_clipped_as_the_transform_makes_them",),
    "test_configurations.py": ("test_settings",),
    "test_contract.py": (
        "test_derivatives_are_finite",
        "test_eager_equals_jit_and_compiles_only_once",
        "test_every_kind_of_limit_gives_the_same",
        "test_gradients_may_be_none_where_params_are_arrays",
        "test_keeps_every_kind_of_leaf_and_its_state",
        "test_one_compilation_over_all_steps_from_an_eager_init",
        "test_scan_under_vmap_over_limits_trees_and_states_equals_loops",
        "test_state_does_not_depend_on_the_dtype_of_the_gradients",
    ),
    "test_derivatives.py": (
        "test_checkify_reports_nothing",
        "test_right_where_smooth",
    ),
    "test_edge_cases.py": ("test_dtype_and_weak_type_stay_whatever_the_limit",),
    "test_elementwise.py": ("test_a_large_limit_is_a_large_limit",),
    "test_experts.py": (
        "test_each_expert_has_its_own_history_inside_shard_map",
        "test_under_jit",
    ),
    "test_explicit.py": (
        "test_bounds_on_entries",
        "test_some_axes_are_manual_and_others_explicit",
    ),
    "test_export.py": (
        "test_exports_for_all_platforms",
        "test_exports_with_symbolic_shapes",
    ),
    "test_from_config.py": ("test_it_makes_what_its_data_says",),
    "test_linf.py": ("test_every_policy_acts_on_one_bad_entry",),
    "test_memories.py": (
        "test_all_is_as_in_one_memory_and_comes_back_where_it_was",
        "test_functions_of_a_tree",
    ),
    "test_metrics.py": ("test_inside_of_what_is_compiled",),
    "test_muon.py": ("test_the_page_runs",),
    "test_narrow.py": ("test_each_entry_is_rounded_once",),
    "test_norms.py": (
        "test_large_leaves_that_are_summed_in_another_dtype",
        "test_zeros_that_make_a_leaf_large_change_nothing",
    ),
    "test_ops.py": ("test_leaves_keep_their_types_whatever_the_limit",),
    "test_optax_suite.py": ("test_passes_with_our_functions",),
    "test_optax_tables.py": ("test_sharding",),
    "test_per_example.py": (
        "test_bound_for_equal_entries",
        "test_bound_for_every_scope_and_response",
        "test_no_example_contributes_more_than_the_limit",
    ),
    "test_per_example_explicit.py": (
        "test_microbatches_that_divide_and_do_not",
        "test_sums_are_those_of_one_device",
    ),
    "test_per_example_gradients.py": (
        "test_a_nan_example_and_an_empty_batch",
        "test_microbatches_give_the_same_sum",
        "test_over_devices",
    ),
    "test_per_example_types.py": (
        "test_batches_of_none_and_one",
        "test_the_bound_where_dtypes_differ",
    ),
    "test_platforms.py": ("test_at_every_scale",),
    "test_programs.py": ("test_equal_constructions_compile_once",),
    "test_promises.py": (
        "test_below_the_limit_nothing_changes",
        "test_limit_and_clipping_twice_for_every_norm",
        "test_limit_and_clipping_twice_for_every_scope",
        "test_limit_figures",
        "test_norm_figures",
        "test_range_is_rescued",
    ),
    "test_range.py": ("test_masking_keeps_the_subnormals_of_bfloat16",),
    "test_reset_state.py": ("test_in_and_around_other_wrappers",),
    "test_rounding.py": ("test_strictly_no_norm_is_above_its_limit_however_near",),
    "test_rules.py": (
        "test_eager_equals_jit",
        "test_follows_the_published_rule_at_every_scale",
        "test_scan_equals_the_loop_and_types_stay",
        "test_sequence_as_printed",
        "test_steps_that_are_not_finite_leave_no_trace",
    ),
    "test_rules_locking.py": (
        "test_after_zero_norms_a_normal_signal_passes",
        "test_checkify_finds_nothing_on_finite_norms",
        "test_defaults_recover_from_a_rise_by_five",
        "test_max_norm_caps_the_limits_and_changes_nothing_else",
        "test_no_allowed_parameter_gives_nan",
        "test_published_settings_recover_as_the_originals_do",
        "test_record_and_patience_say_what_the_statistic_learns",
    ),
    "test_sharding.py": (
        "test_gradients_and_the_whole_range",
        "test_inside_shard_map",
        "test_replicated_leaves_stay_bitwise_equal",
        "test_under_jit",
    ),
    "test_spectral.py": ("test_every_condition_at_every_limit",),
    "test_states.py": ("test_a_state_of_numpy_arrays_is_as_any",),
    "test_suggest.py": ("test_known_spikes_are_found",),
    "test_sweep.py": (
        "test_cores_that_share_the_runs_change_nothing",
        "test_fewer_at_a_time_are_the_same",
    ),
    "test_tensorflow.py": (
        "test_clip_by_norm",
        "test_global_norm_of_trees",
    ),
    "test_tree_map_params.py": ("test_a_state_is_mapped_and_used_as_it_was",),
    "test_whole_norm.py": ("test_the_warm_up_clips_by_the_norm_of_all_groups",),
    "test_without_limit.py": (
        "test_a_group_without_a_limit_stays_and_so_do_its_derivatives",
        "test_an_example_that_is_dropped_has_no_derivative",
    ),
    "test_without_record.py": (
        "test_results_are_those_with_a_record_and_any_state_is_handed_back",
    ),
    "test_wrappers.py": ("test_a_skipped_step_changes_nothing_but_the_counts",),
    "test_wrapping.py": (
        "test_injected_hyperparameters",
        "test_state_survives_a_round_trip",
    ),
    "test_wrong_arguments.py": ("test_a_state_of_another_rule_is_refused_and_both_are_named",),
}
