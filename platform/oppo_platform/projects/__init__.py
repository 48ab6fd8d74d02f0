"""Projects: a team's folders of runs."""
