"""What the API's parameters and the fields of its bodies mean: the descriptions in the OpenAPI document and in the reference.

A name means the same in every operation, unless `IN_ONE` says otherwise. tests/docs/test_reference.py fails on one without.
"""

from __future__ import annotations

MEANINGS = {
    "run_id": "The run's number.",
    "checkpoint_id": "The checkpoint's number, of the run's list of checkpoints.",
    "sample_id": "The answer's number, of the run's list of samples.",
    "view_id": "The view's number.",
    "alert_id": "The alert's number.",
    "team_id": "The team's number.",
    "webhook_id": "The webhook's number.",
    "token_id": "The token's number.",
    "project": "Only of this project, by name or number.",
    "team": "Only of this team, by number.",
    "limit": "At most so many items on a page.",
    "cursor": "Where the page before ended: its `next`. Without it the first page.",
    "filter": "The filter language of the runs table (docs/runs.md), such as `state:running reward>0.5`.",
    "keys": "Names of metrics, separated by commas; docs/metrics.md has them.",
    "x": "The axis: steps, seconds of training, trained response tokens, or device-seconds.",
    "max_points": "A series of more points comes as so many buckets, each with its mean and its extremes.",
    "since_step": "Only points after this step.",
    "from_step": "First step; by default the first one there is.",
    "to_step": "Last step; by default the last one there is.",
    "theme": "Colours of the figure.",
    "q": "Every word, and every phrase in double quotes, occurs, in upper or lower case, also inside a word; at most ten.",
    "stream": "Only lines of this stream.",
    "after": "The first lines after this one: the `next` of the call before. 0 begins with the first line of all.",
    "before": "The last lines before this one.",
    "wait": "While no line follows `after`, the reply waits for one, or for the run's end: so many seconds, at most 25.",
    "kinds": "Only these kinds, separated by commas: `state`, `change`, `decision`, `checkpoint`, `alert`, `alert_closed`.",
    "keeps": "Also decisions that left the value as it was.",
    "step": "Only answers of this PPO step.",
    "min_score": "Reward of at least this.",
    "max_score": "Reward of at most this.",
    "min_age": "Deferred for at least so many steps.",
    "max_age": "Deferred for at most so many steps.",
    "ending": "Only answers that ended so.",
    "held_out": "`true`: an evaluation's answers only; `false`: trained ones only.",
    "prompt": "A `prompt_key`: answers to this very prompt.",
    "excerpt": "Cuts prompt and answer to about so many characters, from shortly before the first hit on; 0: whole.",
    "runs": "Numbers of runs, separated by commas.",
    "target": "The reward to reach; by default the first run's `budget.target_reward`.",
    "baseline": "The run that others are compared with: by default one that is pinned in its project, or else the first one.",
    "group": "A path of the spec by whose value runs are grouped, or `-seed` for everything that differs but the seed.",
    "counted": "Also the smoothed reward by which the target counts as reached.",
    "open": "Only alerts that are not over.",
    "run": "Only of this run, by number.",
    "condition": "Only alerts of this condition.",
    "actor": "Only what this one did, as `user:ada`.",
    "action": "Only this action, as `run.submit`; docs/teams.md lists them.",
}
FIELDS = {
    "yaml": "The spec as YAML text; either this or `spec`.",
    "spec": "The spec as JSON; either this or `yaml`.",
    "project": "Where the run is to live, by name or number; by default the first of yours.",
    "priority": "1 to 99; higher goes first.",
    "changes": 'Other values at dotted paths of the spec: `{"overlap.overcommit.max": 8}`; a number is a place in a list.',
    "step": "The step whose checkpoint it begins with; null: it begins anew.",
    "hours": "So many more on devices.",
    "add": "Words that the run gets.",
    "remove": "Words that it loses.",
    "name": "What it is called.",
    "query": "What a view shows, as in the table's address: `show`, `project`, `q`, `sort` and `cols`.",
    "team": "Whose it is, by number.",
    "view": "The view's number; null: all runs.",
    "up_to": "The number of the newest alert that was seen.",
    "silent": "Whether its alerts are told to nobody from now on.",
    "url": "An https address.",
    "conditions": "Which alerts are posted to it (docs/alerts.md).",
    "on": "Whether anything is posted to it.",
    "scope": "What it may do (docs/tokens.md).",
    "days": "For how long it is valid; null: without an end.",
    "service": "Whether it belongs to the team, instead of the person who makes it.",
}
IN_ONE = {
    ("save_view", "team"): "The team that shares it, by number; null: it is your own.",
    ("create_token", "team"): "Whose runs it is for, by number; by default the first of your teams.",
    ("list_runs", "state"): "Only runs in these states, separated by commas.",
    ("list_runs", "sort"): "A column of the runs table; with `-` before it downwards, as `-reward`.",
    ("show_logs", "limit"): "At most so many lines; a larger number than 1,000 is taken for 1,000.",
    (
        "show_metrics",
        "keys",
    ): "Names of metrics (docs/metrics.md), separated by commas; one that ends in `*` stands for all that begin so.",
    ("show_timeline", "from_step"): "First step; by default the newest steps come.",
    ("show_timeline_figure", "from_step"): "First step; by default the newest steps come.",
    ("list_decisions", "since_step"): "Only decisions after this step.",
    ("list_samples", "sort"): "By what; with `-` before it downwards. What is unknown ranks lowest.",
    ("list_samples", "from_step"): "Only answers of this PPO step and later ones.",
    ("list_samples", "to_step"): "Only answers of this PPO step and earlier ones.",
    ("list_pinned_runs", "project"): "Only the one of this project, by name or number.",
}


def meaning_of(operation: str, parameter: str) -> str:
    """What a parameter of an operation means; empty when nobody has said."""
    return IN_ONE.get((operation, parameter), MEANINGS.get(parameter, ""))


def meaning_of_field(operation: str, field: str) -> str:
    """What a field of an operation's body means; empty when nobody has said."""
    return IN_ONE.get((operation, field), FIELDS.get(field, ""))
