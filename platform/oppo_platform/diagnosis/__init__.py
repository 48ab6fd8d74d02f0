"""`oppo doctor`: checks an installation from end to end, and collects what a report of a problem needs."""
