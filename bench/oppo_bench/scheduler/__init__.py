"""`oppo bench scheduler`: scheduling cycles, submit-to-start latency, attempts per second."""
