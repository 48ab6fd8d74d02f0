"""The Django project: pages, API, scheduler, ingest. It knows the contract and never torch."""
