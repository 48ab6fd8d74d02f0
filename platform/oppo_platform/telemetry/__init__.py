"""What attempts tell: metrics, spans, decisions, samples, logs; and the live stream."""
