"""The Django project: pages, API, scheduler, ingest. It never imports torch."""
