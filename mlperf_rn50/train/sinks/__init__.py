"""Sinks of events: MLPerf log, metrics.jsonl, terminal, telemetry, TensorBoard and watcher."""
