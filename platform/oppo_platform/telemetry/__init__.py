"""Data that attempts report: metrics, spans, decisions, samples, logs; and the live stream."""
