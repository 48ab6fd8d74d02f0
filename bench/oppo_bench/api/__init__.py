"""`oppo bench api`: latency and throughput of the REST API with 10,000 runs."""
