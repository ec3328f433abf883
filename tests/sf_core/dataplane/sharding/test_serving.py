"""Answers, sessions, batches and metrics of two gateway processes are those of one."""

# ruff: noqa: F401
from tests.sf_core.dataplane.control.test_sessions_api import (
    test_a_reward_given_before_counts_when_a_training_session_finishes,
    test_a_session_is_named_by_url_header_or_key,
    test_a_session_is_opened_used_looked_at_and_finished,
)
from tests.sf_core.dataplane.gateway.test_endpoint import (
    test_a_client_that_goes_away_stops_its_generation,
    test_bad_requests_get_a_sentence_in_the_shape_clients_expect,
    test_models_are_listed,
    test_tool_calls_and_their_results_make_one_token_sequence,
)
from tests.sf_core.dataplane.gateway.test_observed import (
    test_branches_are_counted_by_reason_before_and_after_a_session_ends,
    test_figures_count_what_agents_asked_and_got,
)
from tests.sf_core.dataplane.runs.test_endings import (
    test_a_session_that_ran_out_of_context_trains_with_the_reward_of_a_failed_one,
    test_a_session_that_ran_too_long_trains_with_what_was_answered_and_names_its_task,
    test_what_failed_is_tried_with_other_draws_and_what_was_lost_with_the_same,
)
from tests.sf_core.dataplane.runs.test_run import (
    serving,
    test_a_batch_goes_from_claims_to_trajectories_in_the_run_directory,
    test_a_new_attempt_keeps_finished_sessions_and_fences_the_old_one,
    test_a_session_that_keeps_failing_excludes_its_group,
    test_a_session_without_any_turn_counts_as_failed,
    test_evaluations_never_train,
)
